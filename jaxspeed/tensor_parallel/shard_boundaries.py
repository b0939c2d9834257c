"""Shard boundaries: where a program goes between replicated and sharded activations.

An operation *enters* the sharded region if it reads an activation that is not sharded over the axis
and returns one that is: `x @ W` with column-sharded W. It *leaves* the region if it reads a sharded
one and returns one that is not: `h @ W` with row-sharded W, or a lookup in a row-sharded table.
Every device then has a partial sum, to be reduced (Shoeybi et al., arXiv:1909.08053: operators f
and g). All other operations preserve the sharding.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from jaxspeed.jaxpr.traverse import is_var, product_of
from jaxspeed.placement.specs import entry_axes
from jaxspeed.tensor_parallel.dim_equivalence import Node
from jaxspeed.tensor_parallel.dim_propagation import CallFrame, PropagatedDims


@dataclass(frozen=True)
class ShardedProgram:
    """A propagated program with some parameters sharded over an axis of `num_shards` devices."""

    propagated: PropagatedDims
    dims: Mapping[str, int]  # parameter path -> its sharded dim
    num_shards: int
    samples: Node | None = None  # a node of the batch's first dims

    @cached_property
    def _classes(self) -> frozenset[Node]:
        nodes = (self.propagated.parameters[path][dim] for path, dim in self.dims.items())
        return frozenset(self.propagated.classes.of(node) for node in nodes if node is not None)

    @cached_property
    def _uneven(self) -> frozenset[Node]:
        """The classes with unequal shards: a padded vocabulary."""
        uneven_classes = set()
        for path, dim in self.dims.items():
            node = self.propagated.parameters[path][dim]
            if node is not None and self.propagated.classes.own_size(node) % self.num_shards:
                uneven_classes.add(self.propagated.classes.of(node))
        return frozenset(uneven_classes)

    def sharded_dim(self, frame: CallFrame, atom: Any) -> int | None:
        """The dim of a variable that is sharded, or None."""
        classes = self.propagated.classes
        shape = getattr(atom.aval, "shape", ())
        for dim, (node, size) in enumerate(zip(frame.of(atom), shape, strict=True)):
            if node is None:
                continue
            cls = classes.of(node)
            if cls in self._classes and (size % self.num_shards == 0 or cls in self._uneven):
                return dim
        return None

    def enters(self, frame: CallFrame, eqn: Any) -> list[int]:
        """The positions of the operands by which an operation enters the sharded region."""
        if all(self.sharded_dim(frame, v) is None for v in eqn.outvars):
            return []
        return [
            i
            for i, v in enumerate(eqn.invars)
            if _is_activation(frame, v) and self.sharded_dim(frame, v) is None
        ]

    def leaves(self, frame: CallFrame, eqn: Any) -> bool:
        """Whether an operation leaves the sharded region: its results are partial sums."""
        looks_up = eqn.primitive.name == "gather" and frame.is_weight(eqn.invars[0])
        return (
            (product_of(eqn) is not None or looks_up)
            and self.sharded_dim(frame, eqn.outvars[0]) is None
            and any(self.sharded_dim(frame, v) is not None for v in eqn.invars)
        )

    def is_samples(self, node: Node | None) -> bool:
        return self.propagated.classes.same(node, self.samples)

    @cached_property
    def sequences(self) -> frozenset[Node]:
        """The classes of sequence dims, which sequence-parallel activations are sharded along.

        The first dim of a leaving operation's result that is neither the samples' nor a weight's.
        """
        sequence_classes = set()
        for frame, _, eqn in self.propagated.top.equations():
            if self.leaves(frame, eqn):
                dim = self._sequence_of(frame, eqn)
                if dim is not None:
                    node = frame.nodes[eqn.outvars[0]][dim]
                    assert node is not None
                    sequence_classes.add(self.propagated.classes.of(node))
        return frozenset(sequence_classes)

    def _sequence_of(self, frame: CallFrame, eqn: Any) -> int | None:
        classes = self.propagated.classes
        of_weights = {
            classes.of(node)
            for v in eqn.invars
            if frame.sources(v)
            for node in frame.of(v)
            if node is not None
        }
        for dim, node in enumerate(frame.nodes[eqn.outvars[0]]):
            if node is not None and not self.is_samples(node):
                return None if classes.of(node) in of_weights else dim
        return None

    def sequence_dim(self, frame: CallFrame, atom: Any) -> int | None:
        """The sequence dim of a variable, or None."""
        for dim, node in enumerate(frame.of(atom)):
            if node is not None and self.propagated.classes.of(node) in self.sequences:
                return dim
        return None


def _is_activation(frame: CallFrame, atom: Any) -> bool:
    """Whether an atom has gradients and is not a weight."""
    return (
        is_var(atom)
        and bool(atom.aval.shape)
        and jnp.issubdtype(atom.aval.dtype, jnp.inexact)
        and not frame.is_weight(atom)
    )


def dims_sharded_over(axis: str, specs: Mapping[str, Iterable[Any]]) -> dict[str, int]:
    """{path: the dim that is sharded over `axis`} from PartitionSpecs."""
    return {
        path: dim
        for path, spec in specs.items()
        for dim, entry in enumerate(spec)
        if axis in entry_axes(entry)
    }
