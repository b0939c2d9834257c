"""Pool of worker processes for estimates, which end with their parent."""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from jaxspeed.errors import RunError

_LAST_LINES = 12


class Workers:
    """Pool of processes; the job is sent to each once, then requests.

    Args:
      job: a picklable function without arguments, called in each process, that returns the
        function which answers requests.
      count: number of processes.
      environment: variables in addition to this process's.
    """

    def __init__(self, job: bytes, count: int, environment: Mapping[str, str]) -> None:
        self._requests: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._logs = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)
        inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        env = {**inherited, **environment, "PYTHONPATH": path}
        self._processes = [_started(job, log, env) for log in self._logs]
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
                    future.set_exception(RunError(_failure_text(process, log)))
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def close(self) -> None:
        """Kill the processes."""
        self._closed = True
        for process in self._processes:
            self._requests.put(None)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _started(job: bytes, log: Any, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxspeed.planner.search.worker"],
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


def _failure_text(process: "subprocess.Popen[bytes]", log: Any) -> str:
    code = process.wait()
    log.seek(0)
    last = "\n".join(log.read().decode("utf-8", "replace").strip().splitlines()[-_LAST_LINES:])
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"search: a worker process ended ({how}):\n{last}".rstrip()


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

    def close(self) -> None:
        """No-op."""

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
