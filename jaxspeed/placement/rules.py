"""Logical axis rules: the mesh axes that shard a leaf, from the logical names of its dims."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from jaxspeed.axes import AXES, EXPERT, PIPE, TENSOR, sharding_axes
from jaxspeed.config import match
from jaxspeed.errors import ConfigError, PlacementError
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import Leaf

# Logical dim -> mesh axis. A name that is not here (embed, head_dim, pos, ...) is replicated.
LOGICAL_RULES: Mapping[str, str] = sharding_axes()

# Usual names of mesh axes, by which models annotate their own parameters.
TENSOR_NAMES = ("tp", "mp", "model")
DATA_NAMES = ("fsdp", "dp", "data", "zero")

# Dims sharded over pipe and their own axis: all stages share the embedding and the head.
SHARED_BY_STAGES = AXES[PIPE].shares

# Dims that their axes do not divide. The rows of a vocabulary are padded, and layers with ones that
# do nothing; key and value heads are few, and replicated. Any other dim is refused.
PADDED = ("vocab", "block_vocab", "stages")
REPLICATED = ("kv_heads",)

(EXPERTS,) = AXES[EXPERT].dims


class Misfit(NamedTuple):
    """A dim that must be sharded and that its axis does not divide."""

    axis: str
    name: str
    size: int


class ModelSharding(NamedTuple):
    """Sharding of a leaf over the model axes."""

    spec: PartitionSpec
    stored_shape: tuple[int, ...]  # padded where the axis does not divide a dim that may be
    note: str  # dims replicated although they have a name
    misfits: tuple[Misfit, ...]


def model_sharding(
    shape: Sequence[int], names: Sequence[str | None], axis_sizes: Mapping[str, int]
) -> ModelSharding:
    """Shard a leaf by its logical names: each axis once, on the first dim that it divides.

    Where it divides none, on the first one that may be padded.
    """
    entries: list[Any] = [None] * len(shape)
    stored = list(shape)
    notes: list[str] = []
    misfits: list[Misfit] = []
    of_axis: dict[str, list[int]] = {}
    for dim, name in enumerate(names[: len(shape)]):
        axis = LOGICAL_RULES.get(name or "")
        if name == EXPERTS and dim == len(shape) - 1:
            continue  # a router's outputs: every device routes its own tokens
        if axis and axis_sizes[axis] > 1:
            of_axis.setdefault(axis, []).append(dim)
        elif name in SHARED_BY_STAGES and axis_sizes[PIPE] > 1:
            of_axis.setdefault(PIPE, []).append(dim)
    for axis, dims in of_axis.items():
        parts = axis_sizes[axis]
        fitting = [d for d in dims if shape[d] % parts == 0]
        fitting = fitting or [d for d in dims if names[d] in PADDED]
        bad = [d for d in dims if names[d] not in REPLICATED]
        if fitting:
            dim = fitting[0]
            axes: tuple[str, ...] = (axis,)
            if names[dim] in SHARED_BY_STAGES and axis != PIPE and axis_sizes[PIPE] > 1:
                axes, parts = (PIPE, axis), parts * axis_sizes[PIPE]
            entries[dim] = axes if len(axes) > 1 else axis
            stored[dim] = -(-shape[dim] // parts) * parts
        elif bad:
            misfits += [Misfit(axis, names[d] or "", shape[d]) for d in bad]
        else:
            notes += [f"replicated: {shape[d]} {names[d]} over {axis} {parts}" for d in dims]
    return ModelSharding(PartitionSpec(*entries), tuple(stored), ", ".join(notes), tuple(misfits))


def refuse_misfits(leaves: Sequence[Leaf], axis_sizes: Mapping[str, int]) -> None:
    """Raise PlacementError that lists every dim that its axis must divide and does not."""
    misfits: dict[Misfit, list[str]] = {}
    for leaf in leaves:
        for misfit in model_sharding(leaf.shape, leaf.names, axis_sizes).misfits:
            misfits.setdefault(misfit, []).append(leaf.path)
    if not misfits:
        return
    lines = [
        f"{_dim_text(m)} cannot be sharded over {m.axis}={axis_sizes[m.axis]}: {_like_paths(paths)}"
        for m, paths in misfits.items()
    ]
    for axis in dict.fromkeys(misfit.axis for misfit in misfits):
        lines.append(_advice(axis, axis_sizes[axis], _degrees(leaves, axis, axis_sizes)))
    raise PlacementError("mesh: " + "\n".join(lines))


def _dim_text(misfit: Misfit) -> str:
    """`12 heads`, or `a dim of 12` where a layer spec or inference names the axis itself."""
    is_axis = misfit.name == misfit.axis
    return f"a dim of {misfit.size}" if is_axis else f"{misfit.size} {misfit.name}"


def _degrees(leaves: Sequence[Leaf], axis: str, axis_sizes: Mapping[str, int]) -> list[int]:
    """Sizes of an axis that fit every leaf."""
    named = [leaf for leaf in leaves if any(LOGICAL_RULES.get(n or "") == axis for n in leaf.names)]
    alike = {(leaf.shape, leaf.names): leaf for leaf in named}.values()
    sizes = {n for leaf in alike for n in leaf.shape}
    candidates = {d for n in sizes for d in range(1, math.isqrt(n) + 1) if n % d == 0}
    candidates |= {n // d for n in sizes for d in candidates if n % d == 0}
    return [
        size
        for size in sorted(candidates)
        if not any(
            model_sharding(x.shape, x.names, {**axis_sizes, axis: size}).misfits for x in alike
        )
    ]


def _advice(axis: str, size: int, works: Sequence[int]) -> str:
    below = [n for n in works if n < size][-1:]
    above = [n for n in works if n > size][:1]
    nearest = " and ".join(map(str, below + above))
    return (
        f"sizes of {axis} that work for this model: {', '.join(map(str, works))}; "
        f"nearest to {size}: {nearest}"
    )


def _like_paths(paths: Sequence[str], most: int = 4) -> str:
    """Paths, with those of equal layers merged: blocks/*/mlp/up/kernel."""
    alike = dict.fromkeys(re.sub(r"(?<=/)\d+(?=/)|^\d+(?=/)", "*", path) for path in paths)
    return listed(list(alike), most)


# -- logical names from the config, by path pattern ------------------------------------------------

EXAMPLES = 6
REST = "..."  # in parallel.logical_axes: any number of dims without a name


def with_names(
    leaves: Sequence[Leaf], patterns: Mapping[str, Sequence[str | None]]
) -> tuple[Leaf, ...]:
    """Name the dims of each unnamed leaf by the first pattern that covers it.

    A leaf whose only name is that of its stacked dim counts as unnamed.
    """
    check_patterns("parallel.logical_axes", patterns, [leaf.path for leaf in leaves])
    return tuple(_named(leaf, patterns) for leaf in leaves)


def with_own_axis_names(
    leaves: Sequence[Leaf], mapping: Mapping[str, str | None]
) -> tuple[Leaf, ...]:
    """Leaves whose dims a model annotates with its own mesh axes, with `tensor` where it means it.

    Usual names are known, except in a model with logical names, where `model` may be a dim.
    """
    logical = any(name in LOGICAL_RULES for leaf in leaves for name in leaf.names)
    known = {**({} if logical else dict.fromkeys(TENSOR_NAMES, TENSOR)), **mapping}

    def of_leaf(leaf: Leaf) -> Leaf:
        names = tuple(TENSOR if known.get(n or "") == TENSOR else n for n in leaf.names)
        return leaf if names == leaf.names else replace(leaf, names=names)

    return tuple(map(of_leaf, leaves))


def check_patterns(key: str, patterns: Iterable[str], paths: Sequence[str]) -> None:
    """Raise ConfigError when a pattern covers no parameter: it would silently do nothing."""
    for pattern in patterns:
        if not any(match(pattern, path) for path in paths):
            raise ConfigError(
                f"{key}: {pattern!r} covers no parameter of this model; it has, for example: "
                + examples(nearest(pattern, paths))
            )


def examples(paths: Sequence[str]) -> str:
    """A few of the paths."""
    return ", ".join(paths[:EXAMPLES])


def nearest(wanted: str, paths: Sequence[str]) -> list[str]:
    """The paths most like a path or pattern, or the first ones."""
    return difflib.get_close_matches(wanted, paths, n=EXAMPLES, cutoff=0.4) or list(paths)


def _named(leaf: Leaf, patterns: Mapping[str, Sequence[str | None]]) -> Leaf:
    if any(leaf.names[leaf.stacked :]):
        return leaf
    pattern = next((p for p in patterns if match(p, leaf.path)), None)
    if pattern is None:
        return leaf
    names = tuple(patterns[pattern])
    if names.count(REST) == 1 and len(names) <= len(leaf.shape) + 1:
        at, missing = names.index(REST), len(leaf.shape) + 1 - len(names)
        names = (*names[:at], *[None] * missing, *names[at + 1 :])
    if len(names) != len(leaf.shape) or REST in names:
        raise ConfigError(
            f"parallel.logical_axes: {pattern!r} gives {len(names)} names to {leaf.path}, which "
            f'has {len(leaf.shape)} dims {leaf.shape}; one "{REST}" stands for any number of dims '
            "without a name"
        )
    return replace(leaf, names=(*leaf.names[: leaf.stacked], *names[leaf.stacked :]))
