"""torch, transformers, PEFT, bitsandbytes and DeepSpeed, in a process and a venv of their own.

The functions that tests call are in `tests/references/`; `make references` makes the venv.
"""

import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from tests.references import exchange

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "references"
OVERRIDE = "JAXSPEED_REFERENCES"
_DTYPES = {
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2, "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "U8": np.uint8,
    "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.bool_, "C64": np.complex64,
}  # fmt: skip


class ReferencesError(RuntimeError):
    """A function of `tests/references` raised, or its process ended or did not answer."""


def python() -> Path:
    """The interpreter that has the references; without one, the test is skipped."""
    if given := os.environ.get(OVERRIDE):
        if not Path(given).exists():
            raise ReferencesError(f"{OVERRIDE} names {given}, which does not exist")
        return Path(given)
    made = ROOT / ".venv-references" / "bin" / "python"
    if not made.exists():
        pytest.skip(f"{', '.join(exchange.PACKAGES)} have no venv here: make references")
    return made


class References:
    """The process, which starts with the first call and again after one that it did not survive."""

    def __init__(self) -> None:
        self.python = python()
        self._folder = tempfile.TemporaryDirectory(prefix="references-")
        self._log = Path(self._folder.name) / "log"
        self._child: subprocess.Popen[bytes] | None = None

    def call(self, function: str, *, timeout_s: float = 900, **arguments: Any) -> Any:
        """`function` ("module.name") of tests/references, with these arguments.

        Args:
            timeout_s: a process that has not answered by then is killed.
            arguments: JSON, paths, and arrays at any depth, which are torch's tensors there.

        Returns:
            What it returns, with NumPy's arrays for tensors and lists for tuples.
        """
        child = self._child = self._child or self._started()
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            request = {"function": function, "arguments": arguments}
            exchange.write(Path(folder) / "request", request, (np.ndarray, jax.Array), _save)
            self._wait_for_answer(child, folder, function, timeout_s)
            outcome = exchange.read(Path(folder) / "answer", _load)
        if "missing" in outcome:
            venv = self.python.parent.parent
            pytest.skip(f"{outcome['missing']} is not installed in {venv}: make references")
        if "error" in outcome:
            raise ReferencesError(f"{function} raised in {self.python}:\n{outcome['error']}")
        return outcome["value"]

    def interpreter(self, *packages: str) -> Path:
        """For programs of a test's own, which need these packages."""
        for package in packages:
            self.call("protocol.imported", package=package)
        return self.python

    def close(self) -> None:
        if self._child:
            self._child.kill()  # torch takes seconds to end
            self._ended(self._child)
        self._folder.cleanup()

    def _started(self) -> subprocess.Popen[bytes]:
        own = {"PYTHONPATH", "PYTHONHOME", "COVERAGE_PROCESS_START", "VIRTUAL_ENV"}
        env = {name: value for name, value in os.environ.items() if name not in own}
        env |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        env["HF_DATASETS_CACHE"] = self._folder.name
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [self.python, HERE / "serve.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                cwd=self._folder.name,
                env=env,
            )

    def _wait_for_answer(
        self, child: subprocess.Popen[bytes], folder: str, function: str, timeout_s: float
    ) -> None:
        assert child.stdin and child.stdout
        line, said, end = f"{folder}\n".encode(), b"", time.monotonic() + timeout_s
        failure = ""
        try:
            child.stdin.write(line)
        except BrokenPipeError:
            failure = "had ended before"
        while not failure and not said.endswith(b"\n"):
            if not select.select([child.stdout], [], [], max(0, end - time.monotonic()))[0]:
                failure = f"did not answer for {timeout_s:g} s in"
            elif not (part := os.read(child.stdout.fileno(), 4096)):
                failure = "ended in"
            else:
                said += part
        if failure or said != line:
            code = self._ended(child)
            self._child = None
            last = self._log.read_text(errors="replace")[-2000:]
            raise ReferencesError(
                f"the references' process ({self.python}) {failure or 'answered another call than'}"
                f" {function}; its exit code is {code}, and it last wrote:\n{last}"
            )

    @staticmethod
    def _ended(child: subprocess.Popen[bytes]) -> int:
        """The exit code of a process that ends, or else is killed."""
        assert child.stdin and child.stdout
        child.stdin.close()
        try:
            code = child.wait(1)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        child.stdout.close()
        return code


def _save(arrays: dict[str, Any], path: Path) -> None:
    save_file({name: np.asarray(x, order="C") for name, x in arrays.items()}, path)


def _load(path: Path) -> dict[str, np.ndarray]:
    """Not by `safetensors.numpy`, which does not know the dtypes of ml_dtypes."""
    return {
        name: np.frombuffer(x["data"], _DTYPES[x["dtype"]]).reshape(x["shape"])
        for name, x in safetensors.deserialize(path.read_bytes())
    }
