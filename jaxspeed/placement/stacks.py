"""Which parameters are a model's repeated blocks: what the pipe axis cuts.

They are stacked already, with a first dim named `layers`, or they are the like members of a list:
`blocks/0/mlp/up/kernel`, `blocks/1/mlp/up/kernel`, ...

The stages hold a stack as it is stored where it is stacked and each stage has neighbouring layers:
its first dim is cut. Any other is stored cut over pipe on another dim of each parameter.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from jaxspeed.errors import PlacementError
from jaxspeed.placement.rows import Leaf

STAGES = "stages"  # the name of a first dim that stacks layers and that the pipe axis cuts
_NUMBER = re.compile(r"^(.*?)(\d+)$")  # of a path's component: 3, Block_3


@dataclass(frozen=True)
class Stack:
    """The repeated blocks: for each parameter of a block a path that is stacked, or one a layer."""

    layers: int
    leaves: Mapping[str, tuple[str, ...]]
    chunks: int = 1  # runs of neighbouring layers that a stage has

    @property
    def stacked(self) -> bool:
        """Whether the model itself stacks them."""
        return all(len(paths) == 1 for paths in self.leaves.values())

    @property
    def in_place(self) -> bool:
        """Whether the stages hold it as it is stored, its first dim cut."""
        return self.stacked and self.chunks == 1

    @cached_property
    def paths(self) -> frozenset[str]:
        return frozenset(path for paths in self.leaves.values() for path in paths)


def find_stack(
    leaves: Sequence[Leaf],
    patterns: Sequence[str] = (),
    match: Callable[[str, str], bool] | None = None,
) -> Stack | None:
    """The largest stack of a model's parameters, by bytes; None where nothing repeats.

    `patterns` are the config's units: of lists only those whose members one of them covers.
    """
    found = [*_stacked(leaves), *_listed(leaves, patterns, match)]
    sizes = {leaf.path: math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves}
    return max(found, key=lambda s: sum(sizes[p] for p in s.paths), default=None)


def with_stages(leaves: Sequence[Leaf], stack: Stack) -> tuple[Leaf, ...]:
    """The leaves, with the dims of the stack named as its stages cut them.

    The layers where they lie in place; and a vocabulary of each block is not for all stages.
    """

    def named(leaf: Leaf) -> Leaf:
        names = tuple("block_vocab" if name == "vocab" else name for name in leaf.names)
        return replace(leaf, names=(STAGES, *names[1:]) if stack.in_place else names)

    return tuple(named(leaf) if leaf.path in stack.paths else leaf for leaf in leaves)


def refuse_stages(stack: Stack | None, stages: int, chunks: int) -> None:
    """PlacementError where a model has no stack, or fewer layers than stages have chunks."""
    if stack is None:
        raise PlacementError(
            f"mesh.pipe: {stages} stages share a model's repeated blocks, and none were found. "
            'What is needed: blocks stacked along a first dim with the logical name "layers" '
            "(parallel.logical_axes gives names), a list of two or more blocks with equal "
            "parameters, parallel.units patterns that name the members of such a list, or a "
            "jaxspeed.PipelineModule. Blocks of unlike shapes cannot be stages of one program"
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
        f"mesh.pipe: {what} need {stages * chunks} layers, and the blocks of this model "
        f"({next(iter(stack.leaves))}, ...) are {layers}. "
        + (f"What works: {', or '.join(works)}" if works else f"With {layers} there is no pipeline")
    )


def _stacked(leaves: Sequence[Leaf]) -> list[Stack]:
    """One stack for each highest module all of whose parameters are stacked alike."""
    below: dict[str, set[int]] = defaultdict(set)
    for leaf in leaves:
        layers = leaf.shape[0] if leaf.stacked else 0
        for prefix in _prefixes(leaf.path):
            below[prefix].add(layers)
    groups: dict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        if leaf.stacked:
            alike = (p for p in _prefixes(leaf.path) if len(below[p]) == 1)
            groups[next(alike, leaf.path)].append(leaf)
    return [
        Stack(group[0].shape[0], {leaf.path: (leaf.path,) for leaf in group})
        for group in groups.values()
    ]


def _prefixes(path: str) -> list[str]:
    """The modules around a parameter, outermost first."""
    parts = path.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def _listed(
    leaves: Sequence[Leaf], patterns: Sequence[str], match: Callable[[str, str], bool] | None
) -> list[Stack]:
    """The lists whose members have parameters of equal names, shapes and dtypes."""
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
        (inner, leaf.shape, str(leaf.dtype), leaf.names, leaf.trainable, leaf.full_precision)
        for inner, leaf in block.items()
    )


def _longest_run(kinds: Sequence[Any]) -> tuple[int, int]:
    """(where it starts, how long it is) of the longest run of equal members."""
    best = start = 0
    length = 0
    for i in range(len(kinds) + 1):
        if i == len(kinds) or kinds[i] != kinds[start]:
            if i - start > length:
                best, length = start, i - start
            start = i
    return best, length
