"""Embedding lookup in a column-sharded table, without gathering the table.

Every device looks up its columns for the tokens of all devices, and an all-to-all sends each device
all columns of its tokens. That moves and holds as much as one activation [tokens, embed], whatever
the vocabulary size. In backward each device adds the gradients of all tokens to its columns, which
reduces them without a reduce-scatter.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.axes import SEQ
from jaxspeed.ops.free_axes import free_axes, free_sample_axes
from jaxspeed.placement.codec import unpad
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.zero3.sharded_param import ShardedParam

SCOPE = "table_lookup"  # the named scope of its exchanges


def looks_up(eqn: Any, stored: ShardedParam, samples: int | None) -> bool:
    """Whether a `gather` takes full rows of a column-sharded table for a batch of `samples`.

    Positions, which are the same for every sample, do not count: their table is as small as the
    result of the lookup.
    """
    ids, numbers, sharded = eqn.invars[1].aval, eqn.params["dimension_numbers"], stored.sharded_dim
    return (
        sharded is not None
        and not stored.parts  # an encoded table is decoded first
        and ids.shape[0] == samples
        and 0 not in numbers.offset_dims
        and sharded in _row_dims(eqn)
        and sharded not in numbers.start_index_map
        and eqn.params["slice_sizes"][sharded] == stored.shape[sharded]
    )


def look_up(eqn: Any, table: jax.Array, ids: jax.Array, stored: ShardedParam) -> jax.Array:
    """The rows `ids` of a stored table in the layers' dtype, sharded as the batch."""
    sharded, out = stored.sharded_dim, eqn.outvars[0].aval.shape
    assert sharded is not None
    sizes = tuple(
        table.shape[dim] if dim == sharded else size
        for dim, size in enumerate(eqn.params["slice_sizes"])
    )
    table_rows = eqn.primitive.bind(
        on_device(table).astype(stored.dtype), ids, **{**eqn.params, "slice_sizes": sizes}
    )
    columns, positions, rows = _shardings(eqn, stored, sharded)
    with jax.named_scope(SCOPE):
        table_rows = constrain(table_rows, columns, "lookup.columns")
        if positions is not None:
            table_rows = constrain(table_rows, positions, "lookup.positions")
        table_rows = constrain(table_rows, rows, "lookup.rows")
    return unpad(table_rows, out)


def _row_dims(eqn: Any) -> list[int]:
    """The table's dims that are dims of the result, in its order."""
    numbers = eqn.params["dimension_numbers"]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    return [dim for dim in range(eqn.invars[0].aval.ndim) if dim not in gone]


def _shardings(
    eqn: Any, stored: ShardedParam, sharded: int
) -> tuple[NamedSharding, NamedSharding | None, NamedSharding]:
    """Shardings of the result: by columns, as the table; by positions; and as the batch.

    XLA has no all-to-all over the axes of two dims: it would gather all. So those that shard
    positions are exchanged first, if the table is sharded over them.
    """
    mesh = stored.sharding.mesh
    places = dict(zip(_row_dims(eqn), eqn.params["dimension_numbers"].offset_dims, strict=True))

    def along(spec: PartitionSpec, batch: Sequence[str], positions: bool) -> NamedSharding:
        entries: list[Any] = [None] * eqn.outvars[0].aval.ndim
        entries[0] = tuple(batch) or None
        if positions and 1 not in places.values() and len(entries) > 1:
            entries[1] = SEQ
        for dim, place in places.items():
            entries[place] = spec[dim] if dim < len(spec) else None
        return NamedSharding(mesh, PartitionSpec(*entries))

    taken = stored.sharding.spec[sharded]
    taken = (taken,) if isinstance(taken, str) else taken
    data = free_sample_axes(mesh=mesh)
    left = [axis for axis in data if axis not in taken]
    has_positions = free_axes(mesh).get(SEQ, 1) > 1
    positions = None
    if has_positions and SEQ in taken:
        others = tuple(axis for axis in taken if axis != SEQ)
        entries = enumerate(stored.sharding.spec)
        spec = PartitionSpec(*(others if d == sharded else entry for d, entry in entries))
        positions = along(spec, left, has_positions)
    columns = along(stored.sharding.spec, left, has_positions and SEQ not in taken)
    return columns, positions, along(stored.gathered.spec, data, has_positions)
