"""Watchdog of a run's processes: what is stuck, silent or dead ends all of them, with its name.

The run loop marks the *section* that the main thread is in: start, compile, step, evaluate, save or
restore. Two daemon threads go on while it waits for ever in a collective: one measures time, and
one exchanges heartbeats (`heartbeats.py`). A section that exceeds its time-out, a process without a
heartbeat, one that has ended, and an exception of a main thread are posted as a fault, which all
processes print before they end. JAX's own heartbeats do not see a process that is alive but stuck
(jax issue 38503).
"""

import atexit
import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

# JAX has no public name for its coordination client (0.10.2 to 0.12).
from jax._src import distributed

from jaxspeed.config.run_sections import WatchdogSection
from jaxspeed.errors import ExitCode, JaxspeedError, exit_code
from jaxspeed.run.heartbeats import Beat, Heartbeats, has_ended, in_section, shown, where

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
PERIODS = 12  # heartbeats in `silence`
# Seconds in which process 0, which serves the messages, waits for the others to leave.
LEAVING = 5.0
# XLA's errors that may come from elsewhere, unlike RESOURCE_EXHAUSTED and INVALID_ARGUMENT.
_STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED)")
_SLICE = 1.0  # seconds of a wait for messages, after which `close` may have been called
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


class Watchdog:
    """The watchdog of this process. Without other processes it is a no-op, unless it is enabled."""

    def __init__(
        self,
        given: WatchdogSection,
        beats: Heartbeats | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self.beats = beats
        self._clock, self._exit = clock, end
        self._enabled = beats is not None if given.enabled is None else given.enabled
        self._silence = given.silence
        self._period = given.silence / PERIODS
        self._limits = TimeOuts(given)
        self._here = where()
        self._at = Place("start", 0, clock(), self._limits.of("start"), 0)
        self._main = threading.main_thread()
        self._seen: dict[int, tuple[int, float]] = {}  # number of the last heartbeat, and when
        self._last: dict[int, Beat] = {}
        self._neighbours: dict[int, Beat] | None = None
        self._contact = clock()
        self._beat_number = 0
        self._stuck = False
        self.met = False  # whether all processes have started
        self._fault: dict[str, Any] | None = None
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ending = threading.Lock()
        self._listeners: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._early: list[dict[str, Any]] = []  # notices before there was a listener
        self.step_seconds: dict[str, float] = {}  # in each heartbeat

    def start(self) -> "Watchdog":
        """Start the threads."""
        loops = [self._watch] if self._enabled else []
        if self.beats is not None:
            loops.append(self._communicate)
            self._handle_abort()
            self._excepthook, sys.excepthook = sys.excepthook, self._uncaught
        for loop in loops:
            thread = threading.Thread(target=loop, name=f"jaxspeed{loop.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        atexit.register(self.close)
        return self

    def close(self) -> None:
        """Stop watching: this process is done, and may end before the others."""
        if self._closed.is_set():
            return
        self._at = replace(self._at, section="end", limit=float("inf"))
        self._closed.set()
        # One that returns from JAX's client while the interpreter ends crashes the process.
        for thread in self._threads:
            thread.join(5 * _SLICE)
        faulthandler.cancel_dump_traceback_later()
        if self.beats is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.beats.write(self.beat())

    # -- what the run loop calls -------------------------------------------------------------------

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Attribute the main thread's time in the `with` block to a section.

        An exception leaves the section as it is: it is the one that the message names.
        """
        before = self._at.section
        self._change(name)
        yield
        self._left()
        self._change(before)

    def tick(self, step: int | None = None) -> None:
        """Count progress within a section; `step` is the number of steps that have begun."""
        self._left()
        if step is not None:
            self._at = replace(self._at, step=step)
        self._enter(self._at.section)

    def has_met(self) -> None:
        """All processes have started, and written a heartbeat."""
        if self.beats is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._last[0] = self.beats.of(0) or {}
        self.met = True

    @property
    def host(self) -> str:
        return str(self._here["host"])

    def limit(self, section: str) -> float:
        """Seconds after which the section is stuck."""
        return self._limits.of(section)

    def beat(self) -> Beat:
        """This process's heartbeat."""
        at = self._at
        return {
            **self._here,
            "number": self._beat_number,
            "section": at.section,
            "step": at.step,
            "seconds": round(self._clock() - at.since, 1),
            "limit": at.limit if at.limit < float("inf") else None,
            "count": at.count,
            **self._main_frame(),
            **self.step_seconds,
        }

    def progressed(self) -> bool:
        """`tick` as a question whether to stop; never."""
        self.tick()
        return False

    def _change(self, name: str) -> None:
        """Enter a section. Others learn of a new one at once, not with the next heartbeat."""
        new = name != self._at.section
        self._enter(name)
        if new and self.beats is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.beats.write(self.beat())

    def _enter(self, name: str) -> None:
        at, now = self._at, self._clock()
        self._at = Place(name, at.step, now, self._limits.of(name), at.count + 1)

    def _left(self) -> None:
        self._limits.took(self._at.section, self._clock() - self._at.since)

    def failed(self, error: BaseException) -> None:
        """End all processes because of this exception; returns only if there are no others."""
        if self.beats is None or self._closed.is_set():
            return
        self._failure = error
        if _may_follow(error):  # a collective fails at once where another process has ended
            time.sleep(self._silence + 3 * self._period)
        if not isinstance(error, JaxspeedError):
            traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        own = self._fault_of(self.beats.rank, self.beat(), "error", text)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.beats.post(own)
            time.sleep(LEAVING)  # the other thread reads it, and ends this process
        self._end(own)

    def _uncaught(self, kind: Any, error: Any, trace: Any) -> None:
        self.failed(error)
        self._excepthook(kind, error, trace)

    def on_notice(self, kind: str, listener: Callable[[dict[str, Any]], None]) -> None:
        """Call the listener, in the thread of messages, for each notice of this kind."""
        self._listeners[kind] = listener
        early = [notice for notice in self._early if notice["kind"] == kind]
        self._early = [notice for notice in self._early if notice["kind"] != kind]
        for notice in early:
            listener(notice)

    # -- the thread that measures ------------------------------------------------------------------

    def _watch(self) -> None:
        pause = self._period / 4
        last = self._clock()
        while not self._closed.wait(pause):
            # Also where the GIL is held for ever: the interpreter's own thread ends the process.
            faulthandler.dump_traceback_later(4 * self._silence, exit=True)
            now = self._clock()
            if now - last > self._silence / 2:  # this process was suspended, perhaps all were
                self._resumed(now)
            last = now
            self.check(now)

    def _resumed(self, now: float) -> None:
        self._at = replace(self._at, since=now)
        self._contact = now
        self._seen = {rank: (number, now) for rank, (number, _) in self._seen.items()}

    def check(self, now: float) -> None:
        """Look at the clock: the section's time-out, and when process 0 last answered."""
        at = self._at
        if now - at.since > at.limit:
            self._stuck = True  # the thread of messages compares this process with the others
            if self.beats is None:
                self._end(self._fault_of(0, self.beat(), "stuck", _timed_out(self.beat())))
        else:
            self._stuck = False
        if self.beats is not None and now - self._contact > self._silence:
            text = f"the coordination service has not answered for {self._silence:.0f} s"
            self._end(self._fault_of(0, self._last.get(0), "silent", text))

    def _main_frame(self) -> dict[str, Any]:
        """Innermost line of the main thread, and whether it waits in JAX or for a message."""
        frame = sys._current_frames().get(self._main.ident or 0)
        if frame is None:
            return {"waits": False, "at": ""}
        code = frame.f_code
        waits = _WAITS.search(code.co_filename) is not None
        at = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
        return {"waits": waits, "at": at}

    def _fault_of(self, rank: int, beat: Beat | None, why: str, text: str) -> dict[str, Any]:
        place = {"host": beat["host"], "section": in_section(beat)} if beat else {}
        return {"kind": "fault", "rank": rank, "why": why, "text": text, **place}

    # -- the thread of messages --------------------------------------------------------------------

    def _communicate(self) -> None:
        assert self.beats is not None
        while not self._closed.is_set():
            try:
                self.exchange()
                notice = self._next_notice(self.beats)
            except jax.errors.JaxRuntimeError:  # `check` counts the seconds without an answer
                self._closed.wait(min(self._period, 1.0))
                continue
            if notice is None:
                continue
            if notice["kind"] == "fault":
                if notice["why"] == "error":  # the same exception may be on its way here
                    self._closed.wait(min(self._period, 1.0))
                self._end(notice)
            elif notice["kind"] in self._listeners:
                self._listeners[notice["kind"]](notice)
            else:
                self._early.append(notice)

    def _next_notice(self, beats: Heartbeats) -> dict[str, Any] | None:
        """The next notice within a period."""
        until = self._clock() + self._period
        while not self._closed.is_set() and (rest := until - self._clock()) > 0:
            if (notice := beats.next_notice(min(rest, _SLICE))) is not None:
                return notice
        return None

    def exchange(self) -> None:
        """Write this process's heartbeat, read others', and post what they show."""
        assert self.beats is not None
        self._beat_number += 1
        self.beats.write(self.beat())
        self._contact = self._clock()
        rank = self.beats.rank
        if rank == 0:
            self._last = self.beats.all()
        elif (first := self.beats.of(0)) is not None:
            self._last[0] = first
        if not self._enabled:
            return
        self._look_for_silence()
        self._look_at_neighbours()
        if self._stuck:
            self._look_for_the_last(self.beats.all())

    def _look_for_silence(self) -> None:
        now = self._clock()
        for rank, beat in self._last.items():
            number, since = self._seen.get(rank, (-1, now))
            if number != beat["number"]:
                self._seen[rank] = (beat["number"], now)
            elif beat["section"] != "end" and now - since > self._silence:
                self._post(rank, beat, "silent", f"no heartbeat for {now - since:.0f} s")

    def _look_at_neighbours(self) -> None:
        """Processes of this host that have ended are found at once."""
        assert self.beats is not None
        if self._neighbours is None:
            if not self.met:  # not all have written yet
                return
            self._neighbours = self.beats.all()
        for rank, beat in list(self._neighbours.items()):
            if rank != self.beats.rank and has_ended(beat, self._here):
                del self._neighbours[rank]
                latest = self.beats.of(rank) or beat
                if latest["section"] != "end":
                    self._post(rank, latest, "dead", "the process has ended")

    def _look_for_the_last(self, beats: Mapping[int, Beat]) -> None:
        """Post the process that is furthest behind, if its section has timed out."""
        assert self.beats is not None
        beats = {**beats, self.beats.rank: self.beat()}

        def progress(rank: int) -> tuple[Any, ...]:
            beat = beats[rank]
            return beat["count"], beat["waits"], -beat["seconds"]

        last = min(beats, key=progress)
        beat = beats[last]
        # Those that wait for it may time out first: it compiles, or saves.
        if beat["limit"] is not None and beat["seconds"] > beat["limit"]:
            self._post(last, beat, "stuck", _timed_out(beat))

    def _post(self, rank: int, beat: Beat, why: str, text: str) -> None:
        assert self.beats is not None
        self.beats.post(self._fault_of(rank, beat, why, text))

    # -- the end -----------------------------------------------------------------------------------

    def _end(self, fault: dict[str, Any]) -> None:
        """Print the fault, and end this process."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread does
        self._fault = fault
        rank = self.beats.rank if self.beats is not None else 0
        if fault["why"] in ("stuck", "silent"):
            _print(f"stacks of process {rank}:")
            with contextlib.suppress(Exception):  # standard error is closed
                faulthandler.dump_traceback(2, all_threads=True)
        lines = [message(fault)]
        if self.beats is not None and fault["why"] == "stuck":
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                lines.append(shown(self.beats.all(), self.beats.count))
        _print("\n".join(lines))
        self._leave()
        self._exit(self._code(fault, rank))

    def _code(self, fault: Mapping[str, Any], rank: int) -> int:
        if isinstance(self._failure, JaxspeedError) or (self._failure and fault["rank"] == rank):
            return exit_code(self._failure)
        stuck = fault["why"] == "stuck" and fault["rank"] == rank
        return ExitCode.HANG if stuck else ExitCode.PEER

    def _leave(self) -> None:
        """Process 0 leaves last: it serves the messages."""
        if self.beats is None or self._fault is None or self._clock() - self._contact > 5.0:
            return
        beats, deadline = self.beats, time.monotonic() + LEAVING
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            beats.say("left", True)
            expected = beats.count - (self._fault["why"] in ("dead", "silent"))
            while beats.rank == 0 and time.monotonic() < deadline:
                if len(beats.collected("left")) >= expected:
                    break
                time.sleep(0.05)

    def _handle_abort(self) -> None:
        """Name process 0 where JAX aborts this one, which it does once that has ended.

        JAX's `missed_heartbeat_callback` is not for Python (std::bad_cast in jaxlib 0.10.2).
        """
        assert self.beats is not None
        if self.beats.rank == 0 or threading.current_thread() is not self._main:
            return
        library = ctypes.CDLL(None)
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int)

        def aborted(number: int) -> None:
            """In the thread that called abort(); if this returns, the process dies of it."""
            fault = self._fault
            if fault is None and not _answers(distributed.global_state.coordinator_address or ""):
                rank = self.beats.rank if self.beats is not None else 0
                here = f"process {rank} is in {in_section(self.beat())}"
                # Its section is that of a heartbeat before its end.
                text = f"the process has ended; {here}"
                fault = self._fault_of(0, self._last.get(0), "dead", text)
            if fault is not None:
                _print(message(fault))
                self._exit(ExitCode.PEER)

        self._aborted = kind(aborted)  # kept: C holds no reference
        library.signal.argtypes = [ctypes.c_int, kind]
        library.signal.restype = ctypes.c_void_p
        library.signal(signal.SIGABRT, self._aborted)


def message(fault: Mapping[str, Any]) -> str:
    """One line: which process, where, in which section, and what happened to it."""
    host = f" on {fault['host']}" if "host" in fault else ""
    section = f", in {fault['section']}" if "section" in fault else ""
    return f"jaxspeed: process {fault['rank']}{host}{section}: {fault['text']}"


def _timed_out(beat: Beat) -> str:
    return (
        f"stuck for {beat['seconds']:.0f} s; the time-out of run.watchdog.{beat['section']} is "
        f"{beat['limit']:.0f} s"
    )


def _may_follow(error: BaseException) -> bool:
    """Whether the error may be that of a collective whose other side has ended.

    Gloo's is a ValueError in jax 0.10.2.
    """
    return _STATUS.match(str(error)) is not None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except (OSError, ValueError):
        return False
    return True


def _print(text: str) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


# -- the watchdog of this process: JAX's processes are joined once, too ----------------------------

_running: Watchdog | None = None


def watchdog_of(given: WatchdogSection) -> Watchdog:
    """The watchdog of this process, started at the first call."""
    global _running
    if _running is None or (_running.beats is None and distributed.global_state.client is not None):
        state = distributed.global_state
        several = state.client is not None and state.num_processes > 1
        beats = Heartbeats(state.client, state.process_id, state.num_processes) if several else None
        if beats is None and not given.enabled:
            return Watchdog(given)  # a no-op
        _running = Watchdog(given, beats).start()
    return _running


def end_all(error: BaseException) -> None:
    """End the run's other processes because of this exception; a no-op if there are none."""
    if _running is not None:
        _running.failed(error)
