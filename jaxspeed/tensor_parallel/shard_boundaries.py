"""Shard boundaries: where a program goes between replicated and sharded activations.

An operation *enters* the cut where it reads an activation that is not cut over the axis and gives
one that is: `x @ W` with W cut by columns. It *leaves* the cut where it reads one that is cut and
gives one that is not: `h @ W` with W cut by rows, a lookup in a table cut by rows. Every device has
a part of the sum then, and the parts have to be added (Shoeybi et al., arXiv:1909.08053: the
operators f and g). All else goes on as it is cut.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from jaxspeed.jaxpr.evaluate import is_var
from jaxspeed.jaxpr.primitives import PRODUCTS
from jaxspeed.tensor_parallel.dim_equivalence import Node
from jaxspeed.tensor_parallel.dim_propagation import Followed, Frame


@dataclass(frozen=True)
class ShardedProgram:
    """A followed program some of whose parameters are cut over an axis of `ways` devices."""

    followed: Followed
    dims: Mapping[str, int]  # parameter path -> its dim that is cut
    ways: int
    samples: Node | None = None  # a node of the batch's first dims

    @cached_property
    def _classes(self) -> frozenset[Node]:
        nodes = (self.followed.parameters[path][dim] for path, dim in self.dims.items())
        return frozenset(self.followed.classes.of(node) for node in nodes if node is not None)

    @cached_property
    def _uneven(self) -> frozenset[Node]:
        """The classes that are cut into unequal parts: a padded vocabulary."""
        found = set()
        for path, dim in self.dims.items():
            node = self.followed.parameters[path][dim]
            if node is not None and self.followed.classes.own_size(node) % self.ways:
                found.add(self.followed.classes.of(node))
        return frozenset(found)

    def dim(self, frame: Frame, atom: Any) -> int | None:
        """The dim on which a variable is cut, or None."""
        classes = self.followed.classes
        shape = getattr(atom.aval, "shape", ())
        for dim, (node, size) in enumerate(zip(frame.of(atom), shape, strict=True)):
            if node is None:
                continue
            cls = classes.of(node)
            if cls in self._classes and (size % self.ways == 0 or cls in self._uneven):
                return dim
        return None

    def enters(self, frame: Frame, eqn: Any) -> list[int]:
        """The positions of the operands by which an operation enters the cut."""
        if all(self.dim(frame, v) is None for v in eqn.outvars):
            return []
        return [
            i
            for i, v in enumerate(eqn.invars)
            if _is_activation(frame, v) and self.dim(frame, v) is None
        ]

    def leaves(self, frame: Frame, eqn: Any) -> bool:
        """Whether an operation leaves the cut: its result is a sum over devices."""
        name = eqn.primitive.name
        looks_up = name == "gather" and frame.is_weight(eqn.invars[0])
        return (
            (name in PRODUCTS or looks_up)
            and self.dim(frame, eqn.outvars[0]) is None
            and any(self.dim(frame, v) is not None for v in eqn.invars)
        )

    def is_samples(self, node: Node | None) -> bool:
        return self.followed.classes.same(node, self.samples)

    @cached_property
    def sequences(self) -> frozenset[Node]:
        """The classes of the dims along which activations between the cuts can be cut instead.

        Of what leaves the cut, the first dim that is neither the samples' nor a weight's.
        """
        found = set()
        for frame in self.followed.frames():
            for eqn in frame.jaxpr.eqns:
                if self.leaves(frame, eqn):
                    dim = self._sequence_of(frame, eqn)
                    if dim is not None:
                        node = frame.nodes[eqn.outvars[0]][dim]
                        assert node is not None
                        found.add(self.followed.classes.of(node))
        return frozenset(found)

    def _sequence_of(self, frame: Frame, eqn: Any) -> int | None:
        classes = self.followed.classes
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

    def sequence_dim(self, frame: Frame, atom: Any) -> int | None:
        """The dim of a variable that is its sequence, if it has one that the axis can cut."""
        for dim, node in enumerate(frame.of(atom)):
            if node is not None and self.followed.classes.of(node) in self.sequences:
                return dim
        return None


def _is_activation(frame: Frame, atom: Any) -> bool:
    """What gradients flow into, and what is no weight."""
    return (
        is_var(atom)
        and bool(atom.aval.shape)
        and jnp.issubdtype(atom.aval.dtype, jnp.inexact)
        and not frame.is_weight(atom)
    )


def dims_cut_over(axis: str, specs: Mapping[str, Iterable[Any]]) -> dict[str, int]:
    """{path: the dim that `axis` cuts} from PartitionSpecs."""
    return {
        path: dim
        for path, spec in specs.items()
        for dim, entry in enumerate(spec)
        if axis in ((entry,) if isinstance(entry, str) else tuple(entry or ()))
    }
