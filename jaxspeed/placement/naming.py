"""Logical names for the dims of parameters whose model gives none: path patterns of the config."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxspeed.config import match
from jaxspeed.errors import ConfigError
from jaxspeed.placement.rows import Leaf

EXAMPLES = 6


def with_names(
    leaves: Sequence[Leaf], patterns: Mapping[str, Sequence[str | None]]
) -> tuple[Leaf, ...]:
    """The leaves, each with the names of the first pattern that covers it, if it has none yet.

    That it stacks layers is no name of its own: a stack may say that of dims without names.
    """
    check_patterns("parallel.logical_axes", patterns, [leaf.path for leaf in leaves])
    return tuple(_named(leaf, patterns) for leaf in leaves)


def check_patterns(key: str, patterns: Iterable[str], paths: Sequence[str]) -> None:
    """ConfigError when a pattern covers no parameter: it would do nothing, silently."""
    for pattern in patterns:
        if not any(match(pattern, path) for path in paths):
            raise ConfigError(
                f"{key}: {pattern!r} covers no parameter of this model; it has, for example: "
                + examples(paths)
            )


def examples(paths: Sequence[str]) -> str:
    """A few of the paths."""
    return ", ".join(paths[:EXAMPLES])


def _named(leaf: Leaf, patterns: Mapping[str, Sequence[str | None]]) -> Leaf:
    if any(leaf.names[leaf.stacked :]):
        return leaf
    pattern = next((p for p in patterns if match(p, leaf.path)), None)
    if pattern is None:
        return leaf
    names = tuple(patterns[pattern])
    if len(names) != len(leaf.shape):
        raise ConfigError(
            f"parallel.logical_axes: {pattern!r} gives {len(names)} names to {leaf.path}, which "
            f"has {len(leaf.shape)} dims {leaf.shape}"
        )
    return replace(leaf, names=(*leaf.names[: leaf.stacked], *names[leaf.stacked :]))
