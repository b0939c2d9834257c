"""One mesh from the several words that a config has for it."""

from typing import Any

from jaxspeed.config.parallelism import AXES, Mesh
from jaxspeed.config.problems import Problem
from jaxspeed.config.schema import Settings


def mesh_from_words(settings: Settings) -> tuple[Mesh, list[Problem]]:
    """The mesh that all words together describe, and where they disagree.

    `tensor_parallel.autotp_size` is the tensor axis, `data_parallel_size` the product of replica
    and data, `mics_shard_size` the data axis with copies on replica. An axis of -1 takes the
    devices that remain; without a word about it that is data.
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
