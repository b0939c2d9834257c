"""A process that calls reward functions: `python -u reward_worker.py`, without jaxspeed.

It answers the messages of its stdin, pickles, with lines of JSON: the first, (sys.path, paths of
functions), with their names and the arguments that each needs; each other one, (number of a
function, its arguments as a pickle), with `answer`. What functions print goes to stderr.
"""

import contextlib
import importlib
import inspect
import json
import math
import operator
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any


class _Refused(Exception):
    """A function or a result that cannot be used; the message is for users."""


def guard(parent: int) -> None:
    """Start a process that kills the process group once nobody writes to this pipe any more.

    No thread could do it: functions may hold the GIL for ever, as a regular expression does. It is
    no child of this process, which may wait for any of its own.
    """
    if child := os.fork():
        os.waitpid(child, 0)
        return
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.closerange(0, parent)  # the pipe of answers shows when the worker has ended
        os.closerange(parent + 1, 1024)
        poll = select.poll()
        poll.register(parent, 0)
        poll.poll()
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def ignore_termination() -> None:
    """Schedulers send SIGTERM to all processes of a job, and the run may use its last seconds."""
    worker = os.getpid()

    def terminated(*_: Any) -> None:  # SIG_IGN would be inherited by what functions start
        if os.getpid() != worker:
            os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, terminated)


class RewardFunction:
    """A reward function, by its path package.module:name."""

    def __init__(self, path: str) -> None:
        module, _, name = path.partition(":")
        self.call: Callable[..., Any] = operator.attrgetter(name)(importlib.import_module(module))
        if not callable(self.call):
            raise _Refused(f"{name} is no function, but of type {type(self.call).__name__}")
        self.name = getattr(self.call, "__name__", type(self.call).__name__)
        parameters: Mapping[str, inspect.Parameter] = {}
        with contextlib.suppress(ValueError):  # of some functions in C
            parameters = inspect.signature(self.call).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        self._takes_all = not parameters or inspect.Parameter.VAR_KEYWORD in kinds
        self._takes = set(parameters)
        self.needs = [
            name
            for name, x in parameters.items()
            if x.default is x.empty and x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)
        ]

    def __call__(self, columns: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
        passed = {**columns, **arguments}
        if missing := [name for name in self.needs if name not in passed]:
            there = ", ".join(columns) or "none"
            raise _Refused(f"needs {', '.join(missing)}; the columns of the records are {there}")
        if not self._takes_all:
            passed = {name: x for name, x in passed.items() if name in self._takes}
        result = self.call(**passed)
        if inspect.isawaitable(result):
            import asyncio

            async def awaited() -> Any:
                return await result

            result = asyncio.run(awaited())
        return result


def answer(function: RewardFunction, request: bytes) -> dict[str, Any]:
    """The rewards of a call, and what it logs by completion and by call."""
    columns, arguments, state = pickle.loads(request)
    count = len(arguments["prompts"])
    logged, metrics = dict[str, list[Any]](), dict[str, list[float]]()

    def log_extra(column: str, values: Any) -> None:
        logged[column] = list(values)
        if len(logged[column]) != count:
            number = len(logged[column])
            raise _Refused(f"log_extra({column!r}) has {number} values for {count} completions")

    def log_metric(name: str, value: Any) -> None:
        metrics.setdefault(name, []).append(float(value))

    arguments["trainer_state"] = SimpleNamespace(**state)
    result = function(columns, {**arguments, "log_extra": log_extra, "log_metric": log_metric})
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
        kind = type(result).__name__
        raise _Refused(f"returned {kind}, and not a list of {count} numbers")
    values = list(result)
    if len(values) != count:
        raise _Refused(f"returned {len(values)} rewards for {count} completions")
    rewards = [None if value is None else number(value) for value in values]
    return {"values": rewards, "logged": logged, "metrics": metrics}


def number(value: Any) -> float:
    if not hasattr(value, "__float__"):
        raise _Refused(f"returned {value!r:.100} among its rewards, which is no number")
    value = float(value)
    if not math.isfinite(value):
        raise _Refused(f"returned {value} among its rewards; None is for no reward")
    return value


def shown(error: BaseException) -> str:
    """The first line of an error, and the line of user code that raised it."""
    if isinstance(error, _Refused):
        return str(error)
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]:.300}" if lines else type(error).__name__
    libraries = *(f"{x}/lib" for x in (sys.prefix, sys.base_prefix)), "<", __file__
    frames = traceback.extract_tb(error.__traceback__)
    if ours := [frame for frame in frames if not frame.filename.startswith(libraries)]:
        text += f" ({os.path.basename(ours[-1].filename)}, line {ours[-1].lineno})"
    return text


def main() -> None:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    guard(requests.fileno())
    ignore_termination()

    def say(message: Any) -> None:
        def plain(value: Any) -> Any:  # such as of NumPy
            return value.tolist() if hasattr(value, "tolist") else str(value)

        answers.write(json.dumps(message, default=plain) + "\n")
        answers.flush()

    sys.path[:], paths = pickle.load(requests)
    functions = []
    for path in paths:
        try:
            functions.append(RewardFunction(path))
        except BaseException as error:
            say({"path": path, "error": shown(error)})
            return
    say({"names": [x.name for x in functions], "needs": [x.needs for x in functions]})
    while True:
        try:
            chosen, request = pickle.load(requests)
        except EOFError:
            return
        try:
            say(answer(functions[chosen], request))
        except BaseException as error:
            say({"error": shown(error)})


if __name__ == "__main__":
    main()
