"""Sharding propagation as by XLA's partitioner: the mesh axes of each dim of each array.

The shardings of arguments and constraints propagate through the operations, with the data and
against it, until nothing changes. Two dims are tied where an operation reads the same index along
both.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxspeed.jaxpr.dim_relations import (
    DimRelations,
    pairwise,
    relations,
    reshape_groups,
    same_place,
)
from jaxspeed.jaxpr.primitives import CONSTRAINT, GROUPED_PRODUCTS, PALLAS
from jaxspeed.jaxpr.traverse import consts_and_carry
from jaxspeed.ops.moe.grouped_products import result_spec
from jaxspeed.placement.specs import by_dim, entry_axes, num_shards
from jaxspeed.planner.trace.trace_ir import (
    LEAVE,
    PAIRWISE,
    PLACED,
    Op,
    Scope,
    Value,
    all_ops,
    wires,
)

Tie = tuple[Value, int, Value, int]  # (an input, its dim, an output, its dim)


def propagate_shardings(scope: Scope, specs: Sequence[Any], mesh: Mapping[str, int]) -> None:
    """Set the `spec` of every value from `specs`, the PartitionSpecs of the scope's inputs."""
    for value, spec in zip(scope.ins, specs, strict=True):
        _set(value, spec, mesh)
    ops = list(all_ops(scope))
    read: dict[Value, set[str]] = {}
    for op in ops:
        for v in op.values:
            read.setdefault(v, set()).add(op.name)
    for op in ops:
        if op.name == CONSTRAINT:
            # Of a chain of constraints only the last counts.
            if read.get(op.outs[0]) != {CONSTRAINT}:
                _set(op.outs[0], op.params["sharding"].spec, mesh)
        elif op.name in (PLACED, LEAVE):
            for out, spec in zip(op.outs, op.params["specs"], strict=True):
                _set(out, spec, mesh, fixed=False)
        elif op.name in GROUPED_PRODUCTS:
            _set(op.outs[0], result_spec(op.name, op.params), mesh, fixed=False)
    ties = [tie for op in ops for tie in ties_of(op)]
    merges = [op for op in ops if any(merged_dims(op))]
    changed = True
    while changed:
        changed = False
        went = True  # forward to a fixpoint first: producers determine a sharding before consumers
        while went:
            went = False
            for source, d, target, e in ties:
                went |= _propagate(source, d, target, e, mesh)
            for op in merges:
                went |= _merge(op, mesh)
            changed |= went
        for source, d, target, e in reversed(ties):
            changed |= _propagate(target, e, source, d, mesh)


def shards_per_dim(value: Value, mesh: Mapping[str, int]) -> list[int]:
    """The number of shards of each dim."""
    return [num_shards(axes, mesh) for axes in value.spec]


def _set(value: Value, spec: Any, mesh: Mapping[str, int], fixed: bool = True) -> None:
    entries = by_dim(spec, len(value.shape))
    value.spec = [tuple(axis for axis in entry_axes(e) if mesh[axis] > 1) for e in entries]
    value.axes |= {axis for axes in value.spec for axis in axes}
    free = PartitionSpec.UNCONSTRAINED
    value.fixed = frozenset(d for d, e in enumerate(entries) if fixed and e is not free)


def _propagate(source: Value, d: int, target: Value, e: int, mesh: Mapping[str, int]) -> bool:
    axes = source.spec[d]
    if not axes or e in target.fixed or target.spec[e] or target.axes.intersection(axes):
        return False
    if target.shape[e] % num_shards(axes, mesh):
        return False
    target.spec[e] = axes
    target.axes.update(axes)
    return True


def merged_dims(op: Op) -> Iterator[tuple[list[int], int]]:
    """(dims of the operand, the dim of the result) that a reshape merges."""
    if op.name == "reshape" and op.ins[0] is not None:
        for olds, news in reshape_groups(op.ins[0].shape, op.outs[0].shape):
            if len(olds) > 1 and len(news) == 1:
                yield olds, news[0]


def _merge(op: Op, mesh: Mapping[str, int]) -> bool:
    """Shard a merged dim as all of its dims are, if of each outer one a device has one index."""
    (source, *_), (target, *_), changed = op.ins, op.outs, False
    assert source is not None
    for olds, e in merged_dims(op):
        axes = tuple(axis for d in olds for axis in source.spec[d])
        outer = all(num_shards(source.spec[d], mesh) == source.shape[d] for d in olds[:-1])
        other_axes = target.axes - {*target.spec[e]}
        if outer and axes != target.spec[e] and e not in target.fixed and not other_axes & {*axes}:
            target.spec[e], changed = axes, True
            target.axes.update(axes)
    return changed


def ties_of(op: Op) -> Iterator[Tie]:
    """Dims along which an operation reads and writes the same index.

    Includes dims along which it mixes elements and, for an unknown operation, dims of the same
    position and size: XLA's partitioner propagates there too. Constraints propagate to their
    operand.
    """
    if op.bodies:
        yield from _of_bodies(op)
        return
    if op.name in PALLAS or op.name in GROUPED_PRODUCTS:  # a kernel may mix along any dim
        return
    known = relations_of(op)
    for out, factors in zip(op.outs, known.results, strict=True):
        at = {factor: e for e, factor in enumerate(factors) if factor is not None}
        for v, operand_factors in zip(op.ins, known.operands, strict=True):
            if v is not None:
                yield from ((v, d, out, at[f]) for d, f in enumerate(operand_factors) if f in at)


def relations_of(op: Op) -> DimRelations:
    """The relations of an operation's dims; guessed from their positions if it has no rule."""
    in_shapes = [v.shape if v is not None else () for v in op.ins]
    out_shapes = [out.shape for out in op.outs]
    if op.name in PAIRWISE:
        return pairwise(out_shapes)
    known = relations(op.name, op.params, in_shapes, out_shapes)
    return same_place(in_shapes, out_shapes) if known is None else known


def _leading(v: Value | None, more: int, out: Value, skip: int) -> Iterator[Tie]:
    """Tie the dims of `v` from `more` on to those of `out` from `skip` on."""
    if v is not None:
        count = min(len(v.shape) - more, len(out.shape) - skip)
        yield from ((v, d + more, out, d + skip) for d in range(count))


def _of_bodies(op: Op) -> Iterator[Tie]:
    """Ties of a loop or cond: an array that a scan slices or stacks has one dim more."""
    scan = op.name == "scan"
    consts, carry = consts_and_carry(op) if scan else (len(op.ins), len(op.outs))
    for body in op.bodies:
        inputs, outs, _ = wires(op, body)
        for i, (v, inner) in enumerate(inputs):
            yield from _leading(v, i >= consts + carry, inner, 0)
        for i, (body_out, out) in enumerate(outs):
            yield from _leading(body_out, 0, out, i >= carry)
            if scan and i < carry:
                yield from _leading(body_out, 0, body.ins[consts + i], 0)
                yield from _leading(op.ins[consts + i], 0, out, 0)
