"""Schema of all config keys, with DeepSpeed's defaults.

The parameters that an optimizer or a schedule has are in `optimizers` and `lr_schedules`.
"""

from typing import Annotated, Any

from pydantic import Field

from jaxspeed.config.expert_section import ExpertParallel
from jaxspeed.config.lora_section import Lora
from jaxspeed.config.parallelism import (
    NO_SEQUENCE,
    ActivationCheckpointing,
    Mesh,
    Parallel,
    PipelineSection,
)
from jaxspeed.config.run_sections import (
    Autotuning,
    Checkpoint,
    CommsLogger,
    Data,
    Elasticity,
    FileMonitor,
    FlopsProfiler,
    ModelSection,
    ObjectiveSection,
    RunSection,
    Wandb,
)
from jaxspeed.config.tensor_section import TensorParallel
from jaxspeed.config.types import (
    AutoOrTexts,
    Beta,
    Coercing,
    Count,
    Dtype,
    Flag,
    Lenient,
    Natural,
    NonNegative,
    Opaque,
    Pattern,
    Positive,
    PrintEvery,
    ReductionOp,
    ScalePower,
    Section,
    Text,
    section,
)
from jaxspeed.config.verdicts import (
    REMOVED,
    approximated,
    harmless,
    has_no_part,
    honoured,
    is_absent,
    refused,
    refused_section,
)
from jaxspeed.config.zero_section import Aio, Zero

# -- dtypes of compute, accumulation and update ----------------------------------------------------


_STORED_DTYPES = (
    "Parameters are stored as fp32 masters and buffers as the model initializes them; set bf16 or "
    "fp16 for the compute dtype."
)
_DIVISION = (
    "The loss is divided before the backward pass, not the gradients before their reduction; the "
    "mean is the same, but for what overflows or underflows in 16 bits."
)
_ANY_OPTIMIZER = "Any optimizer works at any stage."
_UNBUILT = "Not built; remove it."
_GONE = f"{REMOVED}, and not built here; remove it."
_ORDERED = "A source of your own (data.source: package.module:name) decides on the samples' order."
_COMPILED = "The step is always one program, compiled by XLA."
_OFFLOADED = "Write zero_optimization.offload_optimizer or offload_param instead."
_ON_BF16 = ("bf16.enabled", (True,))
_ON_AUTOCAST = ("torch_autocast.enabled", (True,))
_ON_FP16 = ("fp16.enabled", (True,))
_ON_HYBRID = ("hybrid_engine.enabled", (True,))


class Fp16(Coercing):
    """DeepSpeed's fp16 section, with loss scaling."""

    enabled: Flag = honoured(False, "Computes in fp16 from fp32 masters, with loss scaling.")
    loss_scale: NonNegative = honoured(
        0.0, "0 is the dynamic scale, any other number a fixed one.", when=_ON_FP16
    )
    initial_scale_power: ScalePower = honoured(
        16, "The dynamic scale starts at 2 to this power.", when=_ON_FP16
    )
    loss_scale_window: Natural = honoured(
        1000, "The scale doubles after so many steps without overflow.", when=_ON_FP16
    )
    hysteresis: Count = honoured(
        2, "Number of overflows before the scale is halved.", when=_ON_FP16
    )
    consecutive_hysteresis: Flag = honoured(
        False, "A step without overflow restores the hysteresis.", when=_ON_FP16
    )
    min_loss_scale: NonNegative = honoured(1.0, "Lower bound of the scale.", when=_ON_FP16)
    auto_cast: Flag = approximated(
        False, "Floating inputs are cast to the compute dtype in any case.", when=_ON_FP16
    )
    fp16_master_weights_and_grads: Flag = honoured(
        False, "Masters and gradients are in fp16 too.", when=_ON_FP16
    )

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is dynamic, which DeepSpeed writes as a scale of 0."""
        return self.loss_scale == 0


class Bf16(Coercing):
    """DeepSpeed's bf16 section."""

    enabled: Flag = honoured(False, "Computes in bf16 from fp32 masters.")
    check_grad_overflow: Flag = honoured(
        True, "A step with a non-finite gradient is skipped and counted.", when=_ON_BF16
    )
    bf16_master_weights_and_grads: Flag = honoured(
        False, "Masters and gradients are in bf16 too.", when=_ON_BF16
    )
    bf16_optimizer_states: Flag = honoured(
        False, "The optimizer's moments are stored in bf16.", when=_ON_BF16
    )
    immediate_grad_update: Flag = harmless(False, "XLA orders the update.")


class DataTypes(Lenient):
    """Dtypes apart from the compute dtype."""

    grad_accum_dtype: Dtype | None = honoured(None, "The dtype in which gradients accumulate.")
    param_dtype: Dtype | None = refused(None, _STORED_DTYPES)
    buffer_dtype: Dtype | None = refused(None, _STORED_DTYPES)
    keep_in_fp32_modules: AutoOrTexts = honoured(
        "auto",
        "Names of parameters that layers read in fp32, beside parallel.full_precision: a name may "
        'stand anywhere in a dotted path (blocks.0.router.weight), and * is any text. "auto" and '
        "[]: those that the model itself marks. Buffers are never cast; DeepSpeed's key covers "
        "only them.",
    )


class TorchAutocast(Lenient):
    """DeepSpeed's torch_autocast section: automatic mixed precision."""

    enabled: Flag = honoured(
        False,
        "The loss is traced in fp32, and its matmuls, convolutions and attention take operands in "
        "torch_autocast.dtype; float16 with a dynamic loss scale. Weights in "
        "parallel.full_precision keep fp32.",
        differs=(
            _ON_BF16,
            "While bf16.enabled is true, all operations compute in bf16 as the model's code writes "
            "them, and none is moved to fp32.",
        ),
    )
    dtype: Dtype | None = honoured(
        None, "Dtype of these operands.", when=_ON_AUTOCAST, unless=_ON_BF16
    )
    lower_precision_safe_modules: list[Text] | None = approximated(
        None,
        "Under stage 3 the weights of these modules (classes of Flax or torch, or path patterns; "
        "null: all) that only matmuls and convolutions read are gathered, and their gradients "
        "reduced, in torch_autocast.dtype; all others, and with mesh.pipe all, in fp32. Below "
        "stage 3 gradients are reduced in the dtype that the backward pass computes.",
        when=_ON_AUTOCAST,
        unless=_ON_BF16,
    )


class CompileSection(Coercing):
    """DeepSpeed's section for torch's compiler and DeepCompile."""

    enabled: Flag = harmless(False, _COMPILED)
    disable: Flag = harmless(False, _COMPILED)
    backend: Any = harmless(None, _COMPILED)
    kwargs: Any = harmless(None, _COMPILED)
    deepcompile: Flag = harmless(False, _COMPILED)
    autoep_non_moe: Flag = harmless(False, _COMPILED)
    passes: Any = harmless(
        None, f"{_COMPILED} AutoSP is one: mesh.seq, or sequence_parallel_size, shards sequences."
    )
    free_activation: Any = harmless(None, _COMPILED)
    free_activation_threshold: Any = harmless(None, _COMPILED)
    offload_activation: Flag = refused(
        False, "Write activation_checkpointing.cpu_checkpointing instead."
    )
    offload_activation_pin_memory: Any = harmless(None, _COMPILED)
    offload_opt_states: Flag = refused(False, _OFFLOADED)
    offload_parameters: Flag = refused(False, _OFFLOADED)
    double_buffer: Any = harmless(None, _COMPILED)
    symmetric_memory: Any = harmless(None, _COMPILED)
    debug_log: Any = harmless(None, _COMPILED)
    sync_before_reduce: Any = harmless(None, _COMPILED)
    sync_after_reduce: Any = harmless(None, _COMPILED)
    sync_before_allgather: Any = harmless(None, _COMPILED)
    sync_after_allgather: Any = harmless(None, _COMPILED)
    keep_int_input_tensors: Any = harmless(None, _COMPILED)
    keep_all_input_tensors: Any = harmless(None, _COMPILED)


class HybridEngine(Coercing):
    """DeepSpeed's section for sampling from the parameters that train."""

    enabled: Flag = harmless(
        False,
        "Sampling reads the very parameters that train in any case: objective.type grpo or rloo, "
        "engine.rollout, engine.generate.",
    )
    max_out_tokens: Count = harmless(
        512,
        "A cache is as long as prompt and completion, which data.seq_len and "
        "objective.max_completion_length bound.",
    )
    inference_tp_size: Count = approximated(
        1,
        "Sampling shards the model over mesh.tensor, as the step does. Under stage 3, parameters "
        "that do not fit gathered are gathered unit by unit instead.",
        when=_ON_HYBRID,
    )
    release_inference_cache: Flag = harmless(
        False, "Caches are released after each rollout in any case."
    )
    pin_parameters: Flag = harmless(
        True,
        "Under stage 3, parameters are gathered once for a rollout where they fit, otherwise unit "
        "by unit.",
    )
    tp_gather_partition_size: Count = harmless(8, "XLA schedules the gathers.")
    enable_cuda_graph: Flag = harmless(False, "Decoding is a compiled loop on the devices.")


class Group(Section):
    """Parameter group, selected by a path pattern; the first match applies."""

    pattern: Pattern = honoured(..., "The parameters of this group, as a path pattern.")
    lr_factor: NonNegative = honoured(1.0, "Multiplies the learning rate of the group.")
    weight_decay: NonNegative | None = honoured(None, "The weight decay of the group.")
    frozen: Flag = honoured(False, "The group is not trained.")


class OptimizerSection(Lenient):
    """Optimizer: DeepSpeed's `type` and `params`, and jaxspeed's additional keys."""

    type: Text = honoured(
        ...,
        "The optimizer, built with Optax; Adam decouples its weight decay unless adam_w_mode is "
        "false.",
    )
    params: Opaque = Field(default_factory=dict)
    groups: list[Group] = Field(default_factory=list)
    exclude_norms_and_biases: Flag = honoured(
        False, "Excludes norms and biases from the weight decay."
    )
    ema_decay: Annotated[Beta, Field(gt=0)] | None = honoured(
        None, "Maintains an exponential moving average of the weights."
    )
    legacy_fusion: Flag = harmless(False, "XLA fuses the update.")


class Scheduler(Lenient):
    """A schedule: DeepSpeed's `type` and `params`."""

    type: Text = honoured(..., "The schedule, by DeepSpeed's formula; linear by Hugging Face's.")
    params: Opaque = Field(default_factory=dict)


class Settings(Lenient):
    """Fields of a config; `jaxspeed.Config` adds loading, validation and explanation."""

    strict: Flag = honoured(
        False, "Unknown keys are errors, also in sections in which DeepSpeed ignores them."
    )

    train_batch_size: Count | None = honoured(
        None,
        "Samples per optimizer step, over all devices: micro-batch x accumulation x data-parallel "
        "size.",
    )
    train_micro_batch_size_per_gpu: Count | None = honoured(
        None, "Samples per micro-batch and data rank."
    )
    gradient_accumulation_steps: Count | None = honoured(
        None, "Micro-batches per optimizer step, run by a scan inside the compiled step."
    )
    managed_gradient_accumulation: Flag = refused(
        True,
        "The step accumulates inside one program; pass engine.train_batch a complete global batch.",
    )

    gradient_clipping: NonNegative = honoured(
        1.0,
        "The gradient's global norm is clipped to this; 0 disables it. The norm before and after "
        "is a metric.",
    )
    gradient_allreduce_op: ReductionOp = honoured(
        "mean", '"mean" averages over N data ranks, "sum" is N times that.'
    )
    communication_data_type: Dtype | None = approximated(
        None,
        "Gradients are reduced in this dtype under stage 3 and where they are reduced once per "
        "step; otherwise in the dtype that the backward pass computes.",
        None,
    )
    seq_parallel_communication_data_type: Dtype = approximated(
        "fp32",
        "Where it is set, and mesh.seq is above 1, it takes the place of communication_data_type.",
        unless=NO_SEQUENCE,
    )
    prescale_gradients: Flag = approximated(False, _DIVISION, False)
    gradient_predivide_factor: Positive = approximated(1.0, _DIVISION, 1.0)
    sparse_gradients: Flag = refused(
        False,
        f"{REMOVED}. Gradients are dense arrays in XLA; remove the key, embeddings train without "
        "it.",
    )

    trainable: list[Pattern] | None = honoured(
        None,
        "Path patterns of the parameters that are trained, by default all; all others are frozen.",
    )
    lora: Lora | None = None
    optimizer: OptimizerSection | None = None
    scheduler: Scheduler | None = None

    fp16: Fp16 = section()
    bf16: Bf16 = section()
    data_types: DataTypes = section()
    torch_autocast: TorchAutocast = section()
    amp: Opaque | None = refused_section(
        f'{REMOVED}. Apex is for torch; write "bf16": {{"enabled": true}}, fp16 or torch_autocast.'
    )

    zero_optimization: Zero = section()
    zero_allow_untested_optimizer: Flag = harmless(False, _ANY_OPTIMIZER)
    zero_force_ds_cpu_optimizer: Flag = harmless(True, _ANY_OPTIMIZER)
    disable_allgather: Flag = harmless(False, "XLA chooses the collectives.")

    mesh: Mesh = section()
    parallel: Parallel = section()
    data_parallel_size: Count | None = honoured(
        None, "The size of mesh.replica x mesh.data x mesh.expert."
    )
    sequence_parallel_size: Count | None = honoured(None, "The size of mesh.seq.")
    tensor_parallel: TensorParallel = section()
    expert_parallel: ExpertParallel = section()
    use_data_before_expert_parallelism: Flag = harmless(
        False,
        "The order of ranks in DeepSpeed's groups; the numbers are the same. Here the devices of "
        "mesh.expert are the near ones, and those of mesh.data around them.",
    )
    pipeline: PipelineSection = section()
    activation_checkpointing: ActivationCheckpointing = section()
    elasticity: Elasticity = section()
    checkpoint: Checkpoint = section()

    steps_per_print: PrintEvery = honoured(
        None, "Number of steps between log lines of loss and learning rate."
    )
    wall_clock_breakdown: Flag = approximated(
        False,
        "Waits for every step, and logs the median time of a step every steps_per_print steps. "
        "Forward pass, backward pass and update are one program, without times of their own; "
        "run.profile_step writes a trace of them.",
        False,
    )
    memory_breakdown: Flag = honoured(False, "Logs device memory every steps_per_print steps.")
    dump_state: Flag = honoured(False, "Logs the config and the placement table at the start.")
    log_level: Text | None = harmless(None, 'Set it on Python\'s logger "jaxspeed".')
    tensorboard: FileMonitor = section()
    csv_monitor: FileMonitor = section()
    wandb: Wandb = section()
    comet: Opaque | None = refused_section("Not built; engine.add_hook gets the numbers to log.")
    flops_profiler: FlopsProfiler = section()
    comms_logger: CommsLogger = section()
    timers: Opaque | None = harmless(None, "wall_clock_breakdown times the steps.")

    model: ModelSection | None = None
    objective: ObjectiveSection | None = None
    data: Data = section()
    run: RunSection = section()
    vocabulary_size: Natural | None = harmless(
        None, "Only for warnings in DeepSpeed; the model defines its vocabulary."
    )
    dataloader_drop_last: Flag = harmless(
        False, "Only for DeepSpeed's data loader; engine.train_batch takes complete batches."
    )

    autotuning: Autotuning = section()
    aio: Aio = section()
    compile: CompileSection = section()
    hybrid_engine: HybridEngine = section()
    disable_python_gc: Flag = harmless(
        False, "A step is one call; Python's collector pauses where jaxspeed traces."
    )
    sparse_attention: Opaque | None = refused_section(
        f"{REMOVED}. A model calls its attention itself; remove it.", is_off=is_absent
    )
    nebula: Opaque | None = refused_section(
        f"{REMOVED}. Checkpoints are saved in the background without Azure's service; remove it."
    )
    datastates_ckpt: Opaque | None = refused_section(_UNBUILT)
    graph_harvesting: Flag = refused(False, f"{REMOVED}. XLA decides on CUDA graphs; remove it.")
    progressive_layer_drop: Opaque | None = refused_section(_GONE)
    curriculum_learning: Opaque | None = refused_section(f"{_GONE} {_ORDERED}")
    data_efficiency: Opaque | None = refused_section(f"{_UNBUILT} {_ORDERED}", is_off=has_no_part)
    compression_training: Opaque | None = refused_section(_GONE)
    quantize_training: Opaque | None = refused_section(_GONE)
    weight_quantization: Opaque | None = refused_section(_UNBUILT, is_off=is_absent)
    eigenvalue: Opaque | None = refused_section(_GONE)
