"""Compile a step for devices that are not here, in a process of its own."""

import contextlib
import importlib.util
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxspeed.errors import ConfigError, ModelError, RunError
from jaxspeed.hardware.targets import Target
from jaxspeed.planner.compile import deviceless_cuda
from jaxspeed.planner.compile.outcome import KEPT, PRINTED, Failure, Outcome, Request

PATIENCE = 1800.0  # seconds; the largest that were seen took a tenth
_LAST_LINES = 12  # of what a process said before it failed


def compile_for(
    target: Target, job: Any, patience: float = PATIENCE, keep: str | Path | None = None
) -> Outcome:
    """What the target's compiler makes of a step.

    Args:
      target: devices that need not be here.
      job: called with devices in the other process as `(program, batch) = job(devices)`; it has to
        be picklable.
      patience: seconds after which the compile is given up.
      keep: a file that is to have the executable.

    Raises:
      ConfigError: the compiler is not installed, or does not know the chip.
      ModelError: the job cannot be sent to another process.
      RunError: the compile failed, or took too long.
      JaxspeedError: whatever building the program raised there.
    """
    refuse_missing(target, keep is not None)
    request = _pickled(job)
    with tempfile.TemporaryDirectory(prefix="jaxspeed-plan-") as folder:
        answer, said = Path(folder) / "answer", Path(folder) / "said"
        with said.open("wb") as output:
            asked = Request(request, target, str(answer), keep is not None)
            code = _run(target, asked, output, patience)
        if not answer.exists():
            raise RunError(_why(target, code, said.read_text("utf-8", "replace")))
        found = pickle.loads(answer.read_bytes())
        if keep is not None and isinstance(found, Outcome) and found.report:
            shutil.move(Path(folder) / KEPT, keep)
            found = replace(found, kept=str(keep))
    if isinstance(found, Failure):
        raise found.error
    return found


def refuse_missing(target: Target, keep: bool = False) -> None:
    """ConfigError unless the target's compiler is installed, and what it makes can be kept."""
    chip = target.chip
    if keep and chip.platform == "cuda":
        raise ConfigError(
            f"--keep: target {target}: what is compiled for absent GPUs goes past jax's own path "
            "(planner/compile/deviceless_cuda.py), so jax cannot keep it; on the GPUs themselves "
            "run.compilation_cache keeps the step of the first start"
        )
    if not chip.compiles:
        raise ConfigError(
            f"target {target}: no compiler here takes {chip.name}; leave out --compile for the "
            "estimate"
        )
    if chip.platform == "tpu" and not _installed("libtpu"):
        raise ConfigError(
            f"target {target}: its compiler is not installed: pip install jaxspeed[tpu] "
            "(libtpu, 160 MB). The estimate, without --compile, needs nothing"
        )
    if chip.platform == "cuda" and not any(map(_installed, deviceless_cuda.PLUGINS)):
        raise ConfigError(
            f"target {target}: its compiler is not installed: pip install jaxspeed[cuda] "
            "(jax[cuda13], 3.4 GB; neither a GPU nor a driver is needed). The estimate, without "
            "--compile, needs nothing"
        )


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _pickled(job: Any) -> bytes:
    try:
        made = pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ModelError(
            "to compile for a target, the model and its loss go to another process, which cannot "
            f"be done with these ({error}). Make them functions of a module, or name them in the "
            'config: {"model": {"factory": "my_module:build"}}'
        ) from None
    if b"__main__" in made:
        raise ModelError(
            "to compile for a target, the model and its loss go to another process, which does not "
            "have what the script that runs defines (__main__). Put them into a module that the "
            "script imports"
        )
    return made


def _environment(target: Target, folder: Path) -> dict[str, str]:
    """That of the process: the platform and flags of the target, and our modules."""
    ours = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    own = {"JAX_PLATFORMS": "cpu"}
    if target.chip.platform == "tpu":
        # No TPU is looked for, and several processes may have the compiler.
        own |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        # The step's text, once: no pass has an empty name.
        own["XLA_FLAGS"] = (
            f"--xla_dump_to={folder / PRINTED} --xla_dump_hlo_as_text "
            "--xla_dump_hlo_module_re=jit_step.* --xla_dump_hlo_pass_re=^$"
        )
    if target.chip.platform == "cuda":
        own = deviceless_cuda.environment()
    return {
        **ours,
        **own,
        # A program for absent devices cannot be loaded back from the compilation cache.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path),
    }


def _run(target: Target, request: Request, output: Any, patience: float) -> int:
    """Its exit code. The process ends before this does, however this ends."""
    command = [sys.executable, "-P", "-m", "jaxspeed.planner.compile.child"]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=_environment(target, Path(request.answer).parent),
        start_new_session=True,  # Ctrl-C is ours to answer
    )
    assert child.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # it has failed already, and says why
            child.stdin.write(pickle.dumps(request))
            child.stdin.flush()  # and not closed: it ends with us
        return child.wait(patience)
    except subprocess.TimeoutExpired:
        raise RunError(
            f"target {target}: the compile took more than {patience:g} s and was given up"
        ) from None
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()


def _why(target: Target, code: int, said: str) -> str:
    """What became of a process that left no answer."""
    lines = said.strip().splitlines()
    checks = [line for line in lines if re.match(r"F\d{4} ", line)]  # by which XLA ends itself
    last = "\n".join(checks or lines[-_LAST_LINES:])
    if code == -signal.SIGKILL:
        return (
            f"target {target}: the process that compiled was killed, as a machine does whose "
            f"memory runs out\n{last}".rstrip()
        )
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"target {target}: the compile failed ({how}):\n{last}"
