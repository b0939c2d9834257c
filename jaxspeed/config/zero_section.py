"""The `zero_optimization` section."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict

from jaxspeed.config.parallelism import AxisSize
from jaxspeed.config.types import (
    Coercing,
    Count,
    Flag,
    Lenient,
    Natural,
    Opaque,
    Share,
    Text,
    integral,
    lower,
    section,
)
from jaxspeed.config.verdicts import (
    REMOVED,
    approximated,
    harmless,
    honoured,
    ignored,
    is_absent,
    refused,
    refused_section,
)

Stage = Annotated[int, Strict(), Field(ge=0, le=3), BeforeValidator(integral)]
Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(lower)]
Where = Annotated[Literal["device", "host"], BeforeValidator(lower)]


_NVME = "An option of DeepSpeed's runtime for NVMe; parameters are not stored there."
_PINNED = "Always on: host transfers inside of the step need pinned memory."
_TRANSFERS = "An option of DeepSpeed's runtime; XLA schedules host transfers."
_SCHEDULED = "An option of DeepSpeed's runtime; XLA schedules collectives and buffers."
_NO_GATHERING = "Arrays are global: a save needs no gathering in advance."
_OFFLOADED_PARAM = ("zero_optimization.offload_param.device", ("cpu", "nvme"))
_PARAM_ON_DISK = ("zero_optimization.offload_param.device", ("nvme",))
_OFFLOADED_OPTIMIZER = ("zero_optimization.offload_optimizer.device", ("cpu", "nvme"))
ON_DISK = ("zero_optimization.offload_optimizer.device", ("nvme",))
_OVERLAPPED = "Always on: a bucket is read, and one written, while another is updated."
LARGEST_BUCKET = 1 << 22  # elements of an array per device


class OffloadParam(Coercing):
    """Parameters in host memory."""

    device: Device = honoured(
        "none",
        "cpu: parameters are offloaded to pinned host memory, at any stage, and streamed unit by "
        "unit to the device for both passes; gradients are offloaded as they are computed. none: "
        "all stay on the device.",
        differs=(
            ("zero_optimization.stage", (0, 1, 2)),
            "DeepSpeed offloads parameters at stage 3 only.",
        ),
    )
    nvme_path: Text | None = harmless(None, _NVME, when=_PARAM_ON_DISK)
    pin_memory: Flag = approximated(True, _PINNED, when=_OFFLOADED_PARAM)
    buffer_count: Natural = harmless(5, _NVME, when=_PARAM_ON_DISK)
    buffer_size: Natural = harmless(100_000_000, _NVME, when=_PARAM_ON_DISK)
    max_in_cpu: Natural = harmless(1_000_000_000, _NVME, when=_PARAM_ON_DISK)


class OffloadOptimizer(Coercing):
    """Optimizer state in host memory, or on a disk."""

    device: Device = honoured(
        "none",
        "cpu: masters, moments and the moving average are offloaded to pinned host memory, and "
        "streamed through the device by the update. nvme: they are in files under nvme_path, and "
        "read, updated and written bucket by bucket, after all gradients. none: they stay on the "
        "device.",
    )
    nvme_path: Text | None = honoured(
        None,
        "A folder of a local disk. Each process has a folder of its own there, which is scratch: "
        "only checkpoints outlive a run.",
        when=ON_DISK,
    )
    pin_memory: Flag = approximated(True, _PINNED, when=_OFFLOADED_OPTIMIZER)
    ratio: Share = honoured(
        1.0,
        "The share of the parameters, in bytes and the largest first, whose masters and moments "
        "are offloaded.",
        when=_OFFLOADED_OPTIMIZER,
    )
    where: Where = honoured(
        "device",
        "Where offloaded state is updated: on the device, through which it is streamed, or on the "
        "host's cores, as in DeepSpeed: gradients are transferred there, and only parameters back.",
        when=_OFFLOADED_OPTIMIZER,
    )
    buffer_count: Natural = honoured(
        4,
        "Buckets in host memory at once, at least 3. DeepSpeed's are tensors, of which a parameter "
        "has several.",
        when=ON_DISK,
    )
    pipeline_read: Flag = harmless(False, _OVERLAPPED, when=ON_DISK)
    pipeline_write: Flag = harmless(False, _OVERLAPPED, when=ON_DISK)
    pipeline: Flag = harmless(False, _OVERLAPPED, when=ON_DISK)
    fast_init: Flag = harmless(False, _TRANSFERS, when=_OFFLOADED_OPTIMIZER)
    super_offload: Flag = refused(
        False, "SuperOffload is not built; device cpu streams the update through the device."
    )
    cpuadam_cores_perc: Share = harmless(
        0.8,
        "XLA chooses the number of host cores for an update (where).",
        when=_OFFLOADED_OPTIMIZER,
    )


_THREADS = "Two to four threads transfer up to 8 MiB a call."


class Aio(Lenient):
    """Options of DeepSpeed's library for files."""

    block_size: Natural = harmless(1 << 20, _THREADS)
    queue_depth: Natural = harmless(8, _THREADS)
    thread_count: Count = approximated(
        1, "The threads that read and write, at least 2 and at most 4.", when=ON_DISK
    )
    intra_op_parallelism: Count = harmless(1, _THREADS)
    single_submit: Flag = harmless(False, _THREADS)
    overlap_events: Flag = harmless(True, _THREADS)
    use_gds: Flag = ignored(False, "State passes through host memory; GPUs do not read files.")


class Zero(Coercing):
    """ZeRO stage and offload, and runtime options of DeepSpeed's implementation."""

    stage: Stage = honoured(
        0, "State sharded over data: 1 masters and moments, 2 also gradients, 3 also parameters."
    )
    stage3_param_persistence_threshold: Natural = honoured(
        100_000,
        "Under stage 3, parameters with fewer elements than this stay replicated; with "
        "offload_param, parameters with fewer per layer stay on the device.",
    )
    mics_shard_size: AxisSize = honoured(
        -1,
        "Sets mesh.data to this and mesh.replica to the rest, so that each group of so many "
        f"devices holds one copy. {REMOVED}; it works here.",
    )
    mics_hierarchical_params_gather: Flag = harmless(
        False, f"{_SCHEDULED} {REMOVED}; mics_shard_size works here."
    )
    zero_hpz_partition_size: Natural = refused(
        1,
        "A secondary partition of the weights is not built; mesh.replica x mesh.data keeps all of "
        "ZeRO's communication inside a group.",
        0,
    )
    zero_quantized_weights: Flag = refused(False, "Quantised gathers are not built; remove it.")
    zero_quantized_nontrainable_weights: Flag = approximated(
        False,
        "Frozen weights of linear layers are stored and gathered as model.quantize says, by "
        "default in rows of int8; DeepSpeed's blocks are others. Without frozen ones it has no "
        "effect, as there.",
        False,
    )
    zero_quantized_gradients: Flag = refused(
        False, "Quantised reductions are not built; remove it."
    )
    zeropp_loco_param: Opaque | None = refused(
        None, f"{REMOVED}, and quantised reductions are not built here; remove it.", {}
    )
    zenflow: Opaque | None = refused_section(
        "ZenFlow is not built; remove it. offload_optimizer: {device: cpu, where: host} updates "
        "on the host's cores.",
        is_off=is_absent,
    )
    offload_param: OffloadParam = section()
    offload_optimizer: OffloadOptimizer = section()
    cpu_offload: Flag | None = honoured(
        None, "DeepSpeed's old key for offload_optimizer.device: true is cpu."
    )
    cpu_offload_param: Flag | None = honoured(
        None, "DeepSpeed's old key for offload_param.device: true is cpu."
    )
    cpu_offload_use_pin_memory: Flag | None = harmless(None, "Host memory is pinned in any case.")
    stage3_gather_16bit_weights_on_model_save: Flag = harmless(False, _NO_GATHERING)
    stage3_gather_fp16_weights_on_model_save: Flag = harmless(False, _NO_GATHERING)

    reduce_bucket_size: Natural = harmless(500_000_000, _SCHEDULED)
    allgather_bucket_size: Natural = harmless(500_000_000, _SCHEDULED)
    overlap_comm: Flag | None = harmless(None, _SCHEDULED)
    contiguous_gradients: Flag = harmless(True, _SCHEDULED)
    reduce_scatter: Flag = harmless(True, _SCHEDULED)
    allgather_partitions: Flag = harmless(True, _SCHEDULED)
    use_multi_rank_bucket_allreduce: Flag = harmless(True, _SCHEDULED)
    round_robin_gradients: Flag = harmless(False, _SCHEDULED)
    stage3_prefetch_bucket_size: Natural = harmless(50_000_000, _SCHEDULED)
    stage3_max_live_parameters: Natural = harmless(1_000_000_000, _SCHEDULED)
    stage3_max_reuse_distance: Natural = harmless(1_000_000_000, _SCHEDULED)
    stage3_model_persistence_threshold: Natural = harmless(2**63 - 1, _SCHEDULED)
    stage3_module_granularity_threshold: Natural = harmless(0, _SCHEDULED)
    stage3_use_all_reduce_for_fetch_params: Flag = harmless(False, _SCHEDULED)
    stage3_allgather_sequential: Flag = harmless(False, _SCHEDULED)
    sub_group_size: Natural = approximated(
        1_000_000_000,
        "Elements of a bucket, counted per device: at most 4,194,304, since several are in host "
        "memory at once; 0 is the most.",
        when=ON_DISK,
    )
    compute_grad_norm: Flag = harmless(True, "The norm is a metric of every step.")
    parameter_alignment: Flag = harmless(False, _SCHEDULED)
    ignore_unused_parameters: Flag = harmless(
        True, "An unused parameter has a gradient of zero here."
    )
    elastic_checkpoint: Flag = harmless(
        False, "Arrays are global, independent of the number of devices."
    )
    load_from_fp32_weights: Flag = harmless(True, "The fp32 masters are the stored weights.")
    legacy_stage1: Flag = harmless(False, _SCHEDULED)
    memory_efficient_linear: Flag = harmless(True, _SCHEDULED)
    pipeline_loading_checkpoint: Flag = harmless(False, _SCHEDULED)
    override_module_apply: Flag = harmless(True, _SCHEDULED)
    log_trace_cache_warnings: Flag = harmless(False, _SCHEDULED)
    enable_sanity_checks: Flag = harmless(False, _SCHEDULED)
    save_muon_momentum_buffer_in_memory: Flag = harmless(False, _SCHEDULED)
    leaf_module: Opaque | None = harmless(None, "Units are found or named by parallel.units.")
