"""Find a model's repeated blocks, which pipeline stages partition over `pipe`.

They are stacked already, with a first dim named `layers`, or they are equal members of a list:
`blocks/0/mlp/up/kernel`, `blocks/1/mlp/up/kernel`, ...

A stack whose stages each have neighbouring layers is stored as the stages use it: its first dim is
sharded over pipe. Any other stack is stored with another dim of each parameter sharded over pipe.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from jaxspeed.errors import PlacementError
from jaxspeed.placement.rows import Leaf

STAGES = "stages"  # logical name of a first dim that stacks layers and is sharded over pipe
_NUMBER = re.compile(r"^(.*?)(\d+)$")  # of a path's component: 3, Block_3


@dataclass(frozen=True)
class Stack:
    """The repeated blocks: for each parameter of a block one stacked path, or a path per layer."""

    layers: int
    leaves: Mapping[str, tuple[str, ...]]
    chunks: int = 1  # runs of neighbouring layers per stage
    dims: Mapping[str, int] = field(default_factory=dict)  # by path: the layers' dim, if not 0
    divided: bool = False  # whether a stacked path may be several, of ranges of its layers

    def __str__(self) -> str:
        return f"{next(iter(self.leaves))}, ... ({self.layers} blocks)"

    def layers_dim(self, path: str) -> int | None:
        """The dim of a parameter that stacks the blocks; None in a list."""
        return self.dims.get(path, 0) if self.stacked else None

    @property
    def stacked(self) -> bool:
        """Whether the model itself stacks its blocks."""
        return self.divided or all(len(paths) == 1 for paths in self.leaves.values())

    @property
    def in_place(self) -> bool:
        """Whether stages use it as it is stored, with its first dim sharded over pipe."""
        moved = self.divided or any(self.dims.values())
        return self.stacked and self.chunks == 1 and not moved

    def cannot_be_encoded(self, path: str) -> bool:
        """Whether stages exchange a parameter only as a plain array."""
        return isinstance(self, UnlikeStages) or bool(self.dims.get(path))

    @cached_property
    def paths(self) -> frozenset[str]:
        return frozenset(path for paths in self.leaves.values() for path in paths)


@dataclass(frozen=True)
class UnlikeStages(Stack):
    """Unlike blocks: one layer per stage, and the stage of each parameter that one stage reads."""

    stage_of: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.layers} unlike stages"

    @property
    def stacked(self) -> bool:
        return False


def find_stack(
    leaves: Sequence[Leaf],
    patterns: Sequence[str] = (),
    match: Callable[[str, str], bool] | None = None,
) -> Stack | None:
    """Find the largest stack of a model's parameters, by bytes; None where nothing repeats.

    `patterns` are the config's units: with them, only lists whose members one of them covers.
    """
    return next(iter(find_stacks(leaves, patterns, match)), None)


def find_stacks(
    leaves: Sequence[Leaf],
    patterns: Sequence[str] = (),
    match: Callable[[str, str], bool] | None = None,
) -> list[Stack]:
    """Find every stack that the names of a model's parameters suggest, the largest first.

    An encoder of images has none: it runs with the embedding.
    """
    leaves = [leaf for leaf in leaves if not leaf.of_images]
    stacked = [
        Stack(group[0].shape[0], {leaf.path: (leaf.path,) for leaf in group})
        for group in stacked_modules(leaves).values()
    ]
    return largest_first([*stacked, *_listed(leaves, patterns, match)], leaves)


def largest_first(stacks: Sequence[Stack], leaves: Sequence[Leaf]) -> list[Stack]:
    """Sort stacks by their bytes."""
    return sorted(stacks, key=lambda s: -stack_bytes(s, leaves))


def divided_like(stack: Stack, leaves: Sequence[Leaf]) -> Stack:
    """The stack with the ranges of layers that are leaves of their own in place of parameters.

    Raises:
      PlacementError: the stages are unlike.
    """
    ranges: dict[str, list[str]] = defaultdict(list)
    for leaf in leaves:
        if leaf.range and leaf.parameter in stack.paths:
            ranges[leaf.parameter].append(leaf.path)
    if not ranges:
        return stack
    if isinstance(stack, UnlikeStages):
        raise PlacementError(
            f"mesh.pipe: unlike blocks are stages, and layers of {next(iter(ranges))} are trained "
            "in part; train all or none of them, or use mesh.pipe 1"
        )
    divided = {name: tuple(ranges.get(name, (name,))) for name in stack.leaves}
    return replace(stack, leaves=divided, divided=True)


def with_adapters_of(stack: Stack, leaves: Sequence[Leaf]) -> Stack:
    """The stack with the leaves of adapters of its parameters.

    Raises:
      PlacementError: of equal blocks some have an adapter that others have not.
    """
    of: dict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        if leaf.adapts in stack.paths:
            of[str(leaf.adapts)].append(leaf)
    with_adapters = dict(stack.leaves)
    for name, paths in stack.leaves.items():
        kinds = {tuple((x.path.rpartition("/")[2], x.shape) for x in of[path]) for path in paths}
        if len(kinds) > 1:
            raise PlacementError(
                f"mesh.pipe: the blocks of a pipeline are equal, and the adapters of {name} are "
                "not: adapt all layers with one rank, or use mesh.pipe 1"
            )
        for kind, _ in next(iter(kinds)):
            with_adapters[f"lora/{name}/{kind}"] = tuple(f"lora/{path}/{kind}" for path in paths)
    if isinstance(stack, UnlikeStages):
        adapter_stages = {
            x.path: stack.stage_of[path]
            for path, adapter_leaves in of.items()
            for x in adapter_leaves
        }
        return replace(stack, leaves=with_adapters, stage_of={**stack.stage_of, **adapter_stages})
    return replace(stack, leaves=with_adapters)


def stack_bytes(stack: Stack, leaves: Sequence[Leaf]) -> int:
    """The bytes of a stack's parameters."""
    members = [leaf for leaf in leaves if leaf.path in stack.paths]
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in members)


def with_stages(leaves: Sequence[Leaf], stack: Stack) -> tuple[Leaf, ...]:
    """Name the dims of the stack's leaves as its stages shard them.

    The layers dim, where the stack is in place; and the vocabulary of a block, which stages do not
    share.
    """

    def named(leaf: Leaf) -> Leaf:
        names = tuple("block_vocab" if name == "vocab" else name for name in leaf.names)
        return replace(leaf, names=(STAGES, *names[1:]) if stack.in_place else names)

    return tuple(named(leaf) if leaf.path in stack.paths else leaf for leaf in leaves)


def refuse_stages(stack: Stack | None, stages: int, chunks: int) -> None:
    """Raise PlacementError where a model has no stack, or fewer layers than stages need."""
    if stack is None:
        raise PlacementError(
            f"mesh.pipe: {stages} stages partition a model's repeated blocks, and none were found. "
            'Needed: blocks stacked along a first dim with the logical name "layers" '
            "(parallel.logical_axes gives names), or along any dim with initialize(..., "
            "example_batch=...), by which the scan over them is found in the traced loss; a list "
            "of two or more blocks with equal parameters; parallel.units patterns that name the "
            "members of such a list; or a jaxspeed.PipelineModule. Unlike blocks become stages "
            "with initialize(..., example_batch=...), by which the traced loss is divided"
        )
    layers = stack.layers
    if stages * chunks <= layers:
        return
    what = f"{stages} stages" if chunks == 1 else f"{stages} stages with {chunks} chunks each"
    works = [f"mesh.pipe up to {layers // chunks}"] if layers >= 2 * chunks else []
    if chunks > 1 and layers >= 2 * stages:
        works.append(f"parallel.pipeline_chunks up to {layers // stages}")
    if chunks > 1 and layers >= stages:
        works.append("a parallel.pipeline_schedule without chunks")
    raise PlacementError(
        f"mesh.pipe: {what} need {stages * chunks} layers, and this model has {layers} blocks "
        f"({next(iter(stack.leaves))}, ...). "
        + (f"Would work: {', or '.join(works)}" if works else f"{layers} cannot form a pipeline")
    )


def stacked_modules(leaves: Sequence[Leaf]) -> dict[str, list[Leaf]]:
    """The highest modules all of whose parameters stack equally many layers, by path.

    A stacked parameter of no such module stands alone. Adapters are grouped as their weights.
    """
    below: dict[str, set[int]] = defaultdict(set)
    for leaf in leaves:
        layers = leaf.shape[0] if leaf.stacked else 0
        for prefix in () if leaf.adapts else _prefixes(leaf.path):
            below[prefix].add(layers)
    groups: dict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        if leaf.stacked:
            path = leaf.adapts or leaf.path
            alike = (p for p in _prefixes(path) if len(below[p]) == 1)
            group = next(alike, path)
            groups[f"lora/{group}" if leaf.adapts else group].append(leaf)
    return groups


def _prefixes(path: str) -> list[str]:
    """Paths of the modules around a parameter, outermost first."""
    parts = path.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def _listed(
    leaves: Sequence[Leaf], patterns: Sequence[str], match: Callable[[str, str], bool] | None
) -> list[Stack]:
    """Find the lists whose members have parameters of equal names, shapes and dtypes."""
    members: dict[str, dict[int, dict[str, Leaf]]] = defaultdict(lambda: defaultdict(dict))
    for leaf in leaves:
        parts = leaf.path.split("/")
        for i, part in enumerate(parts):
            numbered = _NUMBER.match(part)
            # An array may be the member of a list itself; w1 and w2 are no list.
            if numbered is None or (i == len(parts) - 1 and not part.isdigit()):
                continue
            member = "/".join(parts[: i + 1])
            if patterns and not any(match and match(p, member) for p in patterns):
                continue
            of_list = "/".join([*parts[:i], numbered[1]])
            members[of_list][int(numbered[2])]["/".join(parts[i + 1 :])] = leaf
    stacks = []
    for of_list, blocks in members.items():
        numbers = sorted(blocks)
        kinds = [_kind(blocks[n]) for n in numbers]
        start, length = _longest_run(kinds)
        if length < 2:
            continue
        run = [blocks[n] for n in numbers[start : start + length]]
        names = {inner: f"{of_list}*/{inner}".removesuffix("/") for inner in run[0]}
        leaves_of = {name: tuple(b[inner].path for b in run) for inner, name in names.items()}
        stacks.append(Stack(length, leaves_of))
    return stacks


def _kind(block: Mapping[str, Leaf]) -> Any:
    return sorted(
        (inner, leaf.shape, str(leaf.dtype), leaf.names, leaf.full_precision)
        for inner, leaf in block.items()
    )


def _longest_run(kinds: Sequence[Any]) -> tuple[int, int]:
    """(start, length) of the longest run of equal members."""
    best = start = 0
    length = 0
    for i in range(len(kinds) + 1):
        if i == len(kinds) or kinds[i] != kinds[start]:
            if i - start > length:
                best, length = start, i - start
            start = i
    return best, length
