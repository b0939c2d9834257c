"""Sections of a run: which one the main thread is in, since when, and for how long it may be.

They are start, compile, step, evaluate, save and restore. Each has a time-out, set by the config or
learnt from the run.
"""

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
    "save": 1800.0,
    "restore": 3600.0,
}
FACTOR = 10  # times the longest so far is too long
# The first ones of a section may compile: an evaluation, a save, and steps that wait for the first.
FIRST = 10
_WAITS = re.compile(r"[/\\](jax|jaxlib)[/\\]|process_agreement\.py")


class TimeOuts:
    """Time-outs of the sections: set by the config, or learnt from the run."""

    def __init__(self, given: WatchdogSection) -> None:
        self._given = {name: getattr(given, name) for name in FLOORS}
        self._longest = dict.fromkeys(FLOORS, 0.0)
        self._done = dict.fromkeys(FLOORS, 0)

    def of(self, section: str) -> float:
        """Seconds after which the section is stuck."""
        if (given := self._given[section]) is not None:
            return float(given)
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
    """Position of the main thread: its section, the last step before it, and since when."""

    section: str
    step: int
    since: float
    limit: float
    count: int  # of sections so far: all processes go through the same ones


class Sections:
    """The main thread's way through the sections, and what is learnt from it."""

    def __init__(self, given: WatchdogSection, clock: Callable[[], float]) -> None:
        self._clock, self._time_outs = clock, TimeOuts(given)
        self._main = threading.main_thread()
        self._own: deque[float] = deque(maxlen=50)  # seconds of steps on this process's host
        self.at = Place("start", 0, clock(), self.limit("start"), 0)

    def limit(self, section: str) -> float:
        """Seconds after which the section is stuck."""
        return self._time_outs.of(section)

    def enter(self, name: str) -> None:
        at, now = self.at, self._clock()
        self.at = Place(name, at.step, now, self.limit(name), at.count + 1)

    def left(self) -> None:
        """The section has ended, or progressed: learn how long that took."""
        self._time_outs.took(self.at.section, self._clock() - self.at.since)

    def tick(self, step: int | None) -> None:
        """Count progress within a section; `step` is the number of steps that have begun."""
        self.left()
        if step is not None:
            self.at = replace(self.at, step=step)
        self.enter(self.at.section)

    def stepped(self, seconds: float) -> None:
        """Note the time of a step until this process waits for others."""
        self._own.append(seconds)

    def resumed(self, now: float) -> None:
        """Do not count the time in which the process was suspended."""
        self.at = replace(self.at, since=now)

    def end(self) -> None:
        """There is nothing more to wait for."""
        self.at = replace(self.at, section="end", limit=float("inf"))

    def position(self) -> dict[str, Any]:
        """What a heartbeat says of the main thread."""
        at = self.at
        return {
            "section": at.section,
            "step": at.step,
            "seconds": round(self._clock() - at.since, 1),
            "limit": at.limit if at.limit < float("inf") else None,
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
