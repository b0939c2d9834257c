"""Over which mesh axes each array of an opened program is cut.

The compiler's partitioner in small: what the program says (its arguments and its constraints) goes
along the operations, with the data and against it, until nothing changes. A dim is tied to another
where an operation reads the same index along both.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxspeed.jaxpr.dim_relations import DimRelations, pairwise, relations, same_place
from jaxspeed.jaxpr.traverse import consts_and_carry
from jaxspeed.placement.specs import by_dim, entry_axes
from jaxspeed.planner.memory.trace_ir import (
    LEAVE,
    PAIRWISE,
    PLACED,
    Op,
    Scope,
    Value,
    all_ops,
)

Cut = tuple[str, ...]
Tie = tuple[Value, int, Value, int]  # (an input, its dim, an output, its dim)
CONSTRAINT = "sharding_constraint"


def cut_all(scope: Scope, given: Sequence[Any], mesh: Mapping[str, int]) -> None:
    """Sets `cut` of every value; `given` are the PartitionSpecs of the scope's inputs."""
    for value, spec in zip(scope.ins, given, strict=True):
        _set(value, spec)
    ops = list(all_ops(scope))
    for op in ops:
        if op.name == CONSTRAINT:
            _set(op.outs[0], op.params["sharding"].spec)
        elif op.name in (PLACED, LEAVE):
            for out, spec in zip(op.outs, op.params["specs"], strict=True):
                _set(out, spec, fixed=False)
    ties = [tie for op in ops for tie in ties_of(op)]
    changed = True
    while changed:
        changed = False
        went = True  # forward as far as it goes, because data says more than what becomes of it
        while went:
            went = False
            for source, d, target, e in ties:
                went |= _go(source, d, target, e, mesh)
            changed |= went
        for source, d, target, e in reversed(ties):
            changed |= _go(target, e, source, d, mesh)


def cut_of(spec: Any, rank: int) -> list[Cut]:
    """The entries of a PartitionSpec, one a dim."""
    return [entry_axes(entry) for entry in by_dim(spec, rank)]


def ways(value: Value, mesh: Mapping[str, int]) -> list[int]:
    """Into how many parts each dim is cut."""
    return [math.prod(mesh[a] for a in cut) for cut in value.cut]


def _set(value: Value, spec: Any, fixed: bool = True) -> None:
    value.cut = cut_of(spec, len(value.shape))
    value.axes |= {axis for entry in value.cut for axis in entry}
    said = [entry is not PartitionSpec.UNCONSTRAINED for entry in spec]
    said += [True] * (len(value.shape) - len(said))
    value.fixed = frozenset(d for d, says in enumerate(said) if says and fixed)


def _go(source: Value, d: int, target: Value, e: int, mesh: Mapping[str, int]) -> bool:
    cut = source.cut[d]
    if not cut or e in target.fixed or target.cut[e] or target.axes.intersection(cut):
        return False
    parts = math.prod(mesh[axis] for axis in cut)
    if parts == 1 or target.shape[e] % parts:
        return False
    target.cut[e] = cut
    target.axes.update(cut)
    return True


def ties_of(op: Op) -> Iterator[Tie]:
    """Dims along which an operation reads and writes the same index.

    Also along which it mixes, and dims of one place and size where nothing is known of it: a
    partitioner goes on there. Constraints are such operations: what their user says of a result
    also says how what is constrained is best made.
    """
    if op.name in _LOOPS_AND_BRANCHES:
        yield from _LOOPS_AND_BRANCHES[op.name](op)
        return
    if op.name == "pallas_call":  # a kernel may mix along any dim
        return
    known = _relations(op)
    for out, factors in zip(op.outs, known.results, strict=True):
        at = {factor: e for e, factor in enumerate(factors) if factor is not None}
        for v, given in zip(op.ins, known.operands, strict=True):
            if v is not None:
                yield from ((v, d, out, at[f]) for d, f in enumerate(given) if f in at)


def _relations(op: Op) -> DimRelations:
    given = [v.shape if v is not None else () for v in op.ins]
    made = [out.shape for out in op.outs]
    if op.name in PAIRWISE:
        return pairwise(made)
    known = relations(op.name, op.params, given, made)
    return same_place(given, made) if known is None else known


def _leading(v: Value | None, more: int, out: Value, skip: int) -> Iterator[Tie]:
    """Dims of `v` from `more` on are those of `out` from `skip` on."""
    if v is not None:
        count = min(len(v.shape) - more, len(out.shape) - skip)
        yield from ((v, d + more, out, d + skip) for d in range(count))


def _scan(op: Op) -> Iterator[Tie]:
    body, (consts, carry) = op.bodies[0], consts_and_carry(op)
    for i, (v, inner) in enumerate(zip(op.ins, body.ins, strict=True)):
        yield from _leading(v, i >= consts + carry, inner, 0)
    for i, (inner_out, out) in enumerate(zip(body.outs, op.outs, strict=True)):
        if inner_out is None:
            continue
        yield from _leading(inner_out, 0, out, i >= carry)
        if i < carry:
            yield from _leading(inner_out, 0, body.ins[consts + i], 0)
            yield from _leading(op.ins[consts + i], 0, out, 0)


def _while(op: Op) -> Iterator[Tie]:
    body = op.bodies[0]
    skip = op.params["cond_nconsts"]
    for v, inner in zip(op.ins[skip:], body.ins, strict=True):
        yield from _leading(v, 0, inner, 0)
    for inner_out, out in zip(body.outs, op.outs, strict=True):
        if inner_out is not None:
            yield from _leading(inner_out, 0, out, 0)


def _cond(op: Op) -> Iterator[Tie]:
    for body in op.bodies:
        for v, inner in zip(op.ins[1:], body.ins, strict=True):
            yield from _leading(v, 0, inner, 0)
        for inner_out, out in zip(body.outs, op.outs, strict=True):
            if inner_out is not None:
                yield from _leading(inner_out, 0, out, 0)


_LOOPS_AND_BRANCHES = {"scan": _scan, "while": _while, "cond": _cond}
