"""The traced and partitioned step that the estimates of memory and time read."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxspeed.config import Config
from jaxspeed.hardware.chip import Chip, assumed
from jaxspeed.jaxpr.primitives import GROUPED_PRODUCTS
from jaxspeed.ops import gpu, splash
from jaxspeed.ops.moe.dispatch import SLACK
from jaxspeed.placement.rows import HOST
from jaxspeed.planner.trace.bf16_demotion import narrow_values
from jaxspeed.planner.trace.classify import Kinds
from jaxspeed.planner.trace.partitioning import propagate_shardings
from jaxspeed.planner.trace.tiles import Sizes, kernel_layouts
from jaxspeed.planner.trace.trace_ir import Scope, Value, all_ops, open_program
from jaxspeed.tensor_parallel import best_overlap
from jaxspeed.train.program import Program

ONE_ROUND = (
    "assumes one round: no device sends another more than "
    f"{float(SLACK):g} times its share of the rows for experts"
)


@dataclass(frozen=True, eq=False)
class Step:
    """A training step as operations per loop, with the sharding of each array.

    Attributes:
      platform: "tpu", "cuda" or "cpu", for its kernels and layouts.
      operations: the operations, before shardings are propagated through them.
      state: number of inputs that are the state, and of outputs that are the next one.
      paths: for each input its path in (state, batch).
      specs: for each input its sharding.
      in_host: for each input whether it is in host memory.
    """

    program: Program
    batch: Any
    platform: str
    operations: Scope
    state: int
    paths: Sequence[Any]
    specs: Sequence[Any]
    in_host: Sequence[bool]

    @cached_property
    def scope(self) -> Scope:
        """The operations, with the sharding of each array."""
        propagate_shardings(self.operations, self.specs, dict(self.program.mesh.shape))
        return self.operations

    @cached_property
    def assumes(self) -> str:
        """What the estimates take for granted of the run's data; "" if nothing."""
        layouts = (
            op.params["layout"]
            for op in all_ops(self.operations)
            if op.name in GROUPED_PRODUCTS and op.params["active"]
        )
        return ONE_ROUND if any(layout.expert_shards > 1 for layout in layouts) else ""

    @cached_property
    def uses_host(self) -> bool:
        """Whether any array is in host memory."""
        outs = (v for op in all_ops(self.operations) for v in op.outs)
        return any(v.host for v in (*self.operations.ins, *outs))

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of arrays per device."""
        tiled = self.platform == "tpu"
        narrow = narrow_values(self.scope) if tiled else frozenset()
        minor = kernel_layouts(self.scope) if tiled else {}
        return Sizes(dict(self.program.mesh.shape), tiled, narrow, self.platform == "cuda", minor)

    @cached_property
    def kinds(self) -> Kinds:
        """Kinds of its arrays."""
        return Kinds(self.scope, self.state, self._vocabularies())

    def _vocabularies(self) -> list[Value]:
        """The stored copies of parameters with a vocabulary dim."""
        tables = {row.path for row in self.program.table if "vocab" in row.leaf.names}
        pairs = zip(self.paths, self.scope.ins, strict=True)
        return [
            value
            for path, value in pairs
            if any(getattr(key, "key", None) in tables for key in path)
        ]


def read_step(program: Program, batch: Any, platform: str | None = None) -> Step:
    """Trace and partition the step of a program, on any devices, simulated ones too.

    Args:
      batch: arrays or their shapes, of an entire step.
      platform: by default that of the devices.
    """
    program_platform = _platform(program)
    platform = platform or program_platform
    arguments = (program.state, program.abstract_batch(program.complete(batch)))
    # JAX caches the trace for the first step on these devices: it must choose kernels that run.
    with as_on("" if platform == program_platform else platform):
        traced = program.step.trace(*arguments)
    operations = open_program(traced.jaxpr, platform)
    leaves = jax.tree_util.tree_flatten_with_path(arguments)[0]
    return Step(
        program,
        arguments[1],
        platform,
        operations,
        len(jax.tree.leaves(program.state)),
        [path for path, _ in leaves],
        [x.sharding.spec for _, x in leaves],
        [x.sharding.memory_kind == HOST for _, x in leaves],
    )


def _platform(program: Program) -> str:
    name = program.mesh.devices.flat[0].platform
    return "cuda" if name == "gpu" else str(name)


def as_on(platform: str, capability: gpu.Capability | None = None) -> AbstractContextManager[None]:
    """Trace inside with the attention kernels of an absent chip; an outer capability stays."""
    if platform == "tpu":
        return splash.assumed(capability[0] if capability else None)
    return gpu.assumed(capability) if platform == "cuda" else nullcontext()


@contextmanager
def on_chip(chip: Chip) -> Iterator[None]:
    """Trace inside as for an absent chip."""
    with as_on(chip.platform, chip.capability), assumed(chip):
        yield


def with_overlap(config: Config, platform: str) -> Config:
    """The config with `parallel.tensor_overlap: auto` resolved for the platform."""
    best = best_overlap({"cuda": "gpu"}.get(platform, platform))
    if config.tensor_overlap != "auto" or not config.parallel.sequence_parallel_activations:
        return config
    parallel = config.parallel.model_copy(update={"tensor_overlap": best})
    return config.model_copy(update={"parallel": parallel})
