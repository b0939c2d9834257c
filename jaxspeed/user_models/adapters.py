"""Adapt a user's model (nnx factory, Linen module or a pair of functions) to the Model protocol."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
from flax import nnx

from jaxspeed.config import match
from jaxspeed.errors import ModelError
from jaxspeed.placement.precision import keeps_fp32
from jaxspeed.user_models.batches import takes_rng
from jaxspeed.user_models.linen_model import LinenModel
from jaxspeed.user_models.nnx_model import NnxModel
from jaxspeed.user_models.pair_model import PairModel
from jaxspeed.user_models.pretrained_model import Pretrained
from jaxspeed.user_models.protocol import Model
from jaxspeed.user_models.trainable import ALL_TRAINED, TrainRule


def adapt_model(
    model: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    example_batch: Any = None,
    trained: TrainRule = ALL_TRAINED,
    full_precision: Sequence[str] = (),
    keep_in_fp32: Sequence[str] = (),
    state_collections: Sequence[str] | None = None,
    init_with: Callable[[Any, Any], Any] | None = None,
) -> Model:
    """Adapt an nnx factory, a Linen module or a pair (init, apply), or one that is pretrained.

    Args:
      trained: which parameters are trained.
      full_precision: path patterns of parameters that are never cast to a 16-bit dtype.
      keep_in_fp32: the same as names of `data_types.keep_in_fp32_modules`.
      state_collections: state carried from step to step besides parameters: names of Linen
        collections or of nnx Variable types; None for all but sown and intermediate values.
      init_with: the calls that create a Linen module's parameters, as init_with(model, batch);
        None for those of the loss.
    """
    if isinstance(model, Pretrained):
        adapted: Any = adapt_model(
            model.model,
            loss_fn,
            example_batch=example_batch,
            trained=trained,
            full_precision=full_precision,
            keep_in_fp32=keep_in_fp32,
            state_collections=state_collections,
            init_with=init_with,
        )
        adapted.weights = model.weights
        return adapted

    def is_full(paths: Sequence[str]) -> bool:
        named = any(keeps_fp32(name, path) for name in keep_in_fp32 for path in paths)
        return named or any(match(pattern, path) for pattern in full_precision for path in paths)

    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ModelError(
            f"model is the class {model.__name__}; pass a Linen module: {model.__name__}(...)"
        )
    if isinstance(model, nn.Module):
        if example_batch is None:
            raise ModelError(
                "a Linen module initializes its parameters from a batch: pass "
                "initialize(..., example_batch=...)"
            )
        return LinenModel(
            model, loss_fn, example_batch, trained, is_full, state_collections, init_with
        )
    if init_with is not None:
        raise ModelError("init_with is for Linen modules, which create parameters when called")
    if isinstance(model, tuple) and len(model) == 2 and all(map(callable, model)):
        return PairModel(model[0], model[1], example_batch, trained, is_full)
    if isinstance(model, nnx.Module):
        raise ModelError(
            f"model is a built {type(model).__name__}; pass its factory, so that it can be "
            f"initialized sharded: model=lambda rngs: {type(model).__name__}(..., rngs=rngs)"
        )
    if not callable(model):
        raise ModelError(
            f"model is a {type(model).__name__}; it may be a factory of an nnx.Module "
            "(lambda rngs: ...), a Linen module, or a pair (init, apply)"
        )
    return NnxModel(model, trained, is_full, state_collections, seeded=takes_rng(loss_fn))
