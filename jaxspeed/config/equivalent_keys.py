"""Keys that say the same thing in several ways, resolved into one: mesh, offload, pipeline."""

from collections.abc import Iterator
from typing import Any

from jaxspeed.config.batch import Stages
from jaxspeed.config.parallelism import AXES, Mesh
from jaxspeed.config.problems import Problem
from jaxspeed.config.schema import Settings
from jaxspeed.config.verdicts import shown


def mesh_from_keys(settings: Settings) -> tuple[Mesh, list[Problem]]:
    """The mesh that all keys together describe, and where they disagree.

    `tensor_parallel.autotp_size` is the tensor axis, `data_parallel_size` the product of replica
    and data, `mics_shard_size` the data axis with copies on replica. An axis of -1 takes the
    devices that remain; where no key says which, that is data.
    """
    said: dict[str, int] = {axis: getattr(settings.mesh, axis) for axis in _set_in(settings.mesh)}
    problems: list[Problem] = []

    def say(axis: str, size: int, word: str) -> None:
        if said.setdefault(axis, size) in (size, -1):
            said[axis] = size
        else:
            problems.append(_twice(f"mesh.{axis}", said[axis], word, size))

    if settings.tensor_parallel.autotp_size:
        say("tensor", settings.tensor_parallel.autotp_size, "tensor_parallel.autotp_size")
    if settings.sequence_parallel_size is not None:
        say("seq", settings.sequence_parallel_size, "sequence_parallel_size")
    if settings.pipeline.stages != "auto":
        say("pipe", settings.pipeline.stages, "pipeline.stages")
    shard = settings.zero_optimization.mics_shard_size
    if shard != -1:
        say("data", shard, "zero_optimization.mics_shard_size")
        said.setdefault("replica", -1)
    if settings.data_parallel_size is not None:
        problems += _split_ranks(said, settings.data_parallel_size)

    said.setdefault("data", 1 if -1 in said.values() else -1)
    open_axes = [axis for axis in AXES if said.get(axis) == -1]
    if len(open_axes) > 1:
        found = " and ".join(f"mesh.{axis} -1" for axis in open_axes)
        problems.append(Problem("mesh", found, "At most one axis may be -1; say the others' size."))
    return Mesh(**said), problems


def _split_ranks(said: dict[str, int], ranks: int) -> list[Problem]:
    """Fills replica and data from their product."""
    word = "data_parallel_size"
    replica, data = said.get("replica", 1), said.get("data", -1)
    if replica == -1 and data == -1:
        return []
    if replica == -1 or data == -1:
        open_axis, known = ("replica", data) if replica == -1 else ("data", replica)
        if ranks % known == 0:
            said[open_axis] = ranks // known
            return []
    elif replica * data == ranks:
        return []
    if replica == 1:
        return [_twice("mesh.data", data, word, ranks)]
    return [_twice("mesh.replica x mesh.data", f"{_size(replica)} x {_size(data)}", word, ranks)]


def _size(size: int) -> str:
    return "?" if size == -1 else str(size)


def _twice(here: str, size: Any, word: str, other: int) -> Problem:
    found = f"{other}, while {here} is {size}"
    return Problem(word, found, "Both say the same thing: make them equal, or remove one.", (here,))


def _set_in(mesh: Mesh) -> list[str]:
    return [axis for axis in AXES if axis in mesh.model_fields_set]


# -- offload ---------------------------------------------------------------------------------------

# DeepSpeed's old keys for sections of today.
_OLD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


def with_one_offload(settings: Settings) -> Settings:
    """With the sections that DeepSpeed's old keys stand for, where those alone are set.

    Where both are and disagree, `offload_problems` tells.
    """
    zero = settings.zero_optimization
    for old, new in _OLD.items():
        section = getattr(zero, new)
        if getattr(zero, old) and "device" not in section.model_fields_set:
            section = section.model_copy(update={"device": "cpu"})
            zero = zero.model_copy(update={new: section})
    return settings.model_copy(update={"zero_optimization": zero})


def offload_problems(settings: Settings) -> Iterator[Problem]:
    """Keys of offload that contradict each other, and what has no such device."""
    zero = settings.zero_optimization
    for old, new in _OLD.items():
        said, device = getattr(zero, old), getattr(zero, new).device
        key = f"zero_optimization.{new}.device"
        if device == "nvme":
            works = 'NVMe is not built: write "cpu", which is the host\'s memory.'
            yield Problem(key, '"nvme"', works)
        if said is not None and said != (device != "none"):
            found = f"{shown(said)}, while {key} is {shown(device)}"
            works = "Both say the same thing: make them equal, or remove one."
            yield Problem(f"zero_optimization.{old}", found, works, (key,))


# -- pipelines -------------------------------------------------------------------------------------

_RECOMPUTE = "parallel.pipeline_recompute"
_INTERVAL = "pipeline.activation_checkpoint_interval"


def stages_of(settings: Settings, count: int) -> Stages:
    """So many stages under the schedule of the config."""
    return Stages(count, settings.parallel.pipeline_schedule == "interleaved")


def with_one_recompute(settings: Settings) -> Settings:
    """With `parallel.pipeline_recompute` by DeepSpeed's key for it, where that alone is set.

    Where both are and disagree, `pipeline_problems` tells.
    """
    parallel = settings.parallel
    said = "pipeline_recompute" in parallel.model_fields_set
    if said or not settings.pipeline.activation_checkpoint_interval:
        return settings
    parallel = parallel.model_copy(update={"pipeline_recompute": "layers"})
    return settings.model_copy(update={"parallel": parallel})


def pipeline_problems(settings: Settings) -> Iterator[Problem]:
    """Keys of a pipeline that contradict each other."""
    parallel, interval = settings.parallel, settings.pipeline.activation_checkpoint_interval
    if interval and parallel.pipeline_recompute != "layers":
        found = f"{interval}, while {_RECOMPUTE} is {shown(parallel.pipeline_recompute)}"
        works = f'It asks for {_RECOMPUTE} "layers": make them equal, or remove one.'
        yield Problem(_INTERVAL, found, works, (_RECOMPUTE,))
    default = type(parallel).model_fields["pipeline_chunks"].default
    if parallel.pipeline_schedule != "interleaved" and parallel.pipeline_chunks != default:
        schedule = "parallel.pipeline_schedule"
        found = f"{parallel.pipeline_chunks} with {schedule} {shown(parallel.pipeline_schedule)}"
        works = f'Only {schedule} "interleaved" has chunks: write it, or remove the key.'
        yield Problem("parallel.pipeline_chunks", found, works, (schedule,))
