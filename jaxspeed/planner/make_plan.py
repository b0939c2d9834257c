"""Make a plan: build the program, estimate, compile and search, for current or target devices."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxspeed.data import known_shapes
from jaxspeed.engine import compiled_report
from jaxspeed.engine.jax_setup import enable_compilation_cache
from jaxspeed.engine.offload_check import asks, transfer_in, transfer_of
from jaxspeed.errors import ConfigError, DataError
from jaxspeed.generation.rollout_programs import rollout_programs
from jaxspeed.hardware.targets import Target
from jaxspeed.placement.mesh import resolve_sizes
from jaxspeed.planner.compile import PATIENCE
from jaxspeed.planner.compile.in_child import StepCompiler
from jaxspeed.planner.memory import memory_in
from jaxspeed.planner.plan import Plan
from jaxspeed.planner.search_run import Job, Progress, advice_of, search_run
from jaxspeed.planner.time import time_in
from jaxspeed.planner.time.torus import refuse_torus
from jaxspeed.planner.trace import read_step
from jaxspeed.planner.trace.traced_step import on_chip, with_overlap
from jaxspeed.run.start import Source, in_steps
from jaxspeed.sequence_parallel import AttentionReport
from jaxspeed.train.program import Program


def plan_run(
    source: Source,
    *,
    compiling: bool = True,
    target: Target | None = None,
    compiler: StepCompiler | None = None,
    patience: float = PATIENCE,
    tokens: float | None = None,
    search_seconds: float | None = None,
    progress: Progress = lambda text: None,
) -> Plan:
    """The plan of a config on the current devices, or on simulated devices of a target.

    Without `compiling`, or for a target without its `compiler`, there are no figures from the
    compiler. With `search_seconds` variants of the config are searched, and with `compiling` the
    best of them is compiled.
    """
    source = _in_steps(source)
    if target is None:
        return _here(source, compiling)
    # JAX caches traces, so even the first is made as on the target.
    with on_chip(target.chip):
        refuse_torus(target, resolve_sizes(source.config.mesh.model_dump(), target.count))
        program, batch = _program(
            replace(source, config=with_overlap(source.config, target.chip.platform))
        )
        if not program.on_one_mesh:
            raise ConfigError(
                "--target: a parameter server's step is many programs on two meshes, but a plan is "
                "of one program. Omit --target, or set parallel.data_reduction to "
                '"xla" or "ring"'
            )
        if compiler:
            compiler.submit(Job(source, batch))
        estimated = replace(_estimated(program, batch, target), run_tokens=tokens)
        if search_seconds is not None:
            search_result = search_run(
                source,
                program,
                batch,
                target,
                seconds=search_seconds,
                compiling=compiling,
                patience=patience,
                progress=progress,
            )
            return _advised(replace(estimated, search=search_result), source, batch)
        if not compiler:
            return _advised(estimated, source, batch)
        outcome = compiler.outcome(patience)
        report, transfer = outcome.report, estimated.transfer
        if report and transfer:
            report = replace(report, transfer=transfer.counted(report.flops))
        return _advised(replace(estimated, compiled=report, outcome=outcome), source, batch)


def _in_steps(source: Source) -> Source:
    """The run with its number of steps, for which run.epochs needs the data."""
    if source.config.run.epochs is None:
        return source
    try:
        return in_steps(source, source.corpus())
    except DataError as error:
        raise ConfigError(f"run.epochs: {error}. With run.steps a plan needs no data") from None


def _here(source: Source, compiling: bool) -> Plan:
    """The plan on the current devices."""
    program, batch = _program(source)
    attention = _attention(program, batch)  # before the step is traced: it refuses all at once
    rollout = rollout_programs(program, batch)
    if compiling:
        compiled = compiled_report(program, batch, rollout=rollout)
        if not compiled.others:
            plan = Plan(program, compiled.pipeline, compiled, compiled.transfer, compiled.kept)
            return replace(plan, attention=attention)
    else:
        compiled = None
    transfer = transfer_of(program, batch) if program.on_one_mesh else None
    pipeline, kept = program.pipeline_report(batch), program.kept_report(batch)
    return Plan(program, pipeline, compiled, transfer, kept, attention=attention, rollout=rollout)


def _program(source: Source) -> tuple[Program, Mapping[str, Any]]:
    """The program, and the shapes of a batch."""
    enable_compilation_cache(source.config.run.compilation_cache)
    program, _ = Job(source)(None)
    batch = batch_shapes(source, program.batch.train)
    program.read_batch(batch, program.batch.train, abstract=True)
    return program, batch


def _estimated(program: Program, batch: Mapping[str, Any], target: Target) -> Plan:
    attention = _attention(program, batch)
    transfer = memory = time = None
    known = target.chip.platform != "cpu"
    if known or asks(program):
        step = read_step(program, batch, target.chip.platform)
        transfer = transfer_in(step)
        if known:
            memory, time = memory_in(step, target.chip), time_in(step, target)
        rollout = step.rollout.programs if step.rollout else None
    else:
        rollout = rollout_programs(program, batch, target.chip.platform)
    if transfer:
        transfer = replace(transfer, device_kind=target.chip.kind)
    return Plan(
        program,
        program.pipeline_report(batch),
        None,
        transfer,
        program.kept_report(batch),
        target,
        memory=memory,
        time=time,
        attention=attention,
        rollout=rollout,
    )


def _attention(program: Program, batch: Mapping[str, Any]) -> AttentionReport | None:
    return program.attention_report(batch) if program.on_one_mesh else None


def _advised(plan: Plan, source: Source, batch: Mapping[str, Any]) -> Plan:
    """The plan with advice, if it does not fit by the compiler or otherwise by the estimate."""
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


def batch_shapes(source: Source, samples: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a global batch.

    They follow from the model's limits, without reading a corpus; only for user-defined samples or
    models a sample is read.
    """
    known = known_shapes(source.config.data, source.reads, samples)
    if known is not None:
        return known
    return source.corpus().train.shapes(samples)
