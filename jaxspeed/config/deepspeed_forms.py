"""DeepSpeed's other names and forms of keys and values, rewritten to those of the schema.

What DeepSpeed reads from a form of its own is read so here: old names, `zero_optimization: true`,
numbers as text in the sections that it validates with Pydantic, unknown keys that it ignores.
"""

import math
import typing
from dataclasses import dataclass, field
from typing import Any

from jaxspeed.config.problems import Problem
from jaxspeed.config.schema import Settings
from jaxspeed.config.suggestions import suggest
from jaxspeed.config.tree import VOCABULARY, section_in
from jaxspeed.config.types import Coercing, Lenient, Section
from jaxspeed.config.verdicts import Key, shown
from jaxspeed.near_words import is_near

ZERO = "zero_optimization"

ALIASES = {"bfloat16": "bf16", "tensor_parallel.tensor_parallel": "tensor_parallel.tp"} | {
    # DeepSpeed's fields have these names, and the ones with stage3_ are Pydantic's aliases of them.
    path.replace("stage3_", ""): path
    for path in VOCABULARY
    if path.startswith(f"{ZERO}.stage3_") and "fp16" not in path
}
ALIASES["tensor_parallel.kernel_inject"] = "tensor_parallel.replace_with_kernel_inject"

_WARMUPS = ("log", "linear")


@dataclass
class Forms:
    """A config in the schema's names and values, and what was rewritten.

    `ignored` has the unknown keys that DeepSpeed ignores, with a sentence on the place of those
    that are misplaced.
    """

    tree: dict[str, Any]
    notes: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def canonical_path(path: str) -> str:
    """Replace old names in a path by current ones."""
    for old, new in ALIASES.items():
        if path == old or path.startswith(f"{old}."):
            return new + path[len(old) :]
    return path


def rewrite(written: dict[str, Any], strict: bool) -> Forms:
    """Rewrite a config without comments; with `strict`, unknown keys stay for the schema."""
    forms = Forms({})
    forms.tree = _rewritten(written, Settings, "", forms, None if strict else written)
    _warmup_type(forms)
    return forms


def _rewritten(node: dict[str, Any], section: type[Section], prefix: str, forms: Forms,
               written: dict[str, Any] | None) -> dict[str, Any]:  # fmt: skip
    result: dict[str, Any] = {}
    for name, value in node.items():
        path = prefix + name
        known = ALIASES.get(path, path).rpartition(".")[2]
        if known != name and known in node:
            works = "Both are the same section: keep one." if not prefix else "Keep one of the two."
            forms.problems.append(Problem(path, f"both it and {known}", works))
            continue
        field = section.model_fields.get(known)
        inner = section_in(field.annotation) if field else None
        path = prefix + known
        if path == ZERO and isinstance(value, bool):
            value = {"stage": int(value)}
            forms.notes[path] = f"{shown(bool(value['stage']))} is stage {value['stage']}."
        if field is None and written is not None and issubclass(section, Lenient):
            meant = suggest(path, value, written)
            if meant is None or meant.place:
                where = f"It has an effect only as {meant.place}." if meant else ""
                forms.ignored[path] = where
                continue
        elif inner is not None and isinstance(value, dict):
            value = _rewritten(value, inner, f"{path}.", forms, written)
        elif field is not None and issubclass(section, Coercing):
            read, key = _coerced(value, _kinds(field.annotation)), field.json_schema_extra
            if type(read) is not type(value):
                forms.notes[path] = f"Read as {shown(read)}, as DeepSpeed does."
            elif isinstance(key, Key) and key.verdict == "harmless" and _is_fraction(value, field):
                read = round(value)
                forms.notes[path] = f"Rounded to {read}."
            value = read
        result[known] = value
    return result


def _is_fraction(value: Any, field: Any) -> bool:
    """Whether a value is a finite number with a fraction where an integer belongs."""
    return (
        isinstance(value, float)
        and math.isfinite(value)
        and not value.is_integer()
        and int in (kinds := _kinds(field.annotation))
        and float not in kinds
    )


def _kinds(annotation: Any) -> set[type]:
    """Plain types of a field's annotation."""
    if isinstance(annotation, type):
        return {annotation}
    return set().union(*map(_kinds, typing.get_args(annotation)))


def _coerced(value: Any, kinds: set[type]) -> Any:
    """Read a number or a flag as Pydantic does where it is not strict."""
    if bool in kinds:
        text = str(value).lower() if isinstance(value, str | int | float) else ""
        if text in ("true", "1", "1.0", "yes", "on", "y", "t"):
            return True
        if text in ("false", "0", "0.0", "no", "off", "n", "f"):
            return False
    elif isinstance(value, str) and kinds & {int, float} and str not in kinds:
        try:
            number = float(value)
        except ValueError:
            return value
        if math.isfinite(number):
            return int(number) if number.is_integer() and float not in kinds else number
    return value


def _warmup_type(forms: Forms) -> None:
    """Replace an unknown warm-up curve by "log", as DeepSpeed does, unless it is misspelt."""
    scheduler = forms.tree.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, dict) else None
    kind = params.get("warmup_type") if isinstance(params, dict) else None
    if not isinstance(kind, str) or any(is_near(kind.lower(), k) for k in ("auto", *_WARMUPS)):
        return
    assert isinstance(scheduler, dict) and isinstance(params, dict)
    forms.tree["scheduler"] = {**scheduler, "params": {**params, "warmup_type": "log"}}
    forms.notes["scheduler.params.warmup_type"] = (
        f'{shown(kind)} is no curve that DeepSpeed knows: it takes "log".'
    )
