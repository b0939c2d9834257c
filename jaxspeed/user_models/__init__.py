"""What users pass: models of all kinds behind one protocol, batches, random streams.

Parameters and other variables of a model are flat dicts from path to array; `bind` turns them into
the model that is passed to the user's loss function.
"""

from jaxspeed.user_models.adapters import adapt_model
from jaxspeed.user_models.layer_list import LayerSpec, TiedLayerSpec
from jaxspeed.user_models.pipeline_module import PipelineModule
from jaxspeed.user_models.protocol import Model

__all__ = [
    "LayerSpec",
    "Model",
    "PipelineModule",
    "TiedLayerSpec",
    "adapt_model",
]
