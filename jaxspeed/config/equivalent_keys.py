"""Keys with the same meaning, resolved into one: mesh, offload, pipeline; contradictions."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxspeed.axes import DATA, axis_names, product, sample_axes
from jaxspeed.config.batch import Stages
from jaxspeed.config.optimizers import PAGED
from jaxspeed.config.parallelism import Mesh
from jaxspeed.config.problems import Problem
from jaxspeed.config.schema import Settings
from jaxspeed.config.verdicts import shown
from jaxspeed.config.zero_section import OffloadOptimizer


def mesh_from_keys(settings: Settings) -> tuple[Mesh, list[Problem]]:
    """Resolve the mesh from all keys for it, and list contradictions.

    `tensor_parallel.autotp_size` is the tensor axis, `data_parallel_size` the product of replica,
    data and expert, `sequence_parallel_size` the seq axis, `mics_shard_size` the data axis with
    copies on replica. An axis of -1 takes the remaining devices; where no key has -1, that is data.
    """
    axes = [axis for axis in axis_names() if axis in settings.mesh.model_fields_set]
    sizes: dict[str, int] = {axis: getattr(settings.mesh, axis) for axis in axes}
    problems: list[Problem] = []

    def add(axis: str, size: int, key: str) -> None:
        if sizes.setdefault(axis, size) in (size, -1):
            sizes[axis] = size
        else:
            problems.append(_twice(f"mesh.{axis}", sizes[axis], key, size))

    if settings.tensor_parallel.autotp_size:
        add("tensor", settings.tensor_parallel.autotp_size, "tensor_parallel.autotp_size")
    if settings.expert_parallel.enabled:
        add("expert", settings.expert_parallel.autoep_size, "expert_parallel.autoep_size")
    if settings.sequence_parallel_size is not None:
        add("seq", settings.sequence_parallel_size, "sequence_parallel_size")
    if settings.pipeline.stages != "auto":
        add("pipe", settings.pipeline.stages, "pipeline.stages")
    shard = settings.zero_optimization.mics_shard_size
    if shard != -1:
        add("data", shard, "zero_optimization.mics_shard_size")
        sizes.setdefault("replica", -1)
    if settings.data_parallel_size is not None:
        problems += _split_ranks(sizes, settings.data_parallel_size)

    sizes.setdefault("data", 1 if -1 in sizes.values() else -1)
    open_axes = [axis for axis in axis_names() if sizes.get(axis) == -1]
    if len(open_axes) > 1:
        actual = " and ".join(f"mesh.{axis} -1" for axis in open_axes)
        problems.append(
            Problem("mesh", actual, "At most one axis may be -1; set the others' sizes.")
        )
    return Mesh(**sizes), problems


# Of the root and of a section: keys that set axes, or that have an effect over one alone.
_OF_AXES = {
    "": (
        "mesh",
        "data_parallel_size",
        "sequence_parallel_size",
        "seq_parallel_communication_data_type",
        "tensor_parallel",
        "expert_parallel",
        "pipeline",
        "elasticity",
    ),
    "parallel": ("sequence",),
    "zero_optimization": ("mics_shard_size",),
}


def without_axes(written: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config as written, without those of mesh axes."""
    kept = {key: value for key, value in written.items() if key not in _OF_AXES[""]}
    for name, keys in _OF_AXES.items():
        if isinstance(section := kept.get(name), Mapping):
            kept[name] = {key: value for key, value in section.items() if key not in keys}
    return kept


def _split_ranks(sizes: dict[str, int], ranks: int) -> list[Problem]:
    """Fill in the axes that shard samples from the product of their sizes."""
    axis_sizes = {axis: sizes.get(axis, -1 if axis == DATA else 1) for axis in sample_axes()}
    unset = [axis for axis, size in axis_sizes.items() if size == -1]
    known = product(set(axis_sizes).difference(unset), axis_sizes)
    if len(unset) > 1:
        return []
    if unset and ranks % known == 0:
        sizes[unset[0]] = ranks // known
        return []
    if not unset and known == ranks:
        return []
    used = [axis for axis, size in axis_sizes.items() if size != 1 or axis == DATA]
    here = " x ".join(f"mesh.{axis}" for axis in used)
    actual = " x ".join("?" if axis_sizes[axis] == -1 else str(axis_sizes[axis]) for axis in used)
    return [_twice(here, actual, "data_parallel_size", ranks)]


def _twice(here: str, size: Any, key: str, other: int) -> Problem:
    actual = f"{other}, while {here} is {size}"
    return Problem(key, actual, "Both set the same size: make them equal, or remove one.", (here,))


# -- offload ---------------------------------------------------------------------------------------

# DeepSpeed's old keys for its current sections.
_OLD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


def with_one_offload(settings: Settings) -> Settings:
    """Set the sections that DeepSpeed's old keys and paged optimizers stand for, if they are not.

    Where both are set and disagree, `offload_problems` reports it.
    """
    zero, optimizer = settings.zero_optimization, settings.optimizer
    paged = optimizer is not None and optimizer.type.startswith(PAGED)
    for old, new in _OLD.items():
        section = getattr(zero, new)
        asked = getattr(zero, old) or (paged and new == "offload_optimizer")
        if asked and "device" not in section.model_fields_set:
            section = section.model_copy(update={"device": "cpu"})
            zero = zero.model_copy(update={new: section})
    return settings.model_copy(update={"zero_optimization": zero})


def offload_problems(settings: Settings) -> Iterator[Problem]:
    """Yield contradictions of offload keys, and unsupported devices."""
    zero = settings.zero_optimization
    for old, new in _OLD.items():
        old_value, device = getattr(zero, old), getattr(zero, new).device
        key = f"zero_optimization.{new}.device"
        if device == "nvme" and new == "offload_param":
            works = (
                "Parameters on a disk are not built: a program that reads them unit by unit would "
                "call the host, which JAX refuses on several meshes and XLA does not overlap. "
                'Write "cpu" for host memory; offload_optimizer may be "nvme".'
            )
            yield Problem(key, '"nvme"', works, fix={key: "cpu"})
        if old_value is not None and old_value != (device == "cpu"):
            actual = f"{shown(old_value)}, while {key} is {shown(device)}"
            works = "Both set the same offload: make them equal, or remove one."
            yield Problem(f"zero_optimization.{old}", actual, works, (key,))
    offload = zero.offload_optimizer
    if offload.device == "nvme":
        yield from _disk_problems(settings, offload)


def _disk_problems(settings: Settings, offload: OffloadOptimizer) -> Iterator[Problem]:
    section = "zero_optimization.offload_optimizer"
    if not offload.nvme_path:
        works = "Needs a folder of a local disk, which holds masters and moments."
        yield Problem(f"{section}.nvme_path", 'none with device "nvme"', works)
    if offload.buffer_count < 3:
        works = "Needs at least 3: one that is read, one that is updated, and one that is written."
        yield Problem(f"{section}.buffer_count", str(offload.buffer_count), works)
    if settings.parallel.data_reduction == "parameter_server":
        works = 'Servers store state in memory: write "cpu", or data_reduction "xla".'
        about = ("parallel.data_reduction",)
        yield Problem(f"{section}.device", '"nvme" with a parameter server', works, about)


# -- pipelines -------------------------------------------------------------------------------------

_RECOMPUTE = "parallel.pipeline_recompute"
_INTERVAL = "pipeline.activation_checkpoint_interval"


def stages_of(settings: Settings, count: int) -> Stages:
    """Constraints of so many stages under the schedule of the config."""
    return Stages(count, settings.parallel.pipeline_schedule == "interleaved")


def with_one_recompute(settings: Settings) -> Settings:
    """Set `parallel.pipeline_recompute` from DeepSpeed's key, where only that is set.

    Where both are set and disagree, `pipeline_problems` reports it.
    """
    parallel = settings.parallel
    is_set = "pipeline_recompute" in parallel.model_fields_set
    if is_set or not settings.pipeline.activation_checkpoint_interval:
        return settings
    parallel = parallel.model_copy(update={"pipeline_recompute": "layers"})
    return settings.model_copy(update={"parallel": parallel})


def pipeline_problems(settings: Settings) -> Iterator[Problem]:
    """Yield contradictions of pipeline keys."""
    parallel, interval = settings.parallel, settings.pipeline.activation_checkpoint_interval
    if interval and parallel.pipeline_recompute != "layers":
        actual = f"{interval}, while {_RECOMPUTE} is {shown(parallel.pipeline_recompute)}"
        works = f'It stands for {_RECOMPUTE} "layers": make them equal, or remove one.'
        yield Problem(_INTERVAL, actual, works, (_RECOMPUTE,))
    default = type(parallel).model_fields["pipeline_chunks"].default
    if parallel.pipeline_schedule != "interleaved" and parallel.pipeline_chunks != default:
        schedule = "parallel.pipeline_schedule"
        actual = f"{parallel.pipeline_chunks} with {schedule} {shown(parallel.pipeline_schedule)}"
        works = f'Only {schedule} "interleaved" has chunks: set that, or remove the key.'
        yield Problem("parallel.pipeline_chunks", actual, works, (schedule,))
