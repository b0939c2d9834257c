"""The process that compiles for devices that are not here, and ends with the one that asked.

It has the platform and the flags of the target's compiler to itself: libtpu prints warnings into
plain CPU runs and holds a lock, and the plugin of CUDA does not share an environment with it well.
"""

import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxspeed.errors import JaxspeedError
from jaxspeed.hardware.targets import Target
from jaxspeed.hlo import CompiledReport, report
from jaxspeed.planner.compile import deviceless_cuda
from jaxspeed.planner.compile.outcome import KEPT, PRINTED, Failure, Outcome, Request, out_of_memory
from jaxspeed.train.aot_step import identity_of, write
from jaxspeed.train.program import Program

# From the devices to a program and the shapes of its batch.
Job = Callable[[Sequence[Any] | None], tuple[Program, Any]]


def main() -> None:
    """Reads a request from stdin, and writes its outcome where that says."""
    request: Request = pickle.load(sys.stdin.buffer)
    folder = Path(request.answer).parent
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    kept_in = folder / KEPT if request.keep else None
    made = run(pickle.loads(request.job), request.target, folder / PRINTED, kept_in)
    # A file that is there is whole.
    part = Path(f"{request.answer}.part")
    part.write_bytes(pickle.dumps(made))
    part.replace(request.answer)


def _end_with_parent(folder: Path) -> None:
    """The parent holds the other end of stdin for as long as it lives and waits."""
    while os.read(0, 1):  # not sys.stdin, whose lock this would hold when Python ends
        pass
    shutil.rmtree(folder, ignore_errors=True)  # which nobody reads any more
    os.killpg(0, signal.SIGKILL)  # with what the compiler has started


def run(
    job: Job, target: Target, printed_in: Path | None = None, kept_in: Path | None = None
) -> Outcome | Failure:
    """Build, lower and compile the step that would run.

    `printed_in` is the folder that XLA was told to print programs into, if it was; `kept_in` the
    file that is to have the executable.
    """
    started = time.perf_counter()
    try:
        devices = devices_of(target)
        program, batch = job(devices)
        traced = program.step.trace(program.state, program.abstract_batch(batch))
        if target.chip.platform == "cuda":
            lowered = traced.lower(lowering_platforms=("cuda",))
        else:
            lowered = traced.lower()
        lowering = time.perf_counter() - started
        compiled = _compile(lowered, target)
        seconds = time.perf_counter() - started - lowering
        if kept_in:
            write(kept_in, compiled, identity_of(lowered, program.devices, program.mesh))
    except JaxspeedError as error:
        return Failure(error)
    except jax.errors.JaxRuntimeError as error:
        refused = out_of_memory(str(error))
        if refused is None:
            raise
        return Outcome(None, refused, time.perf_counter() - started)
    text = Printed(compiled, printed_in, target)
    found = _reported(text, program, batch, target, seconds)
    return Outcome(found, None, time.perf_counter() - started)


def _compile(lowered: Any, target: Target) -> Any:
    if target.chip.platform == "cuda":
        return deviceless_cuda.compile_lowered(lowered, target)
    return lowered.compile()


def _reported(
    compiled: Any, program: Program, batch: Any, target: Target, seconds: float
) -> CompiledReport:
    schedule, kept = program.pipeline_report(batch), program.kept_report(batch)
    waiting = program.table.host_bytes_by_role()
    found = report(compiled, program.mesh, seconds, schedule, None, waiting, kept)
    if target.slices > 1:
        found = replace(found, no_text="of several slices libtpu prints the program of one")
    # A program for GPUs is lowered on a CPU's mesh, but their compiler separates host memory.
    return replace(found, separates_host=target.chip.platform != "cpu")


@dataclass(frozen=True)
class Printed:
    """A compiled program, with its text as XLA printed it where it cannot be had afterwards.

    libtpu 0.0.51 cannot print some programs that it has compiled ("async-update instruction should
    have 1 operands"), but prints them into a folder while it compiles. Of several slices it has the
    text of one, in which what slices exchange is not: there it is left out.
    """

    compiled: Any
    folder: Path | None
    target: Target

    @property
    def input_shardings(self) -> Any:
        return self.compiled.input_shardings

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()

    def as_text(self) -> str:
        if self.target.slices > 1:
            return ""
        printed = (
            sorted(self.folder.glob("*jit_step*.after_optimizations.txt")) if self.folder else []
        )
        return printed[-1].read_text("utf-8") if printed else str(self.compiled.as_text())


def devices_of(target: Target) -> Sequence[Any]:
    """Those to build the program on: the target's own, or for GPUs as many simulated ones."""
    if target.chip.platform != "tpu":
        jax.config.update("jax_num_cpu_devices", target.count)
        return jax.devices("cpu")
    from jax.experimental import topologies

    told = dict(target.chip.compiler or {})
    name = f"{told.pop('topology')}:{'x'.join(map(str, target.topology))}"
    if target.slices > 1:
        told["num_slices"] = target.slices
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **told).devices


if __name__ == "__main__":
    main()
