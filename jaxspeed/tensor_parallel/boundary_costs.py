"""Communication costs of sharding a class of dims, in one forward and backward pass.

Counted in elements of full arrays. With dy the gradient of y:

    y = x W, contracted dim sharded ("row")       y is a sum over devices: all-reduce y
    y = x W, free dim of W sharded ("column")     dx = dy W^T is such a sum: all-reduce dx
    a lookup in a table with sharded rows         as a row matmul
    a reduction over the sharded dim              all-reduce its result
    a broadcast along the sharded dim             all-reduce in the backward pass
    an operation where a sharded dim ends         all-gather the operand
    an operation where a sharded dim begins       all-gather the result's gradient

A gradient is reduced once per array, however many matmuls read it. Arrays that depend on no
parameter have no gradient, and the batch is replicated over the axis: both are free.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxspeed.axes import TENSOR
from jaxspeed.communication import Communication, Sent, ring_passes
from jaxspeed.jaxpr.primitives import PRODUCTS
from jaxspeed.jaxpr.traverse import shape_of
from jaxspeed.tensor_parallel.array_roles import ArrayRoles
from jaxspeed.tensor_parallel.dim_equivalence import Node
from jaxspeed.tensor_parallel.dim_propagation import (
    CallFrame,
    PropagatedDims,
    is_elementwise,
    relations_of,
)
from jaxspeed.tensor_parallel.matmuls import Matmul

SPLITS = ("slice", "dynamic_slice", "split", "gather")
ALL_REDUCE, ALL_GATHER = "all-reduce", "all-gather"


@dataclass(frozen=True)
class BoundaryCosts:
    """By class: its collectives, of full arrays, and the number of arrays that it is split into."""

    sends: dict[Node, list[Communication]]
    splits: dict[Node, int]

    def sent(self, cls: Node) -> int:
        """Elements sent, per (T - 1) / T: an all-reduce sends an array twice."""
        return sum(
            send.elements * send.runs * ring_passes(send.kind) for send in self.sends.get(cls, ())
        )


class _Counter:
    def __init__(self, tensor: int) -> None:
        self.tensor = tensor
        self.sends: dict[Node, list[Communication]] = {}
        self.splits: dict[Node, int] = {}
        self._summed: set[tuple[Node, int]] = set()

    def add(self, cls: Node, send: Communication) -> None:
        self.sends.setdefault(cls, []).append(send)

    def add_gradient(self, cls: Node, array: int, send: Communication) -> None:
        if (cls, array) not in self._summed:
            self._summed.add((cls, array))
            self.add(cls, send)

    def forward(self, kind: str, why: str, times: int, *sent: Sent) -> Communication:
        """A collective of full arrays; `why` is row, vocabulary or the operation's name."""
        return Communication.of_arrays(
            kind,
            (TENSOR,),
            sent,
            times,
            source="trace",
            group_size=self.tensor,
            purpose="activations",
            site=why,
        )

    def backward(self, kind: str, why: str, times: int, *sent: Sent) -> Communication:
        """A collective of gradients; `why` is column, broadcast or the operation's name."""
        return replace(self.forward(kind, why, times, *sent), backward=True)


def boundary_costs(
    propagated: PropagatedDims, arrays: ArrayRoles, matmuls: Sequence[Matmul], tensor: int
) -> BoundaryCosts:
    """The costs of each class, as if it alone were sharded."""
    counter = _Counter(tensor)
    for matmul in matmuls:
        _of_matmul(counter, matmul)
    for frame, position, eqn in propagated.top.equations():
        if position not in frame.inner and eqn.primitive.name not in PRODUCTS:
            _of_ends(counter, propagated, arrays, frame, position, eqn)
            _of_broadcasts(counter, arrays, frame, eqn)
    return BoundaryCosts(counter.sends, counter.splits)


def _of_matmul(counter: _Counter, matmul: Matmul) -> None:
    result = (math.prod(matmul.result), matmul.dtype)
    contracted = matmul.classes("contracted", 0) | matmul.classes("contracted", 1)
    why = "vocabulary" if matmul.kind == "lookup" else "row"
    if any(x.trained for x in matmul.operands):
        for cls in contracted:
            counter.add(cls, counter.forward(ALL_REDUCE, why, matmul.times, result))
    for side, other in ((0, 1), (1, 0)):
        array = matmul.operands[other]
        if array.trained:
            sent = (array.elements, array.dtype)
            send = counter.backward(ALL_REDUCE, "column", matmul.times, sent)
            for cls in matmul.classes("free", side) - contracted:
                counter.add_gradient(cls, array.id, send)


def _of_ends(
    counter: _Counter,
    propagated: PropagatedDims,
    arrays: ArrayRoles,
    frame: CallFrame,
    position: int,
    eqn: Any,
) -> None:
    """Count the collectives of dims that end or begin at an operation."""
    name, of, times = eqn.primitive.name, propagated.classes.of, frame.times
    lookup = relations_of(eqn) if name == "gather" else None
    indexed = lookup.reduced(0) if lookup else ()  # counted as a matmul's contracted dims
    for i, dim in frame.ended.get(position, ()):
        atom = eqn.invars[i]
        node = frame.of(atom)[dim]
        if node is None or not arrays.of(frame, atom).trained or (i == 0 and dim in indexed):
            continue
        if name.startswith(("reduce_", "arg")) and not name.startswith("reduce_window"):
            send = counter.forward(ALL_REDUCE, name, times, *map(_full, eqn.outvars))
        else:
            send = counter.forward(ALL_GATHER, name, times, _full(atom))
            if name in SPLITS and not frame.is_weight(atom):
                counter.splits[of(node)] = counter.splits.get(of(node), 0) + len(eqn.outvars)
        counter.add(of(node), send)
    trained = [v for v in eqn.invars if arrays.of(frame, v).trained]
    if not trained or name == "gather":
        return
    for i, dim in frame.began.get(position, ()):
        node = frame.of(eqn.outvars[i])[dim]
        if node is None:
            continue
        if name == "broadcast_in_dim":
            send = counter.backward(ALL_REDUCE, name, times, _full(trained[0]))
            counter.add_gradient(of(node), arrays.of(frame, trained[0]).id, send)
        else:
            result = _full(eqn.outvars[i])
            counter.add(of(node), counter.backward(ALL_GATHER, name, times, result))


def _of_broadcasts(counter: _Counter, arrays: ArrayRoles, frame: CallFrame, eqn: Any) -> None:
    """Count operands of size 1 along a dim of the result: [batch, seq, 1] * [batch, seq, embed]."""
    if not is_elementwise(eqn):
        return
    result = eqn.outvars[0]
    rank = len(shape_of(result))
    of = arrays.propagated.classes.of
    for atom in eqn.invars:
        sizes = shape_of(atom)
        if len(sizes) != rank or sizes == shape_of(result) or not arrays.of(frame, atom).trained:
            continue
        for size, node in zip(sizes, frame.of(result), strict=True):
            if size == 1 and node is not None:
                send = counter.backward(ALL_REDUCE, "broadcast", frame.times, _full(atom))
                counter.add_gradient(of(node), arrays.of(frame, atom).id, send)


def _full(atom: Any) -> Sent:
    return math.prod(shape_of(atom)), atom.aval.dtype


def totals(sends: Iterable[Communication]) -> dict[tuple[str, bool], tuple[int, int]]:
    """{(kind, backward): (number of collectives, elements)} in one pass."""
    counts: dict[tuple[str, bool], tuple[int, int]] = {}
    for send in sends:
        count, elements = counts.get((send.kind, send.backward), (0, 0))
        counts[send.kind, send.backward] = count + send.runs, elements + send.elements * send.runs
    return counts
