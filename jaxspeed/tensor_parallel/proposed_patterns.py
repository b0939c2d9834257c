"""Path patterns (layer specs) for the user's config that shard exactly the proposed parameters.

A pattern covers a module if one type fits all its parameters, and every layer of a list if they are
sharded alike. `named_by_specs`, which reads the config, interprets each candidate, so that the
patterns give exactly the proposed sharding.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxspeed.axes import TENSOR
from jaxspeed.config import TensorLayerSpec, match
from jaxspeed.errors import ConfigError
from jaxspeed.placement.apply_layer_specs import Use, named_by_specs
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.rules import LOGICAL_RULES

SpecType = Literal["column", "row", "vocabulary", "replicated"]
_NUMBERED = re.compile(r"^(.*_)?\d+$")  # `3` of a list, `Dense_3` of Linen


@dataclass(frozen=True)
class ShardedDim:
    """The dim of a parameter that is sharded over the tensor axis."""

    dim: int
    vocabulary: bool = False  # a vocabulary, which may be padded


ShardedDims = Mapping[str, ShardedDim]


def as_layer_specs(
    leaves: Sequence[Leaf], sharded: ShardedDims, uses: Mapping[str, Use]
) -> dict[str, str | dict[str, Any]]:
    """`tensor_parallel.partition_config.layer_specs` that shard exactly these parameters."""
    bare = [replace(leaf, names=_without_tensor(leaf)) for leaf in leaves]
    left = [leaf.path for leaf in bare if leaf.path in sharded]
    specs: list[TensorLayerSpec] = []
    while left:
        spec = _spec_for(left[0], bare, sharded, uses)
        specs.append(spec)
        left = [path for path in left if not match(spec.pattern, path)]
    specs.sort(key=lambda spec: "/" not in spec.pattern)  # patterns that match anywhere come last
    return {
        s.pattern: s.type if s.dim is None else {"type": s.type, "dim": s.dim}
        for s in _excepting(specs, bare, sharded, uses)
    }


def _module(path: str) -> str:
    return path.rpartition("/")[0]


def _without_tensor(leaf: Leaf) -> tuple[str | None, ...]:
    return tuple(None if LOGICAL_RULES.get(n or "") == TENSOR else n for n in leaf.names)


def _given_by(
    leaves: Sequence[Leaf], specs: Sequence[TensorLayerSpec], uses: Mapping[str, Use]
) -> dict[str, ShardedDim] | None:
    """The sharding that these specs give; None if they are refused."""
    try:
        named = named_by_specs(leaves, specs, uses)
    except ConfigError:
        return None
    return {
        leaf.path: ShardedDim(dim, name == "vocab")
        for leaf in named
        for dim, name in enumerate(leaf.names)
        if LOGICAL_RULES.get(name or "") == TENSOR
    }


def _spec_for(
    path: str, leaves: Sequence[Leaf], sharded: ShardedDims, uses: Mapping[str, Use]
) -> TensorLayerSpec:
    """The widest pattern, with its type, that is right for all parameters that it covers."""
    for pattern in _patterns(path, [leaf.path for leaf in leaves]):
        covered = {leaf.path for leaf in leaves if match(pattern, leaf.path)}
        modules = {_module(path) for path in covered}  # a bias is interpreted with its kernel
        around = [leaf for leaf in leaves if _module(leaf.path) in modules]
        wanted = {path: sharded[path] for path in covered if path in sharded}
        for spec in _specs(pattern, wanted, uses):
            if _given_by(around, [spec], uses) == wanted:
                return spec
    return TensorLayerSpec(path, _type_of(path, sharded[path], uses), sharded[path].dim)


def _patterns(path: str, paths: Sequence[str]) -> Iterator[str]:
    """Patterns of the module, then of the parameter, from the widest to the narrowest.

    Layer numbers become wildcards from the left; of patterns that cover the same, the one with
    fewest wildcards counts.
    """
    *module, _ = path.split("/")
    for segments in filter(None, (module, path.split("/"))):
        numbered = [i for i, segment in enumerate(segments) if _NUMBERED.match(segment)]
        by_reach: dict[tuple[str, ...], str] = {}
        for count in range(len(numbered), -1, -1):
            wildcards = numbered[:count]
            pattern = "/".join(
                _wildcard(s) if i in wildcards else s for i, s in enumerate(segments)
            )
            by_reach[tuple(p for p in paths if match(pattern, p))] = pattern
        yield from by_reach.values()


def _wildcard(segment: str) -> str:
    return re.sub(r"\d+$", "*", segment)


def _specs(pattern: str, wanted: ShardedDims, uses: Mapping[str, Use]) -> Iterator[TensorLayerSpec]:
    """Specs of a pattern that might be right, those without a dim first."""
    types = {at.dim: _type_of(path, at, uses) for path, at in wanted.items()}
    yield from (TensorLayerSpec(pattern, type_) for type_ in dict.fromkeys(types.values()))
    yield from (TensorLayerSpec(pattern, types[dim], dim) for dim in sorted(types))


def _type_of(path: str, at: ShardedDim, uses: Mapping[str, Use]) -> SpecType:
    if at.vocabulary:
        return "vocabulary"
    return "row" if path in uses and at.dim in uses[path].contracted else "column"


def _excepting(
    specs: Sequence[TensorLayerSpec],
    leaves: Sequence[Leaf],
    sharded: ShardedDims,
    uses: Mapping[str, Use],
) -> Sequence[TensorLayerSpec]:
    """The specs, preceded by exceptions for parameters that a pattern covers wrongly."""
    covered = _given_by(leaves, specs, uses) or {}
    for leaf in leaves:
        at = sharded.get(leaf.path)
        if covered.get(leaf.path) != at:
            type_: SpecType = "replicated" if at is None else _type_of(leaf.path, at, uses)
            specs = [TensorLayerSpec(leaf.path, type_, at.dim if at else None), *specs]
    return specs


def by_layer_pattern(paths: Sequence[str]) -> dict[str, list[str]]:
    """Paths grouped by their pattern without layer numbers: `blocks/*/mlp/up/kernel`."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        shown = "/".join(_wildcard(s) if _NUMBERED.match(s) else s for s in path.split("/"))
        groups.setdefault(shown, []).append(path)
    return groups
