"""The adapters of a config: which weights and layers are adapted, and what else is trained."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from jaxspeed.adapters.adapter import Adapter
from jaxspeed.config.lora_section import Lora
from jaxspeed.config.patterns import member_of, pattern_problem
from jaxspeed.errors import ConfigError
from jaxspeed.jaxpr.weight_uses import Uses, WeightDims
from jaxspeed.placement.linear_layers import (
    TABLES,
    experts_dim,
    is_at_an_end,
    is_head,
    matrix_inputs,
)
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.rules import nearest
from jaxspeed.placement.specs import by_dim
from jaxspeed.user_models.trainable import NamedLeaves

log = logging.getLogger("jaxspeed")

# What another library names the module, or the parameter, of each parameter: the dotted names by
# path, with the number of the layer where the parameter stacks layers and it has one of each.
OtherNames = Mapping[str, Sequence[tuple[int | None, str]]]


class SavedAdapter(Protocol):
    """An adapter in files, of a model whose parameters have the shapes that are given."""

    def settings(self, shapes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keys of the section `lora` that it has, but for those of what is adapted."""

    def ranks(self, shapes: Mapping[str, Any]) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
        """(ranks, alphas) of each weight, for its stacked dims; of rank 0 is none."""

    def values(self, shapes: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        """The values of its leaves, and of the parameters that it replaces."""


@dataclass(frozen=True)
class ChosenAdapters:
    """The adapters by weight, and the model's own parameters that are trained beside them.

    Attributes:
      layers: of trained biases of which only some layers are, which ones.
      section: that of the config with the settings of a saved adapter.
    """

    adapters: Mapping[str, Adapter]
    trained: frozenset[str]
    layers: Mapping[str, Sequence[bool]]
    section: Lora


def choose_adapters(
    section: Lora,
    leaves: Sequence[Leaf],
    uses: Uses | None,
    saved: SavedAdapter | None = None,
    other_names: Callable[[Mapping[str, Any]], OtherNames] | None = None,
) -> ChosenAdapters:
    """The adapters of the parameters of a model.

    Args:
      uses: the dims of each weight in the products that read it; None if the loss is not traced.
      saved: the adapter of `lora.adapter`, which decides what is adapted.
      other_names: of parameters of these shapes, for names that name nothing of the model's own.

    Raises:
      ConfigError: lists all that names nothing, and the ranks that are too large.
    """
    if saved is None:
        choosing = _Choosing(section, leaves, uses, other_names)
        choice = choosing.choice()
    else:
        completed = _as_saved(section, saved.settings({leaf.path: leaf.shape for leaf in leaves}))
        choosing = _Choosing(completed, leaves, uses, other_names)
        choice = choosing.of_saved(saved)
        if not choosing.problems:
            asking = choice.section.model_copy(update=_named_in(section))
            _refuse_another_choice(section, choice, _Choosing(asking, leaves, uses, other_names))
    if choosing.problems:
        raise ConfigError("\n".join(choosing.problems))
    if choice.section.bias != "none" and not any(map(_is_bias, choice.trained)):
        of = "this model" if choice.section.bias == "all" else "an adapted module"
        log.warning("lora.bias is %r, and no parameter of %s is a bias", choice.section.bias, of)
    if choice.section.use_dora and (experts := choosing.named_experts(choice.adapters)):
        log.warning(
            "lora.use_dora: PEFT has no DoRA of stacked experts (%s): the adapter can be merged, "
            "but is not written in PEFT's format: for that exclude them (lora.exclude_modules)",
            listed(experts),
        )
    return choice


def refuse_unlike(
    saved: SavedAdapter, adapters: Mapping[str, Adapter], shapes: Mapping[str, Any]
) -> None:
    """Raise ConfigError unless a saved adapter has the weights, ranks and scales of `adapters`."""
    root = saved.settings(shapes)["use_rslora"]
    saved_ranks = saved.ranks(shapes)
    unlike = sorted(saved_ranks.keys() ^ adapters.keys())
    for path, adapter in adapters.items():
        if path not in saved_ranks:
            continue
        ranks, alphas = saved_ranks[path]
        scales = np.where(ranks > 0, alphas / np.maximum(np.sqrt(ranks) if root else ranks, 1), 0)
        adapter_scales = np.where(
            adapter.per_layer(adapter.ranks) > 0, adapter.per_layer(adapter.scales), 0
        )
        same_ranks = np.array_equal(ranks, adapter.per_layer(adapter.ranks))
        if not (same_ranks and np.allclose(scales, adapter_scales)):
            unlike.append(path)
    if unlike:
        raise ConfigError(
            "load_adapter: its weights, ranks and alphas have to be those of the config's section "
            f"lora, and differ in {listed(unlike)}; start another engine with lora.adapter"
        )


def usual_dims(leaf: Leaf) -> WeightDims:
    """The dims of a weight by its name and shape, as Flax's layers have them."""
    names = by_dim(leaf.names, len(leaf.shape))
    stack = (*range(leaf.stacked), *experts_dim(leaf))
    rest = [d for d in range(len(leaf.shape)) if d not in stack]
    if leaf.path.rpartition("/")[2] in TABLES or names[rest[0]] == "vocab":
        if is_head(leaf):  # its logits are h W^T
            return WeightDims(stack, tuple(rest[1:]), tuple(rest[:1]), "product")
        return WeightDims(stack, tuple(rest[:1]), tuple(rest[1:]), "lookup")
    known = matrix_inputs(leaf)
    inputs = known or len(rest) - 1
    kind: Any = "product" if len(rest) == 2 or known else "convolution"
    return WeightDims(stack, tuple(rest[:inputs]), tuple(rest[inputs:]), kind)


_CHOOSE = frozenset({  # keys of the section that say what is adapted and trained
    "target_modules", "exclude_modules", "target_parameters", "layers_to_transform",
    "rank_pattern", "alpha_pattern", "modules_to_save",
})  # fmt: skip


def _as_saved(section: Lora, settings: Mapping[str, Any]) -> Lora:
    """The section with the settings of a saved adapter.

    Raises:
      ConfigError: the config says something else.
    """
    free = {"adapter", "lora_dropout"}  # dropout is of training alone
    configured = {key: getattr(section, key) for key in section.model_fields_set - free - _CHOOSE}
    unlike = [key for key, x in configured.items() if key not in settings or settings[key] != x]
    if unlike:
        settings_text = ", ".join(f"lora.{key} is {configured[key]!r}" for key in sorted(unlike))
        raise ConfigError(
            f"lora.adapter: {section.adapter} has its own settings, and {settings_text}; remove "
            + ("it" if len(unlike) == 1 else "them")
        )
    said = section.model_fields_set - _CHOOSE
    return section.model_copy(update={k: x for k, x in settings.items() if k not in said})


def _named_in(section: Lora) -> dict[str, Any]:
    """What the config itself names to adapt and train."""
    return {key: getattr(section, key) for key in _CHOOSE & section.model_fields_set}


def _refuse_another_choice(section: Lora, chosen: ChosenAdapters, asking: "_Choosing") -> None:
    """Raise ConfigError if the config names what to adapt, and a saved adapter is another one."""
    named = _named_in(section)
    if not named:
        return
    asked = asking.choice()

    def sizes(choice: ChosenAdapters) -> set[Any]:
        return {(path, x.ranks, x.scales) for path, x in choice.adapters.items()}

    unlike = {path for path, *_ in sizes(asked) ^ sizes(chosen)}
    if not named.keys() & {"target_modules", "target_parameters"}:
        unlike &= chosen.adapters.keys()
    if "modules_to_save" in named:
        unlike |= asked.trained ^ chosen.trained
    if unlike or asking.problems:
        what = f" (of {listed(sorted(unlike))})" if unlike else ""
        keys = listed([f"lora.{key}" for key in sorted(named)], len(named))
        raise ConfigError(
            f"lora.adapter: what {section.adapter} adapts and trains{what} is not what {keys} "
            f"{'names' if len(named) == 1 else 'name'}; remove "
            + ("it" if len(named) == 1 else "them")
        )


class _Choosing:
    def __init__(
        self,
        section: Lora,
        leaves: Sequence[Leaf],
        uses: Uses | None,
        other_names: Callable[[Mapping[str, Any]], OtherNames] | None,
    ) -> None:
        self.section, self.leaves, self.uses = section, leaves, uses
        self.named = NamedLeaves(leaves)
        self._find_other_names = other_names
        self._is_own = dict[str, bool]()  # whether a pattern covers a path of the model
        self.problems: list[str] = []
        self.weights = [
            leaf
            for leaf in leaves
            if len(leaf.shape) - leaf.stacked >= 2
            and jnp.issubdtype(leaf.dtype, jnp.floating)
            and not leaf.path.endswith("/bias")  # of heads, in two dims
        ]

    def choice(self) -> ChosenAdapters:
        section = self.section
        saved = self._saved()
        excluded = self._covered("exclude_modules", section.exclude_modules or (), self.weights)
        parameters = self._covered(
            "target_parameters", section.target_parameters or (), self.weights
        )
        modules = self._modules()
        adapters: dict[str, Adapter] = {}
        wanted = set(section.layers_to_transform or ())
        for leaf in self.weights:
            if leaf.path in saved:
                continue
            layers = {
                layer
                for layer in self.named.layers(leaf)
                if layer in modules.get(leaf.path, ()) or layer in parameters.get(leaf.path, ())
                if layer not in excluded.get(leaf.path, ())
                and (not wanted or self._number(leaf, layer) in wanted)
            }
            if layers:
                adapters[leaf.path] = self._adapter_of(leaf, layers, leaf.path in parameters)
        if wanted:
            self._check_layers(wanted)
        for key in ("rank_pattern", "alpha_pattern"):
            adapted = [leaf for leaf in self.weights if leaf.path in adapters]
            self._covered(key, getattr(section, key), adapted)
        if not adapters and not self.problems:
            self.problems.append(
                "lora: no weight of this model is adapted; name modules in lora.target_modules, "
                f"such as {listed(self._module_names())}"
            )
        return self._choice(adapters, saved)

    def _choice(self, adapters: Mapping[str, Adapter], saved: set[str]) -> ChosenAdapters:
        biases = self._biases(adapters)
        layers = {
            path: flags for path, flags in biases.items() if path not in saved and not all(flags)
        }
        return ChosenAdapters(adapters, frozenset((*saved, *biases)), layers, self.section)

    def _modules(self) -> dict[str, set[int]]:
        """The layers of each weight that `target_modules` names."""
        section, targets = self.section, self.section.target_modules
        if targets != "all-linear":
            return self._covered("target_modules", targets, self.weights)
        if section.target_parameters and "target_modules" not in section.model_fields_set:
            return {}
        linear = [leaf for leaf in self.weights if self._is_linear(leaf)]
        if not linear:
            self.problems.append(
                'lora.target_modules: found "all-linear", and this model has no linear layer but '
                f"its output; it has the weights {listed([x.path for x in self.weights])}"
            )
        return {leaf.path: set(self.named.layers(leaf)) for leaf in linear}

    def _is_linear(self, leaf: Leaf) -> bool:
        uses = [usual_dims(leaf)] if self.uses is None else self.uses.get(leaf.path, ())
        products = bool(uses) and all(dims.kind == "product" for dims in uses)
        return products and not is_at_an_end(leaf)

    def _covered(
        self, key: str, targets: Sequence[str] | Mapping[str, Any], leaves: Sequence[Leaf]
    ) -> dict[str, set[int]]:
        """The layers of each leaf that a name or pattern covers; one of nothing is a problem."""
        covered: dict[str, set[int]] = {}
        for target in targets:
            pattern = _pattern(target)
            problem = pattern_problem(pattern)
            if problem:
                self.problems.append(f"lora.{key}: found {target!r}. Needs {problem}.")
                continue
            layers_of = {
                leaf.path: {i for i in self.named.layers(leaf) if self._is_of(target, leaf, i)}
                for leaf in leaves
            }
            if not any(layers_of.values()):
                self.problems.append(
                    f"lora.{key}: {target!r} names nothing that this can be for; nearest: "
                    + listed(nearest(target, self._module_names()))
                    + self.named.hint(pattern)
                )
            for path, layers in layers_of.items():
                if layers:
                    covered[path] = covered.get(path, set()) | layers
        return covered

    def _is_of(self, target: str, leaf: Leaf, layer: int) -> bool:
        """Whether a name or pattern covers a leaf, or this layer of it.

        A name that the model has nowhere may be that of Hugging Face's model, as PEFT knows it.
        """
        pattern = _pattern(target)
        if target not in self._is_own:
            self._is_own[target] = self.named.covers(pattern)
        if self._is_own[target]:
            return self.named.is_of(pattern, leaf, layer)
        of_layer = (None, layer) if leaf.path in self.named.prefixes else None
        return any(
            f".{name}".endswith(f".{target}")
            for number, name in self._other_names.get(leaf.path, ())
            if of_layer is None or number in of_layer
        )

    @cached_property
    def _other_names(self) -> OtherNames:
        if self._find_other_names is None:
            return {}
        return self._find_other_names({leaf.path: leaf.shape for leaf in self.leaves})

    def named_experts(self, paths: Collection[str]) -> list[str]:
        """Which of these are stacked experts, of a model that has Hugging Face's names."""
        experts = [x.path for x in self.leaves if x.path in paths and experts_dim(x)]
        return [path for path in experts if path in self._other_names]

    def _module_names(self) -> list[str]:
        """The modules of weights, dotted as in PEFT, without the numbers of layers."""
        modules = [
            (leaf.path.rpartition("/")[0] or leaf.path).replace("/", ".") for leaf in self.weights
        ]
        modules += [name for x in self.weights for _, name in self._other_names.get(x.path, ())]
        names = (".".join(p for p in m.split(".") if not p.isdigit()) for m in modules)
        return list(dict.fromkeys(names))

    def _number(self, leaf: Leaf, layer: int) -> int | None:
        """The number of a layer among all; None for a weight outside of layers."""
        if leaf.path in self.named.prefixes:
            return layer
        segments = leaf.path.split("/")
        members = (member for at in range(len(segments)) for member in member_of(segments, at))
        return next((number for _, number, _ in members), None)

    def _check_layers(self, wanted: set[int]) -> None:
        pairs = [(leaf, i) for leaf in self.weights for i in self.named.layers(leaf)]
        known = {number for pair in pairs if (number := self._number(*pair)) is not None}
        unknown = sorted(wanted - known)
        if unknown:
            layers = f"{max(known) + 1} layers" if known else "no numbered layers"
            self.problems.append(
                f"lora.layers_to_transform: found {listed([*map(str, unknown)])}, and this model "
                f"has {layers}{self.named.hint('layers[0:1]') if not known else ''}"
            )

    def of_saved(self, saved: SavedAdapter) -> ChosenAdapters:
        """The adapters that a saved one has."""
        saved_ranks = saved.ranks({leaf.path: leaf.shape for leaf in self.leaves})
        adapters: dict[str, Adapter] = {}
        experts = [x.path for x in self.leaves if x.path in saved_ranks and experts_dim(x)]
        for leaf in self.leaves:
            if leaf.path not in saved_ranks:
                continue
            of_layers = [
                np.reshape(x, (x.shape[0] if x.shape else 1, -1)) for x in saved_ranks[leaf.path]
            ]
            if any((x != x[:, :1]).any() for x in of_layers):
                self.problems.append(
                    f"lora.adapter: the experts of {leaf.path} have adapters of different ranks"
                )
                continue
            ranks, alphas = (x[:, 0].tolist() for x in of_layers)
            adapters[leaf.path] = self._adapter(leaf, ranks, alphas, bool(experts_dim(leaf)))
        if experts and self.section.lora_dropout:
            self.problems.append(
                f"lora.lora_dropout: found {self.section.lora_dropout:g}, and the adapter "
                f"{self.section.adapter} is of stacked experts ({listed(experts)}). "
                "PEFT has dropout for modules alone: remove it"
            )
        return self._choice(adapters, self._saved())

    def _saved(self) -> set[str]:
        """The parameters that `modules_to_save` names."""
        covered = self._covered("modules_to_save", self.section.modules_to_save or (), self.leaves)
        for path, layers in covered.items():
            count = len(self.named.layers(self.named.by_path[path]))
            if len(layers) < count:
                self.problems.append(
                    f"lora.modules_to_save: names {len(layers)} of the {count} layers of {path}, "
                    "which are one parameter here and are trained together: name all of them"
                )
        return {*covered}

    def _adapter_of(self, leaf: Leaf, layers: set[int], of_parameter: bool) -> Adapter:
        section = self.section
        pairs = [
            (
                int(self._of_layer(section.rank_pattern, leaf, layer, section.r)),
                self._of_layer(section.alpha_pattern, leaf, layer, section.lora_alpha),
            )
            for layer in self.named.layers(leaf)
        ]
        ranks = [rank if layer in layers else 0 for layer, (rank, _) in enumerate(pairs)]
        return self._adapter(leaf, ranks, [alpha for _, alpha in pairs], of_parameter)

    def _adapter(
        self, leaf: Leaf, ranks: list[int], alphas: list[float], of_parameter: bool
    ) -> Adapter:
        section = self.section
        dims, is_assumed = self._dims(leaf, of_parameter)
        scales = [
            alpha / (math.sqrt(rank) if section.use_rslora else rank) if rank else 0.0
            for rank, alpha in zip(ranks, alphas, strict=True)
        ]
        inputs, outputs = (
            math.prod(leaf.shape[d] for d in role) for role in (dims.inputs, dims.outputs)
        )
        if max(ranks) > min(inputs, outputs):
            self.problems.append(
                f"lora.r: rank {max(ranks)} is above {min(inputs, outputs)}, the smaller dim of "
                f"{leaf.path} ({inputs:,} x {outputs:,}); such an adapter is no smaller than the "
                f"weight: use at most {min(inputs, outputs)}, lora.rank_pattern for this module, "
                "or lora.exclude_modules"
            )
        if len({*ranks}) == len({*scales}) == 1:
            ranks, scales = ranks[:1], scales[:1]
        return Adapter(
            leaf.path,
            leaf.shape,
            dims,
            tuple(ranks),
            tuple(scales),
            section.lora_dropout,
            section.use_dora,
            is_assumed,
            of_parameter,
        )

    def _dims(self, leaf: Leaf, of_parameter: bool) -> tuple[WeightDims, bool]:
        """The dims of a weight, and whether they are assumed."""
        if self.uses is None:
            return usual_dims(leaf), True
        uses = self.uses.get(leaf.path, ())
        lookups = [dims for dims in uses if dims.kind == "lookup"]
        dims = next(iter((*lookups, *uses)), usual_dims(leaf))
        experts = experts_dim(leaf, of_parameter)
        inputs, outputs = (
            tuple(d for d in role if d not in experts) for role in (dims.inputs, dims.outputs)
        )
        if not inputs or not outputs:
            return dims, False
        return WeightDims(tuple(sorted({*dims.stack, *experts})), inputs, outputs, dims.kind), False

    def _of_layer(
        self, values: Mapping[str, float], leaf: Leaf, layer: int, default: float
    ) -> float:
        matches = (x for name, x in values.items() if self._is_of(name, leaf, layer))
        return next(matches, default)

    def _biases(self, adapters: Mapping[str, Adapter]) -> dict[str, Sequence[bool]]:
        """The biases that are trained, and which of their layers are."""
        if self.section.bias == "none":
            return {}
        adapted: dict[str, set[int]] = defaultdict(set)  # the layers of each module
        for path, adapter in adapters.items():
            count = len(self.named.layers(self.named.by_path[path]))
            ranks = adapter.ranks * (count if len(adapter.ranks) == 1 else 1)
            adapted[path.rpartition("/")[0]] |= {i for i, rank in enumerate(ranks) if rank}
        biases: dict[str, Sequence[bool]] = {}
        for leaf in filter(lambda leaf: _is_bias(leaf.path), self.leaves):
            layers, module = self.named.layers(leaf), leaf.path.rpartition("/")[0]
            trained = layers if self.section.bias == "all" else adapted[module]
            if trained:
                biases[leaf.path] = [layer in trained for layer in layers]
        return biases


def _is_bias(path: str) -> bool:
    return path.rpartition("/")[2] == "bias"


def _pattern(name: str) -> str:
    """The path pattern of a module's name: itself, or that of the end of a dotted path."""
    if "." in name and not any(sign in name for sign in "/*?["):
        return f"**/{name.replace('.', '/')}"
    return name
