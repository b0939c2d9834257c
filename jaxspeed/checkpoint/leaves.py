"""Canonical names of the leaves of a train state in a checkpoint; nothing that can be recomputed.

    step, skipped, loss_scale/...   the counters
    params/PATH                     the copy of a parameter that the optimizer updates
    opt/PATH, ema/PATH              its moments, its moving average, other optimizer leaves
    variables/PATH                  statistics, random streams, buffers
    ring_errors/LAYOUT              rounding errors of quantized ring reduction
    adapters/NAME/...               the same of an adapter that is loaded and not in use

A value that a codec stores is saved as it is stored, one array for each of the codec's, below its
name: `params/PATH/codes`.

A parameter of which ranges of layers are stored apart, since only some are trained, is one, and so
is its moving average, with the values of the frozen layers. Its moments are those of the trained
layers, `opt/.../PATH/[start:stop]`.

The 16-bit parameters that layers read are cast from their masters. The names do not depend on mesh,
stage or precision, so any program of the same model and optimizer can restore them. The exception
is ring errors: they are per device, and another layout, which has other names, starts from zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.disk.disk_array import is_on_disk
from jaxspeed.optim import LossScale
from jaxspeed.placement.codec import PLAIN, Codec, Stored, StoredValue, pad, unpad
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.placement.rows import Row
from jaxspeed.placement.specs import by_dim
from jaxspeed.train.program import Program
from jaxspeed.train_state.opt_layout import PackedLeaves
from jaxspeed.train_state.state import TrainState, updated_values
from jaxspeed.user_models.rng import is_key

Arrays = dict[str, Any]
RING_ERRORS = "ring_errors"


@dataclass(frozen=True)
class SavedLeaf:
    """One value of a checkpoint.

    Attributes:
      shape: without the padding that sharding needs.
      stored: the padded value, with the sharding that a program's state has.
      key: the implementation of a random key, of which the data is saved.
      encoded: the arrays of a codec other than PLAIN.
      parts: of a parameter whose layers are stored apart: these leaves, by their names in a state.
        Of a packed leaf the one that a state has instead.
      packed: the leaves that a state stores together, of which this is one.
    """

    shape: tuple[int, ...]
    stored: jax.ShapeDtypeStruct
    key: str | None = None
    codec: Codec = PLAIN
    encoded: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    parts: Mapping[str, "SavedLeaf"] = field(default_factory=dict)
    packed: PackedLeaves | None = None

    @property
    def arrays(self) -> Stored:
        """The shapes, dtypes and shardings of the saved arrays."""
        return self.stored if self.codec == PLAIN else dict(self.encoded)

    @property
    def nbytes(self) -> int:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self.arrays))


def saved_arrays(program: Program, state: TrainState) -> Arrays:
    """The saved values of a state, as they are stored, or their shapes, by name; parts apart."""
    rows = program.table
    return {
        "step": state.step,
        "skipped": state.skipped,
        **_under("loss_scale", state.loss_scale._asdict()),
        **{f"params/{row.path}": updated_values(state, row) for row in rows},
        **_under("opt", program.layout.flat(state.opt)),
        **_under("ema", state.ema),
        **_under("variables", state.variables),
        **_under(RING_ERRORS, state.ring_errors),
    }


def saved_leaves(program: Program, exclude_frozen: bool = False) -> dict[str, SavedLeaf]:
    """The saved leaves of a program's state, by name, without arrays.

    Args:
      exclude_frozen: leave out parameters that are not trained. Of one of which some layers are
        trained, only their ranges are saved, as `params/PATH/[start:stop]`.
    """
    table = program.table
    values = {f"params/{row.path}": table.stored(row, row.updated) for row in table}
    values |= {f"opt/{path}": value for path, value in program.layout.values.items()}
    logical = {name: value.shape for name, value in values.items()}
    logical |= {f"ema/{row.path}": row.leaf.shape for row in table}
    arrays = jax.tree.map(
        lambda x: x.shape_struct if is_on_disk(x) else x,
        saved_arrays(program, program.state),
        is_leaf=is_on_disk,
    )
    leaves = {name: _leaf(x, values.get(name), logical.get(name)) for name, x in arrays.items()}
    for group in program.layout.packed:
        has = {f"opt/{group.first}": leaves[f"opt/{group.first}"]}
        for path in group.paths.values():
            place = group.saved(path, program.layout.by_parameter[path])
            leaf = _leaf(table.stored_leaf(place).arrays, None, place.shape)
            leaves[f"opt/{path}"] = replace(leaf, parts=has, packed=group)
    if exclude_frozen:
        frozen = frozen_leaves(program)
        leaves = {name: leaf for name, leaf in leaves.items() if name not in frozen}
    for path, rows in table.parameters.items():
        names = [f"params/{row.path}" for row in rows]
        are_saved = all(name in leaves for name in names)
        if len(rows) > 1 and are_saved and all(row.updated.codec == PLAIN for row in rows):
            averages = [f"ema/{row.path}" for row in rows]
            averages = [a if a in leaves else p for a, p in zip(averages, names, strict=True)]
            if averages != names:
                leaves[f"ema/{path}"] = _joined({name: leaves[name] for name in averages})
            leaves[f"params/{path}"] = _joined({name: leaves[name] for name in names})
    parts = {name for leaf in leaves.values() if leaf.packed is None for name in leaf.parts}
    return {name: leaf for name, leaf in leaves.items() if name not in parts}


def frozen_leaves(program: Program) -> dict[str, SavedLeaf]:
    """The leaves of the parameters that are not trained, by their names in a state."""
    table = program.table
    return {
        f"params/{row.path}": _leaf(
            program.state.params[row.path], table.stored(row, row.updated), row.leaf.shape
        )
        for row in table
        if not row.leaf.trainable
    }


def _joined(parts: Mapping[str, SavedLeaf]) -> SavedLeaf:
    """The leaf of a parameter whose ranges of layers are these."""
    shapes = [leaf.shape for leaf in parts.values()]
    layers = sum(shape[0] for shape in shapes)
    padded = (max(sizes) for sizes in zip(*(leaf.stored.shape[1:] for leaf in parts.values())))
    at = next(iter(parts.values())).stored.sharding
    spec = PartitionSpec(None, *by_dim(at.spec, len(shapes[0]))[1:])
    stored = jax.ShapeDtypeStruct(
        (layers, *padded),
        jnp.result_type(*(leaf.stored.dtype for leaf in parts.values())),
        sharding=NamedSharding(at.mesh, spec),
    )
    return SavedLeaf((layers, *shapes[0][1:]), stored, parts=parts)


def join(name: str, leaf: SavedLeaf, parts: Mapping[str, Any]) -> jax.Array:
    """The value of a leaf with parts, as it is saved; called inside jit, which sorts `parts`."""
    if leaf.packed:
        (stack,) = parts.values()
        leaves = leaf.packed.unpack(on_device(stack))
        return next(x for path, x in leaves.items() if f"/{name}".endswith(f"/opt/{path}"))
    values = [unpad(on_device(parts[name]), part.shape) for name, part in leaf.parts.items()]
    return pad(jnp.concatenate(values).astype(leaf.stored.dtype), leaf.stored.shape)


def apart(name: str, leaf: SavedLeaf, x: Stored) -> dict[str, Stored]:
    """A saved value by its names in a state, those of `packed` ones apart; called inside jit."""
    if not leaf.parts or leaf.packed:
        return {name: x}
    kind, values, start = name.partition("/")[0], {}, 0
    for part, of_part in leaf.parts.items():
        rows = x[start : start + of_part.shape[0]]
        start += of_part.shape[0]
        if part.startswith(f"{kind}/"):  # an average has no part of its own for frozen layers
            value = unpad(rows, of_part.shape).astype(of_part.stored.dtype)
            values[part] = pad(value, of_part.stored.shape)
    return values


def packed(
    group: PackedLeaves, leaves: Mapping[str, SavedLeaf], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Leaves of a state that are stored together, by name, from their saved values."""
    names = {path: leaves[f"opt/{path}"] for path in group.paths.values()}
    logical = {path: unpad(values[f"opt/{path}"], leaf.shape) for path, leaf in names.items()}
    return _under("opt", group.pack(logical))


def group_in_state(group: PackedLeaves, leaves: Mapping[str, SavedLeaf]) -> dict[str, SavedLeaf]:
    """The leaves of a state that are stored together, by name."""
    (stack,) = leaves[f"opt/{group.first}"].parts.values()
    at = NamedSharding(stack.stored.sharding.mesh, PartitionSpec())
    nothing = SavedLeaf((0,), jax.ShapeDtypeStruct((0,), stack.stored.dtype, sharding=at))
    paths = group.paths.values()
    return _under("opt", {path: stack if path == group.first else nothing for path in paths})


def _leaf(x: Any, value: StoredValue | None, logical: tuple[int, ...] | None) -> SavedLeaf:
    if value and value.codec != PLAIN:
        stored = jax.ShapeDtypeStruct(value.padded, value.dtype, sharding=value.sharding)
        return SavedLeaf(value.shape, stored, None, value.codec, value.arrays)
    if not is_key(x):
        return SavedLeaf(logical or tuple(x.shape), x)
    impl = []

    def look(key: jax.Array) -> jax.Array:
        impl.append(str(jax.random.key_impl(key)))  # not known from shapes alone
        return jax.random.key_data(key)

    data = jax.eval_shape(look, jax.ShapeDtypeStruct(x.shape, x.dtype))
    stored = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)
    return SavedLeaf(tuple(data.shape), stored, impl[0])


def key_data(x: Any) -> Any:
    """The data of a random key; any other array unchanged."""
    return jax.random.key_data(x) if is_key(x) else x


def published(row: Row, master: jax.Array) -> jax.Array:
    """The parameter as layers read it, from the copy that is updated."""
    assert row.param is not None
    return unpad(master.astype(row.param.dtype), row.shape(row.param))


def as_state(program: Program, saved: Mapping[str, Any], params: Mapping[str, Any]) -> TrainState:
    """The state of these saved arrays, and of the parameters that were published from them."""
    shapes = program.state
    opt = [saved[f"opt/{path}"] for path in program.layout.places]
    rows = list(program.table)
    return TrainState(
        step=saved["step"],
        skipped=saved["skipped"],
        params={
            row.path: params[row.path] if row.master else saved[f"params/{row.path}"]
            for row in rows
            if row.param
        },
        master={row.path: saved[f"params/{row.path}"] for row in rows if row.master},
        opt=jax.tree.unflatten(program.layout.tree, opt),
        ema={path: saved[f"ema/{path}"] for path in shapes.ema},
        variables={path: saved[f"variables/{path}"] for path in shapes.variables},
        loss_scale=LossScale(*(saved[f"loss_scale/{name}"] for name in LossScale._fields)),
        ring_errors={name: saved[f"{RING_ERRORS}/{name}"] for name in shapes.ring_errors},
    )


def _under(prefix: str, flat: Mapping[str, Any]) -> Arrays:
    return {f"{prefix}/{path}": x for path, x in flat.items()}


def donatable_copy(x: Stored, leaf: SavedLeaf) -> Stored:
    """A copy on the device that the step may donate; called inside jit."""
    x = jax.tree.map(jnp.copy, on_device(x))
    return jax.random.wrap_key_data(x, impl=leaf.key) if leaf.key else x


def encoded_anew(x: Stored, was: SavedLeaf, leaf: SavedLeaf) -> Stored:
    """What was saved as `was` stored as `leaf`, on the device; called inside jit."""
    shape, dtype = leaf.shape, leaf.stored.dtype
    if was.codec == leaf.codec:
        moved = leaf.codec.repadded(on_device(x), shape, leaf.arrays)
        if moved is not None:
            return moved
    value = unpad(was.codec.decode(on_device(x), shape, dtype), shape)
    value = pad(value.astype(dtype), leaf.stored.shape)
    return leaf.codec.encode(value, shape, leaf.arrays)
