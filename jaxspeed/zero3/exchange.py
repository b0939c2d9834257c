"""The exchange of a segment: how its parameters are gathered and its gradients scattered.

Sharding constraints are the default (`BY_CONSTRAINT`); rings are another
(`ring_reduction/unit_exchange.py`). An exchange is static: `place` has its arrays, which a segment
passes as arguments because a `custom_vjp` in a scan may not close over traced values.

It sees the stored arrays, each as a `ShardedParam` of its own; what a codec encoded is decoded
after it (`decoded`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxspeed.zero3.sharded_param import ShardedParam

# (arrays, arrays that exist first, place) -> the arrays, with a data dependency on those.
Order = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], list[Any]]


class Exchange(Protocol):
    """All-gather of a segment's parameters and reduce-scatter of their gradients."""

    @property
    def place(self) -> Sequence[jax.Array]:
        """This device's ranks: integers, passed to `gather` and `scatter`."""
        return ()

    @property
    def per_rank(self) -> bool:
        """Whether the data axes are manual around it: an array is one rank's part."""
        return False

    @property
    def differentiable(self) -> bool:
        """Whether JAX differentiates `gather`; otherwise only a custom VJP calls it."""
        return False

    def gather(
        self, stored: Sequence[ShardedParam], shards: Sequence[Any], place: Sequence[Any]
    ) -> list[Any]:
        """The stored arrays of parameters, gathered, cast and unpadded."""
        ...

    def saved(
        self, stored: Sequence[ShardedParam], full: Sequence[Any], place: Sequence[Any]
    ) -> list[Any]:
        """What a segment saves of its gathered arrays for the backward pass: by default nothing."""
        return []

    def gather_again(
        self,
        stored: Sequence[ShardedParam],
        shards: Sequence[Any],
        saved: Sequence[Any],
        place: Sequence[Any],
    ) -> list[Any]:
        """The gathered arrays in the backward pass, from the shards and what was saved."""
        return self.gather(stored, shards, place)

    def scatter(
        self,
        stored: Sequence[ShardedParam],
        grads: Sequence[Any],
        likes: Sequence[Any],
        place: Sequence[Any],
    ) -> list[Any]:
        """The gradients of the gathered parameters, summed over the ranks, as shards."""
        ...

    @property
    def in_order(self) -> bool:
        """Whether data has to order it: `ordered` is not the identity."""
        return False

    def ordered(
        self, arrays: Sequence[Any], first: Sequence[Any], place: Sequence[Any]
    ) -> list[Any]:
        """The arrays, in use only after `first` exists if data has to order exchanges."""
        return list(arrays)


class ByConstraint(Exchange):
    """Sharding constraints, of which XLA makes all-gathers and reduce-scatters."""

    @property
    def differentiable(self) -> bool:
        return True

    def gather(
        self, stored: Sequence[ShardedParam], shards: Sequence[Any], place: Sequence[Any]
    ) -> list[Any]:
        return [s.read(w) for s, w in zip(stored, shards, strict=True)]

    def scatter(
        self,
        stored: Sequence[ShardedParam],
        grads: Sequence[Any],
        likes: Sequence[Any],
        place: Sequence[Any],
    ) -> list[Any]:
        return [s.scatter(g, w) for s, g, w in zip(stored, grads, likes, strict=True)]


BY_CONSTRAINT = ByConstraint()


def arrays_of(stored: Sequence[ShardedParam]) -> list[ShardedParam]:
    """How each of the stored arrays of parameters is stored."""
    return jax.tree.leaves([s.arrays for s in stored])


def decoded(stored: Sequence[ShardedParam], full: Sequence[Any]) -> list[Any]:
    """The parameters as layers read them, from their gathered arrays."""
    tree = jax.tree.structure([s.arrays for s in stored])
    values = jax.tree.unflatten(tree, full)
    return [s.decoded(x) for s, x in zip(stored, values, strict=True)]


@dataclass(frozen=True)
class InOrder:
    """Another exchange on simulated devices, which drop barriers and mix messages: data orders it.

    A segment's exchange then depends on the results of the one before.
    """

    exchange: Exchange
    order: Order
    in_order = True
    differentiable = False  # a custom VJP orders it

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exchange, name)

    def ordered(
        self, arrays: Sequence[Any], first: Sequence[Any], place: Sequence[Any]
    ) -> list[Any]:
        return self.order(arrays, first, place)
