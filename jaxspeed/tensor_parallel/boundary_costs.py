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
from dataclasses import dataclass
from typing import Any, Literal

from jaxspeed.jaxpr.primitives import PRODUCTS
from jaxspeed.tensor_parallel.array_roles import Reading
from jaxspeed.tensor_parallel.dim_equivalence import Node
from jaxspeed.tensor_parallel.dim_propagation import (
    Followed,
    Frame,
    is_elementwise,
    relations_of,
    shape_of,
)
from jaxspeed.tensor_parallel.matmuls import Product

PIECES = ("slice", "dynamic_slice", "split", "gather")


@dataclass(frozen=True)
class Message:
    """What the devices of a tensor group tell each other in one place of the program.

    Attributes:
      kind: all-reduce or all-gather.
      backward: whether it is in the backward pass.
      elements: of the whole array.
      times: how often in one pass.
      why: row, column, vocabulary, or the operation's name.
    """

    kind: Literal["all-reduce", "all-gather"]
    backward: bool
    elements: int
    times: int
    why: str

    @property
    def sent(self) -> int:
        """Elements that go over the wire, per (T - 1) / T: an all-reduce sends all of it twice."""
        return self.elements * self.times * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Costs:
    """By class: its messages, and into how many pieces what is computed along it is split."""

    messages: dict[Node, list[Message]]
    pieces: dict[Node, int]

    def sent(self, cls: Node) -> int:
        return sum(message.sent for message in self.messages.get(cls, ()))


class _Counting:
    def __init__(self) -> None:
        self.messages: dict[Node, list[Message]] = {}
        self.pieces: dict[Node, int] = {}
        self._summed: set[tuple[Node, int]] = set()

    def add(self, cls: Node, message: Message) -> None:
        self.messages.setdefault(cls, []).append(message)

    def add_gradient(self, cls: Node, array: int, message: Message) -> None:
        if (cls, array) not in self._summed:
            self._summed.add((cls, array))
            self.add(cls, message)


def costs(followed: Followed, reading: Reading, found: Sequence[Product]) -> Costs:
    """The messages of every class, as if it alone were cut."""
    counting = _Counting()
    for product in found:
        _of_product(counting, product)
    for frame in followed.frames():
        for position, eqn in enumerate(frame.jaxpr.eqns):
            if position not in frame.inner and eqn.primitive.name not in PRODUCTS:
                _of_ends(counting, followed, reading, frame, position, eqn)
                _of_broadcasts(counting, reading, frame, eqn)
    return Costs(counting.messages, counting.pieces)


def _of_product(counting: _Counting, product: Product) -> None:
    size = math.prod(product.result)
    contracted = product.classes("contracted", 0) | product.classes("contracted", 1)
    why = "vocabulary" if product.kind == "lookup" else "row"
    if any(x.trained for x in product.operands):
        for cls in contracted:
            counting.add(cls, Message("all-reduce", False, size, product.times, why))
    for side, other in ((0, 1), (1, 0)):
        array = product.operands[other]
        if array.trained:
            message = Message("all-reduce", True, array.elements, product.times, "column")
            for cls in product.classes("free", side) - contracted:
                counting.add_gradient(cls, array.id, message)


def _of_ends(
    counting: _Counting,
    followed: Followed,
    reading: Reading,
    frame: Frame,
    position: int,
    eqn: Any,
) -> None:
    """Dims that do not go on from an operand, or that are only in the result."""
    name, of = eqn.primitive.name, followed.classes.of
    results = sum(math.prod(shape_of(v)) for v in eqn.outvars)
    lookup = relations_of(eqn) if name == "gather" else None
    indexed = lookup.reduced(0) if lookup else ()  # the product with its rows sums over them
    for i, dim in frame.ended.get(position, ()):
        atom = eqn.invars[i]
        node = frame.of(atom)[dim]
        if node is None or not reading.trained(frame, atom) or (i == 0 and dim in indexed):
            continue
        if name.startswith(("reduce_", "arg")) and not name.startswith("reduce_window"):
            message = Message("all-reduce", False, results, frame.times, name)
        else:
            size = math.prod(shape_of(atom))
            message = Message("all-gather", False, size, frame.times, name)
            if name in PIECES and not frame.is_weight(atom):
                counting.pieces[of(node)] = counting.pieces.get(of(node), 0) + len(eqn.outvars)
        counting.add(of(node), message)
    trained = [v for v in eqn.invars if reading.trained(frame, v)]
    if not trained or name == "gather":
        return
    for i, dim in frame.began.get(position, ()):
        node = frame.of(eqn.outvars[i])[dim]
        if node is None:
            continue
        if name == "broadcast_in_dim":
            size = math.prod(shape_of(trained[0]))
            message = Message("all-reduce", True, size, frame.times, name)
            counting.add_gradient(of(node), reading.id(frame, trained[0]), message)
        else:
            size = math.prod(shape_of(eqn.outvars[i]))
            counting.add(of(node), Message("all-gather", True, size, frame.times, name))


def _of_broadcasts(counting: _Counting, reading: Reading, frame: Frame, eqn: Any) -> None:
    """An operand of size 1 along a dim of the result: [batch, seq, 1] * [batch, seq, embed]."""
    if not is_elementwise(eqn):
        return
    result = eqn.outvars[0]
    rank = len(shape_of(result))
    of = reading.followed.classes.of
    for atom in eqn.invars:
        sizes = shape_of(atom)
        if len(sizes) != rank or sizes == shape_of(result) or not reading.trained(frame, atom):
            continue
        for size, node in zip(sizes, frame.of(result), strict=True):
            if size == 1 and node is not None:
                message = Message("all-reduce", True, math.prod(sizes), frame.times, "broadcast")
                counting.add_gradient(of(node), reading.id(frame, atom), message)


def together(messages: Iterable[Message]) -> dict[tuple[str, bool], tuple[int, int]]:
    """{(kind, backward): (how many, elements)} in one pass."""
    found: dict[tuple[str, bool], tuple[int, int]] = {}
    for m in messages:
        count, elements = found.get((m.kind, m.backward), (0, 0))
        found[m.kind, m.backward] = count + m.times, elements + m.elements * m.times
    return found
