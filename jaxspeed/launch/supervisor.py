"""One run of many processes: when one fails all are ended, and the run is started again.

Processes cannot do this themselves: JAX aborts the peers of a failed process natively, and one
that is killed prints nothing. The launcher watches them all, and the last line is its own.
"""

import contextlib
import math
import queue
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Any, Protocol

from jaxspeed.errors import ExitCode
from jaxspeed.launch.launch_folder import LaunchFolder
from jaxspeed.launch.local_group import GIVE_UP, Asked, Ended, Event, Output
from jaxspeed.launch.output import Display
from jaxspeed.launch.remote_group import LOST

# Passed on. The first two ask a run to save and end; the others are the processes' own business.
STOPS = (signal.SIGTERM, signal.SIGINT)
PASSED_ON = (*STOPS, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_TICK = 0.2
_SECONDS_FOR_THE_CAUSE = 2.0
_LONGEST_BACK_OFF = 60.0
_FAULT = "jaxspeed: "  # begins what a watchdog prints before it ends a process
_MEANINGS: dict[int, str] = {
    ExitCode.CRASH: "an error",
    ExitCode.CONFIG: "a config or usage error",
    ExitCode.DIVERGED: "the loss stayed non-finite",
    ExitCode.HANG: "its watchdog found it stuck",
    ExitCode.PEER: "another process failed",
    ExitCode.PREEMPTED: "asked to stop, and the state is saved",
    LOST: "its host cannot be reached",
}
_FINAL = (ExitCode.CONFIG, ExitCode.DIVERGED)  # the same again would fail again


class ProcessGroup(Protocol):
    """The started processes of one attempt, here or on other hosts."""

    def signal(self, number: int) -> None: ...
    def resize(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Restarts:
    """How often a failed run starts again, from its newest checkpoint.

    Attributes:
      most: in all.
      without_progress: in a row, without a newer checkpoint between them.
      grace: seconds between SIGTERM and SIGKILL for the processes that did not fail; and between
        a request to stop and SIGKILL, for those that do not save first.
      back_off: seconds before the first restart, doubled for each without progress.
    """

    most: int = 0
    without_progress: int = 3
    grace: float = 10.0
    back_off: float = 1.0


@dataclass(frozen=True)
class Attempt:
    """How one start of all processes ended.

    Attributes:
      codes: exit code by rank.
      cause: the failure that ended the others, if any.
      asked: the first signal that asked the launcher to stop.
      progress: step of the newest checkpoint.
      seconds: from the start to the cause, or to the end.
    """

    codes: dict[int, int]
    cause: Ended | None
    asked: int | None
    progress: int
    seconds: float

    @property
    def code(self) -> int:
        """The launcher's own exit code."""
        if self.cause is not None:
            return self.cause.code if self.cause.code > 0 else 128 - self.cause.code
        if self.asked is None or not any(self.codes.values()):
            return ExitCode.SUCCESS
        saved = ExitCode.PREEMPTED in self.codes.values()
        return ExitCode.PREEMPTED if saved else 128 + self.asked


def supervise(
    start: Callable[["SimpleQueue[Any]", str], ProcessGroup],
    count: int,
    display: Display,
    restarts: Restarts,
    host_of: Callable[[int], str] = lambda rank: socket.gethostname(),
) -> int:
    """Run `count` processes, restart them as allowed, and return the exit code of the last try.

    `start(events, progress)` starts them all: `progress` is a path for `report_progress`.
    """
    newest = fruitless = done = 0
    with LaunchFolder() as folder, _passed_on() as events:
        while True:
            watch = _Watch(count, display, restarts.grace, events)
            attempt = watch.run(lambda: start(events, f"{folder}/progress"))
            if attempt.cause is None:
                if attempt.asked is not None and attempt.code:
                    how = "; the state is saved" * (attempt.code == ExitCode.PREEMPTED)
                    if killed := [r for r, c in attempt.codes.items() if c == -signal.SIGKILL]:
                        ranks = ", ".join(map(str, sorted(killed)))
                        how += f"; killed after {restarts.grace:g} s (--grace): rank {ranks}"
                    name = signal.Signals(attempt.asked).name
                    display.say(f"jaxspeed launch: stopped by {name}{how}")
                return int(attempt.code)
            fruitless = 0 if attempt.progress > newest else fruitless + 1
            newest = max(newest, attempt.progress)
            verdict = _verdict(attempt, done, fruitless, restarts)
            _report(display, attempt, host_of(attempt.cause.rank), verdict)
            if verdict:
                return int(attempt.code)
            done += 1
            wait = min(restarts.back_off * 2.0 ** max(fruitless - 1, 0), _LONGEST_BACK_OFF)
            where = f"step {newest}" if newest else "the start"
            display.say(
                f"jaxspeed launch: restart {done} of at most {restarts.most} in {wait:.0f} s, "
                f"from {where}"
            )
            if _asked_within(wait, events):
                display.say("jaxspeed launch: asked to stop before the restart")
                return int(attempt.code)


def _verdict(attempt: Attempt, done: int, fruitless: int, restarts: Restarts) -> str:
    """Why a failed run is not restarted; "" if it is."""
    assert attempt.cause is not None
    if not restarts.most or attempt.cause.code in _FINAL:
        return "the others were ended"
    if attempt.asked is not None:
        return "not restarted, as it was asked to stop"
    if done >= restarts.most:
        return f"not restarted: {done} restarts are done (--max-restarts)"
    if fruitless > restarts.without_progress:
        return (
            f"not restarted: no newer checkpoint in {fruitless} starts "
            "(--max-restarts-without-progress)"
        )
    return ""


def _report(display: Display, attempt: Attempt, host: str, verdict: str) -> None:
    """Show the last output of the process that failed; then, as the last line, how it ended."""
    cause = attempt.cause
    assert cause is not None
    lines = display.last_lines(cause.rank)
    if lines:
        log = display.log_of(cause.rank)
        display.say(f"last output of rank {cause.rank}" + (f" (all: {log})" if log else "") + ":")
        for line in lines:
            display.say(f"  | {line}")
    display.say(
        f"jaxspeed launch: rank {cause.rank} of {len(attempt.codes)} on {host} "
        f"{how_it_ended(cause.code)}{_fault(cause.code, lines)}, after {attempt.seconds:.0f} s; "
        + (verdict or "the others were ended")
    )


def _fault(code: int, lines: Sequence[str]) -> str:
    """The process at fault, as the watchdog of the one that ended names it."""
    faults = [line for line in lines if line.startswith(_FAULT)]
    if code in (ExitCode.PEER, ExitCode.HANG) and faults:
        return f": {faults[-1].removeprefix(_FAULT)}"
    return ""


def how_it_ended(code: int) -> str:
    """An exit code of a process in prose."""
    if code < 0:
        hint = " (out of memory, if nobody sent it)" * (-code == signal.SIGKILL)
        return f"was killed by {signal.Signals(-code).name}{hint}"
    meaning = _MEANINGS.get(code)
    if meaning is None and 128 < code < 128 + signal.NSIG:
        with contextlib.suppress(ValueError):
            meaning = f"stopped by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}" + (f" ({meaning})" if meaning else "")


class _Watch:
    """Waits for the end of all processes of one attempt, and ends those that a failure leaves."""

    def __init__(
        self, count: int, display: Display, grace: float, events: "SimpleQueue[Any]"
    ) -> None:
        self._count, self._display, self._grace, self._events = count, display, grace, events
        self._codes: dict[int, int] = {}
        self._failures: list[Ended] = []  # before any process was ended from here
        self._asked: int | None = None
        self._times_asked = self._progress = 0
        self._term_at = self._kill_at = self._give_up_at = math.inf
        self._is_ending = self._gave_up = False

    def run(self, start: Callable[[], ProcessGroup]) -> Attempt:
        begun = time.time()
        group = start()
        try:
            while len(self._codes) < self._count:
                self._take(_next(self._events), group)
                self._display.pass_time()
                self._keep_time(group)
        finally:
            group.close()
        cause = min(self._failures, key=_likeliest, default=None)
        end = time.time() if cause is None else cause.at
        return Attempt(self._codes, cause, self._asked, self._progress, max(end - begun, 0.0))

    def _take(self, event: Event | None, group: ProcessGroup) -> None:
        if isinstance(event, Output):
            self._display.show(event)
        elif isinstance(event, Ended):
            self._codes[event.rank] = event.code
            self._progress = max(self._progress, event.progress)
            if event.code == ExitCode.PREEMPTED and self._asked is None:
                self._asked = signal.SIGTERM  # it was asked itself; all save and end
            killed = self._gave_up and event.code == -signal.SIGKILL
            if event.code and not (self._asked is not None and (_is_stop(event.code) or killed)):
                self._failed(event)
        elif isinstance(event, Asked):
            if event.number == signal.SIGWINCH:
                group.resize()
                return
            if event.number in STOPS:
                self._asked = self._asked or event.number
                self._times_asked += 1
                if self._times_asked == 1:
                    self._give_up_at = time.monotonic() + self._grace
            # The second one ends a process at once; one that sees a third is beyond help.
            group.signal(signal.SIGKILL if self._times_asked > 2 else event.number)

    def _failed(self, event: Ended) -> None:
        if self._is_ending:
            return
        self._failures.append(event)
        # The failure of a peer may be seen here before the peer's end.
        wait = _SECONDS_FOR_THE_CAUSE if _is_consequence(event.code) else 0.0
        self._term_at = min(self._term_at, time.monotonic() + wait)

    def _keep_time(self, group: ProcessGroup) -> None:
        now = time.monotonic()
        if now >= self._term_at:
            self._is_ending, self._term_at = True, math.inf
            self._kill_at = now + self._grace
            group.signal(signal.SIGTERM)
        if now >= self._give_up_at:
            self._gave_up, self._give_up_at = True, now + max(self._grace, _TICK)
            group.signal(GIVE_UP)
        if now >= self._kill_at:
            self._kill_at = math.inf
            group.signal(signal.SIGKILL)


def _is_consequence(code: int) -> bool:
    """Whether a process ended so because of another: JAX aborts the peers of a failed one."""
    return code in (ExitCode.PEER, -signal.SIGABRT)


def _likeliest(failure: Ended) -> tuple[bool, float]:
    return _is_consequence(failure.code), failure.at


def _is_stop(code: int) -> bool:
    """Whether a process that was asked to stop ended as asked."""
    number = -code if code < 0 else code - 128
    return code == ExitCode.PREEMPTED or number in STOPS


def _next(events: "SimpleQueue[Any]") -> Event | None:
    with contextlib.suppress(queue.Empty):
        event: Event = events.get(timeout=_TICK)
        return event
    return None


@contextlib.contextmanager
def _passed_on() -> "Iterator[SimpleQueue[Any]]":
    """A queue of events, in which the signals to this process appear too."""
    events: SimpleQueue[Any] = SimpleQueue()

    def take(number: int, frame: FrameType | None) -> None:
        events.put(Asked(number))

    before = {number: signal.signal(number, take) for number in (*PASSED_ON, signal.SIGWINCH)}
    try:
        yield events
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _asked_within(seconds: float, events: "SimpleQueue[Any]") -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        event = _next(events)
        if isinstance(event, Asked) and event.number in STOPS:
            return True
    return False
