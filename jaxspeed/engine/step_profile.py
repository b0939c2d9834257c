"""The reports of `flops_profiler` and `comms_logger`, with numbers from the compiled step.

DeepSpeed measures operations as torch runs them. Here a step is one program, so that FLOPs and
collectives are those of its text, and time is measured for the entire step.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspeed.axes import PIPE, TENSOR
from jaxspeed.communication import Communication
from jaxspeed.config.run_sections import CommsLogger
from jaxspeed.errors import RunError
from jaxspeed.hlo import CompiledReport
from jaxspeed.jaxpr.flops import count_products, program_flops
from jaxspeed.placement.show import bytes_text, mesh_text, scaled_text, seconds_text
from jaxspeed.train.program import Program

log = logging.getLogger("jaxspeed")


class StepProfile:
    """Reports one step: `flops_profiler.profile_step`, and the first one for `comms_logger`."""

    def __init__(self, program: Program) -> None:
        config = program.config
        self._program = program
        self._flops = config.flops_profiler
        self._comms = config.comms_logger
        self._pending = config.comms_logger.enabled
        self._start: float | None = None

    def begin(self, step: int, state: Any) -> None:
        """Wait for the steps before this one, if it is to be timed."""
        self._start = None
        if self._flops.enabled and step == max(1, self._flops.profile_step):
            jax.block_until_ready(state)
            self._start = time.perf_counter()

    def end(self, step: int, metrics: Any, compiled: Callable[[], CompiledReport], batch: Any,
            state: Any) -> None:  # fmt: skip
        """Log and write what is due after this step."""
        if self._start is not None:
            jax.block_until_ready(metrics)
            seconds = time.perf_counter() - self._start
            forward = _forward(self._program, state, batch)
            lines = flops_lines(self._program, compiled(), seconds, forward)
            depths = module_lines(self._program, self._flops.module_depth, self._flops.top_modules)
            self._write(f"flops profiler: step {step}", [*lines, *depths])
        if self._pending:
            self._pending = False
            collectives = compiled().collectives
            shown = list(comms_lines(_chosen(collectives or (), self._comms), self._comms))
            if collectives is None:
                shown = ["  unknown: the backend does not print its program"]
            log.info("comms logger: step %d\n%s", step, "\n".join(shown))

    def _write(self, title: str, lines: list[str]) -> None:
        text = "\n".join([title, *(f"  {line}" for line in lines)])
        path = self._flops.output_file
        if path is None:
            log.info("%s", text)
        elif jax.process_index() == 0:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(f"{text}\n", encoding="utf-8")
            except OSError as error:
                works = f"flops_profiler.output_file: cannot write {path}: {error.strerror}"
                raise RunError(works) from error


def _forward(program: Program, state: Any, batch: Any) -> float | None:
    """FLOPs of a forward pass per device, of matmuls and convolutions; None of several programs."""
    if not program.on_one_mesh:
        return None
    traced = program.evaluate.trace(state, batch)
    return program_flops(traced.jaxpr.jaxpr, count_products) / program.mesh.size


def flops_lines(
    program: Program, report: CompiledReport, seconds: float, forward: float | None
) -> Iterator[str]:
    """Yield the summary of a step that took so long."""
    mesh = program.mesh.shape
    parameters = sum(math.prod(row.leaf.shape) for row in program.table)
    samples, devices = program.batch.train, program.mesh.size
    yield f"world size {devices} ({mesh_text(mesh)})"
    yield f"data parallel size {program.table.ranks}"
    yield f"model parallel size {mesh[TENSOR] * mesh[PIPE]}"
    yield f"batch size per device {program.batch.micro * program.batch.accumulation}"
    yield f"params of model {scaled_text(parameters, '')}"
    if forward is not None:
        yield f"fwd MACs per device {scaled_text(forward / 2, 'MACs')}"
        yield f"fwd flops per device {scaled_text(forward, 'FLOPs')}"
    yield f"step latency {seconds_text(seconds)}"
    if report.flops is not None:
        name = "fwd+bwd flops per device, with recomputation"
        yield f"{name} {scaled_text(report.flops, 'FLOPs')}"
        yield f"FLOPS per device {scaled_text(report.flops / seconds, 'FLOP/s')}"
    yield f"samples/second {samples / seconds:.4g}"


def module_lines(program: Program, depth: int, top: int) -> Iterator[str]:
    """Yield the modules with the most parameters at each depth up to `depth`, -1 for all."""
    paths = {row.path: math.prod(row.leaf.shape) for row in program.table}
    deepest = max(path.count("/") for path in paths)
    for level in range(1, (deepest if depth < 0 else min(depth, deepest)) + 1):
        sizes: Counter[str] = Counter()
        for path, size in paths.items():
            if path.count("/") >= level:
                sizes["/".join(path.split("/")[:level])] += size
        shown = ", ".join(f"{name} {scaled_text(n, '')}" for name, n in sizes.most_common(top))
        yield f"depth {level}: params {shown}"


def _chosen(collectives: tuple[Communication, ...], section: CommsLogger) -> list[Communication]:
    """The collectives that the section selects, by DeepSpeed's names or XLA's."""
    names = tuple(name.replace("_", "-") for name in section.prof_ops)
    return [
        collective
        for collective in collectives
        if section.prof_all or _is_named(collective.kind, names)
    ]


def _is_named(kind: str, names: tuple[str, ...]) -> bool:
    """Whether an operation is `all-gather-into-tensor` or the like."""
    return any(name.startswith(kind) for name in names)


def comms_lines(collectives: list[Communication], section: CommsLogger) -> Iterator[str]:
    """Yield the collectives of a step by kind and size, with `verbose` each of them."""
    groups: Counter[tuple[str, str, int, str]] = Counter()
    for op in collectives:
        groups[op.kind, "+".join(op.axes), op.bytes, op.dtype] += op.runs
    yield f"  {'Comm. Op':<22}{'Axes':<16}{'Message Size':<14}{'Dtype':<8}{'Count':>7}  Total"
    for (kind, axes, size, dtype), runs in sorted(
        groups.items(), key=lambda item: -item[0][2] * item[1]
    ):
        total = bytes_text(size * runs)
        yield f"  {kind:<22}{axes:<16}{bytes_text(size):<14}{dtype:<8}{runs:>7}  {total}"
    for op in collectives if section.verbose else ():
        site = f" | {op.site}" if section.debug and op.site else ""
        yield f"  comm op: {op.kind} | count: {op.runs} | msg size: {bytes_text(op.bytes)}{site}"
