"""Shardings of single parameters as path patterns for the user's config.

A pattern speaks of a whole module where one word is true of all its parameters, and of every layer
of a list alike. What a word means is asked of `named_by_specs`, which reads the config, so that the
patterns say there exactly what was meant here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxspeed.config import TensorLayerSpec, match
from jaxspeed.errors import ConfigError
from jaxspeed.placement.apply_layer_specs import Use, named_by_specs
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.rules import LOGICAL_RULES

Word = Literal["column", "row", "vocabulary", "replicated"]
_NUMBERED = re.compile(r"^(.*_)?\d+$")  # `3` of a list, `Dense_3` of Linen


@dataclass(frozen=True)
class ShardedDim:
    """The dim of a parameter that the tensor axis cuts."""

    dim: int
    vocabulary: bool = False  # it may be padded: a vocabulary


Wanted = Mapping[str, ShardedDim]


def as_layer_specs(
    leaves: Sequence[Leaf], cuts: Wanted, uses: Mapping[str, Use]
) -> dict[str, str | dict[str, Any]]:
    """`tensor_parallel.partition_config.layer_specs` that cuts exactly these parameters."""
    bare = [replace(leaf, names=_without_tensor(leaf)) for leaf in leaves]
    left = [leaf.path for leaf in bare if leaf.path in cuts]
    specs: list[TensorLayerSpec] = []
    while left:
        spec = _spec_for(left[0], bare, cuts, uses)
        specs.append(spec)
        left = [path for path in left if not match(spec.pattern, path)]
    specs.sort(key=lambda spec: "/" not in spec.pattern)  # those that may match anywhere come last
    return {
        s.pattern: s.type if s.dim is None else {"type": s.type, "dim": s.dim}
        for s in _excepting(specs, bare, cuts, uses)
    }


def _module(path: str) -> str:
    return path.rpartition("/")[0]


def _without_tensor(leaf: Leaf) -> tuple[str | None, ...]:
    return tuple(None if LOGICAL_RULES.get(n or "") == "tensor" else n for n in leaf.names)


def _meant(
    leaves: Sequence[Leaf], specs: Sequence[TensorLayerSpec], uses: Mapping[str, Use]
) -> dict[str, ShardedDim] | None:
    """What these specs cut; None where they do not tell."""
    try:
        named = named_by_specs(leaves, specs, uses)
    except ConfigError:
        return None
    return {
        leaf.path: ShardedDim(dim, name == "vocab")
        for leaf in named
        for dim, name in enumerate(leaf.names)
        if LOGICAL_RULES.get(name or "") == "tensor"
    }


def _spec_for(
    path: str, leaves: Sequence[Leaf], cuts: Wanted, uses: Mapping[str, Use]
) -> TensorLayerSpec:
    """The widest pattern, and its word, that is true of all that it covers."""
    for pattern in _patterns(path, [leaf.path for leaf in leaves]):
        covered = {leaf.path for leaf in leaves if match(pattern, leaf.path)}
        modules = {_module(path) for path in covered}  # a bias is seen with its kernel
        around = [leaf for leaf in leaves if _module(leaf.path) in modules]
        wanted = {path: cuts[path] for path in covered if path in cuts}
        for spec in _words(pattern, wanted, uses):
            if _meant(around, [spec], uses) == wanted:
                return spec
    return TensorLayerSpec(path, _word_of(path, cuts[path], uses), cuts[path].dim)


def _patterns(path: str, paths: Sequence[str]) -> Iterator[str]:
    """The module's, then the parameter's own; each with as many numbers left open as tell more."""
    *module, _ = path.split("/")
    for segments in filter(None, (module, path.split("/"))):
        numbered = [i for i, segment in enumerate(segments) if _NUMBERED.match(segment)]
        by_reach: dict[tuple[str, ...], str] = {}
        for count in range(len(numbered), -1, -1):
            opened = numbered[:count]
            pattern = "/".join(_open(s) if i in opened else s for i, s in enumerate(segments))
            by_reach[tuple(p for p in paths if match(pattern, p))] = pattern
        yield from by_reach.values()


def _open(segment: str) -> str:
    return re.sub(r"\d+$", "*", segment)


def _words(pattern: str, wanted: Wanted, uses: Mapping[str, Use]) -> Iterator[TensorLayerSpec]:
    """What may be said of a pattern, the plainest first."""
    said = {cut.dim: _word_of(path, cut, uses) for path, cut in wanted.items()}
    yield from (TensorLayerSpec(pattern, word) for word in dict.fromkeys(said.values()))
    yield from (TensorLayerSpec(pattern, said[dim], dim) for dim in sorted(said))


def _word_of(path: str, cut: ShardedDim, uses: Mapping[str, Use]) -> Word:
    if cut.vocabulary:
        return "vocabulary"
    return "row" if path in uses and cut.dim in uses[path].contracted else "column"


def _excepting(
    specs: Sequence[TensorLayerSpec], leaves: Sequence[Leaf], cuts: Wanted, uses: Mapping[str, Use]
) -> Sequence[TensorLayerSpec]:
    """The specs, with exceptions before them for what a pattern covers and does not mean."""
    meant = _meant(leaves, specs, uses) or {}
    for leaf in leaves:
        cut = cuts.get(leaf.path)
        if meant.get(leaf.path) != cut:
            word: Word = "replicated" if cut is None else _word_of(leaf.path, cut, uses)
            specs = [TensorLayerSpec(leaf.path, word, cut.dim if cut else None), *specs]
    return specs


def alike(paths: Sequence[str]) -> dict[str, list[str]]:
    """Paths by what they are but for the number of their layer: `blocks/*/mlp/up/kernel`."""
    found: dict[str, list[str]] = {}
    for path in paths:
        shown = "/".join(_open(s) if _NUMBERED.match(s) else s for s in path.split("/"))
        found.setdefault(shown, []).append(path)
    return found
