"""The compile of a step for absent devices, in a child process.

The target's compiler needs a separate process: libtpu prints warnings into CPU runs and holds a
lock, and the CUDA plugin conflicts with it in one environment.
"""

import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxspeed.engine.step_report import report_of_phases
from jaxspeed.errors import ConfigError, JaxspeedError
from jaxspeed.generation.rollout_programs import rollout_programs
from jaxspeed.hardware.chip import assumed
from jaxspeed.hardware.targets import Target
from jaxspeed.hlo import CompiledReport, report
from jaxspeed.ops import gpu
from jaxspeed.planner.compile import EXECUTABLE, PRINTED, deviceless_cuda
from jaxspeed.planner.compile.outcome import Outcome, out_of_memory
from jaxspeed.planner.trace.traced_step import placed_results
from jaxspeed.train.aot_step import identity_of, write
from jaxspeed.train.phases import StepPhase, shapes_after
from jaxspeed.train.program import Program

# A function from the devices to a program and the shapes of its batch.
Job = Callable[[Sequence[Any] | None], tuple[Program, Any]]


def compiling(target: Target, folder: Path, keep: bool) -> Callable[[bytes], Outcome]:
    """Load the target's compiler; the function compiles a pickled `Job`.

    The job is pickled since it may import modules that use JAX, which has to be set up first.
    """
    devices = devices_of(target)

    def answer(job: bytes) -> Outcome:
        try:
            return _compile(pickle.loads(job), devices, target, folder, keep)
        except JaxspeedError:
            raise
        except Exception:  # the process ends, and its traceback is in the parent's error
            traceback.print_exc()
            os._exit(1)

    return answer


def _compile(job: Job, devices: Sequence[Any], target: Target, folder: Path, keep: bool) -> Outcome:
    """Build, lower and compile the programs of the training step."""
    started = time.perf_counter()
    cuda = target.chip.platform == "cuda"
    try:
        as_there = gpu.assumed(target.chip.capability) if cuda else nullcontext()
        with as_there, assumed(target.chip):
            program, batch = job(devices)
            compiler = _PhaseCompiler(program, batch, target, folder, keep)
            rollout = rollout_programs(program, batch, target.chip.platform)
            figures = report_of_phases(program, batch, compiler, rollout)
    except jax.errors.JaxRuntimeError as error:
        refused = out_of_memory(str(error))
        if refused is None:
            raise
        return Outcome(None, refused, time.perf_counter() - started)
    return Outcome(figures, None, time.perf_counter() - started)


class _PhaseCompiler:
    """Compiles the programs of a step: `report, results = compiler(phase, traced, values)`."""

    def __init__(
        self, program: Program, batch: Any, target: Target, folder: Path, keep: bool
    ) -> None:
        if keep and len(program.phases) > 1:
            names = ", ".join(phase.name for phase in program.phases)
            raise ConfigError(f"--keep: it saves one program, and a step is several here: {names}")
        self._program, self._target, self._folder, self._keep = program, target, folder, keep
        self._of_loss: dict[str, Any] = {  # of the program that evaluates the loss
            "pipeline": program.pipeline_report(batch),
            "waiting": program.table.host_bytes_by_role(),
            "kept": program.kept_report(batch),
        }

    def __call__(
        self, phase: StepPhase, traced: Any, values: Mapping[str, Any]
    ) -> tuple[CompiledReport, Any]:
        program, target, mesh = self._program, self._target, phase.mesh
        assert mesh is not None
        cuda = target.chip.platform == "cuda"
        lowered = traced.lower(lowering_platforms=("cuda",)) if cuda else traced.lower()
        started = time.perf_counter()
        compiled: Any = (
            deviceless_cuda.compile_lowered(lowered, target) if cuda else lowered.compile()
        )
        seconds = time.perf_counter() - started
        if self._keep:
            identity = identity_of(lowered, program.devices, program.mesh)
            write(self._folder / EXECUTABLE, compiled, identity)
        name = lowered.compiler_ir().operation.attributes["sym_name"].value
        printed: Any = PrintedProgram(compiled, self._folder / PRINTED, target, name)
        of_loss = phase is program.phases[len(program.array_phases)]
        figures = report(printed, mesh, seconds, **(self._of_loss if of_loss else {}))
        if target.slices > 1:
            figures = replace(figures, no_text="of several slices libtpu prints the program of one")
        # A program for GPUs is lowered on a CPU mesh, but their compiler reports host memory.
        figures = replace(figures, separates_host=target.chip.platform != "cpu")
        if phase is program.phases[-1]:
            return figures, traced.out_info
        if cuda:  # the executable does not have its results' shardings
            return figures, placed_results(program, phase, traced, values, "cuda")
        return figures, shapes_after(compiled, traced)


@dataclass(frozen=True)
class PrintedProgram:
    """A compiled program, with its text from XLA's dump folder.

    libtpu 0.0.51 cannot print some compiled programs ("async-update instruction should have 1
    operands"), but dumps them while it compiles. For several slices it has the text of one, without
    communication between slices: there the text is omitted.
    """

    compiled: Any
    folder: Path
    target: Target
    module: str

    @property
    def input_shardings(self) -> Any:
        return self.compiled.input_shardings

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()

    def as_text(self) -> str:
        if self.target.slices > 1:
            return ""
        printed = sorted(self.folder.glob(f"*.{self.module}.*after_optimizations.txt"))
        return printed[-1].read_text("utf-8") if printed else str(self.compiled.as_text())


def devices_of(target: Target) -> Sequence[Any]:
    """The devices to build the program on: the target's, or for GPUs as many simulated ones."""
    if target.chip.platform != "tpu":
        jax.config.update("jax_num_cpu_devices", target.count)
        return jax.devices("cpu")
    from jax.experimental import topologies

    options = dict(target.chip.compiler or {})
    name = f"{options.pop('topology')}:{'x'.join(map(str, target.topology))}"
    if target.slices > 1:
        options["num_slices"] = target.slices
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
