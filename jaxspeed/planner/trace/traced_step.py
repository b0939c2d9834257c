"""The traced and partitioned step that the estimates of memory and time read."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.config import Config
from jaxspeed.generation.rollout_programs import (
    AT,
    CACHES,
    DRAWS,
    EARLIER,
    MODEL,
    OTHERS,
    ROWS,
    STARTED,
    STARTS,
    STEPS,
    RolloutPrograms,
    rollout_programs,
)
from jaxspeed.hardware.chip import Chip, assumed
from jaxspeed.jaxpr.primitives import GROUPED_PRODUCTS
from jaxspeed.ops import gpu, splash
from jaxspeed.ops.moe.dispatch import SLACK
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.placement.rows import HOST
from jaxspeed.planner.trace.bf16_demotion import narrow_values
from jaxspeed.planner.trace.classify import Kinds
from jaxspeed.planner.trace.partitioning import propagate_shardings
from jaxspeed.planner.trace.tiles import Sizes, kernel_layouts
from jaxspeed.planner.trace.trace_ir import Scope, Value, all_ops, open_program
from jaxspeed.tensor_parallel import best_overlap
from jaxspeed.train.phases import BATCH, STATE, SUMS, StepPhase, over_programs
from jaxspeed.train.program import Program

GATHERED = "parameters gathered to sample"
ROLLOUT_COMPONENTS = {
    **dict.fromkeys((CACHES, OTHERS, STARTED, EARLIER), "key-value caches"),
    **dict.fromkeys((ROWS, STARTS, AT, STEPS, DRAWS), "texts"),
}
_NEXT = (STATE, SUMS)  # what gradients reach: the next state, or a value for a later phase
ONE_ROUND = (
    "assumes one round: no device sends another more than "
    f"{float(SLACK):g} times its share of the rows for experts"
)


@dataclass(frozen=True, eq=False)
class TracedPhase:
    """A program of a step as operations per loop, with the sharding of each array.

    Attributes:
      name: of its phase.
      mesh: {axis: size} of the program.
      platform: "tpu", "cuda" or "cpu", for its kernels and layouts.
      operations: the operations, before shardings are propagated through them.
      ins, outs: for each input and output the name of the step's value that it belongs to.
      paths: for each input its path in that value.
      specs: for each input its sharding.
      in_host: for each input whether it is in host memory.
      lasting: names of the values that are there when a step begins.
      donates: names of the values whose buffers the results take.
      held: values that are in memory while it runs, and that it does not read: their shapes.
      components: {value: its component of memory}, of those that are not lasting.
    """

    program: Program
    name: str
    mesh: Mapping[str, int]
    platform: str
    operations: Scope
    ins: Sequence[str]
    outs: Sequence[str]
    paths: Sequence[Any]
    specs: Sequence[Any]
    in_host: Sequence[bool]
    lasting: frozenset[str] = frozenset({STATE, BATCH})
    donates: tuple[str, ...] = (STATE,)
    held: Mapping[str, Any] = field(default_factory=dict)
    components: Mapping[str, str] = field(default_factory=dict)

    def inputs_of(self, name: str) -> list[Value]:
        """The inputs that are a value of the step."""
        return [v for v, owner in zip(self.operations.ins, self.ins, strict=True) if owner == name]

    def state_read(self) -> Iterator[str]:
        """The paths of the state's arrays that an operation reads."""
        read = {value for op in self.operations.ops for value in op.values}
        for value, owner, path in zip(self.operations.ins, self.ins, self.paths, strict=True):
            if owner == STATE and value in read:
                yield jax.tree_util.keystr(path, simple=True, separator="/")

    @cached_property
    def donated(self) -> list[Value | None]:
        """For each output the input whose next value it is, and whose buffer it takes."""
        sources = {name: iter(self.inputs_of(name)) for name in self.donates}
        return [next(sources[name], None) if name in sources else None for name in self.outs]

    @cached_property
    def scope(self) -> Scope:
        """The operations, with the sharding of each array."""
        propagate_shardings(self.operations, self.specs, self.mesh)
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
        return Sizes(self.mesh, tiled, narrow, self.platform == "cuda", minor)

    @cached_property
    def kinds(self) -> Kinds:
        """Kinds of its arrays."""
        models = [*self._of_models()]
        tables = {row.path for row in self.program.table if "vocab" in row.leaf.names}
        return Kinds(
            self.scope,
            [v for v, _ in models],
            [v for v, name in zip(self.scope.outs, self.outs, strict=True) if name in _NEXT],
            [v for v, path in models if any(getattr(key, "key", None) in tables for key in path)],
        )

    def _of_models(self) -> Iterator[tuple[Value, Any]]:
        """The inputs with their paths that are the state, or another model's."""
        inputs = zip(self.scope.ins, self.ins, self.paths, strict=True)
        return ((v, path) for v, name, path in inputs if name in self.lasting - {BATCH})


@dataclass(frozen=True, eq=False)
class Step:
    """The programs of a training step, traced.

    Attributes:
      batch: the shapes of a batch as the loss reads it, with what earlier phases add.
      on_host: {phase: bytes that host work reads, bytes that it writes}.
      platform: "tpu", "cuda" or "cpu".
    """

    program: Program
    batch: Any
    phases: tuple[TracedPhase, ...]
    on_host: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    platform: str = ""

    @property
    def assumes(self) -> str:
        """What the estimates take for granted of the run's data; "" if nothing."""
        return next(filter(None, (phase.assumes for phase in self.phases)), "")

    @cached_property
    def rollout(self) -> "TracedRollout | None":
        """The programs that sample what it trains on, if its objective does."""
        programs = rollout_programs(self.program, self.batch, self.platform)
        if programs is None:
            return None
        values = programs.values(self.batch)
        phases, *_ = _traced(self.program, programs.phases, values, self.platform)
        gathered = frozenset(programs.once.gathered)
        return TracedRollout(programs, tuple(_of_rollout(phase, gathered) for phase in phases))


@dataclass(frozen=True, eq=False)
class TracedRollout:
    """The programs of a rollout, traced."""

    programs: RolloutPrograms
    phases: tuple[TracedPhase, ...]


def _of_rollout(phase: TracedPhase, gathered: Collection[str]) -> TracedPhase:
    """With the component of each value: what a model's call reads is stored, or gathered once."""

    def owner(name: str, path: Any) -> str:
        is_gathered = name == MODEL and getattr(path[-1], "key", None) in gathered
        return GATHERED if is_gathered else name

    held = dict(phase.held)
    if model := held.get(MODEL):
        sources = model.sources
        held[GATHERED] = {path: x for path, x in sources.items() if path in gathered}
        held[MODEL] = model._replace(sources={p: sources[p] for p in sources if p not in gathered})
    return replace(
        phase,
        ins=[*map(owner, phase.ins, phase.paths)],
        held=held,
        lasting=phase.lasting - ROLLOUT_COMPONENTS.keys() | {GATHERED},
        components=ROLLOUT_COMPONENTS,
    )


def read_step(program: Program, batch: Any, platform: str | None = None) -> Step:
    """Trace and partition the programs of a step, on any devices, simulated ones too.

    Args:
      batch: arrays or their shapes, of an entire step.
      platform: by default that of the devices.
    """
    platform = platform or _platform(program)
    phases, values, on_host = _traced(program, program.phases, program.values(batch), platform)
    return Step(program, values[BATCH], phases, on_host, platform)


def _traced(
    program: Program, phases: Sequence[StepPhase], values: Mapping[str, Any], platform: str
) -> tuple[tuple[TracedPhase, ...], dict[str, Any], dict[str, tuple[int, int]]]:
    """(the programs of phases, the values after them, bytes of host work)."""
    # JAX caches the trace for the first step on these devices: it must choose kernels that run.
    chosen = "" if platform == _platform(program) else platform
    traced_phases: list[TracedPhase] = []

    def results(
        phase: StepPhase, values: Mapping[str, Any], held: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        with as_on(chosen):
            traced = phase.trace(values)
        traced_phase = replace(
            _traced_phase(program, phase, traced, values, platform), lasting=lasting, held=held
        )
        traced_phases.append(traced_phase)
        written = phase.named(traced.out_info)
        return written if phase is phases[-1] else _placed(written, traced_phase, phase)

    lasting = frozenset(values)
    values, on_host = over_programs(phases, values, results)
    return tuple(traced_phases), values, on_host


def _traced_phase(
    program: Program, phase: StepPhase, traced: Any, values: Mapping[str, Any], platform: str
) -> TracedPhase:
    leaves = [
        (name, path, leaf.sharding)
        for name in phase.reads
        for path, leaf in jax.tree_util.tree_flatten_with_path(values[name])[0]
    ]
    written = phase.named(traced.out_info)
    assert phase.mesh is not None
    return TracedPhase(
        program,
        phase.name,
        dict(phase.mesh.shape),
        platform,
        open_program(traced.jaxpr, platform),
        ins=[name for name, _, _ in leaves],
        outs=[name for name, value in written.items() for _ in jax.tree.leaves(value)],
        paths=[path for _, path, _ in leaves],
        specs=[sharding.spec for _, _, sharding in leaves],
        in_host=[in_host(sharding) for _, _, sharding in leaves],
        donates=phase.donates,
    )


def placed_results(
    program: Program, phase: StepPhase, traced: Any, values: Mapping[str, Any], platform: str
) -> Any:
    """The shapes of what a traced program returns, with the shardings that XLA would choose."""
    traced_phase = _traced_phase(program, phase, traced, values, platform)
    placed = _placed(phase.named(traced.out_info), traced_phase, phase)
    return tuple(placed.values()) if len(placed) > 1 else placed.popitem()[1]


def _placed(
    written: Mapping[str, Any], traced_phase: TracedPhase, phase: StepPhase
) -> dict[str, Any]:
    """The shapes of a program's results with their shardings: as it sets them, or propagated."""
    outs: dict[str, list[Value | None]] = {name: [] for name in written}
    for out, owner in zip(traced_phase.scope.outs, traced_phase.outs, strict=True):
        outs[owner].append(out)

    def placed(leaf: Any, out: Value | None) -> jax.ShapeDtypeStruct:
        spec = [axes or None for axes in out.spec] if out else []
        assert phase.mesh is not None
        kind = HOST if out and out.host else None
        sharding = leaf.sharding or NamedSharding(
            phase.mesh, PartitionSpec(*spec), memory_kind=kind
        )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return {
        name: jax.tree.unflatten(
            jax.tree.structure(value), map(placed, jax.tree.leaves(value), outs[name])
        )
        for name, value in written.items()
    }


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
