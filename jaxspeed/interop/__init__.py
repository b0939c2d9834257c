"""Weights in the files of other libraries: read into shards, and written, by mapping tables."""

from jaxspeed.interop.exporting import (
    ExportSummary,
    HFForm,
    export,
    export_adapter,
    save_adapter,
    save_pretrained,
    saved_adapter,
)
from jaxspeed.interop.mapping import MappingTable, TensorRule
from jaxspeed.interop.pretrained import pretrained

__all__ = [
    "ExportSummary",
    "HFForm",
    "MappingTable",
    "TensorRule",
    "export",
    "export_adapter",
    "pretrained",
    "save_adapter",
    "save_pretrained",
    "saved_adapter",
]
