"""Report of a program's compiled step; the devices may be absent."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxspeed.engine.offload_check import check_host_bytes, transfer_of
from jaxspeed.engine.step_from_file import StepFromFile
from jaxspeed.hlo import CompiledReport, report
from jaxspeed.train.phases import StepPhase, shapes_after
from jaxspeed.train.program import Program
from jaxspeed.train_state.staged_init import compile_beside


def compiled_report(
    program: Program,
    batch: Any,
    from_file: StepFromFile | None = None,
    extra: Any = None,
    meanwhile: Callable[[], None] | None = None,
) -> CompiledReport:
    """Report of a program's step, compiled (or loaded from a file) for a batch of these shapes.

    Of several phases it is that of the first program, which has the others' reports.
    """
    batch = program.read_batch(batch, program.batch.train, extra, abstract=True)
    parameters = _sizes(program)
    if len(program.phases) > 1:
        with program.set_mesh():
            return _of_phases(program, batch, meanwhile, parameters)
    (step,) = program.phases
    report, _ = _compiled(
        step,
        program.values(batch),
        meanwhile,
        from_file.compiled(batch) if from_file else None,
        pipeline=program.pipeline_report(batch),
        transfer=transfer_of(program, batch),
        waiting=program.table.host_bytes_by_role(),
        kept=program.kept_report(batch),
        parameters=parameters,
    )
    check_host_bytes(program, report.host_argument_bytes, report.host_temp_bytes)
    return report


def _of_phases(
    program: Program,
    batch: Any,
    meanwhile: Callable[[], None] | None,
    parameters: frozenset[int],
) -> CompiledReport:
    """The report of the first program, which has those of the others and the host work."""
    values, reports = program.values(batch), dict[str, CompiledReport]()
    on_host = dict[str, tuple[int, int]]()
    for phase in program.phases:
        if phase.on_host:
            written = phase.shapes_written(values)
            on_host[phase.name] = _bytes([values[name] for name in phase.reads]), _bytes(written)
        else:
            reports[phase.name], results = _compiled(
                phase, values, meanwhile, parameters=parameters
            )
            written, meanwhile = phase.named(results), None
        values |= written
    (name, first), *others = reports.items()
    return replace(first, phase=name, others=dict(others), on_host=on_host)


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _sizes(program: Program) -> frozenset[int]:
    """The elements of the parameters, and of a layer of those that are stacks."""
    shapes = [row.leaf.shape for row in program.table]
    return frozenset(math.prod(shape[d:]) for shape in shapes for d in (0, 1))


def _compiled(
    phase: StepPhase,
    values: Mapping[str, Any],
    meanwhile: Callable[[], None] | None = None,
    loaded: Any = None,
    **more: Any,
) -> tuple[CompiledReport, Any]:
    """The report of one program, and the shapes of its results.

    It has the compile time unless the program was loaded or is in jit's cache.
    """
    traced = phase.trace(values)
    start = time.perf_counter()
    compiled = loaded or compile_beside(traced.lower(), meanwhile)
    seconds = time.perf_counter() - start
    measured = seconds if not loaded and seconds > 1e-3 else None
    assert phase.mesh is not None
    return report(compiled, phase.mesh, measured, **more), shapes_after(compiled, traced)
