"""The loss of a micro-batch: model adapters, loss forms, precision, randomness, train state.

Parameters and other variables of a model are flat dicts from path to array; `bind` turns them into
the model that is passed to the user's loss function.
"""

from jaxspeed.objective.adapters import adapt_model
from jaxspeed.objective.layer_list import LayerSpec, TiedLayerSpec
from jaxspeed.objective.pipeline_module import PipelineModule
from jaxspeed.objective.protocol import Model

__all__ = [
    "LayerSpec",
    "Model",
    "PipelineModule",
    "TiedLayerSpec",
    "adapt_model",
]
