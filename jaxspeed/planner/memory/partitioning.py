"""Over which mesh axes each array of an opened program is cut.

The compiler's partitioner in small: what the program says (its arguments and its constraints) goes
along the operations, with the data and against it, until nothing changes. A dim is tied to another
where an operation reads the same index along both.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

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
    """Dims along which an operation reads and writes the same index."""
    rule = _RULES.get(op.name)
    if rule is not None:
        yield from rule(op)
        return
    for out in op.outs:  # the same index along dims of the same place and size
        for v in op.values:
            if len(v.shape) == len(out.shape):
                for d, (n, m) in enumerate(zip(v.shape, out.shape, strict=True)):
                    if n == m:
                        yield v, d, out, d


def _constraint(op: Op) -> Iterator[Tie]:
    """Said by its user, so it also says how what is constrained is best made."""
    source, out = op.ins[0], op.outs[0]
    if source is not None:
        yield from ((source, d, out, d) for d in range(len(out.shape)))


def _pairwise(op: Op) -> Iterator[Tie]:
    for v, out in zip(op.ins, op.outs, strict=True):
        if v is not None and len(v.shape) == len(out.shape):
            yield from ((v, d, out, d) for d in range(len(out.shape)))


def _leading(v: Value | None, more: int, out: Value, skip: int) -> Iterator[Tie]:
    """Dims of `v` from `more` on are those of `out` from `skip` on."""
    if v is not None:
        count = min(len(v.shape) - more, len(out.shape) - skip)
        yield from ((v, d + more, out, d + skip) for d in range(count))


def _broadcast(op: Op) -> Iterator[Tie]:
    v, out = op.ins[0], op.outs[0]
    if v is not None:
        for d, e in enumerate(op.params["broadcast_dimensions"]):
            if v.shape[d] == out.shape[e]:
                yield v, d, out, int(e)


def _transpose(op: Op) -> Iterator[Tie]:
    v, out = op.ins[0], op.outs[0]
    if v is not None:
        yield from ((v, int(d), out, e) for e, d in enumerate(op.params["permutation"]))


def _reshape(op: Op) -> Iterator[Tie]:
    """The outermost dims of what is folded or split."""
    v, out = op.ins[0], op.outs[0]
    if v is not None:
        yield from ((v, d, out, e) for d, e in _matching(v.shape, out.shape))


def _matching(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[int, int]]:
    i = j = 0
    while i < len(old) and j < len(new):
        if old[i] == 1 or new[j] == 1:
            if old[i] == new[j]:
                yield i, j
                i, j = i + 1, j + 1
            elif old[i] == 1:
                i += 1
            else:
                j += 1
            continue
        yield i, j
        left, right, i, j = old[i], new[j], i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1


def _squeeze(op: Op) -> Iterator[Tie]:
    v, out = op.ins[0], op.outs[0]
    if v is not None:
        gone = {int(d) % len(v.shape) for d in op.params["dimensions"]}
        left = (d for d in range(len(v.shape)) if d not in gone)
        yield from ((v, d, out, e) for e, d in enumerate(left))


def _reduce(op: Op) -> Iterator[Tie]:
    gone = {int(d) for d in op.params.get("axes", op.params.get("dimensions"))}
    for v in op.values:
        left = [d for d in range(len(v.shape)) if d not in gone]
        for out in op.outs:
            yield from ((v, d, out, e) for e, d in enumerate(left[: len(out.shape)]))


def _dot(op: Op) -> Iterator[Tie]:
    (contracted, batch), out = op.params["dimension_numbers"], op.outs[0]
    for side, v in enumerate(op.ins):
        if v is None:
            continue
        first = [int(d) for d in batch[side]]
        gone = {*first, *(int(d) for d in contracted[side])}
        free = [d for d in range(len(v.shape)) if d not in gone]
        other = op.ins[0]
        skip = len(first)
        if side == 1 and other is not None:
            skip = len(other.shape) - len(contracted[0])
        yield from ((v, d, out, e) for e, d in enumerate(first))
        yield from ((v, d, out, skip + e) for e, d in enumerate(free))


def _gather(op: Op) -> Iterator[Tie]:
    table, ids, out = op.ins[0], op.ins[1], op.outs[0]
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    if table is not None:
        kept = [d for d in range(len(table.shape)) if d not in gone]
        for d, e in zip(kept, numbers.offset_dims, strict=True):
            if sizes[d] == table.shape[d]:
                yield table, d, out, e
    if ids is not None:
        batch = [e for e in range(len(out.shape)) if e not in numbers.offset_dims]
        yield from ((ids, d, out, e) for d, e in enumerate(batch))


def _scatter(op: Op) -> Iterator[Tie]:
    into, updates, out = op.ins[0], op.ins[2], op.outs[0]
    if into is not None:
        yield from ((into, d, out, d) for d in range(len(out.shape)))
    numbers = op.params["dimension_numbers"]
    batching = getattr(numbers, "operand_batching_dims", ())
    gone = {*numbers.inserted_window_dims, *batching}
    kept = [d for d in range(len(out.shape)) if d not in gone]
    if updates is not None:
        for d, e in zip(kept, numbers.update_window_dims, strict=True):
            if updates.shape[e] == out.shape[d]:
                yield updates, e, out, d


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


def _nothing(op: Op) -> Iterator[Tie]:
    del op
    yield from ()


_RULES = {
    CONSTRAINT: _constraint,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _dot,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    **dict.fromkeys(PAIRWISE, _pairwise),
    "pallas_call": _nothing,
    **dict.fromkeys(
        (
            "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
            "reduce", "argmax", "argmin",
        ),
        _reduce,
    ),
}  # fmt: skip
