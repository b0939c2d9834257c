"""Sections `mesh`, `parallel`, `pipeline` and `activation_checkpointing`."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict, create_model
from pydantic_core import PydanticCustomError

from jaxspeed.axes import AXES, DATA, data_ranks, sample_axes
from jaxspeed.config.remat import Remat, bytes_of
from jaxspeed.config.types import (
    LARGEST,
    Count,
    Flag,
    Lenient,
    Natural,
    Pattern,
    Positive,
    Section,
    Share,
    Text,
    integral,
    lower,
    section,
)
from jaxspeed.config.verdicts import approximated, harmless, honoured


def _axis_size(value: Any) -> Any:
    value = integral(value)
    if value == -1 or _is_size(value):
        return value
    needs = "an integer number of devices, at least 1, or -1 for the remaining ones"
    raise PydanticCustomError("axis_size", "{needs}", {"needs": needs})


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST


AxisSize = Annotated[int, BeforeValidator(_axis_size)]


_PARTITIONED = (
    "DeepSpeed partitions activations and gradients between stages over the model-parallel ranks, "
    "and gathers them on arrival. Here they are sharded over tensor with "
    "parallel.sequence_parallel_activations; otherwise XLA chooses."
)
_SWITCHES_ON = (
    "It switches recomputation on; in DeepSpeed only where the model calls its checkpointing."
)
_BUFFERS = "An option of DeepSpeed's runtime; XLA plans the buffers."
NO_TENSOR = ("mesh.tensor", (1,))
NO_SEQUENCE = ("mesh.seq", (1,))
_RING = ("parallel.data_reduction", ("ring",))
_NO_PIPELINE = ("mesh.pipe", (1,))
_SYNCHRONOUS = ("parallel.max_staleness", (None,))
_SERVER = ("parallel.data_reduction", ("parameter_server",))


class _Mesh(Section):
    """Number of devices of each axis; one may be -1, for the remaining devices."""

    if TYPE_CHECKING:

        def __getattr__(self, axis: str) -> int: ...

    @property
    def ranks(self) -> int | None:
        """Number of shards of a batch's samples; None if that depends on the devices."""
        sizes = self.model_dump()
        return None if any(sizes[axis] == -1 for axis in sample_axes()) else data_ranks(sizes)


if TYPE_CHECKING:
    Mesh = _Mesh
else:
    _fields = {
        name: (AxisSize, honoured(-1 if name == DATA else 1, axis.about))
        for name, axis in AXES.items()
    }
    Mesh = create_model(
        "Mesh", __base__=_Mesh, __module__=__name__, __doc__=_Mesh.__doc__, **_fields
    )


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


def _tiles(value: Any) -> Any:
    value = lower(integral(value))
    if value in ("auto", "none") or _is_size(value):
        return value
    needs = 'an integer number of tiles, at least 1, "auto" or "none"'
    raise PydanticCustomError("tiles", "{needs}", {"needs": needs})


TileCount = Annotated[
    Any, BeforeValidator(_tiles, json_schema_input_type=int | Literal["auto", "none"])
]


SequenceKind = Annotated[
    Literal["auto", "gather", "ulysses", "ring", "both"], BeforeValidator(lower)
]
SequenceLayout = Annotated[Literal["auto", "contiguous", "zigzag"], BeforeValidator(lower)]


class SequenceParallel(Section):
    """How sequences are sharded over `mesh.seq`."""

    kind: SequenceKind = honoured(
        "auto",
        'What attention exchanges: "gather", all keys and values to every device; "ulysses", '
        'all-to-alls from positions to heads and back; "ring", keys and values from neighbour to '
        'neighbour; "both", Ulysses in groups and a ring over them; "auto", what takes the least '
        "time.",
        unless=NO_SEQUENCE,
    )
    layout: SequenceLayout = honoured(
        "auto",
        'The order of tokens over the devices: "contiguous", a range for each; "zigzag", two '
        "chunks for each, the r-th and the r-th from the end, which have equal work under a causal "
        'mask, and which the loss has to allow; "auto", zig-zag where the loss allows it and it '
        "divides the work of attention more evenly.",
        unless=NO_SEQUENCE,
    )
    dims: dict[Text, Count] = honoured(
        {},
        "The dim of positions of arrays of the batch, by their names. By default it is dim 1 of "
        "integers [batch, seq], and of other arrays in which dim 1 is as long.",
        unless=NO_SEQUENCE,
    )


class Parallel(Section):
    """Keys of parallelism that DeepSpeed does not have."""

    units: list[Pattern] = honoured(
        [],
        "The modules whose weights ZeRO 3 gathers one at a time and to which remat applies, as "
        "class names or path patterns; by default the repeated modules.",
    )
    full_precision: list[Pattern] = honoured(
        [], "Parameters that are never cast, as path patterns."
    )
    state_collections: list[Text] | None = honoured(
        None,
        "State carried between steps besides parameters: names of Linen collections or nnx "
        "Variable types; by default all but sown and intermediate values.",
    )
    logical_axes: dict[Pattern, list[Text | None]] = honoured(
        {},
        'Dim names of parameters whose model has none, by path pattern: {"**/up/kernel": '
        '["embed", "mlp"]}; one "..." stands for any number of dims without a name.',
    )
    axis_names: dict[Text, Literal["tensor", "data"] | None] = honoured(
        {},
        "Mesh axes by which a model annotates its parameters, and what they are here: "
        '{"mp": "tensor", "fsdp": "data"}; tp, mp and model are tensor by default. What is "data" '
        "or null is left to the config.",
    )
    gradient_reduction: Annotated[
        Literal["auto", "step", "micro_batch"], BeforeValidator(lower)
    ] = honoured(
        "auto",
        'When gradients are reduced over data ranks: once a "step" (stages 0 and 1), every '
        '"micro_batch", or "auto".',
    )
    batch_parts: Count = honoured(
        1,
        "Parts of a micro-batch that do not wait for each other, so that the cores of a CPU work "
        "on several at once. On a single device, for a loss that returns (sum, weight); the "
        "program is compiled that many times as large.",
    )
    data_reduction: Reduction = honoured(
        "xla",
        'How gradients are summed over data ranks: "xla" by its collectives, "ring" by ring '
        'all-reduces with a documented order of summation, "parameter_server" by devices that own '
        "the parameters.",
    )
    ring_directions: Annotated[Literal["one", "both"], BeforeValidator(lower)] = honoured(
        "both",
        '"both" sends half of each chunk in each direction, "one" all of it in one.',
        when=_RING,
    )
    ring_wire: Annotated[Literal["none", "bf16", "int8"], BeforeValidator(lower)] = honoured(
        "none",
        'Format of ring messages: "none" (the gradients\' dtype), "bf16", or "int8" in blocks '
        "with error feedback.",
        when=_RING,
    )
    ring_bucket_bytes: Bytes = honoured(
        32 * 2**20,
        "Gradients are fused into buckets of about this many bytes, one ring each; text such as "
        '"32 MiB" works too.',
        when=_RING,
    )
    servers: Count = honoured(
        1,
        "Number of devices that own the parameters and the optimizer state; the others are "
        "workers.",
        when=_SERVER,
    )
    max_staleness: Natural | None = honoured(
        None,
        "Asynchronous workers; no gradient that is more than this many versions old is applied. "
        "null: synchronous.",
        when=_SERVER,
    )
    on_stale: Annotated[Literal["drop", "wait"], BeforeValidator(lower)] = honoured(
        "wait",
        'A push that would be too old is prevented ("wait": its worker waits before it pulls), or '
        'dropped and counted ("drop").',
        when=_SERVER,
        unless=_SYNCHRONOUS,
    )
    staleness_decay: Decay = honoured(
        1.0,
        "A gradient of staleness t is scaled by this to the power t.",
        when=_SERVER,
        unless=_SYNCHRONOUS,
    )
    worker_pace: list[Positive] = honoured(
        [], "Simulated compute time of each worker, for studies; by default 1.", when=_SERVER
    )
    sequence_parallel_activations: Flag = honoured(
        False,
        "Activations between sharded matmuls are sharded along the sequence over tensor.",
        unless=NO_TENSOR,
    )
    sequence: SequenceParallel = section()
    tensor_overlap: Overlap = honoured(
        "auto",
        'Overlap of tensor-parallel collectives with matmuls: "ring" (a collective matmul), '
        '"ring_both_ways" (in both directions), "none"; "auto" is the best for the platform.',
        unless=NO_TENSOR,
    )
    infer_tensor_cuts: Annotated[Literal["auto", "never"], BeforeValidator(lower)] = honoured(
        "auto",
        '"auto" infers the tensor sharding from the traced program if neither model nor config '
        'sets it; "never" leaves the weights replicated.',
        unless=NO_TENSOR,
    )
    remat: Remat = honoured(
        "none",
        "Residuals that each unit (the repeated module) saves for its backward pass, which "
        'recomputes the rest: "none" recomputes nothing, "full" all but its input, "dots" saves '
        'matmuls with weights, "attention" the output of attention, so that its kernel runs '
        'forward once; {"every_n": k} saves the input of every k-th unit, {"budget": bytes} what '
        'is most expensive to recompute within so many bytes per device, and {"save": [...], '
        '"offload": [...]} the activations of these names.',
    )
    sequence_tiles: TileCount = honoured(
        "auto",
        "The number of tiles of the sequence in which each device evaluates what is per token, "
        'such as the feed-forward blocks and the loss, twice as in a checkpoint; "auto" by bytes, '
        'for sequences of more than 8192 tokens per device; "none" for no tiles.',
    )
    pipeline_schedule: Schedule = honoured(
        "1f1b",
        'Order of micro-batches in the stages: "1f1b", one forward and one backward alternate; '
        '"gpipe", all forwards first, which saves the inputs of every micro-batch; "interleaved", '
        "1f1b with several chunks of the model per device, for a smaller bubble.",
        unless=_NO_PIPELINE,
    )
    pipeline_chunks: Chunks = honoured(
        2,
        "Number of chunks of the model per device.",
        when=("parallel.pipeline_schedule", ("interleaved",)),
        unless=_NO_PIPELINE,
    )
    pipeline_recompute: Recompute = honoured(
        "stage",
        'What the backward pass of a stage recomputes: "stage" all but its input; "layers" the '
        'same, one layer at a time, for less memory and one more forward; "save" nothing.',
        unless=_NO_PIPELINE,
    )
    pipeline_gather: Annotated[Literal["tick", "step"], BeforeValidator(lower)] = honoured(
        "tick",
        'When ZeRO 3 gathers a stage\'s weights: one layer at a time in every "tick", or all of '
        'them once per "step".',
        when=("zero_optimization.stage", (3,)),
        unless=_NO_PIPELINE,
    )


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


class PipelineSection(Lenient):
    """Pipeline parallelism."""

    stages: Stages = honoured("auto", 'The size of mesh.pipe; "auto" does not set it.')
    partition: Partition = approximated(
        "best",
        "The blocks of a stack are equal, so that balancing layers, parameters or FLOPs gives the "
        "same stages. Embedding and head need no balancing, since all stages share them.",
        unless=_NO_PIPELINE,
    )
    seed_layers: Flag = harmless(
        False, "Each layer has its own random stream, independent of its stage."
    )
    activation_checkpoint_interval: Natural = approximated(
        0,
        'Same as parallel.pipeline_recompute "layers": more than 1 counts as 1, since each layer '
        "is one checkpoint; 0 does not set it.",
        0,
        unless=_NO_PIPELINE,
    )
    pipe_partitioned: Flag = approximated(True, _PARTITIONED, unless=_NO_PIPELINE)
    grad_partitioned: Flag = approximated(True, _PARTITIONED, unless=_NO_PIPELINE)


class ActivationCheckpointing(Lenient):
    """Recomputation in the backward pass."""

    partition_activations: Flag = approximated(
        False,
        "Saved residuals are sharded over tensor, and gathered in the backward pass. "
        + _SWITCHES_ON,
        False,
        unless=NO_TENSOR,
    )
    cpu_checkpointing: Flag = approximated(
        False,
        'Saved residuals are offloaded to host memory; without parallel.remat those of "full". '
        + _SWITCHES_ON,
        False,
    )
    cpu_checkpointing_ratio: Share = honoured(
        1.0,
        "The share of each saved residual that is offloaded: of the tokens or features of a "
        "sample, so that every layer transfers as much.",
        when=("activation_checkpointing.cpu_checkpointing", (True,)),
    )
    number_checkpoints: Count | None = approximated(
        None,
        "Number of units that save their input: parallel.remat every_n, by count. In DeepSpeed it "
        "is the number of contiguous buffers, and changes nothing that is saved.",
        None,
    )
    contiguous_memory_optimization: Flag = harmless(False, _BUFFERS)
    synchronize_checkpoint_boundary: Flag = harmless(False, _BUFFERS)
    profile: Flag = harmless(False, _BUFFERS)
