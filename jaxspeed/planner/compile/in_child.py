"""Compile a step for absent devices in a child process.

    with StepCompiler(target) as compiler:  # imports JAX and the target's compiler meanwhile
        compiler.submit(job)
        outcome = compiler.outcome()

Nothing here imports JAX, so that the process starts before this one does.
"""

import importlib.util
import pickle
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspeed.errors import ConfigError, ModelError, RunError
from jaxspeed.hardware.targets import Target
from jaxspeed.planner.compile import EXECUTABLE, PATIENCE, PRINTED
from jaxspeed.planner.compile.workers import Workers

if TYPE_CHECKING:
    from concurrent.futures import Future

    from jaxspeed.planner.compile.outcome import Outcome


class StepCompiler:
    """A process that compiles one step for a target.

    Args:
      target: devices, which may be absent.
      keep: a file to write the executable to.

    Raises:
      ConfigError: the compiler is not installed, or does not support the chip.
    """

    def __init__(self, target: Target, keep: str | Path | None = None) -> None:
        refuse_missing(target, keep is not None)
        self._target, self._keep = target, keep
        self._future: Future[Outcome] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="jaxspeed-plan-")
        folder = self._folder.name
        job = pickle.dumps(CompileJob(target, folder, keep is not None))
        failing, environment = f"target {target}: the compile failed", _environment(target, folder)
        self._worker = Workers(job, 1, environment, failing, folder)

    def submit(self, job: Any) -> None:
        """Start the compile.

        Args:
          job: called with devices in the child process as `(program, batch) = job(devices)`; it has
            to be picklable.

        Raises:
          ModelError: the job cannot be sent to another process.
        """
        self._future = self._worker.submit(pickled(job))

    def outcome(self, patience: float = PATIENCE) -> "Outcome":
        """Wait for the compile, at most `patience` seconds.

        Raises:
          RunError: the compile failed or timed out.
          JaxspeedError: raised by building the program in the child process.
        """
        assert self._future is not None, "submit comes first"
        try:
            outcome = self._future.result(patience)
        except TimeoutError:
            raise RunError(
                f"target {self._target}: the compile timed out after {patience:g} s"
            ) from None
        if self._keep is not None and outcome.report:
            shutil.move(Path(self._folder.name) / EXECUTABLE, self._keep)
            outcome = replace(outcome, kept=str(self._keep))
        return outcome

    def __enter__(self) -> "StepCompiler":
        return self

    def __exit__(self, *_: Any) -> None:
        self._worker.close()
        self._folder.cleanup()


def compile_for(
    target: Target, job: Any, patience: float = PATIENCE, keep: str | Path | None = None
) -> "Outcome":
    """Compile a step for a target, and wait: a StepCompiler's arguments, and its errors."""
    with StepCompiler(target, keep) as compiler:
        compiler.submit(job)
        return compiler.outcome(patience)


@dataclass(frozen=True)
class CompileJob:
    """The job of a compiling process: its one request is answered with an Outcome.

    Attributes:
      folder: for XLA's dump and the executable.
      keep: whether to write the executable.
    """

    target: Target
    folder: str
    keep: bool

    def __call__(self) -> "Callable[[bytes], Outcome]":
        from jaxspeed.planner.compile import child

        return child.compiling(self.target, Path(self.folder), self.keep)


def refuse_missing(target: Target, keep: bool = False) -> None:
    """Raise ConfigError unless the target's compiler is installed and can keep its executable."""
    chip = target.chip
    if keep and chip.platform == "cuda":
        raise ConfigError(
            f"--keep: target {target}: a compile for absent GPUs bypasses jax's own path "
            "(planner/compile/deviceless_cuda.py), so jax cannot serialize it; on the GPUs, "
            "run.compilation_cache caches the step of the first start"
        )
    if not chip.compiles:
        raise ConfigError(
            f"target {target}: no compiler here supports {chip.name}; without --compile the plan "
            "is an estimate"
        )
    modules, what = _COMPILERS.get(chip.platform, ((), ""))
    if modules and not any(map(importlib.util.find_spec, modules)):
        raise ConfigError(
            f"target {target}: its compiler is not installed: pip install "
            f"jaxspeed[{chip.platform}] ({what}). The estimate, without --compile, does not need it"
        )


# Modules of which one is needed, and what pip installs.
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_COMPILERS = {
    "tpu": (("libtpu",), "libtpu, 160 MB"),
    "cuda": (
        CUDA_PLUGINS,
        "jax[cuda13], 3.4 GB; neither a GPU nor a driver is needed",
    ),
}


def pickled(job: Any) -> bytes:
    """A job for another process; ModelError if it cannot be sent there."""
    try:
        data = pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ModelError(
            "to compile for a target, the model and its loss are sent to another process, and "
            f"these cannot be pickled ({error}). Make them functions of a module, or name them in "
            'the config: {"model": {"factory": "my_module:build"}}'
        ) from None
    if b"__main__" in data:
        raise ModelError(
            "to compile for a target, the model and its loss are sent to another process, which "
            "cannot import what the running script defines (__main__). Put them into a module that "
            "the script imports"
        )
    return data


def _environment(target: Target, folder: str) -> dict[str, str]:
    """The child's environment: platform and flags of the target."""
    variables = {"JAX_PLATFORMS": "cpu"}
    if target.chip.platform == "tpu":
        # Do not search for a TPU, and let several processes load the compiler.
        variables |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        # Dump the step's text once: no pass has an empty name. jaxlib 0.12 would write `%loop#1` in
        # place of a get-tuple-element, which `as_text` has as an instruction.
        variables["XLA_FLAGS"] = (
            f"--xla_dump_to={folder}/{PRINTED} --xla_dump_hlo_as_text --xla_dump_compact_gte=false "
            "--xla_dump_hlo_module_re=jit_.* --xla_dump_hlo_pass_re=^$"
        )
    if target.chip.platform == "cuda":
        # Autotuning is impossible, and without it XLA does not choose Triton matmuls.
        flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
        if (tools := _ptxas()) is not None:
            flags += f" --xla_gpu_cuda_data_dir={tools}"
        variables = {
            "CUDA_VISIBLE_DEVICES": "-1",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "JAX_PLATFORMS": "",
            "XLA_FLAGS": flags,
        }
    # A program for absent devices cannot be loaded back from the compilation cache.
    return {**variables, "JAX_ENABLE_COMPILATION_CACHE": "false"}


def _ptxas() -> Path | None:
    """The folder of CUDA's tools from the wheels."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations or () if spec else ()
    tools = (path.parents[1] for place in places for path in Path(place).glob("*/bin/ptxas"))
    return next(tools, None)
