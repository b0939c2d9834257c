"""Schema of all config keys, with DeepSpeed's defaults."""

from jaxspeed.config.lr_schedules import Scheduler
from jaxspeed.config.optimizers import OptimizerSection
from jaxspeed.config.parallelism import ActivationCheckpointing, Mesh, Parallel, PipelineSection
from jaxspeed.config.run_sections import (
    Autotuning,
    Checkpoint,
    CommsLogger,
    Data,
    Elasticity,
    FileMonitor,
    FlopsProfiler,
    ModelSection,
    RunSection,
    Wandb,
)
from jaxspeed.config.tensor_section import TensorParallel
from jaxspeed.config.types import (
    Count,
    Dtype,
    Flag,
    Natural,
    NonNegative,
    Opaque,
    Positive,
    ReductionOp,
    ScalePower,
    Section,
    Text,
)
from jaxspeed.config.zero_section import Zero

# -- dtypes of compute, accumulation and update ----------------------------------------------------


class Fp16(Section):
    """DeepSpeed's fp16 section, with loss scaling."""

    enabled: Flag = False
    loss_scale: NonNegative = 0.0
    initial_scale_power: ScalePower = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: Flag = False
    min_loss_scale: Positive = 1.0
    auto_cast: Flag = False
    fp16_master_weights_and_grads: Flag = False

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is dynamic, which DeepSpeed writes as a scale of 0."""
        return self.loss_scale == 0


class Bf16(Section):
    """DeepSpeed's bf16 section."""

    enabled: Flag = False
    check_grad_overflow: Flag = True
    bf16_master_weights_and_grads: Flag = False
    bf16_optimizer_states: Flag = False
    immediate_grad_update: Flag = False


class DataTypes(Section):
    """Dtypes apart from the compute dtype."""

    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None


class TorchAutocast(Section):
    """DeepSpeed's torch_autocast section; here it sets the compute dtype."""

    enabled: Flag = False
    dtype: Dtype | None = None
    lower_precision_safe_modules: list[Text] | None = None


class Settings(Section):
    """Fields of a config; `jaxspeed.Config` adds loading, validation and explanation."""

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    managed_gradient_accumulation: Flag = True

    gradient_clipping: NonNegative = 1.0
    gradient_allreduce_op: ReductionOp = "mean"
    communication_data_type: Dtype | None = None
    seq_parallel_communication_data_type: Dtype = "fp32"
    prescale_gradients: Flag = False
    gradient_predivide_factor: Positive = 1.0
    sparse_gradients: Flag = False

    optimizer: OptimizerSection | None = None
    scheduler: Scheduler | None = None

    fp16: Fp16 = Fp16()
    bf16: Bf16 = Bf16()
    data_types: DataTypes = DataTypes()
    torch_autocast: TorchAutocast = TorchAutocast()
    amp: Opaque | None = None

    zero_optimization: Zero = Zero()
    zero_allow_untested_optimizer: Flag = False
    zero_force_ds_cpu_optimizer: Flag = True
    disable_allgather: Flag = False

    mesh: Mesh = Mesh()
    parallel: Parallel = Parallel()
    data_parallel_size: Count | None = None
    sequence_parallel_size: Count | None = None
    tensor_parallel: TensorParallel = TensorParallel()
    expert_parallel: Opaque | None = None
    use_data_before_expert_parallelism: Flag = False
    pipeline: PipelineSection = PipelineSection()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    elasticity: Elasticity = Elasticity()
    checkpoint: Checkpoint = Checkpoint()

    steps_per_print: Count | None = None
    wall_clock_breakdown: Flag = False
    memory_breakdown: Flag = False
    dump_state: Flag = False
    log_level: Text | None = None
    tensorboard: FileMonitor = FileMonitor()
    csv_monitor: FileMonitor = FileMonitor()
    wandb: Wandb = Wandb()
    comet: Opaque | None = None
    flops_profiler: FlopsProfiler = FlopsProfiler()
    comms_logger: CommsLogger = CommsLogger()
    timers: Opaque | None = None

    model: ModelSection | None = None
    data: Data = Data()
    run: RunSection = RunSection()
    vocabulary_size: Natural | None = None
    dataloader_drop_last: Flag = False

    autotuning: Autotuning = Autotuning()
    aio: Opaque | None = None
    compile: Opaque | None = None
    hybrid_engine: Opaque | None = None
    sparse_attention: Opaque | None = None
    nebula: Opaque | None = None
    datastates_ckpt: Opaque | None = None
    graph_harvesting: Flag = False
    progressive_layer_drop: Opaque | None = None
    curriculum_learning: Opaque | None = None
    data_efficiency: Opaque | None = None
    compression_training: Opaque | None = None
    quantize_training: Opaque | None = None
    weight_quantization: Opaque | None = None
    eigenvalue: Opaque | None = None
