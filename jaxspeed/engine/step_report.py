"""Report of a program's compiled step; the devices may be absent."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxspeed.engine.offload_check import check_host_bytes, transfer_of
from jaxspeed.engine.step_from_file import StepFromFile
from jaxspeed.hlo import CompiledReport, report
from jaxspeed.train.program import Program, StepPhase
from jaxspeed.train_state.staged_init import compile_beside


def compiled_report(
    program: Program,
    batch: Any,
    from_file: StepFromFile | None = None,
    extra: Any = None,
    meanwhile: Callable[[], None] | None = None,
) -> CompiledReport:
    """Report of a program's step, compiled (or loaded from a file) for a batch of these shapes.

    Of several phases it is that of the first, which has the others' reports.
    """
    batch = program.read_batch(batch, program.batch.train, extra, abstract=True)
    first, *rest = program.phases
    parameters = _sizes(program)
    if rest:
        others = {phase.name: _compiled(phase, batch, parameters=parameters) for phase in rest}
        made = _compiled(first, batch, meanwhile, parameters=parameters)
        return replace(made, phase=first.name, others=others)
    made = _compiled(
        first,
        batch,
        meanwhile,
        from_file.compiled(batch) if from_file else None,
        pipeline=program.pipeline_report(batch),
        transfer=transfer_of(program, batch),
        waiting=program.table.host_bytes_by_role(),
        kept=program.kept_report(batch),
        parameters=parameters,
    )
    check_host_bytes(program, made.host_argument_bytes, made.host_temp_bytes)
    return made


def _sizes(program: Program) -> frozenset[int]:
    """The elements of the parameters, and of a layer of those that are stacks."""
    shapes = [row.leaf.shape for row in program.table]
    return frozenset(math.prod(shape[d:]) for shape in shapes for d in (0, 1))


def _compiled(
    phase: StepPhase,
    batch: Any,
    meanwhile: Callable[[], None] | None = None,
    loaded: Any = None,
    **more: Any,
) -> CompiledReport:
    """The report of one program; its compile time unless it was loaded or is in jit's cache."""
    traced = phase.trace(batch)
    start = time.perf_counter()
    compiled = loaded or compile_beside(traced.lower(), meanwhile)
    seconds = time.perf_counter() - start
    measured = seconds if not loaded and seconds > 1e-3 else None
    return report(compiled, phase.mesh, measured, **more)
