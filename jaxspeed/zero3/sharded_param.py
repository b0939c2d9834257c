"""A sharded parameter: how it is stored, gathered for the layers, and its gradient scattered.

Forward, a stored parameter (cut over the data axes, perhaps padded, in its master dtype) is cast
and gathered. Backward, its gradient goes straight to the cut: XLA makes a reduce-scatter of it, and
the whole reduced gradient never exists. One that waits in host memory comes to the device first,
and its gradient leaves for there at last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.rows import HOST, reduction_dtype
from jaxspeed.placement.specs import by_dim


class GatherScatter(Protocol):
    """Moves the parameters of one piece, and their gradients, between the data ranks."""

    @property
    def place(self) -> Sequence[jax.Array]:
        """Where this device stands: integers, which a segment is given as it is given its inputs.

        They are arguments because a `custom_vjp` in a scan may not close over traced values.
        """

    def gather(
        self, stored: Sequence[ShardedParam], shards: Sequence[Any], place: Sequence[Any]
    ) -> list[Any]:
        """The parameters as layers read them."""

    def scatter(
        self,
        stored: Sequence[ShardedParam],
        grads: Sequence[Any],
        likes: Sequence[Any],
        place: Sequence[Any],
    ) -> list[Any]:
        """The gradients of what `gather` gave, summed over the ranks, as those of the shards."""


@dataclass(frozen=True)
class ShardedParam:
    """How one parameter is stored and how layers read it."""

    shape: tuple[int, ...]  # as layers read it; the stored array may be padded
    dtype: Any  # in which layers read it
    gathered: NamedSharding
    cut: NamedSharding  # of the stored array, and of its gradient
    wire: Any = None  # the dtype in which gradients are reduced; None: as they come
    trainable: bool = True
    grad_cut: NamedSharding | None = None  # of its gradient, where that is cut otherwise
    # What moves it where the data axes are manual: `cut` is then of the array that all ranks have.
    exchange: GatherScatter | None = field(default=None, compare=False)

    @property
    def on_host(self) -> bool:
        """Whether it waits in host memory."""
        return self.cut.memory_kind == HOST

    @property
    def _here(self) -> NamedSharding:
        """As it is cut, in the memory where layers read it."""
        kind = self.gathered.memory_kind
        return NamedSharding(self.cut.mesh, self.cut.spec, memory_kind=kind)

    @property
    def entries(self) -> list[Any]:
        """Over what each dim is cut as layers read it."""
        return by_dim(self.gathered.spec, len(self.shape))

    @property
    def cut_dim(self) -> int | None:
        """The dim on which the stored array is cut more finely than layers read it."""
        specs = [by_dim(s.spec, len(self.shape)) for s in (self.gathered, self.cut)]
        return next((d for d, (a, b) in enumerate(zip(*specs, strict=True)) if a != b), None)

    def moved(self, shape: tuple[int, ...], dims: list[int | None]) -> ShardedParam:
        """The same storage seen through a view: dim d of the view is dim `dims[d]` of this."""

        def along(sharding: NamedSharding) -> NamedSharding:
            entries = by_dim(sharding.spec, len(self.shape))
            spec = PartitionSpec(*(None if d is None else entries[d] for d in dims))
            return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)

        grad_cut = along(self.grad_cut) if self.grad_cut else None
        gathered, cut = along(self.gathered), along(self.cut)
        return replace(self, shape=shape, gathered=gathered, cut=cut, grad_cut=grad_cut)

    def layer(self) -> ShardedParam:
        """One slice of a stacked parameter, as the body of a scan sees it."""
        return self.moved(self.shape[1:], list(range(1, len(self.shape))))

    def read(self, stored: jax.Array) -> jax.Array:
        """The parameter as layers read it: cast on the shard, then gathered, then unpadded."""
        stored = self.brought(stored)
        # Without the first constraint the gather may move above what the shard is tied to.
        stored = constrain(stored, self._here, "unit.cut")
        whole = constrain(stored.astype(self.dtype), self.gathered, "unit.gather")
        return whole if whole.shape == self.shape else whole[tuple(map(slice, self.shape))]

    def on_device(self) -> ShardedParam:
        """The same without a stay in host memory."""
        return replace(self, cut=self._here)

    def brought(self, stored: jax.Array) -> jax.Array:
        """The stored array in the memory where layers read it."""
        return jax.device_put(stored, jax.memory.Space.Device) if self.on_host else stored

    def scatter(self, grad: jax.Array, like: jax.Array) -> jax.Array:
        """The gradient of what `read` gave, as the gradient of the stored array."""
        grad = grad.astype(reduction_dtype(grad.dtype, self.wire))
        if grad.shape != like.shape:
            grad = jnp.pad(grad, [(0, b - a) for a, b in zip(grad.shape, like.shape, strict=True)])
        at = self.grad_cut or self._here
        grad = constrain(grad, at, "unit.scatter").astype(like.dtype)
        return jax.device_put(grad, jax.memory.Space.Host) if self.on_host else grad


# how a piece's parameters come in and its gradients leave: by constraints, or by an exchange.


def place_of(stored: Sequence[ShardedParam]) -> list[Any]:
    """What an exchange has to be told; nothing where there is none."""
    exchange = _exchange(stored)
    return list(exchange.place) if exchange else []


def read_all(
    stored: Sequence[ShardedParam], shards: Sequence[Any], place: Sequence[Any]
) -> list[Any]:
    """All parameters of a piece as layers read them."""
    exchange = _exchange(stored)
    if exchange:
        return exchange.gather(stored, shards, place)
    return [s.read(w) for s, w in zip(stored, shards, strict=True)]


def scatter_all(
    stored: Sequence[ShardedParam], grads: Sequence[Any], likes: Sequence[Any], place: Sequence[Any]
) -> list[Any]:
    """All gradients of a piece as those of what is stored; None where there is none."""
    exchange = _exchange(stored)
    if not exchange:
        triples = zip(stored, grads, likes, strict=True)
        return [None if g is None else s.scatter(g, w) for s, g, w in triples]
    found = [i for i, g in enumerate(grads) if g is not None]

    def picked(values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in found]

    done = iter(exchange.scatter(picked(stored), picked(grads), picked(likes), place))
    return [None if g is None else next(done) for g in grads]


def _exchange(stored: Sequence[ShardedParam]) -> GatherScatter | None:
    return stored[0].exchange if stored else None
