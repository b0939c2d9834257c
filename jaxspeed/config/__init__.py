"""The config: DeepSpeed's keys and jaxspeed's, their verdicts, loading and validation."""

from jaxspeed.config.auto import AutoValues
from jaxspeed.config.batch import Batch
from jaxspeed.config.config import Config, load_config
from jaxspeed.config.explain import explain_config
from jaxspeed.config.fix import fix_config
from jaxspeed.config.layer_specs import TensorLayerSpec
from jaxspeed.config.load import Examined, examine
from jaxspeed.config.patterns import match
from jaxspeed.config.verdicts import ExplainedKey, Verdict

__all__ = [
    "AutoValues",
    "Batch",
    "Config",
    "Examined",
    "ExplainedKey",
    "TensorLayerSpec",
    "Verdict",
    "examine",
    "explain_config",
    "fix_config",
    "load_config",
    "match",
]
