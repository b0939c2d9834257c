"""Every key that a config may hold, with DeepSpeed's defaults; fields only."""

from jaxspeed.config.data import Data
from jaxspeed.config.lr_schedules import Scheduler
from jaxspeed.config.number_formats import Bf16, DataTypes, Fp16, TorchAutocast
from jaxspeed.config.optimizers import Optimizer
from jaxspeed.config.parallelism import ActivationCheckpointing, Mesh, Parallel, Pipeline
from jaxspeed.config.run_sections import (
    Autotuning,
    Checkpoint,
    CommsLogger,
    Elasticity,
    FileMonitor,
    FlopsProfiler,
    Model,
    Run,
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
    Section,
    Text,
)
from jaxspeed.config.zero_section import Zero


class Settings(Section):
    """The fields of a config. `jaxspeed.Config` adds how one is loaded, checked and explained."""

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

    optimizer: Optimizer | None = None
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
    pipeline: Pipeline = Pipeline()
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

    model: Model | None = None
    data: Data = Data()
    run: Run = Run()
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
