"""A sharded parameter (ZeRO 3): its stored shards, all-gather, and gradient reduce-scatter.

Forward, a stored parameter (sharded over the data axes, perhaps padded, in its master dtype) is
cast and all-gathered. Backward, its gradient is constrained to the stored sharding: XLA makes a
reduce-scatter of it, and the full reduced gradient never exists. A parameter in host memory is
copied to the device first, and its gradient back to the host last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.axes import SEQ
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.placement.codec import (
    PLAIN,
    Codec,
    EncodedArray,
    Stored,
    StoredValue,
    pad,
    unpad,
)
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.placement.rows import HOST, reduction_dtype
from jaxspeed.placement.specs import by_dim
from jaxspeed.placement.torus_gather import steps_between


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
    codec: Codec = PLAIN
    parts: tuple[tuple[str, ShardedParam], ...] = ()  # the arrays that a codec stores, by name
    blocks: tuple[int, ...] = ()  # of such an array: those of `EncodedArray`

    @property
    def on_host(self) -> bool:
        """Whether it is stored in host memory."""
        return self.sharding.memory_kind == HOST

    @property
    def arrays(self) -> Stored:
        """How each stored array is stored; a plain parameter is one."""
        return dict(self.parts) if self.parts else self

    def with_parts(self, change: Callable[[ShardedParam], ShardedParam]) -> ShardedParam:
        """With each of a codec's arrays changed."""
        return replace(self, parts=tuple((name, change(part)) for name, part in self.parts))

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
            self,
            shape=shape,
            gathered=gathered,
            sharding=sharding,
            grad_sharding=of_grad,
            blocks=tuple(self.blocks[d] for d in dims if d is not None) if self.blocks else (),
        )

    def layer(self) -> ShardedParam:
        """One slice of a stacked parameter, as the body of a scan reads it."""
        layered = self.with_parts(ShardedParam.layer)
        return layered.moved(self.shape[1:], list(range(1, len(self.shape))))

    def decoded(self, arrays: Stored) -> jax.Array:
        """The parameter as layers read it, from its gathered arrays."""
        if not self.parts:
            return arrays
        return unpad(self.codec.decode(arrays, self.shape, self.dtype), self.shape)

    def read(self, stored: Stored) -> jax.Array:
        """The parameter as layers read it: cast on the shard, then gathered, then unpadded.

        An encoded one is gathered as it is stored, and decoded then.
        """
        if self.parts:
            return self.decoded({name: part.read(stored[name]) for name, part in self.parts})
        # Without the first constraint the gather may move above the barrier on the shard.
        stored = _cast(constrain(on_device(stored), self._here, "unit.shard"), self.dtype)
        for step in steps_between(self._here, self.gathered):
            stored = constrain(stored, step, "unit.step")
        return unpad(constrain(stored, self.gathered, "unit.gather"), self.shape)

    def on_device(self) -> ShardedParam:
        """The same parameter, stored in device memory."""
        return replace(self.with_parts(ShardedParam.on_device), sharding=self._here)

    def scatter(self, grad: jax.Array, like: jax.Array) -> jax.Array:
        """The gradient of the gathered parameter on the stored shards, in device memory."""
        grad = grad.astype(reduction_dtype(grad.dtype, self.wire))
        at, grad = self.grad_sharding or self._here, pad(grad, like.shape)
        if free_axes(self.gathered.mesh).get(SEQ, 1) > 1:
            # Partial sums over samples and positions: XLA would gather what they are sums of.
            grad = constrain(grad, self.gathered, "unit.sum")
        return constrain(grad, at, "unit.scatter").astype(like.dtype)


def encoded(param: ShardedParam, value: StoredValue) -> ShardedParam:
    """A parameter that is stored as this value's arrays."""
    if value.codec == PLAIN:
        return param

    def part(name: str, array: EncodedArray) -> ShardedParam:
        at, stored = param.gathered, value.arrays[name].sharding
        spec = array.spec(value.padded, at)
        gathered = NamedSharding(at.mesh, spec, memory_kind=at.memory_kind)
        how = ShardedParam(array.shape, array.dtype, gathered, stored, trainable=False)
        return replace(how, blocks=array.blocks)

    parts = tuple((name, part(name, array)) for name, array in value.parts.items())
    return replace(param, codec=value.codec, parts=parts)


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
