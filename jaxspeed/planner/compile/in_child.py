"""`compile_for`: compile a step for absent devices in a child process, and wait for its outcome."""

import importlib.util
import pickle
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxspeed.errors import ConfigError, ModelError, RunError
from jaxspeed.hardware.targets import Target
from jaxspeed.planner.compile import PATIENCE, deviceless_cuda
from jaxspeed.planner.compile.child import EXECUTABLE, PRINTED, CompileJob
from jaxspeed.planner.compile.outcome import Outcome
from jaxspeed.planner.compile.workers import Workers


def compile_for(
    target: Target, job: Any, patience: float = PATIENCE, keep: str | Path | None = None
) -> Outcome:
    """Compile a step for a target.

    Args:
      target: devices, which may be absent.
      job: called with devices in the child process as `(program, batch) = job(devices)`; it has to
        be picklable.
      patience: timeout in seconds.
      keep: a file to write the executable to.

    Raises:
      ConfigError: the compiler is not installed, or does not support the chip.
      ModelError: the job cannot be sent to another process.
      RunError: the compile failed or timed out.
      JaxspeedError: raised by building the program in the child process.
    """
    refuse_missing(target, keep is not None)
    job_bytes = pickled(job)
    with tempfile.TemporaryDirectory(prefix="jaxspeed-plan-") as folder:
        compiling = pickle.dumps(CompileJob(job_bytes, target, folder, keep is not None))
        failing, environment = f"target {target}: the compile failed", _environment(target, folder)
        with Workers(compiling, 1, environment, failing, folder) as worker:
            try:
                found: Outcome = worker.submit(None).result(patience)
            except TimeoutError:
                raise RunError(
                    f"target {target}: the compile timed out after {patience:g} s"
                ) from None
        if keep is not None and found.report:
            shutil.move(Path(folder) / EXECUTABLE, keep)
            found = replace(found, kept=str(keep))
    return found


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
_COMPILERS = {
    "tpu": (("libtpu",), "libtpu, 160 MB"),
    "cuda": (
        deviceless_cuda.PLUGINS,
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
    own = {"JAX_PLATFORMS": "cpu"}
    if target.chip.platform == "tpu":
        # Do not search for a TPU, and let several processes load the compiler.
        own |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        # Dump the step's text once: no pass has an empty name.
        own["XLA_FLAGS"] = (
            f"--xla_dump_to={folder}/{PRINTED} --xla_dump_hlo_as_text "
            "--xla_dump_hlo_module_re=jit_step.* --xla_dump_hlo_pass_re=^$"
        )
    if target.chip.platform == "cuda":
        own = deviceless_cuda.environment()
    # A program for absent devices cannot be loaded back from the compilation cache.
    return {**own, "JAX_ENABLE_COMPILATION_CACHE": "false"}
