"""The table of mesh axes: what each one shards, sums and stores. A new axis is a row.

Config fields, logical rules, the layout over links and slices, the search's meshes, the spec of a
batch, the number of its shards, ZeRO's storage and the reduction of gradients are read from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

BatchDim = Literal["samples", "positions"]  # dim 0 of a batch's arrays, and their sequence's


@dataclass(frozen=True)
class Axis:
    """What one mesh axis means.

    Attributes:
      about: the sentence of its config field.
      batch: the dim of a batch that it shards.
      sums: whether gradients are summed over it.
      stores: whether ZeRO shards state over it.
      dims: logical dims of parameters that it shards.
      shares: logical dims that it shards around their own axis.
      near: how near its devices have to be. Slices are spanned by the axes with the lowest numbers.
    """

    about: str
    batch: BatchDim | None = None
    sums: bool = False
    stores: bool = False
    dims: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    near: int = 0


PIPE, DATA, SEQ, EXPERT, TENSOR = "pipe", "data", "seq", "expert", "tensor"

# Outermost first: the order of a mesh's dims.
AXES: dict[str, Axis] = {
    PIPE: Axis(
        "Number of pipeline stages, over which the model's repeated blocks are partitioned.",
        dims=("stages",),  # the layers of the stack that is sharded into stages
        shares=("vocab",),  # all stages share the embedding and the head
        near=1,
    ),
    "replica": Axis(
        "Replicas of the ZeRO-sharded state; a data axis for the batch.",
        batch="samples",
        sums=True,
        near=0,
    ),
    DATA: Axis(
        "The batch and ZeRO's state are sharded over it.",
        batch="samples",
        sums=True,
        stores=True,
        near=2,
    ),
    SEQ: Axis(
        "The positions of each sample are sharded over it, and ZeRO's state, as over data.",
        batch="positions",
        sums=True,
        stores=True,
        near=4,
    ),
    EXPERT: Axis(
        "Weights of experts (the dim `experts`) are sharded over it; outside of them the batch and "
        "ZeRO's state, as over data.",
        batch="samples",
        sums=True,
        stores=True,
        dims=("experts",),
        near=3,
    ),
    TENSOR: Axis(
        "Weights are sharded over it: by layer_specs or a preset, by the model's logical axes, or "
        "as inferred from the traced program.",
        # `block_vocab` is of a table in each block; `tensor` of models that name the axis itself.
        dims=("vocab", "block_vocab", "heads", "kv_heads", "mlp", TENSOR),
        near=5,
    ),
}


def axis_names() -> tuple[str, ...]:
    """All axes, in the order of a mesh's dims."""
    return tuple(AXES)


def sample_axes() -> tuple[str, ...]:
    """The axes that shard the samples of a batch."""
    return tuple(name for name, axis in AXES.items() if axis.batch == "samples")


def summing_axes(spec: Iterable[Any] = ()) -> tuple[str, ...]:
    """The axes over which the gradient of a leaf with this spec is summed."""
    return tuple(name for name, axis in AXES.items() if axis.sums and name not in _axes_in(spec))


def storing_axes(spec: Iterable[Any] = ()) -> tuple[str, ...]:
    """The axes over which ZeRO shards the state of a leaf with this spec."""
    return tuple(name for name, axis in AXES.items() if axis.stores and name not in _axes_in(spec))


def copying_axes() -> tuple[str, ...]:
    """The axes over which gradients are summed and ZeRO's state is replicated."""
    return tuple(name for name in summing_axes() if not AXES[name].stores)


def sharding_axes() -> dict[str, str]:
    """{logical dim of parameters: the axis that shards it}."""
    return {dim: name for name, axis in AXES.items() for dim in axis.dims}


def axes_of_dim(dim: str) -> tuple[str, ...]:
    """The axes that shard a logical dim of parameters, outermost first."""
    return tuple(name for name, axis in AXES.items() if dim in (*axis.shares, *axis.dims))


def spanning_order() -> list[str]:
    """The axes in the order in which they span slices: those that communicate least first."""
    return sorted(AXES, key=lambda name: AXES[name].near)


def product(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """The number of devices along these axes; an axis that is not in `sizes` counts as 1."""
    return math.prod(sizes.get(axis, 1) for axis in axes)


def data_ranks(sizes: Mapping[str, int]) -> int:
    """Number of shards of a batch's samples."""
    return product(sample_axes(), sizes)


def storing_ranks(sizes: Mapping[str, int]) -> int:
    """Number of shards of ZeRO's state."""
    return product(storing_axes(), sizes)


def position_axes() -> tuple[str, ...]:
    """The axes that shard the positions of each sample."""
    return tuple(name for name, axis in AXES.items() if axis.batch == "positions")


def _axes_in(spec: Iterable[Any]) -> set[str]:
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return {axis for entry in entries for axis in entry}
