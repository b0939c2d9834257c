"""The `zero_optimization` section."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict

from jaxspeed.config.parallelism import AxisSize
from jaxspeed.config.types import Flag, Natural, Opaque, Section, Share, Text, integral, lower

Stage = Annotated[int, Strict(), Field(ge=0, le=3), BeforeValidator(integral)]
Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(lower)]
Where = Annotated[Literal["device", "host"], BeforeValidator(lower)]


class OffloadParam(Section):
    """Parameters in host memory."""

    device: Device = "none"
    nvme_path: Text | None = None
    pin_memory: Flag = True
    buffer_count: Natural = 5
    buffer_size: Natural = 100_000_000
    max_in_cpu: Natural = 1_000_000_000


class OffloadOptimizer(Section):
    """Optimizer state in host memory."""

    device: Device = "none"
    nvme_path: Text | None = None
    pin_memory: Flag = True
    ratio: Share = 1.0
    where: Where = "device"
    buffer_count: Natural = 4
    pipeline_read: Flag = False
    pipeline_write: Flag = False
    pipeline: Flag = False
    fast_init: Flag = False
    super_offload: Flag = False
    cpuadam_cores_perc: Share = 0.8


class Zero(Section):
    """ZeRO stage and offload, and runtime options of DeepSpeed's implementation."""

    stage: Stage = 0
    stage3_param_persistence_threshold: Natural = 100_000
    mics_shard_size: AxisSize = -1
    mics_hierarchical_params_gather: Flag = False
    zero_hpz_partition_size: Natural = 1
    zero_quantized_weights: Flag = False
    zero_quantized_nontrainable_weights: Flag = False
    zero_quantized_gradients: Flag = False
    zeropp_loco_param: Opaque | None = None
    zenflow: Opaque | None = None
    offload_param: OffloadParam = OffloadParam()
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    cpu_offload: Flag | None = None
    cpu_offload_param: Flag | None = None
    cpu_offload_use_pin_memory: Flag | None = None
    stage3_gather_16bit_weights_on_model_save: Flag = False
    stage3_gather_fp16_weights_on_model_save: Flag = False

    reduce_bucket_size: Natural = 500_000_000
    allgather_bucket_size: Natural = 500_000_000
    overlap_comm: Flag | None = None
    contiguous_gradients: Flag = True
    reduce_scatter: Flag = True
    allgather_partitions: Flag = True
    use_multi_rank_bucket_allreduce: Flag = True
    round_robin_gradients: Flag = False
    stage3_prefetch_bucket_size: Natural = 50_000_000
    stage3_max_live_parameters: Natural = 1_000_000_000
    stage3_max_reuse_distance: Natural = 1_000_000_000
    stage3_model_persistence_threshold: Natural = 2**63 - 1
    stage3_module_granularity_threshold: Natural = 0
    stage3_use_all_reduce_for_fetch_params: Flag = False
    stage3_allgather_sequential: Flag = False
    sub_group_size: Natural = 1_000_000_000
    ignore_unused_parameters: Flag = True
    elastic_checkpoint: Flag = False
    load_from_fp32_weights: Flag = True
    legacy_stage1: Flag = False
    memory_efficient_linear: Flag = True
    pipeline_loading_checkpoint: Flag = False
    override_module_apply: Flag = True
    log_trace_cache_warnings: Flag = False
    enable_sanity_checks: Flag = False
    save_muon_momentum_buffer_in_memory: Flag = False
    leaf_module: Opaque | None = None
