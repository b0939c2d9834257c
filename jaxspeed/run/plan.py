"""What a config would train, told without making an array of its model."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
from rich.console import Group
from rich.text import Text

from jaxspeed.config.data import Corpus
from jaxspeed.data import build
from jaxspeed.engine.cache import enable_compilation_cache
from jaxspeed.engine.engine import compiled_report
from jaxspeed.engine.moving import asks, transfer_of
from jaxspeed.errors import ConfigError
from jaxspeed.memory.kept import Kept
from jaxspeed.memory.transfer import Transfer
from jaxspeed.observe import CompiledReport
from jaxspeed.parallel.pipeline import PipelineReport
from jaxspeed.placement import show
from jaxspeed.placement.mesh import resolve_sizes
from jaxspeed.plan.compiling import PATIENCE, compile_for
from jaxspeed.plan.kernels import as_on, with_overlap
from jaxspeed.plan.memory import Memory, memory_in, read_step
from jaxspeed.plan.outcome import Outcome
from jaxspeed.plan.search.advice import Advice
from jaxspeed.plan.search.found import Found
from jaxspeed.plan.targets import Target
from jaxspeed.plan.time import Time, time_in
from jaxspeed.plan.torus import refuse_torus
from jaxspeed.run.opening import m_against_n, on_what
from jaxspeed.run.search import Progress, advice_of, search_run
from jaxspeed.run.start import Source
from jaxspeed.train.build import build_program
from jaxspeed.train.family import resolve_model
from jaxspeed.train.program import Program
from jaxspeed.train.served import ServedProgram

WIDTH = 80  # of the plan as text


@dataclass(frozen=True)
class Plan:
    """The program of a config, and what its step costs; it prints itself."""

    program: Program
    pipeline: PipelineReport | None  # where the mesh has stages
    compiled: CompiledReport | None  # where it was compiled
    transfer: Transfer | None = None  # where anything waits in host memory
    kept: Kept | None = None  # where the config says what units keep
    target: Target | None = None  # where it is for devices that need not be here
    outcome: Outcome | None = None  # of compiling for the target
    memory: Memory | None = None  # estimated, for a target
    time: Time | None = None  # estimated, for a target
    run_tokens: float | None = None  # for which device-hours are told
    advice: Advice | None = None  # where it does not fit a target
    search: Found | None = None  # among configs like it

    @property
    def fits(self) -> bool | None:
        """Whether the step fits a device of the target, where its compiler was asked."""
        if self.search and self.search.proved is not None:
            return self.search.proved
        return self.outcome.fits(self.target) if self.outcome and self.target else None

    def __rich__(self) -> Group:
        program, compiled, target = self.program, self.compiled, self.target
        axes, roles = self._axes(), program.table.bytes_by_role()
        temporary = compiled.temp_bytes if compiled else None
        parts: list[Any] = [
            Group(Text.from_markup(on_what(program, target)), Text(self._batch())),
            show.totals(program.table.stage, axes, roles, program.table.host_bytes_by_role()),
            Text(m_against_n(program, temporary, target)),
        ]
        if self.memory and target:
            parts.append(Group(self.memory, Text("\n".join(self._expected(self.memory, target)))))
        if self.time:
            parts.append(Group(self.time, Text(self._hours(self.time))))
        if self.pipeline:
            parts.append(self.pipeline.chart() if compiled else self.pipeline)
        if compiled:
            parts.append(compiled)
        else:
            parts += [each for each in (self.kept, self.transfer) if each]
        if self.outcome:
            parts.append(Text("\n".join(self._verdict(self.outcome))))
        if self.search:
            parts.append(self.search)
        return Group(*[each for part in parts for each in (part, Text())][:-1])

    def __str__(self) -> str:
        return show.as_text(self, WIDTH)

    def figures(self) -> dict[str, Any]:
        """All of it as plain numbers and words, bytes in bytes."""
        table, device = self.program.table, self.program.devices[0]
        roles, in_host = table.bytes_by_role().items(), table.host_bytes_by_role()
        chip = self.target.chip if self.target else None
        return {
            "target": self.target and _figures_of(self.target),
            "mesh": dict(self.program.mesh.shape),
            "devices": {
                "count": len(self.program.devices),
                "platform": chip.platform if chip else device.platform,
                "kind": chip.kind if chip else device.device_kind,
                "simulated": (chip or device).platform == "cpu",
            },
            "batch": asdict(self.program.batch),
            "stage": table.stage,
            "state": {
                role: {
                    "bytes": whole,
                    "bytes_per_device": part,
                    "host_bytes_per_device": in_host.get(role, 0),
                }
                for role, (whole, part) in roles
            },
            "memory": self.memory and self.target and self._memory_figures(),
            "time": self.time and self._time_figures(self.time),
            "advice": self.advice and self.advice.figures(),
            "search": self.search and self.search.figures(),
            "kept": self.kept and self.kept.figures(),
            "transfer": self.transfer and self.transfer.figures(),
            "server": _server(self.program),
            "pipeline": self.pipeline and self.pipeline.figures(),
            "compiled": self.compiled and self.compiled.figures(),
            "outcome": self.outcome and self.target and self.outcome.figures(self.target),
        }

    def _expected(self, memory: Memory, target: Target) -> list[str]:
        """M against N by the estimate, and against the compiler's M where there is one."""
        chip, word = target.chip, memory.on(target.chip.memory)
        of = (
            f"{show.bytes_text(memory.device)} of the {show.bytes_text(chip.memory)} of {chip.name}"
        )
        said = {
            "fits": f"expected to fit: {of}",
            "tight": f"tight: {of}, less room than the estimate may be wrong by; --compile tells",
            "does not fit": f"not expected to fit: {of}",
        }
        lines = [said[word]]
        if chip.platform != "tpu":
            lines.append("(held against compilers for TPUs, not yet against one for GPUs)")
        if self.advice and not self.outcome:
            lines += self.advice.lines()
        compiled = self.outcome.device_bytes if self.outcome else None
        if compiled:
            apart = memory.device / compiled - 1
            lines.append(f"the compiler: {show.bytes_text(compiled)}; the estimate is {apart:+.1%}")
        return lines

    def _memory_figures(self) -> dict[str, Any]:
        assert self.memory and self.target
        return {**self.memory.figures(), "verdict": self.memory.on(self.target.chip.memory)}

    def _tokens(self, time: Time) -> float:
        """Of the run that hours are told for: as asked, else the config's steps."""
        return self.run_tokens or (self.program.config.run.steps or 0) * time.tokens

    def _hours(self, time: Time) -> str:
        tokens = self._tokens(time)
        if not tokens:
            return "(--tokens tells the device-hours of a run)"
        hours = time.device_hours(tokens)
        days = hours / time.devices / 24
        return f"{tokens:.3g} {time.unit}: {hours:,.0f} device-hours, {days:,.1f} days"

    def _time_figures(self, time: Time) -> dict[str, Any]:
        tokens = self._tokens(time)
        hours = time.device_hours(tokens) if tokens else None
        return {**time.figures(), "run": {"tokens": tokens or None, "device_hours": hours}}

    def _verdict(self, outcome: Outcome) -> list[str]:
        """Whether it fits, and if not, what would help."""
        assert self.target is not None
        chip, needed = self.target.chip, outcome.device_bytes
        has = f"{show.bytes_text(chip.memory)} of {chip.name}"
        took = f"compiled for {self.target} in {outcome.seconds:.0f} s"
        if not outcome.fits_device(self.target):
            what = f"{show.bytes_text(needed)}, and there are" if needed else "more than the"
            said = [f"the compiler said: {outcome.refused.said}"] if outcome.refused else []
            advice = self.advice.lines() if self.advice else []
            return [f"does not fit: it needs {what} {has}; {took}", *advice, *said]
        assert needed is not None
        share = f"{show.bytes_text(needed)} of the {has} ({needed / chip.memory:.0%})"
        if not outcome.host_bytes:
            return [f"fits: {share}, {took}"]
        host = show.bytes_text(outcome.host_bytes)
        there = f"{show.bytes_text(chip.host_memory)} that its host has for it"
        if outcome.fits(self.target):
            return [f"fits: {share}, and {host} of the {there}, {took}"]
        return [f"does not fit: it needs {host} of host memory a device, more than the {there}"]

    def _axes(self) -> dict[str, int]:
        return {axis: size for axis, size in self.program.mesh.shape.items() if size > 1}

    def _batch(self) -> str:
        batch, ranks = self.program.batch, self.program.ranks
        return (
            f"batch  {batch.train} samples: {batch.micro} of a data rank and micro-batch, "
            f"x {batch.accumulation} micro-batches x {ranks} ranks"
        )


def _server(program: Program) -> dict[str, Any] | None:
    """Of a parameter server: who there is, and what each worker sends and gets of a version."""
    if not isinstance(program, ServedProgram):
        return None
    return {
        "servers": program.mesh.size,
        "workers": program.ranks,
        "bytes_down": program.bytes_down,
        "bytes_up": program.bytes_up,
    }


def plan_run(
    source: Source,
    *,
    compiling: bool = True,
    target: Target | None = None,
    patience: float = PATIENCE,
    tokens: float | None = None,
    search_seconds: float | None = None,
    progress: Progress = lambda text: None,
) -> Plan:
    """The plan of a config on the devices that there are, or that simulate those of a target.

    Without `compiling` there are no figures of the compiler. With `search_seconds` configs like it
    are searched for so long, and with both what is compiled is the best of them.
    """
    # What is traced first is kept, so all of it is as on the target.
    with as_on(target.chip.platform if target else ""):
        return _planned(source, compiling, target, patience, tokens, search_seconds, progress)


def _planned(
    source: Source,
    compiling: bool,
    target: Target | None,
    patience: float,
    tokens: float | None,
    search_seconds: float | None,
    progress: Progress,
) -> Plan:
    config = source.config
    enable_compilation_cache(config)
    model, loss_fn = resolve_model(config, source.model, source.loss_fn)
    if target:
        refuse_torus(target, resolve_sizes(config.mesh.model_dump(), target.count))
        config = with_overlap(config, target.chip.platform)
    program = build_program(config, model, loss_fn, optimizer=source.optimizer)
    batch = batch_shapes(source, program.batch.train)
    program.check_batch(batch, program.batch.train, abstract=True)
    served = isinstance(program, ServedProgram)
    if served and target:
        raise ConfigError(
            "--target: a parameter server's step is many programs on two meshes, and what is "
            'planned is one. Leave --target out, or parallel.data_reduction at "xla" or "ring"'
        )
    if compiling and target is None:
        compiled = compiled_report(program, batch)
        return Plan(program, compiled.pipeline, compiled, compiled.transfer, compiled.kept)
    transfer = None
    if asks(program) and not served:
        traced = program.step.trace(program.state, program.abstract_batch(batch))
        transfer = transfer_of(program, traced)
    if transfer and target:
        transfer = replace(transfer, device_kind=target.chip.kind)
    schedule, kept = program.pipeline_report(batch), program.kept_report(batch)
    memory = time = None
    if target and target.chip.platform != "cpu":
        step = read_step(program, batch, target.chip.platform)
        memory, time = memory_in(step), time_in(step, target)
    estimated = Plan(
        program, schedule, None, transfer, kept, target, None, memory, time, run_tokens=tokens
    )
    if target is None:
        return estimated
    if search_seconds is not None:
        found = search_run(
            source,
            program,
            batch,
            target,
            seconds=search_seconds,
            compiling=compiling,
            patience=patience,
            progress=progress,
        )
        return _advised(replace(estimated, search=found), source, batch)
    if not compiling:
        return _advised(estimated, source, batch)
    outcome = compile_for(target, _Job(source, batch), patience)
    report = outcome.report
    if report and transfer:
        report = replace(report, transfer=transfer.counted(report.flops))
    return _advised(replace(estimated, compiled=report, outcome=outcome), source, batch)


def _advised(plan: Plan, source: Source, batch: Mapping[str, Any]) -> Plan:
    """With advice, where it does not fit by the compiler, or else by the estimate."""
    target, outcome, memory = plan.target, plan.outcome, plan.memory
    assert target is not None
    if outcome:
        short = not outcome.fits(target)
    else:
        short = memory is not None and memory.on(target.chip.memory) == "does not fit"
    if not short:
        return plan
    needed = outcome.device_bytes if outcome else None
    return replace(plan, advice=advice_of(source, plan.program, batch, target, needed))


@dataclass(frozen=True)
class _Job:
    """Builds the program on other devices, in another process."""

    source: Source
    batch: Mapping[str, jax.ShapeDtypeStruct]

    def __call__(self, devices: Sequence[Any]) -> tuple[Program, Any]:
        config = self.source.config
        model, loss_fn = resolve_model(config, self.source.model, self.source.loss_fn)
        optimizer = self.source.optimizer
        program = build_program(config, model, loss_fn, optimizer=optimizer, devices=devices)
        return program, self.batch


def _figures_of(target: Target) -> dict[str, Any]:
    return {
        "name": str(target),
        "chip": target.chip.name,
        "count": target.count,
        "topology": list(target.topology),
        "slices": target.slices,
        "node": target.node,
        "memory": target.chip.memory,
    }


def batch_shapes(source: Source, samples: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a global batch.

    What the model reads tells them, so that no corpus need be here yet; only where the samples are
    the user's own (or the model is), one is read.
    """
    data = source.config.data
    sources: Sequence[Corpus] = data.mixture or [data]
    own = any(":" in (each.source or "") for each in sources)
    if own or source.reads.sample is None:
        corpus = source.corpus()
    else:
        made = {"source": "synthetic", "samples": 1, "mixture": [], "held_out": 0.0}
        corpus = build(data.model_copy(update=made), **vars(source.reads), seed=0)
    first = corpus.train.batch(0, 1)
    return {
        name: jax.ShapeDtypeStruct((samples, *x.shape[1:]), x.dtype) for name, x in first.items()
    }
