"""Sequence dims of a program: those of the batch's positions, and all dims that continue them.

A dim continues another if an operation mixes along it, or if it is a longer or shorter part of it:

    tokens[:, :-1]                       inputs of [batch, seq + 1]
    jnp.concatenate([cls, patches], 1)   one more position
    jnp.cumsum(x, 1), jnp.convolve       as long, or nearly
    lax.scan(step, state, x)             over time: the stacked results

A reshape of [batch, seq, ...] to [batch * seq, ...] makes a *merged* dim, of which another reshape
may make the two again.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxspeed.jaxpr.dim_relations import reshape_groups
from jaxspeed.jaxpr.primitives import JOINS, LOOPS, SLICES, WINDOW_REDUCTIONS
from jaxspeed.jaxpr.traverse import JaxprEqn, Var, consts_and_carry, shape_of
from jaxspeed.tensor_parallel.dim_equivalence import Node
from jaxspeed.tensor_parallel.dim_propagation import CallFrame, PropagatedDims, relations_of

Place = tuple[int, int]  # (variable, dim) of an equation's operands or results


@dataclass(frozen=True)
class Merged:
    """A dim that a reshape merged: of so many samples, of so many positions, of others."""

    samples: int
    positions: int


@dataclass(frozen=True)
class SequenceDims:
    """The sequence dims of a propagated program, over an axis of `num_shards` devices.

    Attributes:
      positions: the sequence dim of inputs of the program.
    """

    propagated: PropagatedDims
    positions: Mapping[Var, int]
    num_shards: int
    _merged: dict[tuple[Node, int], Merged] = field(default_factory=dict)

    @cached_property
    def classes(self) -> frozenset[Node]:
        """The classes of the sequence dims."""
        classes, top = self.propagated.classes, self.propagated.top
        seeds = (top.nodes[v][dim] for v, dim in self.positions.items())
        sequence_classes = {classes.of(node) for node in seeds if node is not None}
        pairs, reshapes = self._pairs, self._reshapes
        while True:
            new = {classes.of(b) for a, b in pairs if classes.of(a) in sequence_classes}
            for these, those in reshapes:
                new |= {classes.of(node) for node in self._through(these, those, sequence_classes)}
            if new <= sequence_classes:
                return frozenset(sequence_classes)
            sequence_classes |= new

    @property
    def lengths(self) -> frozenset[int]:
        """The numbers of positions of the inputs, and of what continues them."""
        classes, top = self.propagated.classes, self.propagated.top
        nodes = [top.nodes[v][dim] for v, dim in self.positions.items()]
        nodes += [b for _, b in self._pairs if classes.of(b) in self.classes]
        return frozenset(classes.own_size(node) for node in nodes if node is not None)

    def of(self, frame: CallFrame, atom: Any) -> int | None:
        """The sequence dim of a variable, the first if it has several (scores)."""
        classes = self.propagated.classes
        for dim, node in enumerate(frame.of(atom)):
            if node is not None and classes.of(node) in self.classes:
                return None if classes.own_size(node) < self.num_shards else dim
        return None

    def merged(self, node: Node | None) -> Merged | None:
        """What a dim of samples and positions was merged of; None of other dims."""
        if node is None or not self.classes:
            return None
        classes = self.propagated.classes
        return self._merged.get((classes.of(node), classes.own_size(node)))

    @cached_property
    def _pairs(self) -> list[tuple[Node, Node]]:
        """Pairs of dims of which the second continues the first."""
        pairs = []
        for frame, position, eqn in self.propagated.top.equations():
            for (i, a), (j, b) in continued(eqn, position in frame.inner):
                these, those = frame.of(eqn.invars[i])[a], frame.nodes[eqn.outvars[j]][b]
                if these is not None and those is not None:
                    pairs.append((these, those))
        return pairs

    @cached_property
    def _reshapes(self) -> list[tuple[list[Node], list[Node]]]:
        """The dims that reshapes merge and split."""
        reshapes = []
        for frame, _, eqn in self.propagated.top.equations():
            if eqn.primitive.name != "reshape":
                continue
            x, y = frame.of(eqn.invars[0]), frame.nodes[eqn.outvars[0]]
            for old, new in reshape_groups(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])):
                if len(old) != len(new) and 1 in (len(old), len(new)):
                    pair = [x[d] for d in old], [y[d] for d in new]
                    reshapes.append(pair)
        return reshapes  # type: ignore[return-value]  # reshape_groups has no dims of size 1

    def _through(
        self, these: Sequence[Node], those: Sequence[Node], sequence_classes: set[Node]
    ) -> Iterator[Node]:
        """The sequence dims that a reshape makes of a merged dim; records one that it merges."""
        classes = self.propagated.classes
        sizes = [classes.own_size(node) for node in (these if len(those) == 1 else those)]
        at = Merged(sizes[0], sizes[1])
        if len(those) == 1:
            if classes.of(these[1]) in sequence_classes and self.propagated.is_sample(these[0]):
                self._merged[classes.of(those[0]), math.prod(sizes)] = at
        elif self._merged.get((classes.of(these[0]), math.prod(sizes))) == at:
            yield those[1]


def continued(eqn: JaxprEqn, has_frames: bool = False) -> Iterator[tuple[Place, Place]]:
    """(operand, dim) and (result, dim) of dims of which the second continues the first.

    `has_frames` says that the operation's inner programs have dims of their own.
    """
    name, params = eqn.primitive.name, eqn.params
    in_shapes, out_shapes = [shape_of(v) for v in eqn.invars], [shape_of(v) for v in eqn.outvars]
    if has_frames:
        if name in LOOPS:
            consts, carry = consts_and_carry(eqn)
            for i in range(consts + carry, len(in_shapes)):
                yield from (((i, 0), (j, 0)) for j in range(carry, len(out_shapes)))
        return
    if (relations := relations_of(eqn)) is not None:
        for i, factors in enumerate(relations.operands):
            for j, outs in enumerate(relations.results):
                for a, factor in enumerate(factors):
                    if factor in relations.mixed and factor in outs:
                        yield (i, a), (j, outs.index(factor))
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        for a, b in zip(numbers.lhs_spec[2:], numbers.out_spec[2:], strict=True):
            if in_shapes[0][a] != out_shapes[0][b]:
                yield (0, a), (0, b)
    if name not in (*SLICES, *JOINS, *WINDOW_REDUCTIONS):
        return
    for i, shape in enumerate(in_shapes):
        for j, out in enumerate(out_shapes):
            if len(shape) == len(out):
                for d, (n, m) in enumerate(zip(shape, out, strict=True)):
                    # Of a slice, most of the sequence: the first token is not one.
                    if n != m and (2 * m > n or name in WINDOW_REDUCTIONS):
                        yield (i, d), (j, d)
