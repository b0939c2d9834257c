"""Sections of a run: which one the main thread is in, since when, and for how long it may be.

They are start, compile, step, evaluate, generate, rollout, rewards, save, restore, and in a user's
loop `user_code`, the time between two calls of an engine. Each has a time-out, set by the config or
learnt from the run; user code has none unless the config sets it.
"""

import math
import os
import re
import statistics
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxspeed.config.run_sections import WatchdogSection

# Seconds that a section may take before anything is known of the run.
FLOORS = {
    "start": 1800.0,
    "compile": 3600.0,
    "step": 600.0,
    "evaluate": 600.0,
    "generate": 600.0,
    "rollout": 600.0,
    "rewards": 600.0,
    "save": 1800.0,
    "restore": 3600.0,
    "user_code": math.inf,
}
FACTOR = 10  # times the longest so far is too long
# The first ones of a section may compile: an evaluation, a save, and steps that wait for the first.
FIRST = 10
_WAITS = re.compile(r"[/\\](jax|jaxlib)[/\\]|process_agreement\.py|heartbeats\.py")


class TimeOuts:
    """Time-outs of the sections: set by the config, or learnt from the run."""

    def __init__(self, config: WatchdogSection) -> None:
        self._given = {name: getattr(config, name) for name in FLOORS}
        self._longest = dict.fromkeys(FLOORS, 0.0)
        self._done = dict.fromkeys(FLOORS, 0)

    def of(self, section: str) -> float:
        """Seconds after which the section is stuck."""
        if (seconds := self._given[section]) is not None:
            return float(seconds)
        learnt = max(FLOORS[section], FACTOR * self._longest[section])
        if self._done[section] >= FIRST or section in ("start", "compile"):
            return learnt
        return max(learnt, self.of("compile"))

    def took(self, section: str, seconds: float) -> None:
        """Learn from a section that has ended."""
        self._done[section] += 1
        # A first one may have compiled.
        if self._done[section] > 1 or section == "compile":
            self._longest[section] = max(self._longest[section], seconds)


@dataclass(frozen=True)
class Place:
    """Position of the main thread: its section, the last step before it, and since when.

    Attributes:
      count: number of sections so far; all processes go through the same ones.
      bound: the section whose time-out counts: user code's after an exception in another one.
      output: an array that ends the section once it is computed, after a call that dispatched it.
    """

    section: str
    step: int
    since: float
    limit: float
    count: int
    bound: str
    output: Any = None


class Sections:
    """The main thread's way through the sections, and what is learnt from it."""

    def __init__(self, config: WatchdogSection, clock: Callable[[], float]) -> None:
        self._clock, self._time_outs = clock, TimeOuts(config)
        self._main = threading.main_thread()
        self._own: deque[float] = deque(maxlen=50)  # seconds of steps on this process's host
        # The thread that measures sees the end of a step; a signal's handler may call an engine.
        self._changing = threading.RLock()
        self.at = Place("start", 0, clock(), self.limit("start"), 0, "start")

    def limit(self, section: str) -> float:
        """Seconds after which the section is stuck."""
        return self._time_outs.of(section)

    def enter(self, name: str, step: int | None = None) -> None:
        """Enter a section; `step` is the number of steps that have begun, if that has changed."""
        with self._changing:
            if self.at.output is not None:
                self.left()
            at = self._place(name)
            self.at = replace(at, step=at.step if step is None else step, count=at.count + 1)

    def left(self) -> None:
        """The section has ended, or progressed: learn how long that took."""
        self._time_outs.took(self.at.section, self._clock() - self.at.since)

    def tick(self, step: int | None) -> None:
        """Count progress within a section; `step` is the number of steps that have begun."""
        self.left()
        if step is not None:
            self.at = replace(self.at, step=step)
        self.enter(self.at.section)

    def returned(self, name: str, output: Any) -> None:
        """A call of an engine has returned, and user code follows.

        What the call dispatched goes on: then user code begins once `output` is computed.
        """
        with self._changing:
            if self.at.section != name:  # it has compiled
                self.left()
                self.at = self._place(name)
            self.at = replace(self.at, output=output)
            if output is None:
                self._enter_user_code()

    def raised(self) -> None:
        """A call of an engine has raised an exception, in its section; the time is the user's."""
        now, limit = self._clock(), self.limit("user_code")
        with self._changing:
            self.at = replace(self.at, since=now, limit=limit, bound="user_code")

    def look(self) -> Place:
        """The position now: a section ends once the output that it waits for is computed."""
        with self._changing:
            if self.at.output is not None and _is_computed(self.at.output):
                self._enter_user_code()
            return self.at

    def _enter_user_code(self) -> None:
        self.left()
        self.at = replace(self._place("user_code"), step=self.at.step + (self.at.section == "step"))

    def _place(self, name: str) -> Place:
        """A section that begins now, by which the number of sections does not change."""
        at = self.at
        return Place(name, at.step, self._clock(), self.limit(name), at.count, name)

    def stepped(self, seconds: float) -> None:
        """Note the time of a step until this process waits for others."""
        self._own.append(seconds)

    def resumed(self, now: float) -> None:
        """Do not count the time in which the process was suspended."""
        with self._changing:
            self.at = replace(self.at, since=now)

    def end(self) -> None:
        """There is nothing more to wait for."""
        with self._changing:
            self.at = replace(self.at, section="end", limit=math.inf, output=None)

    def position(self) -> dict[str, Any]:
        """What a heartbeat says of the main thread."""
        at = self.look()
        return {
            "section": at.section,
            "step": at.step,
            "seconds": round(self._clock() - at.since, 1),
            "limit": at.limit if at.limit < math.inf else None,
            "bound": at.bound,
            "count": at.count,
            **self._main_frame(),
            "own": round(statistics.median(self._own), 3) if self._own else None,
        }

    def _main_frame(self) -> dict[str, Any]:
        """Innermost line of the main thread, and whether it waits in JAX or for a message."""
        frame = sys._current_frames().get(self._main.ident or 0)
        if frame is None:
            return {"waits": False, "at": ""}
        code = frame.f_code
        waits = _WAITS.search(code.co_filename) is not None
        at = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
        return {"waits": waits, "at": at}


def _is_computed(output: Any) -> bool:
    try:
        return bool(output.is_ready())
    except RuntimeError:  # it was deleted
        return True
