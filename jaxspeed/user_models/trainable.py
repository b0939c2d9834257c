"""Which parameters are trained, and which layers of a stack.

`trainable` (path patterns, functions of the path, filters of nnx) selects them, and the optimizer's
groups that are frozen exclude them: `TrainRule` is the one rule that both reach. Patterns may name
layers, `blocks[20:32]/**`, of a list and of a stack alike: layer 3 of the stack `blocks/up/kernel`
has the path `blocks/3/up/kernel` too. Where the layers of a stack differ, each range of equal ones
becomes a leaf of its own, `blocks/up/kernel/[20:32]`.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flax import nnx
from flax.nnx import filterlib

from jaxspeed.config import Config
from jaxspeed.config.patterns import has_range, lengths_of, match
from jaxspeed.errors import ConfigError, ModelError
from jaxspeed.optim.groups import GroupLike
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import LayerRange, Leaf
from jaxspeed.placement.rules import examples, nearest
from jaxspeed.placement.stacks import stacked_modules

log = logging.getLogger("jaxspeed")
MOST_LAYERS = 10_000  # of a stack whose layers patterns may name: each is matched


@dataclass(frozen=True)
class Selection:
    """The `trainable` argument: `chosen(paths, leaf as the model has it)`, or one of the patterns.

    A Variable that a model has at several paths is trained if a pattern or a function chooses one
    of them. A filter of nnx gets the first, under which Flax lists it.
    """

    chosen: Callable[[Sequence[str], Any], bool]
    patterns: tuple[str, ...] = ()
    types: tuple[type, ...] = ()  # of Variables that the filter names
    by_leaf: bool = False  # whether it depends on more than the path
    every: bool = False  # whether nothing is selected, and all are trained


@dataclass(frozen=True)
class TrainRule:
    """Which parameters and layers are trained: those selected that no frozen group names.

    A parameter belongs to the first of the optimizer's groups that matches.

    Attributes:
      layers: of leaves by path, which of their layers are selected, whatever the selection is.
    """

    selection: Selection
    groups: Sequence[GroupLike] = ()
    layers: Mapping[str, Sequence[bool]] = field(default_factory=dict)

    def __call__(self, paths: Sequence[str], leaf: Any) -> bool:
        """Whether a function or a filter selects a parameter; `over` adds what patterns do."""
        return self.selection.chosen(paths, leaf)

    def adds(self, path: str, leaf: Any) -> bool:
        """Whether a Variable that is no Param is trained: the filter names its type."""
        kinds = self.selection.types
        return isinstance(leaf, kinds) and self.selection.chosen((path,), leaf)

    def over(self, leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
        """All leaves of a model, trained as `__call__` and the patterns say.

        Raises:
          ConfigError: what is selected is in a frozen group too.
        """
        leaves = tuple(leaves)
        named = NamedLeaves(leaves)
        selected = [self._selected(leaf, named) for leaf in leaves]
        frozen = [self._frozen(leaf, named) for leaf in leaves]
        both = [
            named.of_layer(leaf, layer)
            for leaf, *flags in zip(leaves, selected, frozen, strict=True)
            for layer, marks in enumerate(zip(*flags, strict=True))
            if all(marks) and not self.selection.every
        ]
        if both:
            raise ConfigError(
                f"trainable and a frozen group of optimizer.groups both name {listed(both)}; let "
                "one of them leave it out"
            )
        trained = (
            any(on and not off for on, off in zip(*flags, strict=True))
            for flags in zip(selected, frozen, strict=True)
        )
        return tuple(replace(leaf, trainable=on) for leaf, on in zip(leaves, trained, strict=True))

    def by_layers(self, named: "NamedLeaves") -> tuple[Leaf, ...]:
        """The leaves of `over`, with each stack divided where its layers differ."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        trained: dict[str, list[bool]] = {}
        for stack in named.stacks.values():
            for leaf in stack:
                flags = zip(self._selected(leaf, named), self._frozen(leaf, named), strict=True)
                trained[leaf.path] = [on and not off for on, off in flags]
            groups = [self._groups(leaf, named) for leaf in stack]
            kinds = list(zip(*(trained[leaf.path] for leaf in stack), *groups, strict=True))
            borders = [i for i, kind in enumerate(kinds) if i and kind != kinds[i - 1]]
            if borders:
                pairs = list(zip([0, *borders], [*borders, len(kinds)], strict=True))
                ranges |= {leaf.path: pairs for leaf in stack}

        def part(leaf: Leaf, start: int, stop: int) -> Leaf:
            suffix = f"/[{start}:{stop}]"
            return replace(
                leaf,
                path=leaf.path + suffix,
                shape=(stop - start, *leaf.shape[1:]),
                trainable=trained[leaf.path][start],
                shared=tuple(path + suffix for path in leaf.shared),
                range=LayerRange(leaf.path, start, stop, named.of_layer(leaf, start)),
            )

        return tuple(
            divided
            for leaf in named.leaves
            for divided in (
                [part(leaf, *ends) for ends in ranges[leaf.path]] if leaf.path in ranges else [leaf]
            )
        )

    def names_layers(self, leaves: Sequence[Leaf]) -> bool:
        """Whether a pattern may name layers of a stack that the leaves do not show."""
        named = NamedLeaves(leaves)
        patterns = [*self.selection.patterns, *(group.pattern for group in self.groups)]
        return not all(map(named.covers, patterns))

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Refuse or name patterns that cover no parameter.

        Raises:
          ModelError: none of those of `trainable` does.
          ConfigError: one of a group does not.
        """
        named, selection = NamedLeaves(leaves), self.selection
        for group in self.groups:
            if not named.covers(group.pattern):
                raise ConfigError(
                    f"optimizer.groups: {group.pattern!r} covers no parameter of this model; it "
                    f"has, for example: {examples(named.nearest(group.pattern))}"
                    + named.hint(group.pattern)
                )
            if not group.frozen and not named.trains(group.pattern):
                adapted = f"lora/{group.pattern}"
                log.warning(
                    "optimizer.groups: %r covers nothing that is trained, and does nothing%s",
                    group.pattern,
                    f"; its adapters are {adapted!r}" if named.trains(adapted) else "",
                )
        idle = [p for p in selection.patterns if not named.covers(p)]
        notes = [
            f"trainable: {pattern!r} covers no parameter of this model; nearest: "
            + listed(named.nearest(pattern))
            + named.hint(pattern)
            for pattern in idle
        ]
        if notes and len(idle) == len(selection.patterns) and not selection.by_leaf:
            raise ModelError("; ".join(notes))
        for note in notes:
            log.warning("%s", note)

    def _selected(self, leaf: Leaf, named: "NamedLeaves") -> list[bool]:
        """Whether each layer is selected; functions and filters have set the leaf's `trainable`."""
        if leaf.path in self.layers:
            return list(self.layers[leaf.path])
        patterns = self.selection.patterns
        chosen = [any(named.is_of(p, leaf, i) for p in patterns) for i in named.layers(leaf)]
        return chosen if any(chosen) else [leaf.trainable] * len(chosen)

    def _groups(self, leaf: Leaf, named: "NamedLeaves") -> list[int | None]:
        """The number of each layer's group."""
        numbers = range(len(self.groups))

        def group(layer: int) -> int | None:
            matching = (n for n in numbers if named.is_of(self.groups[n].pattern, leaf, layer))
            return next(matching, None)

        return [group(layer) for layer in named.layers(leaf)]

    def _frozen(self, leaf: Leaf, named: "NamedLeaves") -> list[bool]:
        groups = self._groups(leaf, named)
        return [number is not None and self.groups[number].frozen for number in groups]


def train_rule(config: Config, trainable: Any) -> TrainRule:
    """The rule of a config and of the argument `trainable`.

    Raises:
      ConfigError: both set `trainable`, to different values.
      ModelError: it is none of what it may be.
    """
    if config.lora is not None and trainable is not None:
        raise ConfigError(
            "lora: it decides what is trained, and initialize was given trainable=...; write "
            "lora.modules_to_save, and leave the argument out"
        )
    wanted = config.trainable if trainable is None else trainable
    if config.trainable is not None and wanted not in (config.trainable, [*config.trainable]):
        raise ConfigError(
            f"trainable: given twice, as {trainable!r} to initialize(trainable=...) and as "
            f"{config.trainable!r} in the config; leave one out"
        )
    return TrainRule(read_trainable(wanted), config.optimizer.groups if config.optimizer else ())


class NamedLeaves:
    """A model's leaves by the paths that patterns match: those of the layers of stacks too."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = leaves
        self.by_path = {leaf.path: leaf for leaf in leaves}
        stacks = stacked_modules(leaves).items()
        self.stacks = {p: stack for p, stack in stacks if stack[0].shape[0] <= MOST_LAYERS}
        self.prefixes = {
            leaf.path: prefix for prefix, stack in self.stacks.items() for leaf in stack
        }
        lengths = {prefix: stack[0].shape[0] for prefix, stack in self.stacks.items()}
        self.lengths = lengths_of(p for leaf in leaves for p in leaf.paths) | lengths

    def layers(self, leaf: Leaf) -> range:
        return range(leaf.shape[0] if leaf.path in self.prefixes else 1)

    def of_layer(self, leaf: Leaf, layer: int) -> str:
        """The path of a layer's part of a parameter, as if its stack were a list."""
        if leaf.path not in self.prefixes:
            return leaf.path
        prefix = self.prefixes[leaf.path]
        return f"{prefix}/{layer}{leaf.path[len(prefix) :]}"

    def is_of(self, pattern: str, leaf: Leaf, layer: int) -> bool:
        """Whether a pattern covers a leaf, or this layer of it."""
        paths = *leaf.paths, self.of_layer(leaf, layer)
        return any(match(pattern, path, self.lengths) for path in paths)

    def covers_row(self, pattern: str, row: Leaf) -> bool:
        """Whether a pattern covers a leaf, or the range of its layers that is a leaf of its own."""
        leaf = self.by_path[row.parameter]
        return self.is_of(pattern, leaf, row.range.start if row.range else 0)

    def covers(self, pattern: str) -> bool:
        return any(self.is_of(pattern, leaf, i) for leaf in self.leaves for i in self.layers(leaf))

    def trains(self, pattern: str) -> bool:
        """Whether a pattern covers a leaf that is trained."""
        trained = (leaf for leaf in self.leaves if leaf.trainable)
        return any(self.is_of(pattern, leaf, i) for leaf in trained for i in self.layers(leaf))

    def hint(self, pattern: str) -> str:
        """Why a range of layers may cover nothing."""
        if not has_range(pattern):
            return ""
        for path, length in self.lengths.items():
            if pattern.startswith(f"{path}["):
                return f". {path} has {length} layers"
        return (
            '. A stack of layers is known by the name "layers" of its first dim '
            "(parallel.logical_axes gives names), or by the scan over it, with "
            "initialize(..., example_batch=...)"
        )

    def nearest(self, pattern: str) -> list[str]:
        paths = [path for leaf in self.leaves for path in leaf.paths]
        if has_range(pattern):
            for path, prefix in self.prefixes.items():
                paths.append(f"{prefix}[0:{self.lengths[prefix]}]{path[len(prefix) :]}")
        return nearest(pattern, paths)


def read_trainable(wanted: Any) -> Selection:
    """Parse `trainable`; None and `...` are all parameters."""
    if wanted is None or wanted is ... or wanted is True:
        return Selection(lambda paths, leaf: True, every=True)
    if isinstance(wanted, str):
        return Selection(lambda paths, leaf: False, (wanted,))
    if isinstance(wanted, type):
        return _of_filter(filterlib.OfType(wanted))
    if callable(wanted):
        if _required(wanted) == 2:
            return _of_filter(wanted)
        return Selection(lambda paths, leaf: any(wanted(path) for path in paths))
    if isinstance(wanted, Sequence) and all(_is_one(part) for part in wanted):
        parts = [read_trainable(part) for part in wanted]
        return Selection(
            lambda paths, leaf: any(part.chosen(paths, leaf) for part in parts),
            tuple(pattern for part in parts for pattern in part.patterns),
            tuple(kind for part in parts for kind in part.types),
            any(part.by_leaf for part in parts),
        )
    raise ModelError(
        f"trainable is {wanted!r}; it may be path patterns, a function of the path, or a Variable "
        "type or another filter of nnx"
    )


ALL_TRAINED = TrainRule(read_trainable(None))


def _is_one(part: Any) -> bool:
    return isinstance(part, str) or callable(part)


def _of_filter(predicate: Callable[[Any, Any], bool]) -> Selection:
    """The selection by a filter of nnx, which gets the path as a tuple."""

    def chosen(paths: Sequence[str], leaf: Any) -> bool:
        keys = tuple(int(part) if part.isdigit() else part for part in paths[0].split("/"))
        return bool(predicate(keys, leaf))

    return Selection(chosen, types=tuple(_named_types(predicate)), by_leaf=True)


def _named_types(predicate: Any) -> list[type]:
    """Variable types that a filter names, other than Param and its bases."""
    if isinstance(predicate, filterlib.OfType):
        wide = not issubclass(predicate.type, nnx.Variable) or issubclass(nnx.Param, predicate.type)
        return [] if wide else [predicate.type]
    if isinstance(predicate, filterlib.Any | filterlib.All):
        return [kind for part in predicate.predicates for kind in _named_types(part)]
    return []


def _required(function: Callable[..., Any]) -> int:
    """The number of positional parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)
