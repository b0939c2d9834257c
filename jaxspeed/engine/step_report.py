"""Report of a program's compiled step; the devices may be absent."""

import time
from collections.abc import Callable
from typing import Any

from jaxspeed.engine.offload_check import check_host_bytes, transfer_of
from jaxspeed.engine.step_from_file import StepFromFile
from jaxspeed.hlo import CompiledReport, report
from jaxspeed.train.program import Program
from jaxspeed.train.staged_init import compile_beside


def compiled_report(
    program: Program,
    batch: Any,
    from_file: StepFromFile | None = None,
    extra: Any = None,
    meanwhile: Callable[[], None] | None = None,
) -> CompiledReport:
    """Report of a program's step, compiled (or loaded from a file) for a batch of these shapes."""
    batch = program.read_batch(batch, program.batch.train, extra, abstract=True)
    traced, mesh = program.traced_step(batch)
    transfer = None if program.serving else transfer_of(program, batch)
    loaded = from_file.compiled(batch) if from_file else None
    start = time.perf_counter()
    compiled = loaded or compile_beside(traced.lower(), meanwhile)
    timed = None if loaded else _timed(time.perf_counter() - start)
    if program.serving:
        return report(compiled, mesh, timed)
    waiting = program.table.host_bytes_by_role()
    schedule = program.pipeline_report(batch)
    kept = program.kept_report(batch)
    made = report(compiled, mesh, timed, schedule, transfer, waiting, kept)
    check_host_bytes(program, made.host_argument_bytes, made.host_temp_bytes)
    return made


def _timed(seconds: float) -> float | None:
    """The compile time; None under 1 ms: jit cache hit."""
    return seconds if seconds > 1e-3 else None
