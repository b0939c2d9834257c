"""Processes that work on questions beside each other, and end with the one that asked."""

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
    """`submit(question)` of a job that was sent to each process once.

    Args:
      job: called with nothing in each process, it gives the function that answers; both have to be
        picklable.
      count: of the processes.
      environment: beside this process's own.
    """

    def __init__(self, job: bytes, count: int, environment: Mapping[str, str]) -> None:
        self._questions: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._said = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)
        ours = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        env = {**ours, **environment, "PYTHONPATH": path}
        self._processes = [_started(job, said, env) for said in self._said]
        # Daemons: they wait for processes that are killed when this one ends, however it does.
        for process, said in zip(self._processes, self._said):
            threading.Thread(target=self._serve, args=(process, said), daemon=True).start()

    def submit(self, question: Any) -> "Future[Any]":
        """The answer of whichever process is free first.

        What went wrong in answering is the future's exception; RunError where a process ended.
        """
        future: Future[Any] = Future()
        self._questions.put((question, future))
        return future

    def _serve(self, process: "subprocess.Popen[bytes]", said: Any) -> None:
        """Questions to one process, one at a time."""
        assert process.stdin is not None and process.stdout is not None
        while (item := self._questions.get()) is not None:
            question, future = item
            try:
                pickle.dump(question, process.stdin)
                process.stdin.flush()
                answer, error = pickle.load(process.stdout)
            except (OSError, EOFError, ValueError, pickle.UnpicklingError):
                if not self._closed:
                    future.set_exception(RunError(_why(process, said)))
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(answer)

    def close(self) -> None:
        """Ends the processes, whatever they are at."""
        self._closed = True
        for process in self._processes:
            self._questions.put(None)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _started(job: bytes, said: Any, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxspeed.planner.search.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        env=dict(env),
        start_new_session=True,  # Ctrl-C is the parent's to answer
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has failed already, and its answer says why
        pickle.dump(job, process.stdin)
        process.stdin.flush()
    return process


def _why(process: "subprocess.Popen[bytes]", said: Any) -> str:
    code = process.wait()
    said.seek(0)
    last = "\n".join(said.read().decode("utf-8", "replace").strip().splitlines()[-_LAST_LINES:])
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"search: a process that estimated ended ({how}):\n{last}".rstrip()


class Inline:
    """The same in this process: for what cannot be sent to another."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer

    def submit(self, question: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(self._answer(question))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
