"""A sharded parameter (ZeRO 3): its stored shards, all-gather, and gradient reduce-scatter.

Forward, a stored parameter (sharded over the data axes, perhaps padded, in its master dtype) is
cast and all-gathered. Backward, its gradient is constrained to the stored sharding: XLA makes a
reduce-scatter of it, and the full reduced gradient never exists. A parameter in host memory is
copied to the device first, and its gradient back to the host last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.placement.rows import HOST, reduction_dtype
from jaxspeed.placement.specs import by_dim
from jaxspeed.placement.torus_gather import first_step


class GatherScatter(Protocol):
    """All-gather of a segment's parameters and reduce-scatter of their gradients."""

    @property
    def place(self) -> Sequence[jax.Array]:
        """This device's ranks: integers, passed to a segment as arguments.

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
        """The gradients of the gathered parameters, summed over the ranks, as shards."""

    @property
    def in_order(self) -> bool:
        """Whether data has to order exchanges: the backend drops barriers, and mixes messages."""

    def ordered(
        self, arrays: Sequence[Any], first: Sequence[Any], place: Sequence[Any]
    ) -> list[Any]:
        """The arrays; where data has to order exchanges, with a dependency on `first`."""


@dataclass(frozen=True)
class ShardedParam:
    """How one parameter is stored and how layers read it."""

    shape: tuple[int, ...]  # as layers read it; the stored array may be padded
    dtype: Any  # in which layers read it
    gathered: NamedSharding
    sharding: NamedSharding  # of the stored array, and of its gradient
    wire: Any = None  # the dtype in which gradients are reduced; None: their dtype
    trainable: bool = True
    grad_sharding: NamedSharding | None = None  # of its gradient, where that differs
    # With manual data axes: gathers and scatters; `sharding` is then of the global array.
    exchange: GatherScatter | None = field(default=None, compare=False)

    @property
    def on_host(self) -> bool:
        """Whether it is stored in host memory."""
        return self.sharding.memory_kind == HOST

    @property
    def _here(self) -> NamedSharding:
        """The stored sharding in the memory where layers read it."""
        kind = self.gathered.memory_kind
        return NamedSharding(self.sharding.mesh, self.sharding.spec, memory_kind=kind)

    @property
    def entries(self) -> list[Any]:
        """The mesh axes of each dim of the gathered parameter."""
        return by_dim(self.gathered.spec, len(self.shape))

    @property
    def sharded_dim(self) -> int | None:
        """The dim that is gathered: sharded over more axes than when layers read it."""
        specs = [by_dim(s.spec, len(self.shape)) for s in (self.gathered, self.sharding)]
        return next((d for d, (a, b) in enumerate(zip(*specs, strict=True)) if a != b), None)

    def moved(self, shape: tuple[int, ...], dims: list[int | None]) -> ShardedParam:
        """The same storage seen through a view: dim d of the view is dim `dims[d]` of this."""

        def along(sharding: NamedSharding) -> NamedSharding:
            entries = by_dim(sharding.spec, len(self.shape))
            spec = PartitionSpec(*(None if d is None else entries[d] for d in dims))
            return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)

        of_grad = along(self.grad_sharding) if self.grad_sharding else None
        gathered, sharding = along(self.gathered), along(self.sharding)
        return replace(
            self, shape=shape, gathered=gathered, sharding=sharding, grad_sharding=of_grad
        )

    def layer(self) -> ShardedParam:
        """One slice of a stacked parameter, as the body of a scan reads it."""
        return self.moved(self.shape[1:], list(range(1, len(self.shape))))

    def read(self, stored: jax.Array) -> jax.Array:
        """The parameter as layers read it: cast on the shard, then gathered, then unpadded."""
        # Without the first constraint the gather may move above the barrier on the shard.
        stored = _cast(constrain(on_device(stored), self._here, "unit.shard"), self.dtype)
        step = first_step(self._here, self.gathered)
        stored = constrain(stored, step, "unit.step") if step else stored
        full = constrain(stored, self.gathered, "unit.gather")
        return full if full.shape == self.shape else full[tuple(map(slice, self.shape))]

    def on_device(self) -> ShardedParam:
        """The same parameter, stored in device memory."""
        return replace(self, sharding=self._here)

    def scatter(self, grad: jax.Array, like: jax.Array) -> jax.Array:
        """The gradient of the gathered parameter on the stored shards, in device memory."""
        grad = grad.astype(reduction_dtype(grad.dtype, self.wire))
        if grad.shape != like.shape:
            grad = jnp.pad(grad, [(0, b - a) for a, b in zip(grad.shape, like.shape, strict=True)])
        at = self.grad_sharding or self._here
        return constrain(grad, at, "unit.scatter").astype(like.dtype)


Storage = Mapping[Any, ShardedParam]  # of the variables of a program


def _cast(stored: jax.Array, dtype: Any) -> jax.Array:
    """The stored array in the dtype in which layers read it.

    XLA:TPU moves a cast to bf16 out of a loop over layers and holds a bf16 copy of all their
    shards (bfloat16-propagation, libtpu 0.0.52). It does not where the values are rounded first;
    the cast is then exact.
    """
    if stored.dtype == jnp.float32 and dtype == jnp.bfloat16:
        stored = jax.lax.reduce_precision(stored, exponent_bits=8, mantissa_bits=7)
    return stored.astype(dtype)


# All-gather and reduce-scatter of a segment: by sharding constraints, or by an exchange.


def read_all(
    stored: Sequence[ShardedParam], shards: Sequence[Any], place: Sequence[Any]
) -> list[Any]:
    """All parameters of a segment as layers read them."""
    exchange = exchange_of(stored)
    if exchange:
        return exchange.gather(stored, shards, place)
    return [s.read(w) for s, w in zip(stored, shards, strict=True)]


def scatter_all(
    stored: Sequence[ShardedParam], grads: Sequence[Any], likes: Sequence[Any], place: Sequence[Any]
) -> list[Any]:
    """All gradients of a segment, on the stored shards; None where there is none."""
    exchange = exchange_of(stored)
    if not exchange:
        triples = zip(stored, grads, likes, strict=True)
        return [None if g is None else s.scatter(g, w) for s, g, w in triples]
    found = [i for i, g in enumerate(grads) if g is not None]

    def picked(values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in found]

    done = iter(exchange.scatter(picked(stored), picked(grads), picked(likes), place))
    return [None if g is None else next(done) for g in grads]


def exchange_of(stored: Sequence[ShardedParam]) -> GatherScatter | None:
    """The exchange of a segment, if it has one."""
    return stored[0].exchange if stored else None
