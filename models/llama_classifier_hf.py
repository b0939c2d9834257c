"""The classifiers of Llama's blocks in Hugging Face's format: as their language models."""

from .llama_hf import FIELDS, MODEL_TYPES, read_config, table, write_config

__all__ = ["FIELDS", "MODEL_TYPES", "read_config", "table", "write_config"]
