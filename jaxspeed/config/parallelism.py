"""Sections `mesh`, `parallel`, `pipeline` and `activation_checkpointing`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict
from pydantic_core import PydanticCustomError

from jaxspeed.config.remat import Remat, bytes_of
from jaxspeed.config.types import (
    LARGEST,
    Count,
    Flag,
    Natural,
    Pattern,
    Positive,
    Section,
    Text,
    integral,
    lower,
)

AXES = ("pipe", "replica", "data", "seq", "expert", "tensor")


def _axis_size(value: Any) -> Any:
    value = integral(value)
    if value == -1 or _is_size(value):
        return value
    needs = "an integer number of devices, at least 1, or -1 for the remaining ones"
    raise PydanticCustomError("axis_size", "{needs}", {"needs": needs})


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST


AxisSize = Annotated[int, BeforeValidator(_axis_size)]


class Mesh(Section):
    """Number of devices of each axis; one may be -1, for the remaining devices."""

    pipe: AxisSize = 1
    replica: AxisSize = 1
    data: AxisSize = -1
    seq: AxisSize = 1
    expert: AxisSize = 1
    tensor: AxisSize = 1


Overlap = Annotated[Literal["auto", "none", "ring", "ring_both_ways"], BeforeValidator(lower)]
Schedule = Annotated[Literal["1f1b", "gpipe", "interleaved"], BeforeValidator(lower)]
Chunks = Annotated[int, Strict(), Field(ge=2, le=LARGEST), BeforeValidator(integral)]
Recompute = Annotated[Literal["stage", "layers", "save"], BeforeValidator(lower)]
Reduction = Annotated[Literal["xla", "ring", "parameter_server"], BeforeValidator(lower)]
Decay = Annotated[float, Strict(), Field(gt=0, le=1, allow_inf_nan=False)]


def _bytes(value: Any) -> Any:
    read = bytes_of(value)
    if read is None:
        needs = 'a number of bytes, at least 1, or text such as "32 MiB"'
        raise PydanticCustomError("bytes", "{needs}", {"needs": needs})
    return read


Bytes = Annotated[int, BeforeValidator(_bytes, json_schema_input_type=int | str)]


class Parallel(Section):
    """Keys of parallelism that DeepSpeed does not have."""

    units: list[Pattern] = Field(default_factory=list)
    full_precision: list[Pattern] = Field(default_factory=list)
    state_collections: list[Text] | None = None
    logical_axes: dict[Pattern, list[Text | None]] = Field(default_factory=dict)
    axis_names: dict[Text, Literal["tensor", "data"] | None] = Field(default_factory=dict)
    gradient_reduction: Annotated[
        Literal["auto", "step", "micro_batch"], BeforeValidator(lower)
    ] = "auto"
    data_reduction: Reduction = "xla"
    ring_directions: Annotated[Literal["one", "both"], BeforeValidator(lower)] = "both"
    ring_wire: Annotated[Literal["none", "bf16", "int8"], BeforeValidator(lower)] = "none"
    ring_bucket_bytes: Bytes = 32 * 2**20
    servers: Count = 1
    max_staleness: Natural | None = None
    on_stale: Annotated[Literal["drop", "wait"], BeforeValidator(lower)] = "wait"
    staleness_decay: Decay = 1.0
    worker_pace: list[Positive] = Field(default_factory=list)
    sequence_parallel_activations: Flag = False
    tensor_overlap: Overlap = "auto"
    infer_tensor_cuts: Annotated[Literal["auto", "never"], BeforeValidator(lower)] = "auto"
    remat: Remat = "none"
    pipeline_schedule: Schedule = "1f1b"
    pipeline_chunks: Chunks = 2
    pipeline_recompute: Recompute = "stage"
    pipeline_gather: Annotated[Literal["tick", "step"], BeforeValidator(lower)] = "tick"


def _stages(value: Any) -> Any:
    value = integral(value)
    if value == "auto" or _is_size(value):
        return value
    needs = 'an integer number of stages, at least 1, or "auto" for mesh.pipe'
    raise PydanticCustomError("stages", "{needs}", {"needs": needs})


Stages = Annotated[Any, BeforeValidator(_stages, json_schema_input_type=int | Literal["auto"])]

PARTITIONS = ("best", "uniform", "parameters", "flops")
_BY_TYPE = "type:"


def _partition(value: Any) -> Any:
    method = lower(value)
    if method in PARTITIONS:
        return method
    if isinstance(method, str) and method.startswith(_BY_TYPE) and method != _BY_TYPE:
        return _BY_TYPE + value[len(_BY_TYPE) :]
    needs = (
        f'one of {", ".join(PARTITIONS)}, or "type:" and a regex; all partition the blocks evenly'
    )
    raise PydanticCustomError("partition", "{needs}", {"needs": needs})


Partition = Annotated[str, BeforeValidator(_partition)]


class PipelineSection(Section):
    """Pipeline parallelism."""

    stages: Stages = "auto"
    partition: Partition = "best"
    seed_layers: Flag = False
    activation_checkpoint_interval: Natural = 0
    pipe_partitioned: Flag = True
    grad_partitioned: Flag = True


class ActivationCheckpointing(Section):
    """Recomputation in the backward pass."""

    partition_activations: Flag = False
    cpu_checkpointing: Flag = False
    number_checkpoints: Count | None = None
    contiguous_memory_optimization: Flag = False
    synchronize_checkpoint_boundary: Flag = False
    profile: Flag = False
