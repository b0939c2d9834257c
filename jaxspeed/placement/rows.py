"""One parameter, and where each role of it lives: the rows of the placement table.

`param`   what layers read, in the compute dtype
`master`  the fp32 copy that the optimizer updates (mixed precision only)
`grad`    the gradient as accumulated
`opt`     the optimizer's moments
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.placement.specs import by_dim

ROLES = ("param", "master", "grad", "opt")
HOST = "pinned_host"  # the memory kind of what waits in host memory


@dataclass(frozen=True)
class Leaf:
    """One parameter as the model made it."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    names: tuple[str | None, ...] = ()  # logical names of its dims, where the model has them
    trainable: bool = True
    full_precision: bool = False  # never cast to a 16-bit compute dtype

    @property
    def stacked(self) -> int:
        """How many leading dims stack layers."""
        return sum(1 for name in self.names[:1] if name in ("layers", "stages"))

    @property
    def matrix_inputs(self) -> int | None:
        """How many dims after the stacked ones are a matrix's inputs, where heads make it 3-D.

        `[embed, heads, head_dim]` has one, `[heads, head_dim, embed]` two.
        """
        names = self.names[self.stacked :]
        if len(names) != 3 or "head_dim" not in names[1:]:
            return None
        return 1 if names[2] == "head_dim" else 2


@dataclass(frozen=True)
class Precision:
    """The dtypes of the roles."""

    compute: Any = None  # None: each leaf in its own
    grad: Any = None  # None: the leaf's own, fp32 at least
    master_in_compute: bool = False  # no fp32 copy: the 16-bit parameter is what is updated
    opt: Any = None  # None: whatever the optimizer makes


AS_MADE = Precision()


def reduction_dtype(dtype: Any, wanted: Any) -> Any:
    """In which a gradient is reduced: in `wanted` if that is a dtype, and never complex as real."""
    return dtype if wanted is None or jnp.issubdtype(dtype, jnp.complexfloating) else wanted


@dataclass(frozen=True)
class Offload:
    """What waits in host memory."""

    optimizer: float = 0.0  # masters and moments: the share of the parameters, in bytes
    param: bool = False  # parameters and gradients


ON_DEVICE = Offload()


@dataclass(frozen=True)
class Placement:
    """Where one array lives: how it is cut, in which memory, in which dtype."""

    spec: PartitionSpec
    memory_kind: str
    dtype: Any

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return NamedSharding(mesh, self.spec, memory_kind=self.memory_kind)


@dataclass(frozen=True)
class Row:
    """The placements of one leaf, a role each; None where the role is not stored."""

    leaf: Leaf
    shapes: Mapping[PartitionSpec, tuple[int, ...]]  # what is stored so: padded where it is cut
    read: Placement  # as layers see it: gathered over data, and over pipe where that cuts storage
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
        """Whether reading it is a gather (or a cast) that units should do one at a time."""
        return self.source != self.read

    def shape(self, placement: Placement) -> tuple[int, ...]:
        """The shape that this placement stores: padded only where it is cut."""
        return self.shapes[placement.spec]

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The source's shape without the padding of model axes, as a unit is given it.

        Layers see logical dims, cut unevenly; only the dim that is gathered has its padding.
        """
        read, source = (by_dim(p.spec, len(self.leaf.shape)) for p in (self.read, self.source))
        stored = self.shape(self.source)
        sizes = zip(self.leaf.shape, stored, read, source, strict=True)
        return tuple(size if r == s else padded for size, padded, r, s in sizes)
