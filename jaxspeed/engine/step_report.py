"""Report of a program's compiled step; the devices may be absent."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.interpreters import partial_eval

from jaxspeed.engine.offload_check import check_host_bytes, transfer_of
from jaxspeed.engine.step_from_file import StepFromFile
from jaxspeed.generation.rollout_programs import RolloutPrograms
from jaxspeed.hlo import CompiledReport, report
from jaxspeed.metrics.start_lines import Showing, not_shown
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.train.phases import StepPhase, over_programs, shapes_after
from jaxspeed.train.program import Program
from jaxspeed.train_state.staged_init import compile_beside

# From a program, its trace and the shapes of all values to its report and its results' shapes.
Compiled = Callable[[StepPhase, Any, Mapping[str, Any]], tuple[CompiledReport, Any]]


def compiled_report(
    program: Program,
    batch: Any,
    from_file: StepFromFile | None = None,
    extra: Any = None,
    meanwhile: Callable[[], None] | None = None,
    showing: Showing = not_shown,
    rollout: RolloutPrograms | None = None,
) -> CompiledReport:
    """Report of a program's step, compiled (or loaded from a file) for a batch of these shapes.

    Of several phases it is that of the first program, which has the others' reports, and those of
    a rollout.
    """
    batch = program.read_batch(batch, program.batch.train, extra, abstract=True)
    parameters = _sizes(program)
    if len(program.phases) > 1 or rollout:
        with program.set_mesh(), showing("compiling the step's programs"):
            return report_of_phases(
                program,
                batch,
                lambda phase, traced, _: _compiled(
                    phase,
                    traced,
                    meanwhile if phase is program.phases[0] else None,
                    parameters=parameters,
                ),
                rollout,
            )
    (step,) = program.phases
    with showing("tracing the step"):
        traced = step.trace(program.values(batch))
        reports = {
            "pipeline": program.pipeline_report(batch),
            "transfer": transfer_of(program, batch),
            "kept": program.kept_report(batch),
        }
    with showing("loading the step" if from_file else "compiling the step"):
        report, _ = _compiled(
            step,
            traced,
            meanwhile,
            from_file.compiled(batch) if from_file else None,
            waiting=program.table.host_bytes_by_role(),
            parameters=parameters,
            **reports,
        )
    check_host_bytes(program, report.host_argument_bytes, report.host_temp_bytes)
    return report


def report_of_phases(
    program: Program,
    batch: Any,
    compiled: Compiled,
    rollout: RolloutPrograms | None = None,
) -> CompiledReport:
    """The report of the first program, which has those of the others and the host work.

    The programs of a rollout are among the others.
    """
    reports, on_host = _reports(program.phases, program.values(batch), compiled)
    if rollout:
        of_rollout, _ = _reports(rollout.phases, rollout.values(batch), compiled)
        reports |= {f"rollout, {name}": report for name, report in of_rollout.items()}
    (name, first), *others = reports.items()
    if not others:
        return first
    return replace(first, phase=name, others=dict(others), on_host=on_host)


def _reports(
    phases: Sequence[StepPhase], values: Mapping[str, Any], compiled: Compiled
) -> tuple[dict[str, CompiledReport], dict[str, tuple[int, int]]]:
    """({program: its report}, {host work: the bytes that it reads and writes})."""
    reports = dict[str, CompiledReport]()

    def results(
        phase: StepPhase, values: Mapping[str, Any], held: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        traced = phase.trace(values)
        report, written = compiled(phase, traced, values)
        device, host = _held_bytes((_unread(phase, traced, values), held), phase)
        reports[phase.name] = replace(report, held_bytes=device, held_host_bytes=host)
        return phase.named(written)

    _, on_host = over_programs(phases, values, results)
    return reports, on_host


def _unread(phase: StepPhase, traced: Any, values: Mapping[str, Any]) -> list[Any]:
    """The arrays that a program is given and does not read, which XLA's is not given."""
    jaxpr = traced.jaxpr.jaxpr
    _, read = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    arguments = jax.tree.leaves([values[name] for name in phase.reads])
    return [x for x, is_read in zip(arguments, read, strict=True) if not is_read]


def _held_bytes(held: Any, phase: StepPhase) -> tuple[int, int]:
    """Bytes in the memory of each of a program's devices, and in host memory."""
    assert phase.mesh is not None
    devices, sizes = set(phase.mesh.devices.flat), [0, 0]
    for x in jax.tree.leaves(held):
        if x.sharding is not None and x.sharding.device_set == devices:
            shard = math.prod(x.sharding.shard_shape(x.shape))
            sizes[in_host(x.sharding)] += shard * x.dtype.itemsize
    return sizes[0], sizes[1]


def _sizes(program: Program) -> frozenset[int]:
    """The elements of the parameters, and of a layer of those that are stacks."""
    shapes = [row.leaf.shape for row in program.table]
    return frozenset(math.prod(shape[d:]) for shape in shapes for d in (0, 1))


def _compiled(
    phase: StepPhase,
    traced: Any,
    meanwhile: Callable[[], None] | None = None,
    loaded: Any = None,
    **more: Any,
) -> tuple[CompiledReport, Any]:
    """The report of one program, and the shapes of its results.

    It has the compile time unless the program was loaded or is in jit's cache.
    """
    start = time.perf_counter()
    compiled = loaded or compile_beside(traced.lower(), meanwhile)
    seconds = time.perf_counter() - start
    measured = seconds if not loaded and seconds > 1e-3 else None
    assert phase.mesh is not None
    return report(compiled, phase.mesh, measured, **more), shapes_after(compiled, traced)
