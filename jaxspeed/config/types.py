"""Leaf types of the schema: strict, but for what DeepSpeed's files need.

5e8 is an integer, because DeepSpeed's examples write bucket sizes so. The text "8" is a number and
1 is true only in the sections in which DeepSpeed reads them so.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
)
from pydantic_core import PydanticCustomError

from jaxspeed.config.patterns import pattern_problem


class Section(BaseModel):
    """A mapping in the config: frozen, and without unknown keys.

    Its validator is built when it is first used, not when jaxspeed is imported.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def section() -> Any:
    """The field of a section that a config may leave out.

    Its default is an empty mapping, which the validator of all sections reads: a section's own
    constructor would build another one.
    """
    return Field(default_factory=dict, validate_default=True)


class Lenient(Section):
    """A section in which DeepSpeed ignores unknown keys."""


class Coercing(Section):
    """A section in which DeepSpeed reads numbers and flags from text, and "auto" as the default."""


def integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unless_infinite(value: Any) -> Any:
    return None if str(value).lower() in ("inf", "infinity") else value


def lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


DTYPE_WORDS = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}


def read_dtype(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return DTYPE_WORDS.get(value.lower().removeprefix("torch."), value)


def _pattern(value: str) -> str:
    problem = pattern_problem(value)
    if problem:
        raise PydanticCustomError("pattern", "{needs}", {"needs": problem})
    return value


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise PydanticCustomError("text", "{needs}", {"needs": "text without NUL characters"})
    return value


def is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def word_or(word: str, is_other: Callable[[Any], bool], needs: str) -> Discriminator:
    """Tells a word, tagged [word], from values tagged [other]; one error for all else."""

    def chosen(value: Any) -> str | None:
        return "[other]" if is_other(value) else "[word]" if value == word else None

    return Discriminator(
        chosen,
        custom_error_type="text",
        custom_error_message="{needs}",
        custom_error_context={"needs": needs},
    )


Flag = Annotated[bool, Strict()]
# No path, and no name, has a NUL.
Text = Annotated[str, Strict(), Field(min_length=1), AfterValidator(_without_nul)]
AutoOrTexts = Annotated[
    Annotated[Literal["auto"], Tag("[word]")] | Annotated[list[Text], Tag("[other]")],
    word_or("auto", is_list, '"auto" or a list of texts'),
]
LARGEST = 2**63 - 1
Int = Annotated[int, Strict(), Field(ge=-LARGEST, le=LARGEST), BeforeValidator(integral)]
Count = Annotated[int, Strict(), Field(ge=1, le=LARGEST), BeforeValidator(integral)]
# Infinity, as Accelerate writes it, is never.
PrintEvery = Annotated[Count | None, BeforeValidator(_unless_infinite)]
Natural = Annotated[int, Strict(), Field(ge=0, le=LARGEST), BeforeValidator(integral)]
# What a program takes as one argument: an int32.
Seed = Annotated[int, Strict(), Field(ge=0, le=2**31 - 1), BeforeValidator(integral)]
# 2 ** 127 is the largest power of two that fp32, in which the loss is scaled, holds.
ScalePower = Annotated[int, Strict(), Field(ge=0, le=127), BeforeValidator(integral)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Strict(), Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Strict(), Field(ge=0, lt=1, allow_inf_nan=False)]
Betas = tuple[Beta, Beta]

Dtype = Annotated[
    Literal["fp32", "fp16", "bf16"],
    BeforeValidator(read_dtype, json_schema_input_type=Literal[tuple(DTYPE_WORDS)]),
]
ReductionOp = Annotated[Literal["mean", "sum"], BeforeValidator(lower)]
Pattern = Annotated[str, Strict(), AfterValidator(_pattern)]
Opaque = dict[str, Any]
