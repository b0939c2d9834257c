"""Any model behind one face: an nnx.Module factory, a Linen module, or a pair (init, apply).

Parameters and everything else that a model keeps are flat dicts from path to array; `bind` makes of
them what the user's loss function is given.
"""

from jaxspeed.train.model.adapt import adapt_model
from jaxspeed.train.model.face import Model
from jaxspeed.train.model.layer_list import LayerSpec, TiedLayerSpec
from jaxspeed.train.model.pipeline_module import PipelineModule

__all__ = ["LayerSpec", "Model", "PipelineModule", "TiedLayerSpec", "adapt_model"]
