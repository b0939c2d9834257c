"""Communication costs of sharding a class of dims, in one forward and backward pass.

Counted in elements of whole arrays, as the equations say. With dy the gradient of y:

    y = x W, the dim summed over is cut ("row")     y is a sum over devices: all-reduce y
    y = x W, a free dim of W is cut ("column")      dx = dy W^T is such a sum: all-reduce dx
    a lookup in a table cut by rows                 as a row product
    a reduction over the cut dim                    all-reduce its result
    a broadcast along the cut dim                   the reduction is in the backward pass
    an operation that cannot go on cut              gather what it reads; where it is the result
                                                    that is cut, gather that one's gradient

A gradient is summed once for each array, whatever number of products read it. Where nothing depends
on a parameter there is no gradient, and what is read from the batch is whole everywhere: both are
free.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxspeed.communication import Communication, Sent, ring_passes
from jaxspeed.tensor_parallel.array_roles import Reading, shape_of
from jaxspeed.tensor_parallel.dim_equivalence import Node
from jaxspeed.tensor_parallel.dim_propagation import Followed, Frame
from jaxspeed.tensor_parallel.dim_rules import MIXING, RULES
from jaxspeed.tensor_parallel.matmuls import Product
from jaxspeed.tensor_parallel.shard_boundaries import PRODUCTS

PIECES = ("slice", "dynamic_slice", "split", "gather")
ALL_REDUCE, ALL_GATHER = "all-reduce", "all-gather"


@dataclass(frozen=True)
class Costs:
    """By class: what it sends, of whole arrays, and into how many pieces activations are split."""

    sends: dict[Node, list[Communication]]
    pieces: dict[Node, int]

    def sent(self, cls: Node) -> int:
        """Elements that go over the wire, per (T - 1) / T: an all-reduce sends all of it twice."""
        return sum(
            one.elements * one.runs * ring_passes(one.kind) for one in self.sends.get(cls, ())
        )


class _Counting:
    def __init__(self, tensor: int) -> None:
        self.tensor = tensor
        self.sends: dict[Node, list[Communication]] = {}
        self.pieces: dict[Node, int] = {}
        self._summed: set[tuple[Node, int]] = set()

    def add(self, cls: Node, one: Communication) -> None:
        self.sends.setdefault(cls, []).append(one)

    def add_gradient(self, cls: Node, array: int, one: Communication) -> None:
        if (cls, array) not in self._summed:
            self._summed.add((cls, array))
            self.add(cls, one)

    def forward(self, kind: str, why: str, times: int, *sent: Sent) -> Communication:
        """Of whole arrays; `why` is row, vocabulary or the operation's name."""
        return Communication.of_arrays(
            kind,
            ("tensor",),
            sent,
            times,
            source="trace",
            group_size=self.tensor,
            purpose="activations",
            site=why,
        )

    def backward(self, kind: str, why: str, times: int, *sent: Sent) -> Communication:
        """Of gradients; `why` is column, broadcast or the operation's name."""
        return replace(self.forward(kind, why, times, *sent), backward=True)


def costs(followed: Followed, reading: Reading, found: Sequence[Product], tensor: int) -> Costs:
    """What every class sends, as if it alone were cut."""
    counting = _Counting(tensor)
    for product in found:
        _of_product(counting, product)
    for frame in followed.frames():
        for position, eqn in enumerate(frame.jaxpr.eqns):
            if position not in frame.inner and eqn.primitive.name not in PRODUCTS:
                _of_ends(counting, followed, reading, frame, position, eqn)
                _of_broadcasts(counting, reading, frame, eqn)
    return Costs(counting.sends, counting.pieces)


def _of_product(counting: _Counting, product: Product) -> None:
    result = (math.prod(product.result), product.dtype)
    contracted = product.classes("contracted", 0) | product.classes("contracted", 1)
    why = "vocabulary" if product.kind == "lookup" else "row"
    if any(x.trained for x in product.operands):
        for cls in contracted:
            counting.add(cls, counting.forward(ALL_REDUCE, why, product.times, result))
    for side, other in ((0, 1), (1, 0)):
        array = product.operands[other]
        if array.trained:
            sent = (array.elements, array.dtype)
            one = counting.backward(ALL_REDUCE, "column", product.times, sent)
            for cls in product.classes("free", side) - contracted:
                counting.add_gradient(cls, array.id, one)


def _of_ends(
    counting: _Counting,
    followed: Followed,
    reading: Reading,
    frame: Frame,
    position: int,
    eqn: Any,
) -> None:
    """Dims that do not go on from an operand, or that are only in the result."""
    name, of, times = eqn.primitive.name, followed.classes.of, frame.times
    indexed = _indexed(eqn) if name == "gather" else ()
    for i, dim in frame.ended.get(position, ()):
        atom = eqn.invars[i]
        node = frame.of(atom)[dim]
        if node is None or not reading.trained(frame, atom) or (i == 0 and dim in indexed):
            continue
        if name.startswith(("reduce_", "arg")) and not name.startswith("reduce_window"):
            one = counting.forward(ALL_REDUCE, name, times, *map(_whole, eqn.outvars))
        else:
            one = counting.forward(ALL_GATHER, name, times, _whole(atom))
            if name in PIECES and not frame.is_weight(atom):
                counting.pieces[of(node)] = counting.pieces.get(of(node), 0) + len(eqn.outvars)
        counting.add(of(node), one)
    trained = [v for v in eqn.invars if reading.trained(frame, v)]
    if not trained or name == "gather":
        return
    for i, dim in frame.began.get(position, ()):
        node = frame.of(eqn.outvars[i])[dim]
        if node is None:
            continue
        if name == "broadcast_in_dim":
            one = counting.backward(ALL_REDUCE, name, times, _whole(trained[0]))
            counting.add_gradient(of(node), reading.id(frame, trained[0]), one)
        else:
            result = _whole(eqn.outvars[i])
            counting.add(of(node), counting.backward(ALL_GATHER, name, times, result))


def _indexed(eqn: Any) -> tuple[int, ...]:
    """The dims of a lookup's table that its product sums over."""
    sizes = eqn.params["slice_sizes"]
    return tuple(d for d in eqn.params["dimension_numbers"].start_index_map if sizes[d] == 1)


def _of_broadcasts(counting: _Counting, reading: Reading, frame: Frame, eqn: Any) -> None:
    """An operand of size 1 along a dim of the result: [batch, seq, 1] * [batch, seq, embed]."""
    name, rank = eqn.primitive.name, len(shape_of(eqn.outvars[0])) if eqn.outvars else 0
    if rank == 0 or name in RULES or name in MIXING:
        return
    result = eqn.outvars[0]
    of = reading.followed.classes.of
    for atom in eqn.invars:
        sizes = shape_of(atom)
        if len(sizes) != rank or sizes == shape_of(result) or not reading.trained(frame, atom):
            continue
        for size, node in zip(sizes, frame.of(result), strict=True):
            if size == 1 and node is not None:
                one = counting.backward(ALL_REDUCE, "broadcast", frame.times, _whole(atom))
                counting.add_gradient(of(node), reading.id(frame, atom), one)


def _whole(atom: Any) -> Sent:
    return math.prod(shape_of(atom)), atom.aval.dtype


def together(sends: Iterable[Communication]) -> dict[tuple[str, bool], tuple[int, int]]:
    """{(kind, backward): (how many, elements)} in one pass."""
    found: dict[tuple[str, bool], tuple[int, int]] = {}
    for one in sends:
        count, elements = found.get((one.kind, one.backward), (0, 0))
        found[one.kind, one.backward] = count + one.runs, elements + one.elements * one.runs
    return found
