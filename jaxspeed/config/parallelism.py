"""Sections that spread a model over devices, or save its activations' memory."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jaxspeed.config.types import (
    LARGEST,
    Flag,
    Natural,
    Pattern,
    Section,
    Text,
    lower,
    whole,
)

AXES = ("pipe", "replica", "data", "seq", "expert", "tensor")


def _axis_size(value: Any) -> Any:
    value = whole(value)
    if value == -1 or _is_size(value):
        return value
    needs = "a whole number of devices, at least 1, or -1 for all that remain"
    raise PydanticCustomError("axis_size", "{needs}", {"needs": needs})


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST


AxisSize = Annotated[int, BeforeValidator(_axis_size)]


class Mesh(Section):
    """How many devices each axis has; one may be -1, for all that remain."""

    pipe: AxisSize = 1
    replica: AxisSize = 1
    data: AxisSize = -1
    seq: AxisSize = 1
    expert: AxisSize = 1
    tensor: AxisSize = 1


Overlap = Annotated[Literal["auto", "none", "ring", "ring_both_ways"], BeforeValidator(lower)]


class Parallel(Section):
    """What DeepSpeed has no word for."""

    units: list[Pattern] = Field(default_factory=list)
    full_precision: list[Pattern] = Field(default_factory=list)
    logical_axes: dict[Pattern, list[Text | None]] = Field(default_factory=dict)
    gradient_reduction: Annotated[
        Literal["auto", "step", "micro_batch"], BeforeValidator(lower)
    ] = "auto"
    sequence_parallel_activations: Flag = False
    tensor_overlap: Overlap = "auto"
    infer_tensor_cuts: Annotated[Literal["auto", "never"], BeforeValidator(lower)] = "auto"


def _stages(value: Any) -> Any:
    value = whole(value)
    if value == "auto" or _is_size(value):
        return value
    needs = 'a whole number of stages, at least 1, or "auto" for mesh.pipe'
    raise PydanticCustomError("stages", "{needs}", {"needs": needs})


Stages = Annotated[Any, BeforeValidator(_stages, json_schema_input_type=int | Literal["auto"])]


class Pipeline(Section):
    """Pipeline parallelism."""

    stages: Stages = "auto"
    partition: Text = "best"
    seed_layers: Flag = False
    activation_checkpoint_interval: Natural = 0
    pipe_partitioned: Flag = True
    grad_partitioned: Flag = True


class ActivationCheckpointing(Section):
    """Recomputation in the backward pass."""

    partition_activations: Flag = False
    cpu_checkpointing: Flag = False
    number_checkpoints: Natural | None = None
    contiguous_memory_optimization: Flag = False
    synchronize_checkpoint_boundary: Flag = False
    profile: Flag = False
