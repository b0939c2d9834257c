"""`Choice`: the searched settings of a config as one value, and the config keys that set it."""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from jaxspeed.axes import (
    PIPE,
    SEQ,
    TENSOR,
    axis_names,
    copying_axes,
    data_ranks,
    product,
    storing_ranks,
)
from jaxspeed.config import Config
from jaxspeed.config.tree import read
from jaxspeed.placement.mesh import resolve_sizes

HOST_RATIO = "activation_checkpointing.cpu_checkpointing_ratio"
MICRO, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_MISSING = object()

# The key of each field, and the other keys that set it, with the value that makes each a no-op.
_KEYS = {
    "sequence": "parallel.sequence_parallel_activations",
    "stage": "zero_optimization.stage",
    "schedule": "parallel.pipeline_schedule",
    "chunks": "parallel.pipeline_chunks",
    "stage_saves": "parallel.pipeline_recompute",
    "gather": "parallel.pipeline_gather",
    "recompute": "parallel.remat",
    "offload_activations": "activation_checkpointing.cpu_checkpointing",
    "offload_optimizer": "zero_optimization.offload_optimizer.device",
    "offload_parameters": "zero_optimization.offload_param.device",
}
_OTHER_KEYS: Mapping[str, Mapping[str, Any]] = {
    "mesh": {
        "pipeline.stages": "auto",
        "tensor_parallel.autotp_size": 0,
        "data_parallel_size": None,
        "zero_optimization.mics_shard_size": -1,
    },
    "sequence": {"parallel.tensor_overlap": "auto", "tensor_parallel.tp_overlap_comm": False},
    "stage": {"parallel.gradient_reduction": "auto"},
    "stage_saves": {"pipeline.activation_checkpoint_interval": 0},
    "recompute": {
        "activation_checkpointing.number_checkpoints": None,
        "activation_checkpointing.partition_activations": False,
    },
    "offload_optimizer": {"zero_optimization.cpu_offload": None},
    "offload_parameters": {"zero_optimization.cpu_offload_param": None},
}


@dataclass(frozen=True)
class Choice:
    """One point of the search space: all settings that a search changes.

    Attributes:
      mesh: sizes of the axes of `axis_names()`.
      sequence: Megatron's sequence parallelism: activations between tensor-parallel matmuls are
        sharded over `tensor` too.
      stage: of ZeRO.
      schedule, chunks: of the pipeline.
      stage_saves: `parallel.pipeline_recompute`, what a stage saves between its passes.
      gather: when a pipeline gathers under stage 3.
      recompute: `parallel.remat`, as JSON.
      offload_activations: the share of each saved activation that is offloaded to host memory.
      offload_optimizer, offload_parameters: whether offloaded to host memory, or to a disk if the
        config does so.
      micro: samples per data rank and micro-batch.
    """

    mesh: tuple[int, ...]
    sequence: bool
    stage: int
    schedule: str
    chunks: int
    stage_saves: str
    gather: str
    recompute: str
    offload_activations: float
    offload_optimizer: bool
    offload_parameters: bool
    micro: int

    @cached_property
    def sizes(self) -> dict[str, int]:
        """{searched axis: its size}."""
        return dict(zip(axis_names(), self.mesh, strict=True))

    @cached_property
    def pipe(self) -> int:
        return self.sizes[PIPE]

    @cached_property
    def tensor(self) -> int:
        return self.sizes[TENSOR]

    @cached_property
    def seq(self) -> int:
        return self.sizes[SEQ]

    @cached_property
    def ranks(self) -> int:
        """The number of shards of the batch."""
        return data_ranks(self.sizes)

    @cached_property
    def shards(self) -> int:
        """The number of shards of ZeRO's state."""
        return storing_ranks(self.sizes)

    @cached_property
    def copies(self) -> int:
        """The number of replicas of ZeRO's state."""
        return product(copying_axes(), self.sizes)

    def accumulation(self, samples: int) -> int:
        """The micro-batches of a step of `samples`."""
        return samples // (self.ranks * self.micro)

    def name(self, samples: int) -> str:
        """`pipe 4, tensor 8; stage 1; interleaved x2, stage; recompute full; micro 2 x 16`."""
        axes = [f"{axis} {size}" for axis, size in self.sizes.items() if size > 1]
        parts = [", ".join(axes) or "one device", f"stage {self.stage}"]
        if self.pipe > 1:
            chunks = f" x{self.chunks}" if self.schedule == "interleaved" else ""
            parts.append(f"{self.schedule}{chunks}, {self.stage_saves}")
            if self.gather == "step" and self.stage == 3:
                parts.append("gathered once")
        if self.recompute != NONE:
            parts.append(recompute_text(self.recompute))
        share = self.offload_activations
        offloaded = {
            "activations" if share in (0, 1) else f"{share:.0%} of activations": share > 0,
            "optimizer": self.offload_optimizer,
            "parameters": self.offload_parameters,
        }
        if any(offloaded.values()):
            parts.append(f"{' and '.join(n for n, on in offloaded.items() if on)} offloaded")
        if self.tensor > 1 and not self.sequence:
            parts.append("no sequence parallelism")
        parts.append(f"micro {self.micro} x {self.accumulation(samples)}")
        return "; ".join(parts)


def changes(base: Choice, choice: Choice) -> list[str]:
    """The fields that differ."""
    names = (field.name for field in fields(Choice))
    return [name for name in names if getattr(base, name) != getattr(choice, name)]


def remat_json(remat: Any) -> str:
    """A value of `parallel.remat` as a hashable one."""
    return json.dumps(remat, sort_keys=True)


NONE, FULL = remat_json("none"), remat_json("full")


def recompute_text(remat_json: str) -> str:
    remat = json.loads(remat_json)
    if isinstance(remat, str):
        return f"recompute {remat}"
    if "every_n" in remat:
        return f"recompute every {remat['every_n']}"
    return f"recompute to a budget of {remat['budget']}" if "budget" in remat else "recompute names"


def choice_of(config: Config, devices: int) -> Choice:
    """The settings of a config on `devices` devices."""
    sizes = resolve_sizes(config.mesh.model_dump(), devices)
    parallel, zero, recompute = config.parallel, config.zero_optimization, config.recompute
    full = recompute and parallel.remat == "none"  # set by activation_checkpointing alone
    return Choice(
        mesh=tuple(sizes[axis] for axis in axis_names()),
        sequence=parallel.sequence_parallel_activations,
        stage=zero.stage,
        schedule=parallel.pipeline_schedule,
        chunks=parallel.pipeline_chunks,
        stage_saves=config.pipeline_recompute,
        gather=parallel.pipeline_gather,
        recompute=FULL if full else remat_json(parallel.remat),
        offload_activations=recompute.host_ratio,
        offload_optimizer=zero.offload_optimizer.device != "none",
        offload_parameters=zero.offload_param.device == "cpu",
        micro=config.batch_on(sizes).micro,
    )


def keys_of(
    written: Mapping[str, Any], base: Choice, choice: Choice, samples: int
) -> dict[str, Any]:
    """The config keys to set for another choice; None removes a key.

    Args:
      given: the config as written.
      base: its settings.
      choice: the wanted settings.
      samples: per step, unchanged.
    """
    changed = {field for field in _KEYS if getattr(base, field) != getattr(choice, field)}
    keys: dict[str, Any] = {}
    if "offload_activations" in changed:  # cpu_checkpointing implies full remat unless remat is set
        changed.add("recompute")
        share = choice.offload_activations
        if 0 < share < 1 or _found(written, HOST_RATIO):
            keys[HOST_RATIO] = share if 0 < share < 1 else None
    shards = "stage" in changed and _found(written, "zero_optimization.mics_shard_size")
    if choice.mesh != base.mesh or shards:  # a shard size is refused at stage 0
        changed.add("mesh")
        # Another key that sets an axis is removed, so that unchanged axes have to be set too.
        others = any(_found(written, key) for key in _OTHER_KEYS["mesh"])
        axes = zip(axis_names(), base.mesh, choice.mesh)
        keys |= {f"mesh.{axis}": now for axis, was, now in axes if was != now or others}
    for field, key in _KEYS.items():
        if field in changed:
            keys[key] = _value(field, getattr(choice, field))
    for field, others_of in _OTHER_KEYS.items():
        if field in changed and not (field == "sequence" and choice.sequence):
            keys |= {key: value for key, value in others_of.items() if _found(written, key)}
    if choice.mesh != base.mesh or choice.micro != base.micro:
        numbers = {MICRO: choice.micro, ACCUMULATION: choice.accumulation(samples)}
        keys |= {key: n for key, n in numbers.items() if written.get(key) != n}
    return keys


def _value(field: str, value: Any) -> Any:
    if field == "recompute":
        return json.loads(value)
    if field in ("offload_optimizer", "offload_parameters"):
        return "cpu" if value else "none"
    if field == "offload_activations":
        return value > 0
    return value


def _found(written: Mapping[str, Any], key: str) -> bool:
    return read(written, key, _MISSING) is not _MISSING


def with_keys(written: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config as written, with keys set by their paths."""
    result = copy.deepcopy(dict(written))
    for path, value in keys.items():
        *sections, last = path.split(".")
        node = result
        for section in sections:
            if not isinstance(node.get(section), dict):
                node[section] = {}
            node = node[section]
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    return result
