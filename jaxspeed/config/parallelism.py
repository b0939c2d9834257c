"""Sections that spread a model over devices, or save its activations' memory."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jaxspeed.config.types import (
    LARGEST,
    Flag,
    Natural,
    Opaque,
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


class Parallel(Section):
    """What DeepSpeed has no word for."""

    units: list[Pattern] = Field(default_factory=list)
    full_precision: list[Pattern] = Field(default_factory=list)
    logical_axes: dict[Pattern, list[Text | None]] = Field(default_factory=dict)
    gradient_reduction: Annotated[
        Literal["auto", "step", "micro_batch"], BeforeValidator(lower)
    ] = "auto"


class TensorParallel(Section):
    """DeepSpeed's AutoTP."""

    autotp_size: Natural = 0
    preset_model: Text | None = None
    partition_config: Opaque | None = None
    tp_overlap_comm: Flag = False


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
