"""Rows of the placement table: sharding, memory kind and dtype of each role of a parameter.

`param`   the copy that layers read, in the compute dtype
`master`  the fp32 copy that the optimizer updates (mixed precision only)
`grad`    the gradient as accumulated
`opt`     the optimizer's moments
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.placement.codec import PLAIN, Codec, Stored, StoredValue, unpad
from jaxspeed.placement.specs import by_dim

ROLES = ("param", "master", "grad", "opt")
HOST = "pinned_host"  # the memory kind of offloaded arrays
OF_IMAGES = "image_"  # begins the names of dims that belong to encoders of images


IS_RANGE = re.compile(r"\[\d+:\d+\]")  # the last segment of the path of a range of layers


class LayerRange(NamedTuple):
    """Consecutive layers of a stacked parameter, which are a leaf of their own."""

    path: str  # of the parameter
    start: int
    stop: int
    first: str  # the path that the first of these layers has where the stack is a list

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Leaf:
    """One parameter as the model initialized it, or a range of its layers."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    names: tuple[str | None, ...] = ()  # logical names of its dims, where the model has them
    trainable: bool = True
    full_precision: bool = False  # never cast to a 16-bit compute dtype
    shared: tuple[str, ...] = ()  # its other paths, of a Variable that the model has several times
    range: LayerRange | None = None  # if it holds only some layers
    adapts: str | None = None  # the path of the weight of which it is an adapter's leaf

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths by which patterns select it."""
        layer = (self.range.first,) if self.range else ()
        return (self.path, *self.shared, *layer)

    @property
    def parameter(self) -> str:
        """The path of the model's parameter that it is, or whose layers it holds."""
        return self.range.path if self.range else self.path

    @property
    def of_images(self) -> bool:
        """Whether it is of an encoder of images, which runs with the embedding."""
        return any((name or "").startswith(OF_IMAGES) for name in self.names)

    @property
    def stacked(self) -> int:
        """Number of leading dims that stack layers."""
        return sum(1 for name in self.names[:1] if name in ("layers", "stages"))

    @property
    def matrix_inputs(self) -> int | None:
        """Number of input dims after the stacked ones, of a matrix that heads make 3-D.

        `[embed, heads, head_dim]` has one, `[heads, head_dim, embed]` two.
        """
        names = self.names[self.stacked :]
        if len(names) != 3 or "head_dim" not in names[1:]:
            return None
        return 1 if names[2] == "head_dim" else 2


@dataclass(frozen=True)
class Precision:
    """Dtypes of the roles."""

    compute: Any = None  # None: each leaf in its own
    grad: Any = None  # None: the leaf's own, fp32 at least
    master_in_compute: bool = False  # no fp32 copy: the 16-bit parameter is updated
    opt: Any = None  # None: as the optimizer initializes it


AS_MADE = Precision()


def reduction_dtype(dtype: Any, wanted: Any) -> Any:
    """Dtype in which a gradient is reduced: `wanted` if given, and never real for complex."""
    return dtype if wanted is None or jnp.issubdtype(dtype, jnp.complexfloating) else wanted


@dataclass(frozen=True)
class Offload:
    """Arrays that are offloaded to host memory, or to a disk."""

    optimizer: float = 0.0  # masters and moments: the share of the parameters, in bytes
    param: bool = False  # parameters and gradients
    disk: bool = False  # whether masters and moments are on a disk
    on_host: bool = True  # ... and then whether they are read into host memory or the device's


ON_DEVICE = Offload()


@dataclass(frozen=True)
class Placement:
    """Sharding, memory kind, dtype and encoding of one value.

    One on a disk has the memory kind into which it is read.
    """

    spec: PartitionSpec
    memory_kind: str
    dtype: Any
    codec: Codec = PLAIN
    disk: bool = False

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """The placement as a sharding over a mesh."""
        return NamedSharding(mesh, self.spec, memory_kind=self.memory_kind)


@dataclass(frozen=True)
class Row:
    """Placements of one leaf, one per role; None where the role is not stored."""

    leaf: Leaf
    shapes: Mapping[PartitionSpec, tuple[int, ...]]  # the shape stored: padded where it is sharded
    read: Placement  # as layers see it: gathered over data, and over pipe where that shards storage
    param: Placement | None
    master: Placement | None
    grad: Placement | None
    opt: Placement | None
    note: str = ""

    @property
    def path(self) -> str:
        return self.leaf.path

    @property
    def source(self) -> Placement:
        """The stored copy that layers read from."""
        stored = self.param or self.master
        assert stored is not None
        return stored

    @property
    def updated(self) -> Placement:
        """The stored copy that the optimizer updates."""
        stored = self.master or self.param
        assert stored is not None
        return stored

    @property
    def gathered(self) -> bool:
        """Whether units gather (or cast) it before they read it."""
        return self.source != self.read

    def shape(self, placement: Placement) -> tuple[int, ...]:
        """Shape that this placement stores: padded only where it is sharded."""
        return self.shapes[placement.spec]

    def stored(self, placement: Placement, mesh: Mesh) -> StoredValue:
        """The arrays of this placement."""
        return StoredValue(
            self.leaf.shape,
            self.shape(placement),
            placement.dtype,
            placement.sharding(mesh),
            placement.codec,
            self.leaf.stacked,
        )

    def decoded(self, placement: Placement, stored: Stored) -> Any:
        """The unpadded value that this placement stores."""
        shape = self.leaf.shape
        return unpad(placement.codec.decode(stored, shape, placement.dtype), shape)

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of the source without the padding of model axes, as a unit gets it.

        Layers see logical dims, sharded unevenly; only the dim that is gathered has its padding.
        """
        read, source = (by_dim(p.spec, len(self.leaf.shape)) for p in (self.read, self.source))
        stored = self.shape(self.source)
        sizes = zip(self.leaf.shape, stored, read, source, strict=True)
        return tuple(size if r == s else padded for size, padded, r, s in sizes)
