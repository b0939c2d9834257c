"""Operations for models: attention, losses, norms. They read the mesh from the trace's context.

`ops.moe` has mixtures of experts.
"""

from jaxspeed.lazy_names import lazy_names
from jaxspeed.ops.attention import attention
from jaxspeed.ops.cross_entropy import (
    TokenLogprobs,
    cross_entropy,
    linear_cross_entropy,
    logit_logprobs,
    token_logprobs,
)
from jaxspeed.ops.divergence import Divergence, linear_divergence
from jaxspeed.ops.embed import embed
from jaxspeed.ops.next_tokens import NextTokens, split_batch
from jaxspeed.ops.norms import layer_norm, rms_norm
from jaxspeed.ops.rope import (
    LinearScaling,
    RopeScaling,
    Rotation,
    Scaling,
    YarnScaling,
    frequencies,
    rope_scaling,
    rotate,
    rotate_neighbours,
    rotation,
)
from jaxspeed.ops.saved_inputs import saves_inputs
from jaxspeed.ops.spread_samples import spread_samples

# A folder is imported when it is first used: what is in it imports files of this one.
__getattr__, __dir__ = lazy_names(__name__, {})

__all__ = [
    "Divergence",
    "LinearScaling",
    "NextTokens",
    "RopeScaling",
    "Rotation",
    "Scaling",
    "TokenLogprobs",
    "YarnScaling",
    "attention",
    "cross_entropy",
    "embed",
    "frequencies",
    "layer_norm",
    "linear_cross_entropy",
    "linear_divergence",
    "logit_logprobs",
    "rms_norm",
    "rope_scaling",
    "rotate",
    "rotate_neighbours",
    "rotation",
    "saves_inputs",
    "split_batch",
    "spread_samples",
    "token_logprobs",
]
