"""Suggestions for unknown keys: the known key that an unknown one resembles.

A key resembles another if a few letters differ, if it begins another's name, or if it is another
key's name in the wrong section. Only keys are suggested that would be accepted with its value.
"""

from dataclasses import dataclass
from typing import Any

from jaxspeed.config.tree import PARAMS, VOCABULARY, keys_in, section_paths
from jaxspeed.config.verdicts import shown
from jaxspeed.near_words import is_near

# Sections that DeepSpeed does not have.
OWN_SECTIONS = ("mesh", "parallel", "model", "objective", "data", "run")

REMOVE = object()
"""Value of a key that is removed."""

Fix = dict[str, Any]
"""Paths with new values, which fix a problem."""


@dataclass(frozen=True)
class Suggestion:
    """Text on what to write instead of a key, with the change that does it.

    `place` is the key's path, if only its section is wrong.
    """

    text: str
    fix: Fix
    place: str = ""


# Names by which people know other keys: in any section, and in the key's own.
_MEANT = {
    "max_grad_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    "bfp16": "bf16",
    "max_seq_length": "data.seq_len",
    "zero_stage": "zero_optimization.stage",
    "num_train_epochs": "run.epochs",
    "max_steps": "run.steps",
    "eval_steps": "run.eval_every",
    "save_steps": "run.checkpoint_every",
    "ref_model": "objective.reference_model",
    "reward_funcs": "objective.rewards",
    "rollout_func": "objective.rollout",
} | dict.fromkeys(
    ("per_device_batch_size", "per_device_train_batch_size", "micro_batch_per_gpu"),
    "train_micro_batch_size_per_gpu",
)
_MEANT_HERE = {
    "scheduler.params": {"warmup_steps": "warmup_num_steps"},
    "optimizer.params": {"learning_rate": "lr"},
    "mesh": {"dp": "data", "tp": "tensor", "pp": "pipe", "cp": "seq", "sp": "seq", "ep": "expert"},
    "data": {"sample_packing": "packing", "max_length": "seq_len", "sequence_len": "seq_len"},
    "lora": {
        "rank": "r", "lora_r": "r", "lora_rank": "r", "alpha": "lora_alpha", "alfa": "lora_alpha",
        "lora_alfa": "lora_alpha", "dropout": "lora_dropout", "lora_bias": "bias",
        "lora_target_modules": "target_modules", "lora_modules_to_save": "modules_to_save",
        "rslora": "use_rslora", "peft_use_rslora": "use_rslora", "dora": "use_dora",
        "peft_use_dora": "use_dora",
    },
}  # fmt: skip
_OF_ASSISTANT = (
    "By default a conversation's loss counts what the assistant says, or the completion; "
    "data.train_on changes that: remove the key."
)
_SCALE = "fp16 alone scales the loss, since bf16 has the range of fp32: remove the key."
_REMOVED = {
    "data.assistant_only_loss": _OF_ASSISTANT,
    "data.completion_only_loss": _OF_ASSISTANT,
    "data.train_on_inputs": _OF_ASSISTANT,
    "objective.use_vllm": "The model that trains samples itself: remove the key.",
    "objective.max_prompt_length": "Prompts longer than data.seq_len are dropped: remove it.",
    "flash_attention": "The model calls its attention itself: remove the key.",
    "fp16.opt_level": "It is Apex's, which has no other setting here: remove the key.",
} | {
    f"bf16.{key}": _SCALE
    for key in (
        *("auto_cast", "loss_scale", "dynamic_loss_scale", "loss_scale_window"),
        *("initial_scale_power", "hysteresis", "min_loss_scale"),
    )
}
_ENABLED = 'Write "bf16": {"enabled": true}, or fp16.'
_EVERY = "run.eval_every is the number of steps between evaluations."
# What to write instead of keys without a counterpart of their form.
_WRITTEN = {
    "precision": _ENABLED,
    "mixed_precision": _ENABLED,
    "gradient_checkpointing": 'Write "parallel": {"remat": "full"}.',
    "objective.generation_batch_size": "Write train_batch_size, which counts completions.",
    "mesh.fsdp": "Write mesh.data, and zero_optimization.stage 3.",
    "run.evaluation_strategy": _EVERY,
    "run.eval_strategy": _EVERY,
    "run.resume": "The newest checkpoint in run.output, the run's folder, is resumed: remove it.",
    "run.load_best_model_at_end": "Remove it: run.keep_every retains checkpoints, --tag names one.",
    "scheduler.params.warmup_ratio": "Needs steps: warmup_num_steps.",
}

# Names of keys in section-less files of which no other is meant, though some resemble one.
_ANNOTATIONS = ("comment", "comments", "description", "name", "notes", "version")


def suggest(path: str, value: Any, tree: Any = None) -> Suggestion | None:
    """Suggest what an unknown key means; None if it resembles no known key.

    Args:
      path: the unknown key.
      value: its value.
      tree: the config, whose optimizer and schedule decide which parameters exist.
    """
    section, _, name = path.rpartition(".")
    if path in _REMOVED:
        return Suggestion(_REMOVED[path], {path: REMOVE})
    if path in _WRITTEN:
        return Suggestion(_WRITTEN[path], {})
    if path == "fp16.dynamic_loss_scale":
        fix = {path: REMOVE} | ({"fp16.loss_scale": 0} if value else {})
        return Suggestion("A loss_scale of 0 is dynamic: write that instead.", fix)
    if not section and name.lower() in _ANNOTATIONS:
        return None
    here = _known_here(section, name.lower(), value, tree)
    known = here or _elsewhere(name.lower(), section, value, tree)
    if known is None:
        return None
    name = known.removeprefix(f"{section}.")
    text = f'Did you mean "{known if "." in name else name}"?'
    return Suggestion(text, {path: REMOVE, known: value}, "" if here else known)


def _known_here(section: str, lower: str, value: Any, tree: Any) -> str | None:
    """Path of the known key of which a name in this section is an alias or a typo."""
    if lower in _MEANT:
        return _MEANT[lower]
    here = _siblings(section, tree)
    if (meant := _MEANT_HERE.get(section, {}).get(lower)) in here:
        return f"{section}.{meant}"
    for test in (lambda known: known.lower() == lower, lambda known: is_near(lower, known.lower())):
        key = next((k for k in here if test(k) and _takes(f"{section}.{k}", value)), None)
        if key is not None:
            return f"{section}.{key}".removeprefix(".")
    return None


def _siblings(section: str, tree: Any) -> list[str]:
    if section not in PARAMS:
        return keys_in(section)
    params = _params_of(section, tree)
    return list(params.model_fields) if params else []


def _params_of(section: str, tree: Any) -> Any:
    """Parameters of the config's own optimizer or schedule."""
    kind = tree.get(section.partition(".")[0]) if isinstance(tree, dict) else None
    name = kind.get("type") if isinstance(kind, dict) else None
    table = {known.lower(): params for known, params in PARAMS[section].items()}
    return table.get(name.lower()) if isinstance(name, str) else None


def _elsewhere(name: str, section: str, value: Any, tree: Any) -> str | None:
    """Path of the one key that has this name in a section around this one or below.

    Names of one word, such as `name` or `seed`, say too little, but for `lr` and its like.
    """
    is_own = section.partition(".")[0] in OWN_SECTIONS
    paths = []
    for path in (*VOCABULARY, *section_paths()):
        head, _, last = path.rpartition(".")
        if last != name or (head.partition(".")[0] in OWN_SECTIONS) != is_own:
            continue
        nested = f"{head}.".startswith(f"{section}." if section else "")
        around = f"{section}.".startswith(f"{head}." if head else "")
        if not (nested or around) or head in ("optimizer.groups", "data.mixture", "data.eval"):
            continue
        params = _params_of(head, tree) if head in PARAMS else None
        if head not in PARAMS or (params and name in params.model_fields):
            paths.append(path)
    specific = (
        "_" in name or name == "stage" or any(path.startswith("optimizer.") for path in paths)
    )
    is_one = len(paths) == 1 and specific and _takes(paths[0], value)
    return paths[0] if is_one else None


def _takes(path: str, value: Any) -> bool:
    """Whether the key, or the section, may have this value."""
    key = VOCABULARY.get(path.removeprefix("."))
    return isinstance(value, dict) if key is None else key.verdict != "refused" or key.is_off(value)


def own_key(path: str) -> str:
    """Sentence that names jaxspeed's own key of the same name, or ''."""
    name = path.rpartition(".")[2]
    paths = [p for p in VOCABULARY if p.rpartition(".")[2] == name and p.startswith(OWN_SECTIONS)]
    return f" jaxspeed's key is {shown(paths[0])}." if paths else ""
