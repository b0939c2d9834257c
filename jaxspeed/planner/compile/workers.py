"""Worker processes of the planner, for estimates and compiles; they end with their parent.

    with Workers(pickle.dumps(job), 2, environment) as workers:
        workers.submit(request).result()

A worker (`main`) calls the job once, and the function that it returns with each request.
"""

import contextlib
import gc
import os
import pickle
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from jaxspeed.errors import RunError

_LAST_LINES = 12  # of a failed process's output
_MAIN = "from jaxspeed.planner.compile.workers import main; main()"


class Workers:
    """Pool of processes; the job is sent to each once, then requests.

    Args:
      job: a picklable function without arguments, called in each process, that returns the
        function which answers requests.
      count: number of processes.
      environment: variables in addition to this process's.
      failing: the start of the error if a process ends.
      folder: a temporary folder that a worker removes if its parent ends.
    """

    def __init__(
        self,
        job: bytes,
        count: int,
        environment: Mapping[str, str],
        failing: str = "search: a worker process ended",
        folder: str | None = None,
    ) -> None:
        self._failing = failing
        self._requests: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._logs = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)
        inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        env = {**inherited, **environment, "PYTHONPATH": path}
        self._processes = [_started(job, log, env, folder) for log in self._logs]
        # Daemon threads: they wait for processes that are killed when this one ends in any way.
        for process, log in zip(self._processes, self._logs):
            threading.Thread(target=self._serve, args=(process, log), daemon=True).start()

    def submit(self, request: Any) -> "Future[Any]":
        """The response of the first free process.

        The future's exception is what the request raised, or a RunError if the process ended.
        """
        future: Future[Any] = Future()
        self._requests.put((request, future))
        return future

    def _serve(self, process: "subprocess.Popen[bytes]", log: Any) -> None:
        """Send requests to one process, one at a time."""
        assert process.stdin is not None and process.stdout is not None
        while (item := self._requests.get()) is not None:
            request, future = item
            try:
                pickle.dump(request, process.stdin)
                process.stdin.flush()
                result, error = pickle.load(process.stdout)
            except (OSError, EOFError, ValueError, pickle.UnpicklingError):
                if not self._closed:
                    future.set_exception(RunError(self._failure(process, log)))
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _failure(self, process: "subprocess.Popen[bytes]", log: Any) -> str:
        """Why a process ended."""
        code = process.wait()
        log.seek(0)
        lines = log.read().decode("utf-8", "replace").strip().splitlines()
        checks = [line for line in lines if re.match(r"F\d{4} ", line)]  # XLA's fatal log lines
        last = "\n".join(checks or lines[-_LAST_LINES:])
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            how = "killed, probably because this machine ran out of memory"
        return f"{self._failing} ({how}):\n{last}".rstrip()

    def close(self) -> None:
        """Kill the processes."""
        self._closed = True
        for process in self._processes:
            self._requests.put(None)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with a compiler's own processes
            process.wait()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _started(
    job: bytes, log: Any, env: Mapping[str, str], folder: str | None
) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _MAIN, *([folder] if folder else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=dict(env),
        start_new_session=True,  # Ctrl-C is handled by the parent
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has failed; the first request reports why
        pickle.dump(job, process.stdin)
        process.stdin.flush()
    return process


class Inline:
    """The same interface in this process, for jobs that cannot be pickled."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer

    def submit(self, request: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(self._answer(request))
        except Exception as error:
            future.set_exception(error)
        return future

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


# -- in the worker ---------------------------------------------------------------------------------


def main() -> None:
    """Read a job and then requests from stdin; write their responses to stdout."""
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints must not mix with responses
    stdin = os.fdopen(os.dup(0), "rb")  # not sys.stdin, whose lock Python takes when it ends
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    job = pickle.load(stdin)
    threading.Thread(target=_read, args=(stdin, requests), daemon=True).start()
    answer = pickle.loads(job)()
    gc.freeze()  # imported modules: tracing and lowering Llama 3 8B took 1.5 s, and 1.2 with this
    while True:
        request = requests.get()
        try:
            response: tuple[Any, Exception | None] = answer(request), None
        except Exception as error:  # raised in the parent
            response = None, error
        pickle.dump(response, responses)
        responses.flush()


def _read(stdin: Any, requests: "queue.SimpleQueue[Any]") -> None:
    """Read requests, even while one is being answered, and end this process with its parent."""
    try:
        while True:
            requests.put(pickle.load(stdin))
    except EOFError:
        for folder in sys.argv[1:]:
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)
