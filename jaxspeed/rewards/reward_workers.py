"""Workers in which reward functions run, each call within a limit of time."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from jaxspeed.errors import ConfigError, RunError

PROGRAM = Path(__file__).with_name("reward_worker.py")
LOOK_SECONDS = 1.0
IMPORT_SECONDS = 300.0  # at most, of the functions' modules


class RewardCall(NamedTuple):
    """A call of a function.

    Attributes:
      function: its number.
      columns, arguments: lists by completion; `arguments` are those of TRL.
      state: the fields of `trainer_state`.
    """

    function: int
    columns: Mapping[str, list[Any]]
    arguments: Mapping[str, list[Any]]
    state: Mapping[str, Any]


class _Worker:
    """One process, in a group of its own with all that functions start."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # Ctrl-C is handled by the parent
        )
        self.call: int | None = None  # the number of the one that it answers
        self.is_ready = False
        # As for other paths package.module:name, the current folder is searched last.
        here = [] if {"", os.getcwd()} & {*sys.path} else [os.getcwd()]
        self.send(([*sys.path, *here], paths), IMPORT_SECONDS)

    def send(self, message: Any, seconds: float) -> None:
        self.limit = time.monotonic() + seconds
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its answer shows
            pickle.dump(message, self.process.stdin)
            self.process.stdin.flush()

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def answer(self) -> dict[str, Any]:
        """The message that has arrived; an error if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self.kill()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            how = "killed, probably because this machine ran out of memory"
        return {"error": f"its process ended ({how})"}

    def kill(self) -> int:
        """Kill the process and what it started; its exit code."""
        process = self.process
        if process.returncode is None:  # until it is waited for, no other has its number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        return code


class RewardWorkers:
    """Processes that call functions: started at once, replaced where they are killed or end.

    Args:
      paths: of the functions, package.module:name.
      count: number of processes.
      seconds: that a call may take.

    Raises:
      ConfigError: a function cannot be imported or called.
    """

    def __init__(self, paths: Sequence[str], count: int, seconds: float) -> None:
        if getattr(sys.modules["__main__"], "__file__", None) == str(PROGRAM):
            raise ConfigError(
                "the module of a reward trains when it is imported: write that below "
                'if __name__ == "__main__":'
            )
        self._paths, self._seconds = [*paths], seconds
        self.names: list[str] = []
        self.needs: list[list[str]] = []  # arguments of each function that have no default
        self._workers = [_Worker(self._paths) for _ in range(count)]
        try:
            while not self.names:  # the other workers have the same modules
                for worker in self._arrived():
                    if problem := self._started(worker):
                        raise ConfigError(f"objective.rewards: {problem}")
                if self._late():
                    raise ConfigError(f"objective.rewards: {self._slow_import()}")
        except BaseException:
            self.close()
            raise

    def run(
        self, calls: Sequence[RewardCall], stop_at_error: bool, tick: Callable[[], Any]
    ) -> dict[int, dict[str, Any]]:
        """The answers of calls by their number: `values`, `logged` and `metrics`, or an `error`.

        Args:
          stop_at_error: whether calls are left out after the first error.
          tick: called after each answer, and each second; if it returns True the others are left
            out.

        Raises:
          RunError: a worker does not start any more.
        """
        answers, waiting = dict[int, dict[str, Any]](), deque(range(len(calls)))
        try:
            while waiting or any(worker.call is not None for worker in self._workers):
                self._send(calls, waiting)
                for number, answer in self._answers():
                    answers[number] = answer
                    if stop_at_error and "error" in answer:
                        return answers
                if tick():
                    return answers
            return answers
        finally:  # also of an interrupt: later calls are not to get these answers
            for worker in [x for x in self._workers if x.call is not None]:
                self._replace(worker)

    def _send(self, calls: Sequence[RewardCall], waiting: "deque[int]") -> None:
        """Send the next calls to the workers that have none."""
        for worker in self._workers:
            if waiting and worker.is_ready and worker.call is None:
                worker.call = waiting.popleft()
                function, *arguments = calls[worker.call]
                worker.send((function, pickle.dumps(arguments)), self._seconds)

    def _answers(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The answers that have arrived, and errors of the calls whose time is over."""
        for worker in self._arrived():
            if not worker.is_ready:
                if problem := self._started(worker):
                    raise RunError(f"objective.rewards: {problem}")
                continue
            number, answer = worker.call, worker.answer()
            assert number is not None
            worker.call = None
            if worker.process.returncode is not None:
                self._replace(worker)
            yield number, answer
        for worker in self._late():
            if not worker.is_ready:
                raise RunError(f"objective.rewards: {self._slow_import()}")
            number = worker.call
            assert number is not None
            self._replace(worker)
            yield (
                number,
                {"error": f"took more than {self._seconds:g} s (objective.reward_timeout)"},
            )

    def _arrived(self) -> list[_Worker]:
        """Workers with a message, once there is one, the time of one is over, or after a while."""
        busy = [x for x in self._workers if x.call is not None or not x.is_ready]
        seconds = min(x.limit for x in busy) - time.monotonic()
        return wait(busy, min(max(seconds, 0), LOOK_SECONDS))  # type: ignore[arg-type, return-value]

    def _late(self) -> list[_Worker]:
        """Workers whose time is over, without a message that has arrived since."""
        now = time.monotonic()
        busy = [x for x in self._workers if x.call is not None or not x.is_ready]
        late = [x for x in busy if x.limit < now]
        arrived = wait(late, 0) if late else []  # type: ignore[arg-type]
        return [x for x in late if x not in arrived]

    def _started(self, worker: _Worker) -> str:
        """Why a worker that has sent its first message did not start; empty if it did."""
        answer = worker.answer()
        if "error" in answer:
            path = answer.get("path", ", ".join(self._paths))
            return f"{path} cannot be imported: {answer['error']}"
        self.names, self.needs, worker.is_ready = answer["names"], answer["needs"], True
        return ""

    def _slow_import(self) -> str:
        return f"importing {', '.join(self._paths)} took more than {IMPORT_SECONDS:g} s"

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = _Worker(self._paths)

    def close(self) -> None:
        """Kill the processes, with all that functions have started."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
