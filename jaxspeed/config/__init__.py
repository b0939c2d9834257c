"""The config: DeepSpeed's keys and jaxspeed's, their verdicts, loading and validation.

Importing `Config` imports its schema; what loads and explains a config is imported when it is used.
"""

from typing import TYPE_CHECKING

from jaxspeed.config.config import Config, load_config
from jaxspeed.config.patterns import match
from jaxspeed.config.verdicts import ExplainedKey, Verdict
from jaxspeed.lazy_names import lazy_names

if TYPE_CHECKING:
    from jaxspeed.config.auto import AutoValues
    from jaxspeed.config.batch import Batch
    from jaxspeed.config.explain import explain_config
    from jaxspeed.config.fix import fix_config
    from jaxspeed.config.layer_specs import TensorLayerSpec
    from jaxspeed.config.load import Examined, examine

_NAMES = {
    "auto": ("AutoValues",),
    "batch": ("Batch",),
    "explain": ("explain_config",),
    "fix": ("fix_config",),
    "layer_specs": ("TensorLayerSpec",),
    "load": ("Examined", "examine"),
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)

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
