"""adapter_config.json: what PEFT writes there, and how it finds modules by names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxspeed.checkpoint.header import AdapterRecord
from jaxspeed.errors import PretrainedError
from jaxspeed.interop.mapping import Bound, MappingTable, lines
from jaxspeed.interop.peft_layout import AdaptedModule

CONFIG = "adapter_config.json"
MOST = 10  # problems in an error
# The keys of adapter_config.json and their values in an adapter that does not use them.
_VERSION = "0.21.2"
DEFAULTS: Mapping[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None,
    "auto_mapping": None, "base_model_name_or_path": None, "bias": "none", "corda_config": None,
    "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8, "lora_bias": False,
    "lora_dropout": 0.0, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None,
    "peft_type": "LORA", "peft_version": _VERSION, "qalora_group_size": 16, "r": 8,
    "rank_pattern": {}, "revision": None, "target_modules": None, "target_parameters": None,
    "task_type": None, "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip
# Keys that say how an adapter began, or was trained, and change nothing of it.
_NEUTRAL = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "lora_ga_config", "loftq_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "task_type",
})  # fmt: skip
# Keys of the section `lora` that are PEFT's.
SECTION = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "target_parameters",
    "layers_to_transform", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
    "init_lora_weights", "modules_to_save", "bias",
)  # fmt: skip
# Initializations that change the weights of the base.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Of these models PEFT takes the names in `target_modules`, of any module, for those of experts
# (its `transformers_weight_conversion.py`, 0.21), and drops the adapters of all others.
_TAKEN_FOR_EXPERTS = dict.fromkeys(
    ("deepseek_v2", "deepseek_v3", "qwen3_moe"), ("gate_proj", "up_proj", "down_proj")
)
# The names of embeddings whose weights PEFT saves beside their adapters.
SAVED_EMBEDDINGS = ("embed_tokens", "lm_head")


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of a folder's adapter_config.json, with PEFT's defaults.

    Raises:
      PretrainedError: there is none, or it is of another kind than LoRA; lists what is wrong.
    """
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = "a file, not a folder" if folder.is_file() else "no such folder"
        what = f"no {CONFIG}" if folder.is_dir() else what
        raise PretrainedError(f"{folder}: {what}: not a saved adapter") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PretrainedError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise PretrainedError(f"{path}: is not a mapping")
    if (kind := values.get("peft_type")) != "LORA":
        raise PretrainedError(f"{path}: peft_type is {kind!r}; only 'LORA' is read")
    config = {**DEFAULTS, **values}
    problems = [
        f"{name} is {value!r:.60}: not supported"
        for name, value in config.items()
        if name not in (*SECTION, *_NEUTRAL, "layers_pattern")
        and value not in (None, False, [], {}, DEFAULTS.get(name))
    ]
    problems += [
        f"{name} is {config[name]!r:.60}, not {needs}"
        for name, (fits, needs) in _CHECKS.items()
        if not fits(config[name])
    ]
    initial = config["init_lora_weights"]
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        problems.append(
            f"init_lora_weights is {initial!r}, which changes the weights of the base; PEFT "
            "converts it: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    if problems:
        raise PretrainedError(f"{path}:{lines(problems, MOST)}")
    return config


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _patterns(fits: Callable[[Any], bool], value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(map(fits, value.values())))


def _rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_rank, "a positive integer"),
    "lora_alpha": (_positive, "a positive number"),
    "rank_pattern": (partial(_patterns, _rank), "a mapping to positive integers"),
    "alpha_pattern": (partial(_patterns, _positive), "a mapping to positive numbers"),
    "use_rslora": (_flag, "true or false"),
    "use_dora": (_flag, "true or false"),
    "bias": (("none", "all", "lora_only").__contains__, "none, all or lora_only"),
    "modules_to_save": (lambda value: value is None or _texts(value), "a list of names"),
    "target_parameters": (lambda value: value is None or _texts(value), "a list of names"),
}


def matching_value(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """What `rank_pattern` or `alpha_pattern` says of a module: that of the first name that fits.

    As PEFT finds it, in a file whose names are sorted.
    """
    for pattern in sorted(patterns or {}):
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return patterns[pattern]  # type: ignore[index]
        except re.error:
            continue
    return default


@dataclass(frozen=True)
class AdapterForm:
    """What a model's adapters are in PEFT's files.

    Args:
      record: the adapters.
      table: the model's mapping table; None writes keys that are the paths (`peft_layout`), which
        PEFT has no model for.
      config: config.json of the base.
      base: the folder or the id of the base, if it was pretrained.
    """

    record: AdapterRecord
    table: MappingTable | None = None
    config: Mapping[str, Any] | None = None
    base: str | None = None

    @property
    def section(self) -> Mapping[str, Any]:
        return self.record.section

    @property
    def factors(self) -> range:
        """A and B, with DoRA the magnitude too."""
        return range(3 if self.section["use_dora"] else 2)


@dataclass(frozen=True)
class WrittenModule:
    """A module as it is written."""

    module: AdaptedModule
    parts: list[tuple[int, float]]  # rank and alpha of each; rank 0: not adapted
    rank: int
    alpha: float


def saved_modules(form: AdapterForm, bound: Bound) -> set[str]:
    """The modules that are saved: of trained parameters other than biases that `bias` selects."""
    trained = {p.tensor for path in form.record.trained for p in bound.pieces[path]}
    tensors = {*trained, *(head for head, other in bound.table.tied.items() if other in trained)}
    ignored = ".bias" if form.section["bias"] != "none" else None
    names = {t.rpartition(".")[0] for t in tensors if not ignored or not t.endswith(ignored)}
    # One with a parameter of its own has those in it.
    return {name for name in names if not any(name.startswith(f"{other}.") for other in names)}


def config_of(form: AdapterForm, modules: Sequence[WrittenModule], bound: Bound) -> dict[str, Any]:
    """The contents of adapter_config.json: names as the config has them, where PEFT finds the same.

    Other names (paths of ours, `all-linear`, modules that are one there) become the shortest that
    PEFT resolves to the same modules.
    """
    section = form.section
    config = {key: _plain(section[key]) for key in SECTION}
    names = {written.module.name for written in modules if written.module.kind != "parameter"}
    parameters = {written.module.name for written in modules if written.module.kind == "parameter"}
    owners = {tensor.rpartition(".")[0] for tensor in (*bound.tensors, *bound.table.tied)}
    owners.update(bound.table.unread)
    if form.table is not None:
        # PEFT's own "all-linear" has other modules, the routers of mixtures among them.
        is_word = isinstance(config["target_modules"], str)
        if is_word or names != {name for name in owners if _selects(config, name)}:
            config["exclude_modules"] = None
            layers = config["layers_to_transform"]
            if layers and not all(_layer(name) in layers for name in names):
                config["layers_to_transform"] = layers = None
            eligible = {name for name in owners if not layers or _layer(name) in layers}
            config["target_modules"] = _shortest(names, eligible)
        asked = config["target_parameters"] or ()
        if parameters != {n for n in bound.tensors if ends(n, asked)}:
            config["target_parameters"] = _shortest(parameters, {*bound.tensors}) or None
        taken = _TAKEN_FOR_EXPERTS.get((form.config or {}).get("model_type", ""), ())
        if named := {name for name in names if ends(name, taken)}:  # as parameters they are found
            config["exclude_modules"] = config["layers_to_transform"] = None
            config["target_modules"] = _shortest(names - named, owners)
            parameters |= {f"{name}.weight" for name in named}
            config["target_parameters"] = _shortest(parameters, {*bound.tensors})
        kept = saved_modules(form, bound)
        saved = tuple(config["modules_to_save"] or ())
        around = {name.rsplit(".", n)[0] for name in owners for n in range(name.count(".") + 1)}
        if kept != {name for name in around if name.endswith(saved)}:
            config["modules_to_save"] = _shortest(kept, around, str.endswith) or None
    for key, pattern, of in (
        ("r", "rank_pattern", {written.module.name: written.rank for written in modules}),
        (
            "lora_alpha",
            "alpha_pattern",
            {written.module.name: written.alpha for written in modules},
        ),
    ):
        if any(matching_value(config[pattern], n, config[key]) != x for n, x in of.items()):
            distinct = {*of.values()}
            config[key] = _plain(distinct.pop() if len(distinct) == 1 else config[key])
            config[pattern] = _as_patterns({n: _plain(x) for n, x in of.items()}, config[key])
    # PEFT sets it anew for each linear layer.
    kinds = [e.module.kind for e in modules if len(e.module.shapes[0]) == 2]
    linear = [kind for kind in kinds if kind in ("linear", "conv1d")]
    if parameters:  # PEFT does not load them with dropout, which is of training alone
        config["lora_dropout"] = 0.0
    return {**DEFAULTS, **config, **_base(form), "fan_in_fan_out": linear[-1:] == ["conv1d"]}


def _plain(value: Any) -> Any:
    """A number without a fraction as an integer, as PEFT's users write it."""
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return int(value) if isinstance(value, float) and value.is_integer() and value else value


def _base(form: AdapterForm) -> dict[str, Any]:
    """What PEFT says of the base."""
    config = form.config or {}
    (architecture,) = (config.get("architectures") or [""])[:1]
    kinds = {
        "ForCausalLM": "CAUSAL_LM",
        "LMHeadModel": "CAUSAL_LM",
        "ForSequenceClassification": "SEQ_CLS",
    }
    task = next((task for end, task in kinds.items() if architecture.endswith(end)), None)
    base: dict[str, Any] = {"task_type": task, "base_model_name_or_path": form.base}
    if task is None and architecture:
        kind = config["model_type"]
        library = f"transformers.models.{kind}.modeling_{kind}"
        base["auto_mapping"] = {"base_model_class": architecture, "parent_library": library}
    return base


def ends(name: str, names: Iterable[str]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in names)


def _layer(name: str) -> int | None:
    """The number of a module's layer, as `layers_to_transform` finds it."""
    match = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    return int(match[1]) if match else None


def _selects(config: Mapping[str, Any], name: str) -> bool:
    """Whether PEFT adapts a module by `target_modules` and the keys beside it."""
    targets, layers = config["target_modules"], config["layers_to_transform"]
    if isinstance(targets, str) or ends(name, config["exclude_modules"] or ()):
        return False
    kept = config["modules_to_save"] or ()
    if any(re.match(rf"(^|.*\.){re.escape(module)}($|\..*)", name) for module in kept):
        return False
    return ends(name, targets or ()) and (not layers or _layer(name) in layers)


def _shortest(
    names: Collection[str],
    others: Collection[str],
    has_end: Callable[[str, str], bool] = lambda name, end: ends(name, (end,)),
) -> list[str]:
    """The shortest ends of these names that no other one has.

    Args:
      has_end: PEFT's rule. In `modules_to_save` an end is any text: "norm" ends "input_layernorm".
    """
    shortest = set()
    for name in names:
        segments = name.split(".")
        tails = (".".join(segments[-n:]) for n in range(1, len(segments) + 1))
        rest = [other for other in others if other not in names]
        shortest.add(next((e for e in tails if not any(has_end(o, e) for o in rest)), name))
    return sorted(shortest)


def _as_patterns(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """The shortest patterns that give each module its value, where it is not the default."""
    patterns: dict[str, Any] = {}
    for value in {*values.values()} - {default}:
        names = {name for name, x in values.items() if x == value}
        patterns |= dict.fromkeys(_shortest(names, values), value)
    return patterns
