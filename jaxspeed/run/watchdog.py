"""Watchdog of a run's processes: what is stuck, silent or dead ends all of them, with its name.

The run loop, or each call of an engine in a user's own loop, marks the *section* that the main
thread is in (`sections.py`). Two daemon threads go on while it waits for ever in a collective: one
measures time, and one exchanges heartbeats (`heartbeats.py`). A section that exceeds its time-out,
a process without a heartbeat, one that has ended, and an exception of a main thread are posted as a
fault, which all processes print before they end (`ending.py`). JAX's own heartbeats do not see a
process that is alive but stuck (jax issue 38503).
"""

import atexit
import contextlib
import faulthandler
import logging
import os
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

# JAX has no public name for its coordination client (0.11.2 and 0.12.0.1).
from jax._src import distributed

from jaxspeed.config.run_sections import WatchdogSection
from jaxspeed.errors import JaxspeedError
from jaxspeed.run.ending import LEAVING, Ending, fault_by, fault_of, may_follow
from jaxspeed.run.heartbeats import Beat, Heartbeats, has_ended, in_section, shown, where
from jaxspeed.run.sections import Sections

log = logging.getLogger("jaxspeed")

# Heartbeats in `silence`: many, and fewer where process 0 has thousands of processes to serve.
MOST_BEATS, LEAST_BEATS = 12, 4
MESSAGES_PER_SECOND = 1000  # to process 0, as long as that leaves LEAST_BEATS
SLOW, SLOW_SECONDS = 1.5, 0.1  # a slow process takes so many times the median, and so much more
SLOW_EVERY = 300.0  # seconds between looks for one


class Watchdog:
    """The watchdog of this process. Without other processes it is a no-op, unless it is enabled."""

    def __init__(
        self,
        config: WatchdogSection,
        beats: Heartbeats | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self.beats = beats
        self.sections = Sections(config, clock)
        self._clock = clock
        self._enabled = beats is not None if config.enabled is None else config.enabled
        self._silence = config.silence
        count = beats.count if beats is not None else 1
        self.period = min(
            max(config.silence / MOST_BEATS, 3 * count / MESSAGES_PER_SECOND),
            config.silence / LEAST_BEATS,
        )
        # Seconds of a wait for messages, after which `close` may have been called.
        self._wait = min(max(1.0, count / MESSAGES_PER_SECOND), self.period)
        self._here = where()
        self._seen: dict[int, tuple[int, float]] = {}  # number of the last heartbeat, and when
        self._last: dict[int, Beat] = {}
        self._neighbours: dict[int, int] = {}  # process numbers by rank
        self._contact = self._asked_for_slow = clock()
        self._beat_number = 0
        self.met = False  # whether all processes have started
        self._ending = Ending(beats, end)
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listeners: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._early: list[dict[str, Any]] = []  # notices before there was a listener
        self._calls_from: int | None = None  # the thread that is in a call of an engine
        self._engines = 0  # open ones of a user's own loop
        self._warned_of: tuple[int, int] | None = None

    def start(self) -> "Watchdog":
        """Start the threads."""
        loops = [self._watch] if self._enabled else []
        if self.beats is not None:
            loops.append(self._communicate)
            self._ending.name_process_0_at_abort(self._process_0_has_ended)
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
        self.sections.end()
        self._closed.set()
        # One that returns from JAX's client while the interpreter ends crashes the process.
        for thread in self._threads:
            thread.join(5 * self._wait)
        faulthandler.cancel_dump_traceback_later()
        self._write()

    # -- what the run loop calls -------------------------------------------------------------------

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Attribute the main thread's time in the `with` block to a section.

        An exception leaves the section as it is: it is the one that the message names.
        """
        before = self.sections.at.section
        self._change(name)
        yield
        self.sections.left()
        self._change(before)

    def _change(self, name: str) -> None:
        """Enter a section. Others learn of a new one at once, not with the next heartbeat."""
        new = name != self.sections.at.section
        self.sections.enter(name)
        if new:
            self._write()

    def _write(self) -> None:
        if self.beats is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.beats.write(self.beat())

    def tick(self, step: int | None = None) -> None:
        """Count progress within a section; `step` is the number of steps that have begun."""
        self.sections.tick(step)

    def progressed(self) -> bool:
        """`tick` as a question whether to stop; never."""
        self.tick()
        return False

    def waits(self) -> None:
        """Measure the section from now on: the main thread waits for what has its own limit.

        This is no progress, which all processes count alike.
        """
        self.sections.resumed(self._clock())

    @property
    def host(self) -> str:
        return str(self._here["host"])

    def beat(self) -> Beat:
        """This process's heartbeat."""
        return {"host": self.host, "number": self._beat_number, **self.sections.position()}

    def will_meet(self) -> None:
        """Tell processes of this host the number of this one, before all have started."""
        if self.beats is not None:
            self.beats.write(self.beat())
            if self._here["neighbours"]:
                self.beats.say(f"on/{self._here['neighbours']}", self._here["pid"])

    def has_met(self, first: Beat) -> None:
        """All processes have started, and written a heartbeat; process 0 this one."""
        self._last[0] = first
        if self.beats is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                if self._here["neighbours"]:
                    self._neighbours = self.beats.collected(f"on/{self._here['neighbours']}")
        self.met = True

    def failed(self, error: BaseException) -> None:
        """End all processes because of this exception; returns only if there are no others."""
        if self.beats is None or self._closed.is_set():
            return
        self._ending.failure = error
        if may_follow(error):  # a collective fails at once where another process has ended
            time.sleep(self._silence + 3 * self.period)
        fault = fault_by(error, self.beats, self.beat())
        if fault["why"] == "error" and not isinstance(error, JaxspeedError):
            traceback.print_exception(error)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.beats.post(fault)
            time.sleep(LEAVING)  # the other thread reads it, and ends this process
        self._end(fault)

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

    # -- what the engines of a user's own loop call ------------------------------------------------

    @property
    def watches(self) -> bool:
        return bool(self._threads)

    def opened(self) -> None:
        """A user's own loop has one more engine."""
        self._engines += 1

    def closed(self) -> None:
        """An engine is closed. After the last one nobody waits for this process."""
        self._engines -= 1

    @contextlib.contextmanager
    def call(self, name: str, step: int) -> Iterator[Callable[[Any], None]]:
        """Attribute a call of an engine to a section, and the time after it to user code.

        What is yielded is called with an output that the call dispatched, which goes on until the
        output is computed. A call within another one, or in another thread, belongs to that.
        """
        if self._calls_from is not None:
            yield lambda output: None
            return
        outputs: list[Any] = [None]
        try:
            self._calls_from = threading.get_ident()
            self.sections.enter(name, step)  # others learn of it with the next heartbeat
            yield outputs.append
        except BaseException:
            self.sections.raised()
            raise
        else:
            self.sections.returned(name, outputs[-1])
            if not self._engines:
                self.sections.end()
        finally:
            self._calls_from = None

    def compiles(self) -> None:
        """The call of an engine compiles."""
        if self._calls_from == threading.get_ident():
            self._change("compile")

    # -- the thread that measures ------------------------------------------------------------------

    def _watch(self) -> None:
        pause = min(self.period, 5.0) / 4
        last = self._clock()
        while not self._closed.wait(pause):
            if self.beats is not None and distributed.global_state.client is None:
                self._closed.set()  # the user has left the other processes
                faulthandler.cancel_dump_traceback_later()
                return
            # Also where the GIL is held for ever: the interpreter's own thread ends the process.
            faulthandler.dump_traceback_later(4 * self._silence, exit=True)
            now = self._clock()
            if now - last > self._silence / 2:  # this process was suspended, perhaps all were
                self._resumed(now)
            last = now
            self.check(now)

    def _resumed(self, now: float) -> None:
        self.sections.resumed(now)
        self._contact = now
        self._seen = {rank: (number, now) for rank, (number, _) in self._seen.items()}

    def check(self, now: float) -> None:
        """Look at the clock: when process 0 last answered, and the time-out of a single process."""
        at = self.sections.look()
        if self.beats is None:
            if now - at.since > at.limit:
                self._end(fault_of(0, self.beat(), "stuck", _timed_out(self.beat())))
        elif now - self._contact > self._silence:
            text = (
                f"the coordination service has not answered for {self._silence:.0f} s{self._own()}"
            )
            self._end(fault_of(0, self._beat_of_first(), "silent", text))

    def _end(self, fault: dict[str, Any]) -> None:
        self._ending.end(fault, self._clock() - self._contact < 5.0 + self._wait)

    def _process_0_has_ended(self) -> dict[str, Any]:
        return fault_of(0, self._beat_of_first(), "dead", f"the process has ended{self._own()}")

    def _own(self) -> str:
        """This process's section: others know process 0's up to a period before its end."""
        rank = self.beats.rank if self.beats is not None else 0
        return f"; process {rank} is in {in_section(self.beat())}"

    def _beat_of_first(self) -> Beat:
        """The last heartbeat of process 0, which still has to be read where it has started."""
        address = distributed.global_state.coordinator_address or ""
        is_here = address.startswith("unix:")
        host = socket.gethostname() if is_here else address.rpartition(":")[0]
        started = {"host": host, "section": "start", "step": 0}
        return self._last.get(0, started)

    # -- the thread of messages --------------------------------------------------------------------

    def _communicate(self) -> None:
        assert self.beats is not None
        while not self._closed.is_set():
            try:
                self.exchange()
                notice = self._next_notice(self.beats)
            except jax.errors.JaxRuntimeError:  # `check` counts the seconds without an answer
                self._closed.wait(min(self.period, 1.0))
                continue
            if notice is None:
                continue
            if notice["kind"] == "fault":
                if notice["why"] == "error":  # the same exception may be on its way here
                    self._closed.wait(min(self.period, 1.0))
                self._end(notice)
            elif notice["kind"] in self._listeners:
                self._listeners[notice["kind"]](notice)
            else:
                self._early.append(notice)

    def _next_notice(self, beats: Heartbeats) -> dict[str, Any] | None:
        """The next notice within a period."""
        until = self._clock() + self.period
        while not self._closed.is_set() and (rest := until - self._clock()) > 0:
            notice = beats.next_notice(min(rest, self._wait))
            self._contact = self._clock()
            if notice is not None:
                return notice
        return None

    def exchange(self) -> None:
        """Write this process's heartbeat, read others', and post what they show."""
        assert self.beats is not None
        self._beat_number += 1
        self.beats.write(self.beat())
        self._contact = self._clock()
        rank = self.beats.rank
        first = None
        if rank == 0:
            self._last = self.beats.all()
        elif (first := self.beats.of(0)) is not None:
            self._last[0] = first
        if not self._enabled:
            return
        self._look_for_silence()
        self._look_at_neighbours()
        if rank == 0:
            self._look_for_the_last()
            self._look_for_a_slow_one()
        elif first is not None and first["section"] == "end":  # nobody else looks at this one
            beat = self.beat()
            if _is_late(beat):
                self._post(rank, beat, "stuck", _timed_out(beat))

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
        for rank, pid in list(self._neighbours.items()):
            if rank != self.beats.rank and has_ended(pid):
                del self._neighbours[rank]
                latest = self.beats.of(rank)
                if latest is None or latest["section"] != "end":
                    self._post(rank, latest, "dead", "the process has ended")

    def _look_for_the_last(self) -> None:
        """Post the process that is furthest behind, if its section has timed out.

        Those that wait for it may time out before: it compiles, or saves. One that has written no
        heartbeat has not come to its engine.
        """
        assert self.beats is not None

        def progress(rank: int) -> tuple[Any, ...]:
            beat = self._last[rank]
            return beat["count"], beat["waits"], -beat["seconds"]

        running = [rank for rank, beat in sorted(self._last.items()) if beat["section"] != "end"]
        late = [rank for rank in running if _is_late(self._last[rank])]
        if not late:
            return
        last = min(running, key=progress)
        beat, waiting = self._last[last], self._last[late[0]]
        if absent := set(range(self.beats.count)) - set(self._last):
            waits = f"process {late[0]} is in {in_section(waiting)}, {_timed_out(waiting)}"
            self._post(min(absent), None, "stuck", f"no heartbeat so far, and {waits}")
        elif last in late:
            self._post(last, beat, "stuck", _timed_out(beat))
        elif beat["limit"] is None and self._warned_of != (last, beat["count"]):
            self._warned_of = last, beat["count"]
            log.warning(
                "process %d on %s has been in %s for %.0f s, and process %d waits for it in %s; "
                "run.watchdog.user_code bounds the time of user code",
                *(last, beat["host"], in_section(beat), beat["seconds"]),
                *(late[0], in_section(waiting)),
            )

    def _look_for_a_slow_one(self) -> None:
        if self._contact - self._asked_for_slow > SLOW_EVERY:
            self._asked_for_slow = self._contact
            if slow := slowest(self._last):
                log.warning("%s", slow)

    def _post(self, rank: int, beat: Beat | None, why: str, text: str) -> None:
        assert self.beats is not None
        fault = fault_of(rank, beat, why, text)
        if self.beats.rank == 0 and why == "stuck":
            fault["positions"] = shown(self._last, self.beats.count)
        self.beats.post(fault)


def slowest(beats: Mapping[int, Beat]) -> str | None:
    """The process whose steps take longest on its own host, if the others wait for it.

    The time of an entire step is the same for all: they wait for each other in collectives. So a
    slow device is not seen.
    """
    own_seconds = {rank: beat["own"] for rank, beat in beats.items() if beat.get("own")}
    if len(own_seconds) < 2:
        return None
    worst = max(own_seconds, key=lambda rank: own_seconds[rank])
    median = statistics.median(own_seconds.values())
    if own_seconds[worst] < SLOW * median or own_seconds[worst] - median < SLOW_SECONDS:
        return None
    return (
        f"process {worst} on {beats[worst]['host']} is slow: reading data and starting a step take "
        f"it {own_seconds[worst]:.2f} s, the median process {median:.2f} s; all wait for it"
    )


def _is_late(beat: Beat) -> bool:
    return beat["limit"] is not None and beat["seconds"] > beat["limit"]


def _timed_out(beat: Beat) -> str:
    return (
        f"stuck for {beat['seconds']:.0f} s; the time-out of run.watchdog.{beat['bound']} is "
        f"{beat['limit']:.0f} s"
    )


# -- the watchdog of this process: JAX's processes are joined once, too ----------------------------

_running: Watchdog | None = None


def watchdog_of(config: WatchdogSection) -> Watchdog:
    """The watchdog of this process, started at the first call."""
    global _running
    if _running is None or (_running.beats is None and distributed.global_state.client is not None):
        state = distributed.global_state
        several = state.client is not None and state.num_processes > 1
        beats = Heartbeats(state.client, state.process_id, state.num_processes) if several else None
        if beats is None and not config.enabled:
            return Watchdog(config)  # a no-op
        _running = Watchdog(config, beats).start()
    return _running


def end_all(error: BaseException) -> None:
    """End the run's other processes because of this exception; a no-op if there are none."""
    if _running is not None:
        _running.failed(error)
