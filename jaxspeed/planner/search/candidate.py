"""What a search may change of a config, as one value, and the words of the config that say it."""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxspeed.config import Config
from jaxspeed.config.tree import read
from jaxspeed.placement.mesh import resolve_sizes

MESH = ("pipe", "replica", "data", "tensor")
MICRO, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_MISSING = object()

# The key of each field, and the other words for it with what makes each say nothing.
_KEYS = {
    "sequence": "parallel.sequence_parallel_activations",
    "stage": "zero_optimization.stage",
    "schedule": "parallel.pipeline_schedule",
    "chunks": "parallel.pipeline_chunks",
    "stage_keeps": "parallel.pipeline_recompute",
    "gather": "parallel.pipeline_gather",
    "recompute": "parallel.remat",
    "activations_wait": "activation_checkpointing.cpu_checkpointing",
    "optimizer_waits": "zero_optimization.offload_optimizer.device",
    "parameters_wait": "zero_optimization.offload_param.device",
}
_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "mesh": {
        "pipeline.stages": "auto",
        "tensor_parallel.autotp_size": 0,
        "data_parallel_size": None,
        "zero_optimization.mics_shard_size": -1,
    },
    "sequence": {"parallel.tensor_overlap": "auto", "tensor_parallel.tp_overlap_comm": False},
    "stage": {"parallel.gradient_reduction": "auto"},
    "stage_keeps": {"pipeline.activation_checkpoint_interval": 0},
    "recompute": {
        "activation_checkpointing.number_checkpoints": None,
        "activation_checkpointing.partition_activations": False,
    },
    "optimizer_waits": {"zero_optimization.cpu_offload": None},
    "parameters_wait": {"zero_optimization.cpu_offload_param": None},
}


@dataclass(frozen=True)
class Choice:
    """One way to train a model on a target, of all that a search looks at.

    Attributes:
      pipe, replica, data, tensor: the mesh.
      sequence: whether activations between the products that tensor cuts are cut along it too.
      stage: of ZeRO.
      schedule, chunks: of the pipeline.
      stage_keeps: what a stage keeps between its passes, as `parallel.pipeline_recompute`.
      gather: when a pipeline gathers under stage 3.
      recompute: `parallel.remat`, as JSON.
      activations_wait, optimizer_waits, parameters_wait: in host memory.
      micro: samples of a data rank and micro-batch.
    """

    pipe: int
    replica: int
    data: int
    tensor: int
    sequence: bool
    stage: int
    schedule: str
    chunks: int
    stage_keeps: str
    gather: str
    recompute: str
    activations_wait: bool
    optimizer_waits: bool
    parameters_wait: bool
    micro: int

    @property
    def mesh(self) -> tuple[int, int, int, int]:
        return self.pipe, self.replica, self.data, self.tensor

    def on(self, mesh: tuple[int, int, int, int]) -> "Choice":
        """The same on another mesh."""
        pipe, replica, data, tensor = mesh
        return replace(self, pipe=pipe, replica=replica, data=data, tensor=tensor)

    @property
    def ranks(self) -> int:
        """Over how many parts the batch is cut."""
        return self.replica * self.data

    def accumulation(self, samples: int) -> int:
        """The micro-batches of a step of so many samples."""
        return samples // (self.ranks * self.micro)

    def name(self, samples: int) -> str:
        """`pipe 4, data 16, tensor 8; stage 1; interleaved x2; full; micro 2 x 16`."""
        axes = [f"{axis} {size}" for axis, size in zip(MESH, self.mesh) if size > 1]
        told = [", ".join(axes) or "one device", f"stage {self.stage}"]
        if self.pipe > 1:
            chunks = f" x{self.chunks}" if self.schedule == "interleaved" else ""
            told.append(f"{self.schedule}{chunks}, {self.stage_keeps}")
            if self.gather == "step" and self.stage == 3:
                told.append("gathered once")
        if self.recompute != NONE:
            told.append(recompute_text(self.recompute))
        waiting = {
            "activations": self.activations_wait,
            "optimizer": self.optimizer_waits,
            "parameters": self.parameters_wait,
        }
        if any(waiting.values()):
            told.append(f"{' and '.join(n for n, on in waiting.items() if on)} on host")
        if self.tensor > 1 and not self.sequence:
            told.append("whole sequences")
        told.append(f"micro {self.micro} x {self.accumulation(samples)}")
        return "; ".join(told)


def as_word(remat: Any) -> str:
    """A value of `parallel.remat` as one that can be compared and hashed."""
    return json.dumps(remat, sort_keys=True)


NONE, FULL = as_word("none"), as_word("full")


def recompute_text(word: str) -> str:
    remat = json.loads(word)
    if isinstance(remat, str):
        return f"recompute {remat}"
    if "every_n" in remat:
        return f"recompute by {remat['every_n']}"
    return f"recompute to a budget of {remat['budget']}" if "budget" in remat else "recompute names"


def choice_of(config: Config, devices: int) -> Choice:
    """What a config says, on so many devices."""
    sizes = resolve_sizes(config.mesh.model_dump(), devices)
    parallel, zero, words = config.parallel, config.zero_optimization, config.recompute
    asked = words and parallel.remat == "none"  # by activation_checkpointing alone
    return Choice(
        **{axis: sizes[axis] for axis in MESH},
        sequence=parallel.sequence_parallel_activations,
        stage=zero.stage,
        schedule=parallel.pipeline_schedule,
        chunks=parallel.pipeline_chunks,
        stage_keeps=config.pipeline_recompute,
        gather=parallel.pipeline_gather,
        recompute=FULL if asked else as_word(parallel.remat),
        activations_wait=words.on_host,
        optimizer_waits=zero.offload_optimizer.device == "cpu",
        parameters_wait=zero.offload_param.device == "cpu",
        micro=config.batch(sizes["replica"] * sizes["data"], sizes["pipe"]).micro,
    )


def words_of(
    given: Mapping[str, Any], base: Choice, choice: Choice, samples: int
) -> dict[str, Any]:
    """The keys that make of a config another choice; None takes a key out.

    Args:
      given: the config as written.
      base: what it says.
      choice: what it is to say.
      samples: of a step, which stays.
    """
    return dict(_words(given, base, choice, samples))


def _words(
    given: Mapping[str, Any], base: Choice, choice: Choice, samples: int
) -> Iterator[tuple[str, Any]]:
    changed = {field for field in _KEYS if getattr(base, field) != getattr(choice, field)}
    if "activations_wait" in changed:  # to wait in host memory says to keep little, if nothing else
        changed.add("recompute")
    shards = "stage" in changed and _found(given, "zero_optimization.mics_shard_size")
    if choice.mesh != base.mesh or shards:  # a shard size is refused at stage 0
        changed.add("mesh")
        # What another word said of an axis that stays goes with that word, so it is said here.
        said = [key for key in _OTHERS["mesh"] if _found(given, key)]
        for axis, was, now in zip(MESH, base.mesh, choice.mesh):
            if was != now or said:
                yield f"mesh.{axis}", now
    for field, key in _KEYS.items():
        if field in changed:
            yield key, _value(field, getattr(choice, field))
    for field in changed:
        for key, neutral in _OTHERS.get(field, {}).items():
            if _found(given, key) and not (field == "sequence" and choice.sequence):
                yield key, neutral
    if choice.mesh != base.mesh or choice.micro != base.micro:
        numbers = {MICRO: choice.micro, ACCUMULATION: choice.accumulation(samples)}
        yield from ((key, n) for key, n in numbers.items() if given.get(key) != n)


def _value(field: str, value: Any) -> Any:
    if field == "recompute":
        return json.loads(value)
    if field in ("optimizer_waits", "parameters_wait"):
        return "cpu" if value else "none"
    return value


def _found(given: Mapping[str, Any], key: str) -> bool:
    return read(given, key, _MISSING) is not _MISSING


def applied(given: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """A config as written, with keys set by their paths."""
    made = copy.deepcopy(dict(given))
    for path, value in words.items():
        *sections, last = path.split(".")
        node = made
        for section in sections:
            if not isinstance(node.get(section), dict):
                node[section] = {}
            node = node[section]
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    return made
