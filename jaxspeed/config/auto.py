"""Values for "auto" keys, which Hugging Face fills in from a Trainer's arguments.

A value comes from the first of: the caller's `auto`, the rest of the config, the preset "hf" (what
Hugging Face takes by default), and DeepSpeed's own default for the keys whose "auto" it drops.
Batch size, learning rate and number of steps are never guessed: they are asked for.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxspeed.config.batch import ACCUMULATION, MICRO, TRAIN
from jaxspeed.config.parse import apply_override, as_tree
from jaxspeed.config.problems import Problem, unknown_key
from jaxspeed.config.tree import VOCABULARY, declared, given_leaves, read, section_at
from jaxspeed.config.types import Coercing
from jaxspeed.config.verdicts import shown

Tree = dict[str, Any]
AutoValues = Mapping[str, Any] | Iterable[str] | str | None
# Of a config's tree, the hidden size of its model; None where it is unknown.
HiddenSize = Callable[[Tree], int | None]

PRESETS = ("hf",)

LEAVE_OUT = object()
"""Result for an "auto" that other keys or the default determine: the key is removed."""

DROPPED = "DeepSpeed's default"

# Keys with a value "auto" of their own.
OWN_AUTO = {
    "data_types.keep_in_fp32_modules",
    "parallel.gradient_reduction",
    "parallel.sequence.kind",
    "parallel.sequence.layout",
    "parallel.sequence_tiles",
    "parallel.tensor_overlap",
    "parallel.infer_tensor_cuts",
    "pipeline.stages",
}
_LR, _PEAK = "optimizer.params.lr", "scheduler.params.warmup_max_lr"
DECAY_END = "scheduler.params.total_num_steps"
STEPS, EPOCHS = "run.steps", "run.epochs"
# What Hugging Face fills in by the hidden size; the other keys of its formula are harmless here.
BY_HIDDEN_SIZE = "zero_optimization.stage3_param_persistence_threshold"
# What only the user knows: the key that is asked for, and an example.
_ASKED = {
    **dict.fromkeys((TRAIN, MICRO, ACCUMULATION), (MICRO, 8)),
    **dict.fromkeys((_LR, _PEAK), (_LR, 5e-5)),
    DECAY_END: (DECAY_END, 1000),
}


@dataclass(frozen=True)
class Filled:
    """Value that replaces an "auto", and where it is from; None: the default of the key."""

    value: Any
    source: str


@dataclass
class Autos:
    """A config without "auto", what was filled in, and what could not be."""

    tree: Tree
    filled: dict[str, Filled] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    advice: str = ""  # the lines to add


def read_auto(auto: AutoValues) -> tuple[str | None, dict[str, Any], list[Problem]]:
    """Read the caller's values: (preset, values by path, problems).

    Args:
      auto: a preset's name, a mapping of paths to values in which "preset" names one, or a list of
        presets and `key=value`.
    """
    preset: Any = None
    tree: Tree = {}
    problems: list[Problem] = []
    if isinstance(auto, Mapping):
        preset = auto.get("preset")
        tree, problems = as_tree({key: value for key, value in auto.items() if key != "preset"})
    else:
        for item in [auto] if isinstance(auto, str) else auto or ():
            if "=" not in str(item):
                preset = item
            elif problem := apply_override(tree, item):
                problems.append(problem)
    if preset is not None and preset not in PRESETS:
        works = f"Needs {' or '.join(PRESETS)}, or key=value."
        problems.append(Problem("auto", shown(preset), works))
    values = {path: value for path, value in given_leaves(tree) if path}
    problems += [unknown_key(path, value) for path, value in values.items() if not declared(path)]
    return preset, {path: v for path, v in values.items() if declared(path)}, problems


def fill_autos(
    tree: Tree,
    auto: AutoValues = None,
    platform: str | None = None,
    hidden_size: HiddenSize | None = None,
) -> Autos:
    """Fill in every "auto", and the caller's values for keys that the config does not have.

    Args:
      tree: the config, in the schema's names.
      auto: as for `read_auto`.
      platform: cpu, gpu or tpu, by which the preset chooses the precision; by default that of
        `run.devices`, and an accelerator if the config does not set it.
      hidden_size: finds that of the model, by which Hugging Face fills in a threshold; by default
        it is model.config.hidden_size.
    """
    preset, values, problems = read_auto(auto)
    autos = Autos(tree, problems=problems)
    for path, value in values.items():
        _put(autos, path, value)
    open_paths = [
        path
        for path, value in given_leaves(autos.tree)
        if value == "auto" and path not in OWN_AUTO and _is_key(path)
    ]
    if BY_HIDDEN_SIZE in open_paths and hidden_size and (size := hidden_size(autos.tree)):
        open_paths.remove(BY_HIDDEN_SIZE)
        autos.filled[BY_HIDDEN_SIZE] = Filled(10 * size, _RESOLVERS[BY_HIDDEN_SIZE][0])
        autos.tree = with_value(autos.tree, BY_HIDDEN_SIZE, 10 * size)
    asked: dict[str, Any] = {}
    for path in open_paths:
        _fill(autos, path, preset, platform or _platform(autos.tree), asked)
    if asked:
        autos.advice = _lines_to_add(asked, preset)
    return autos


def accepts_auto() -> set[str]:
    """Keys that may hold "auto"."""
    return OWN_AUTO | {path for path in VOCABULARY if _is_dropped(path)} | {*_RESOLVERS, *_HF}


def _put(autos: Autos, path: str, value: Any) -> None:
    """Set one of the caller's values, unless the config has another one."""
    before = read(autos.tree, path, "auto")
    if before in ("auto", value):
        autos.tree = with_value(autos.tree, path, value)
        autos.filled[path] = Filled(value, "auto")
    else:
        actual = f"{shown(value)} by auto, while the config has {shown(before)}"
        autos.problems.append(Problem(path, actual, "Make them equal, or remove one."))


def _fill(
    autos: Autos, path: str, preset: str | None, platform: str | None, asked: dict[str, Any]
) -> None:
    """Fill in one "auto", or ask for it."""
    source, resolver = _RESOLVERS.get(path, ("", lambda tree: None))
    value = resolver(autos.tree)
    if value is LEAVE_OUT and read(autos.tree, "elasticity.enabled") is True:
        source = "elasticity"
    if value is None and preset == "hf" and path in _HF:
        source, default = "Hugging Face's default", _HF[path]
        value = default(autos.tree, platform) if callable(default) else default
    if value is None and _is_dropped(path):
        source, value = DROPPED, LEAVE_OUT
    if value is None and path == DECAY_END and read(autos.tree, EPOCHS) is not None:
        # Any number, until the data are read: no schedule is built with it (train_state).
        autos.filled[path] = Filled("the last step", EPOCHS)
        autos.tree = with_value(autos.tree, path, 1)
        return
    if value is not None:
        autos.filled[path] = Filled(None if value is LEAVE_OUT else value, source)
        autos.tree = with_value(autos.tree, path, value)
        return
    autos.tree = with_value(autos.tree, path, LEAVE_OUT)
    works = "Write a value"
    if source:
        works = f"It is resolved from {source}, which the config does not set. {works}"
    if path in _ASKED:
        key, example = _ASKED[path]
        asked.setdefault(key, example)
        works += ": it is never guessed"
    elif path in _HF:
        asked.setdefault("hf", None)
        works += ', or fill in Hugging Face\'s default by auto "hf"'
    autos.problems.append(
        Problem(
            path, '"auto", which Hugging Face fills in from a Trainer\'s arguments', f"{works}."
        )
    )


def _lines_to_add(asked: dict[str, Any], preset: str | None) -> str:
    """Options that fill in all that is open, with example values."""
    needs_preset = "hf" in asked and preset is None
    values = {key: example for key, example in asked.items() if key != "hf"}
    options = ["--auto hf"] * needs_preset + [f"--auto {k}={v}" for k, v in values.items()]
    mapping = ({"preset": "hf"} if needs_preset or preset else {}) | values
    return (
        f"Add {' '.join(options)} to the command, or auto={json.dumps(mapping)} to "
        "jaxspeed.initialize, with your values."
    )


def _is_key(path: str) -> bool:
    declaration = declared(path)
    return declaration is not None and declaration[0] == path


def _is_dropped(path: str) -> bool:
    """Whether DeepSpeed drops the key's "auto", or the key has no effect."""
    if VOCABULARY[path].verdict in ("harmless", "ignored"):
        return True
    section, _, name = path.rpartition(".")
    section_class = section_at(section)
    is_precision = section in ("fp16", "bf16") and name == "enabled"
    return section_class is not None and issubclass(section_class, Coercing) and not is_precision


def with_value(tree: Tree, path: str, value: Any) -> Tree:
    """Copy of the tree with a value at a path, or without it for LEAVE_OUT."""
    head, _, rest = path.partition(".")
    if rest:
        inner = tree.get(head)
        return {**tree, head: with_value(inner if isinstance(inner, dict) else {}, rest, value)}
    if value is LEAVE_OUT:
        return {key: item for key, item in tree.items() if key != head}
    return {**tree, head: value}


def _platform(tree: Tree) -> str | None:
    devices = read(tree, "run.devices")
    return devices.partition(":")[0] if isinstance(devices, str) else None


# -- values from the config ------------------------------------------------------------------------


def _number(path: str, factor: int = 1) -> Callable[[Tree], Any]:
    def resolve(tree: Tree) -> Any:
        value = read(tree, path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value * factor

    return resolve


def _batch(tree: Tree) -> Any:
    known = any(isinstance(tree.get(key), int | float) for key in (TRAIN, MICRO))
    return LEAVE_OUT if known or read(tree, "elasticity.enabled") is True else None


def _unless(path: str) -> Callable[[Tree], Any]:
    return lambda tree: False if read(tree, path) is True else None


_RESOLVERS: dict[str, tuple[str, Callable[[Tree], Any]]] = {
    TRAIN: (MICRO, _batch),
    MICRO: (TRAIN, _batch),
    ACCUMULATION: (f"{TRAIN} or {MICRO}", _batch),
    _LR: (_PEAK, _number(_PEAK)),
    _PEAK: (_LR, _number(_LR)),
    DECAY_END: (STEPS, _number(STEPS)),
    "fp16.enabled": ("bf16.enabled true", _unless("bf16.enabled")),
    "bf16.enabled": ("fp16.enabled true", _unless("fp16.enabled")),
    "mesh.tensor": ("tensor_parallel.autotp_size", _number("tensor_parallel.autotp_size")),
    "tensor_parallel.autotp_size": ("mesh.tensor", _number("mesh.tensor")),
    BY_HIDDEN_SIZE: (
        "the model's hidden size, times 10 as Hugging Face does",
        _number("model.config.hidden_size", 10),
    ),
}

# -- Hugging Face's defaults -----------------------------------------------------------------------


def _bf16(tree: Tree, platform: str | None) -> bool:
    return read(tree, "fp16.enabled") is not True and platform != "cpu"


def _fp16(tree: Tree, platform: str | None) -> bool:
    """Enable fp16 on a GPU, for a file that does not know bf16."""
    return read(tree, "bf16.enabled") is None and platform in ("gpu", "cuda")


_HF: dict[str, Any] = {
    "optimizer.type": "AdamW",
    "scheduler.type": "WarmupDecayLR",
    "gradient_clipping": 1.0,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_num_steps": 0,
    "fp16.enabled": _fp16,
    "bf16.enabled": _bf16,
}
