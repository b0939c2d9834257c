"""Values for "auto" keys, which Hugging Face fills in from a Trainer's arguments.

A value comes from the first of: the caller's `auto`, the rest of the config, the preset "hf" (what
Hugging Face's Trainer does by default), and DeepSpeed's own default for the keys whose "auto" it
drops. Where a config has no optimizer or no schedule, the preset adds the Trainer's. Batch size,
learning rate and number of steps are never guessed: they are asked for.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxspeed.config.batch import ACCUMULATION, MICRO, TRAIN
from jaxspeed.config.lr_schedules import ABSOLUTE_SCHEDULES
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
_BY_TRAINER = "Hugging Face's default"

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
    """A config without "auto", what was filled in, and what could not be.

    `notes` has, by path, what a user should know of it.
    """

    tree: Tree
    filled: dict[str, Filled] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
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
    hidden_size: HiddenSize | None = None,
    has_optimizer: bool = False,
) -> Autos:
    """Fill in every "auto", and the caller's values for keys that the config does not have.

    Args:
      tree: the config, in the schema's names.
      auto: as for `read_auto`.
      hidden_size: finds that of the model, by which Hugging Face fills in a threshold; by default
        it is model.config.hidden_size.
      has_optimizer: whether the caller has an optimizer, to which the preset adds none.
    """
    preset, values, problems = read_auto(auto)
    autos = Autos(tree, problems=problems)
    adds = preset == "hf" and not has_optimizer
    missing = [section for section in _TRAINERS if adds and not tree.get(section)]
    for path, value in values.items():
        _put(autos, path, value)
    added = {path for section in missing for path in _add_trainers(autos, section)}
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
        _fill(autos, path, preset, asked, "nothing" if path in added else '"auto"')
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


def _add_trainers(autos: Autos, section: str) -> Iterator[str]:
    """Add the Trainer's optimizer or schedule; yield its parameters, which are "auto"."""
    if (chosen := f"{section}.type") in autos.filled:  # by the caller
        return
    schedule = str(read(autos.tree, "scheduler.type")).lower()
    is_absolute = schedule in map(str.lower, ABSOLUTE_SCHEDULES)
    is_idle = is_absolute and read(autos.tree, _PEAK) != "auto"
    for path, value in given_leaves(_TRAINERS[section], section):
        if read(autos.tree, path) is None and not (path == _LR and is_idle):
            autos.tree = with_value(autos.tree, path, value)
            if value == "auto":
                yield path
            else:
                autos.filled[path] = Filled(value, _BY_TRAINER)
    autos.notes[chosen] = (
        f"Not set: {_TRAINERS[section]['type']}, as Hugging Face's Trainer has it."
    )


def _fill(autos: Autos, path: str, preset: str | None, asked: dict[str, Any], actual: str) -> None:
    """Fill in one "auto", or ask for it."""
    source, resolver = _RESOLVERS.get(path, ("", lambda tree: None))
    value = resolver(autos.tree)
    if value is LEAVE_OUT and read(autos.tree, "elasticity.enabled") is True:
        source = "elasticity"
    if value is None and preset == "hf" and path in _HF:
        source, value = _BY_TRAINER, _HF[path]
        if value is False:
            works = f'--auto {path}=true, or auto={{"{path}": true}}, enables it.'
            autos.notes[path] = f'"auto" is false in Hugging Face\'s Trainer by default: {works}'
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
    if source and not (source == _PEAK and read(autos.tree, "scheduler.type") == "linear"):
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
            path, f"{actual}, which Hugging Face fills in from a Trainer's arguments", f"{works}."
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


_HF: dict[str, Any] = {
    "optimizer.type": "AdamW",
    "scheduler.type": "WarmupDecayLR",
    "gradient_clipping": 1.0,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_num_steps": 0,
    "fp16.enabled": False,
    "bf16.enabled": False,
}
_TRAINERS: Tree = {
    "optimizer": {
        "type": "AdamW",
        "exclude_norms_and_biases": True,
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "scheduler": {
        "type": "linear",
        "params": dict.fromkeys(("warmup_num_steps", "total_num_steps"), "auto"),
    },
}
