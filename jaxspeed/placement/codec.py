"""Codecs: how the stored arrays of a parameter, or of a moment, encode its value.

`PLAIN` stores the value itself, cast and padded. Any other codec stores a dict of arrays, and a
`CodecRule` assigns it: to frozen parameters and to moments, because a stored integer is never
differentiated.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.config.patterns import match
from jaxspeed.placement.specs import by_dim, num_shards

Role = Literal["param", "opt"]
Stored = Any  # an array, or a dict of arrays; of shapes or shardings where only these are known


class EncodedArray(NamedTuple):
    """One array of an encoded value.

    Attributes:
      blocks: for each dim of the array how many of the value's elements along the same dim one
        element encodes; 0 for a dim that is none of the value's, which is replicated.
    """

    shape: tuple[int, ...]
    dtype: Any
    blocks: tuple[int, ...]

    def spec(self, padded: Sequence[int], sharding: NamedSharding) -> PartitionSpec:
        """The value's sharding, where no block covers several shards; replicated elsewhere."""
        entries, sizes = by_dim(sharding.spec, len(padded)), sharding.mesh.shape

        def along(dim: int, block: int) -> Any:
            inside = block and padded[dim] // num_shards(entries[dim], sizes) % block == 0
            return entries[dim] if inside else None

        return PartitionSpec(*(along(dim, block) for dim, block in enumerate(self.blocks)))


class Codec(Protocol):
    """How arrays encode a value.

    It is static and hashable. A dim with blocks of 1 has the value's size, so that a slice of rows
    is a slice of every array. Blocks stay inside a layer of a stack and inside a shard; an array
    whose blocks cover several shards (one scale for a row, say) is replicated over them.
    """

    @property
    def name(self) -> str:
        """The name under which checkpoints have it; `named` finds it."""
        ...

    @classmethod
    def named(cls, name: str) -> "Codec | None":
        """The codec of this class, with its options, that has this name; None if none has."""
        return None

    @property
    def views(self) -> Collection[str]:
        """Which of slice, dynamic_slice and squeeze may be applied to each array.

        Before any other view the value is gathered and decoded.
        """
        return ()

    def multiples(self, shape: Sequence[int]) -> Sequence[int]:
        """Where ZeRO shards a dim of the value, a shard has a multiple of so many elements."""
        return [1] * len(shape)

    def arrays(
        self, padded: Sequence[int], parts: Sequence[int], dtype: Any, shape: Sequence[int]
    ) -> Mapping[str, EncodedArray]:
        """The arrays of a padded value; `shape` is without padding.

        Blocks stay inside of `parts`, the number of each dim's equal parts: its shards, or layers.
        """
        ...

    def encode(self, value: jax.Array, shape: Sequence[int], like: Stored) -> Stored:
        """The arrays of a padded value, or of some rows of it.

        `shape` is without padding, and `like` has the arrays' shapes.
        """
        ...

    def decode(self, stored: Stored, shape: Sequence[int], dtype: Any) -> jax.Array:
        """The padded value in this dtype; `shape` is without padding."""
        ...

    def repadded(self, stored: Stored, shape: Sequence[int], like: Stored) -> Stored | None:
        """The arrays of the same value with the shapes of `like`; None: decode and encode it."""
        return None


@dataclass(frozen=True)
class Plain(Codec):
    """The value itself, as one array."""

    @property
    def name(self) -> str:
        return "plain"

    @classmethod
    def named(cls, name: str) -> "Plain | None":
        return PLAIN if name == PLAIN.name else None

    def arrays(
        self, padded: Sequence[int], parts: Sequence[int], dtype: Any, shape: Sequence[int]
    ) -> Mapping[str, EncodedArray]:
        return {"value": EncodedArray(tuple(padded), dtype, (1,) * len(padded))}

    def encode(self, value: jax.Array, shape: Sequence[int], like: Stored) -> Stored:
        return value

    def decode(self, stored: Stored, shape: Sequence[int], dtype: Any) -> jax.Array:
        value: jax.Array = stored
        return value


PLAIN = Plain()


class AssignsCodecs(Protocol):
    """A rule that assigns codecs."""

    def codec_for(self, role: Role, *paths: str) -> Codec | None:
        """The codec of what has these paths, the last one a parameter's; None: not by this rule."""
        ...


@dataclass(frozen=True)
class CodecRule(AssignsCodecs):
    """The codec of the parameters, or of the moments, that match a pattern; the first rule wins.

    A rule of "opt" is matched with a moment's own path too, as `*/nu/**`; `Codec.multiples` is
    asked of the codec that matches the parameter's.
    """

    role: Role
    pattern: str
    codec: Codec

    def covers(self, path: str) -> bool:
        """Whether the pattern matches, or is the path of a range of layers."""
        return path == self.pattern or match(self.pattern, path)

    def codec_for(self, role: Role, *paths: str) -> Codec | None:
        return self.codec if role == self.role and any(map(self.covers, paths)) else None


def codec_of(rules: Sequence[AssignsCodecs], role: Role, *paths: str) -> Codec:
    """The codec that the rules assign to what has these paths, the last one a parameter's."""
    return next(filter(None, (rule.codec_for(role, *paths) for rule in rules)), PLAIN)


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
    def parts(self) -> Mapping[str, EncodedArray]:
        """The arrays of the codec, by name."""
        entries = by_dim(self.sharding.spec, len(self.padded))
        parts = [num_shards(entry, self.sharding.mesh.shape) for entry in entries]
        parts[: self.stacked] = self.padded[: self.stacked]
        return self.codec.arrays(self.padded, parts, self.dtype, self.shape)

    @cached_property
    def arrays(self) -> Stored:
        """Shapes, dtypes and shardings of the arrays."""
        if self.codec == PLAIN:
            return jax.ShapeDtypeStruct(self.padded, self.dtype, sharding=self.sharding)
        mesh, kind = self.sharding.mesh, self.sharding.memory_kind

        def placed(part: EncodedArray) -> jax.ShapeDtypeStruct:
            spec = part.spec(self.padded, self.sharding)
            at = NamedSharding(mesh, spec, memory_kind=kind)
            return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=at)

        return {name: placed(part) for name, part in self.parts.items()}

    @property
    def shardings(self) -> Stored:
        return jax.tree.map(lambda array: array.sharding, self.arrays)

    @property
    def on_device(self) -> Stored:
        """The shardings of the arrays in device memory."""
        kind = self.sharding.mesh.devices.flat[0].default_memory().kind
        return jax.tree.map(lambda at: at.with_memory_kind(kind), self.shardings)

    @cached_property
    def layer(self) -> "StoredValue":
        """A layer of a stack."""
        _, *entries = by_dim(self.sharding.spec, len(self.padded))
        at = self.sharding
        sharding = NamedSharding(at.mesh, PartitionSpec(*entries), memory_kind=at.memory_kind)
        return StoredValue(
            self.shape[1:], self.padded[1:], self.dtype, sharding, self.codec, self.stacked - 1
        )

    def encode(self, value: jax.Array) -> Stored:
        """The arrays of an unpadded value."""
        value = pad(value if value.dtype == self.dtype else value.astype(self.dtype), self.padded)
        return self.codec.encode(value, self.shape, self.arrays)

    def decode(self, stored: Stored) -> jax.Array:
        """The unpadded value of the arrays."""
        return unpad(self.codec.decode(stored, self.shape, self.dtype), self.shape)

    @property
    def total_bytes(self) -> int:
        """Bytes of the arrays without padding, if one device held them all."""
        parts = [n if dim < self.stacked else 1 for dim, n in enumerate(self.shape)]
        arrays = self.codec.arrays(self.shape, parts, self.dtype, self.shape)
        return sum(map(_nbytes, arrays.values()))

    @property
    def device_bytes(self) -> int:
        """Bytes of a device's shards."""
        sizes = self.sharding.mesh.shape
        return sum(
            _nbytes(array) // math.prod(num_shards(entry, sizes) for entry in array.sharding.spec)
            for array in jax.tree.leaves(self.arrays)
        )


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
