"""The config: DeepSpeed's keys and jaxspeed's, their verdicts, loading and validation."""

from jaxspeed.config.batch import Batch
from jaxspeed.config.config import Config, load_config
from jaxspeed.config.explain import explain_config
from jaxspeed.config.layer_specs import TensorLayerSpec
from jaxspeed.config.patterns import match
from jaxspeed.config.verdicts import ExplainedKey, Verdict

__all__ = [
    "Batch",
    "Config",
    "ExplainedKey",
    "TensorLayerSpec",
    "Verdict",
    "explain_config",
    "load_config",
    "match",
]
