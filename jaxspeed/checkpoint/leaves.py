"""What of a train state is kept, and under which names: nothing that can be made again.

    step, skipped, loss_scale/...   the counters
    params/PATH                     the copy of a parameter that the optimizer updates
    opt/PATH, ema/PATH              its moments, its moving average, the optimizer's own leaves
    variables/PATH                  statistics, random streams, buffers
    ring_errors/LAYOUT              what packing gradients for a ring has lost

The 16-bit parameters that layers read are made from their masters. The names say nothing of mesh,
stage or precision, so any program of the same model and optimizer can take them. But for the errors
of a ring: they are each device's own, and another layout, which has other names, begins anew.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.objective.rng import is_key
from jaxspeed.objective.train_state import TrainState, unpad, updated_values
from jaxspeed.optim import LossScale
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.placement.rows import Row
from jaxspeed.train.program import Program

Arrays = dict[str, Any]
RING_ERRORS = "ring_errors"


@dataclass(frozen=True)
class KeptLeaf:
    """One array of a checkpoint."""

    shape: tuple[int, ...]  # without the padding that a cut needs
    stored: jax.ShapeDtypeStruct  # as a program holds it, with its sharding
    key: str | None = None  # the implementation, where it is a random key: its data is kept

    @property
    def nbytes(self) -> int:
        return math.prod(self.stored.shape) * self.stored.dtype.itemsize


def kept_arrays(program: Program, state: TrainState) -> Arrays:
    """{name: array} of a state, or of its shapes."""
    rows = program.table
    return {
        "step": state.step,
        "skipped": state.skipped,
        **_under("loss_scale", state.loss_scale._asdict()),
        **{f"params/{row.path}": updated_values(state, row) for row in rows},
        **_under("opt", flat_with_paths(state.opt)),
        **_under("ema", state.ema),
        **_under("variables", state.variables),
        **_under(RING_ERRORS, state.ring_errors),
    }


def kept_leaves(program: Program) -> dict[str, KeptLeaf]:
    """{name: leaf} of what a program's state keeps, without arrays."""
    logical: dict[str, tuple[int, ...]] = {}
    for row in program.table:
        logical[f"params/{row.path}"] = logical[f"ema/{row.path}"] = tuple(row.leaf.shape)
    for path, (shape, _, _) in program.layout.places.items():
        logical[f"opt/{path}"] = tuple(shape)
    arrays = kept_arrays(program, program.state)
    return {name: _leaf(x, logical.get(name)) for name, x in arrays.items()}


def _leaf(x: Any, logical: tuple[int, ...] | None) -> KeptLeaf:
    if not is_key(x):
        return KeptLeaf(logical or tuple(x.shape), x)
    impl = []

    def look(key: jax.Array) -> jax.Array:
        impl.append(str(jax.random.key_impl(key)))  # which shapes alone do not tell
        return jax.random.key_data(key)

    data = jax.eval_shape(look, jax.ShapeDtypeStruct(x.shape, x.dtype))
    stored = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)
    return KeptLeaf(tuple(data.shape), stored, impl[0])


def key_data(x: Any) -> Any:
    """The numbers of a random key; any other array as it is."""
    return jax.random.key_data(x) if is_key(x) else x


def published(row: Row, master: jax.Array) -> jax.Array:
    """What layers read of a parameter, from the copy that is updated."""
    assert row.param is not None
    return unpad(master.astype(row.param.dtype), row.shape(row.param))


def as_state(program: Program, kept: Mapping[str, Any], params: Mapping[str, Any]) -> TrainState:
    """The state of these kept arrays, and of the parameters that were published from them."""
    shapes = program.state
    opt = [kept[f"opt/{path}"] for path in flat_with_paths(shapes.opt)]
    rows = list(program.table)
    return TrainState(
        step=kept["step"],
        skipped=kept["skipped"],
        params={
            row.path: params[row.path] if row.master else kept[f"params/{row.path}"]
            for row in rows
            if row.param
        },
        master={row.path: kept[f"params/{row.path}"] for row in rows if row.master},
        opt=jax.tree.unflatten(jax.tree.structure(shapes.opt), opt),
        ema={path: kept[f"ema/{path}"] for path in shapes.ema},
        variables={path: kept[f"variables/{path}"] for path in shapes.variables},
        loss_scale=LossScale(*(kept[f"loss_scale/{name}"] for name in LossScale._fields)),
        ring_errors={name: kept[f"{RING_ERRORS}/{name}"] for name in shapes.ring_errors},
    )


def _under(prefix: str, flat: Mapping[str, Any]) -> Arrays:
    return {f"{prefix}/{path}": x for path, x in flat.items()}


def own(x: Any, leaf: KeptLeaf) -> Any:
    """A buffer that the step may use up, from one that may be borrowed; on the device, traced."""
    x = jnp.copy(on_device(x))
    return jax.random.wrap_key_data(x, impl=leaf.key) if leaf.key else x
