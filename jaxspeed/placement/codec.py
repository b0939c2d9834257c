"""Codecs: how the stored arrays of a parameter, or of a moment, encode its value.

`PLAIN` stores the value itself, cast and padded. Any other codec stores a dict of arrays, and a
`CodecRule` assigns it: to frozen parameters and to moments, because a stored integer is never
differentiated.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.config.patterns import match
from jaxspeed.placement.specs import by_dim, num_shards

Stored = Any  # an array, or a dict of arrays; of shapes or shardings where only these are known


class Codec(Protocol):
    """How arrays encode a value.

    It is static and hashable. Each of its arrays has the dims of the value, in their order. Along
    a dim it has the value's size, so that a slice of rows is a slice of every array, or is smaller
    by a factor, the size of a block. Blocks stay inside a layer of a stack and inside a shard; an
    array whose block covers several shards is replicated over them.
    """

    @property
    def name(self) -> str:
        """The name under which checkpoints have it; `CODECS` finds it by this name."""
        ...

    @property
    def views(self) -> Collection[str]:
        """Which of slice, dynamic_slice and squeeze may be applied to each array.

        Before any other view the value is gathered and decoded.
        """
        return ()

    def arrays(self, shape: Sequence[int], parts: Sequence[int], dtype: Any) -> Stored:
        """The shapes of the arrays of a value.

        Blocks stay inside of `parts`, the number of each dim's equal parts: its shards, or layers.
        """
        ...

    def encode(self, value: jax.Array, like: Stored) -> Stored:
        """The arrays of a value, or of some rows of it; `like` has their shapes."""
        ...

    def decode(self, stored: Stored, dtype: Any) -> jax.Array:
        """The value in this dtype."""
        ...


@dataclass(frozen=True)
class Plain(Codec):
    """The value itself, as one array."""

    @property
    def name(self) -> str:
        return "plain"

    def arrays(self, shape: Sequence[int], parts: Sequence[int], dtype: Any) -> Stored:
        return jax.ShapeDtypeStruct(tuple(shape), dtype)

    def encode(self, value: jax.Array, like: Stored) -> Stored:
        return value

    def decode(self, stored: Stored, dtype: Any) -> jax.Array:
        value: jax.Array = stored
        return value


PLAIN = Plain()
CODECS: dict[str, Codec] = {PLAIN.name: PLAIN}  # what checkpoints may name


@dataclass(frozen=True)
class CodecRule:
    """The codec of the parameters, or of the moments, that match a pattern; the first rule wins.

    A rule of "opt" is matched with a moment's own path too, as `*/nu/**`.
    """

    role: Literal["param", "opt"]
    pattern: str
    codec: Codec


def codec_of(rules: Sequence[CodecRule], role: Literal["param", "opt"], *paths: str) -> Codec:
    """The codec that the rules assign."""
    found = (
        rule.codec
        for rule in rules
        if rule.role == role and any(match(rule.pattern, path) for path in paths)
    )
    return next(found, PLAIN)


@dataclass(frozen=True)
class StoredValue:
    """A value of the state and the arrays that store it.

    Attributes:
      shape: of the value, without padding.
      padded: the shape that is encoded.
      sharding: of the padded value.
      stacked: number of leading dims that stack layers.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding
    codec: Codec = PLAIN
    stacked: int = 0

    @cached_property
    def arrays(self) -> Stored:
        """Shapes, dtypes and shardings of the arrays."""
        mesh, kind = self.sharding.mesh, self.sharding.memory_kind
        entries = by_dim(self.sharding.spec, len(self.padded))
        parts = [num_shards(entry, mesh.shape) for entry in entries]
        parts[: self.stacked] = self.padded[: self.stacked]

        def placed(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            spec = array_spec(array.shape, self.padded, self.sharding)
            at = NamedSharding(mesh, spec, memory_kind=kind)
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=at)

        if self.codec == PLAIN:
            return jax.ShapeDtypeStruct(self.padded, self.dtype, sharding=self.sharding)
        return jax.tree.map(placed, self.codec.arrays(self.padded, parts, self.dtype))

    @property
    def shardings(self) -> Stored:
        return jax.tree.map(lambda array: array.sharding, self.arrays)

    def encode(self, value: jax.Array) -> Stored:
        """The arrays of an unpadded value."""
        value = pad(value if value.dtype == self.dtype else value.astype(self.dtype), self.padded)
        return self.codec.encode(value, self.arrays) if self.codec != PLAIN else value

    def decode(self, stored: Stored) -> jax.Array:
        """The unpadded value of the arrays."""
        return unpad(self.codec.decode(stored, self.dtype), self.shape)

    @property
    def total_bytes(self) -> int:
        """Bytes of the arrays without padding, if one device held them all."""
        parts = [n if dim < self.stacked else 1 for dim, n in enumerate(self.shape)]
        arrays = self.codec.arrays(self.shape, parts, self.dtype)
        return sum(_nbytes(array) for array in jax.tree.leaves(arrays))

    @property
    def device_bytes(self) -> int:
        """Bytes of a device's shards."""
        sizes = self.sharding.mesh.shape
        return sum(
            _nbytes(array) // math.prod(num_shards(entry, sizes) for entry in array.sharding.spec)
            for array in jax.tree.leaves(self.arrays)
        )


def array_spec(
    shape: Sequence[int], padded: Sequence[int], sharding: NamedSharding
) -> PartitionSpec:
    """The sharding of one array of a value: the value's, but for blocks that cover many shards."""
    entries = by_dim(sharding.spec, len(padded))

    def along(dim: int) -> Any:
        shard = padded[dim] // num_shards(entries[dim], sharding.mesh.shape)
        block = padded[dim] // max(shape[dim], 1)
        return entries[dim] if block and shard % block == 0 else None

    return PartitionSpec(*map(along, range(len(padded))))


def parts_of(name: str, stored: Stored) -> Mapping[str, Any]:
    """{name of an array: array} of a value: its own name, or one below it for each array."""
    if not isinstance(stored, dict):
        return {name: stored}
    return {f"{name}/{part}": array for part, array in stored.items()}


def pad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Append zeros up to a stored shape."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, b - a) for a, b in zip(x.shape, shape, strict=True)])


def unpad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Remove the padding of a stored shape."""
    return x if x.shape == shape else x[tuple(map(slice, shape))]


def _nbytes(array: Any) -> int:
    return math.prod(array.shape) * int(array.dtype.itemsize)
