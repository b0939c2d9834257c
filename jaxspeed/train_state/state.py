"""The train state: parameters, masters, optimizer state, variables; padding and state layout."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxspeed.optim import LossScale
from jaxspeed.placement.codec import Stored
from jaxspeed.placement.rows import IS_RANGE, Row
from jaxspeed.placement.table import PlacementTable

Arrays = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Train state as a pytree; parameters are flat dicts by path, as the table stores them."""

    step: Any  # int32 [], steps taken, skipped ones included
    skipped: Any  # int32 [], steps whose update was not finite
    params: Arrays  # the `param` rows
    master: Arrays  # the `master` rows
    opt: Any  # the optimizer's own state
    ema: Arrays  # the moving average of the trained parameters, if configured
    variables: Arrays  # statistics, random streams, buffers
    loss_scale: LossScale
    # Error feedback of quantized ring messages, per device: added to the next message.
    ring_errors: Arrays = field(default_factory=dict)

    def sources(self, table: PlacementTable) -> Arrays:
        """Stored copy of each parameter that layers read from."""
        return {r.path: (self.params if r.param else self.master)[r.path] for r in table}


def updated_values(state: TrainState, row: Row) -> Stored:
    """Stored copy of a parameter that the optimizer updates."""
    return (state.master if row.master else state.params)[row.path]


def logical_value(state: TrainState, row: Row) -> jax.Array:
    """A parameter in the precision of its update, decoded and without padding."""
    value: jax.Array = row.decoded(row.updated, updated_values(state, row))
    return value


def wide_dtype(row: Row) -> Any:
    """Dtype of a gradient that is passed to the optimizer."""
    return jnp.promote_types(row.updated.dtype, jnp.float32)


def native_tree(model: Any, flat: Mapping[str, Any]) -> Any:
    """Unflatten trained parameters to the model's tree for optimizers; frozen ones are masked.

    In place of a parameter of which ranges of layers are leaves stands `{"[start:stop]": array}`.
    """
    by_parameter: dict[str, Any] = {}
    for path, value in flat.items():
        parameter, _, layers = path.rpartition("/")
        if IS_RANGE.fullmatch(layers):
            by_parameter.setdefault(parameter, {})[layers] = value
        else:
            by_parameter[path] = value
    return model.native(by_parameter, optax.MaskedNode())
