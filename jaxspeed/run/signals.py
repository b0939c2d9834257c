"""Stop requests: SIGTERM or SIGUSR1 (from a scheduler), SIGINT (Ctrl-C), agreed by processes."""

import contextlib
import logging
import os
import signal
import threading
from types import FrameType
from typing import Any, Self

import jax

from jaxspeed.checkpoint.process_agreement import HOURS, is_first
from jaxspeed.launch.variables import report_stops
from jaxspeed.run.heartbeats import Heartbeats
from jaxspeed.run.watchdog import Watchdog

# The last one is what mpirun passes on; a site's rule for SLURM jobs may send it, too.
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAY_SECONDS = 2.0  # of a step after a signal, before a line says what is waited for

log = logging.getLogger("jaxspeed")


class StopRequest:
    """Inside of the `with` block the first signal is recorded, a second one ends the process.

    The first is its own even if another process had passed on a request before: one Ctrl-C or a
    scheduler's signal comes to all of them, in any order with the notices.

    With several processes, all of them stop at the same call of `agreed`. They agree in threads, by
    notices, and no collective is needed: on the first signal each process says how many calls it
    has made, and makes none until process 0 has said at which one to stop, the largest number plus
    one. So a process stops at the next step that it begins, or soon after.
    """

    def __init__(self, watchdog: Watchdog | None = None) -> None:
        self.signal: signal.Signals | None = None  # of this process, or another's
        self._was_sent = False
        self._waiting: threading.Timer | None = None
        self._beats: Heartbeats | None = watchdog.beats if watchdog is not None else None
        self._calls = 0
        self._stop_at: int | None = None
        self._waits = False  # whether `_agreeing` is held until all know where to stop
        self._agreeing = threading.Lock()
        self._before: dict[signal.Signals, Any] = {}
        if watchdog is not None and self._beats is not None:
            watchdog.on_notice("stop", self._say_calls)
            watchdog.on_notice("stop at", self._stop_there)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _REQUESTS:
                self._before[number] = signal.signal(number, self._asked)
            report_stops(True)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        report_stops(False)
        if self._waiting is not None:
            self._waiting.cancel()

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self._was_sent:  # the second: the default action
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._was_sent = True
        if is_first():
            text = (
                "%s: the run ends once its current step is done and saved; a second one ends it now"
            )
            self._waiting = threading.Timer(
                SAY_SECONDS, log.warning, (text, signal.Signals(number).name)
            )
            self._waiting.daemon = True
            self._waiting.start()
        if self.signal is not None:
            return
        self.signal = signal.Signals(number)
        if self._beats is not None:
            # Not in this thread, which may be sending something else.
            threading.Thread(target=self._pass_on, args=(self._beats,), daemon=True).start()

    def _pass_on(self, beats: Heartbeats) -> None:
        assert self.signal is not None
        # Without an answer the coordination service is gone, and the watchdog ends the run.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            beats.post({"kind": "stop", "signal": int(self.signal)})

    def agreed(self) -> bool:
        """Whether to stop now. All processes make the same calls, and return the same in each."""
        if self._beats is None:
            return self.signal is not None
        with self._agreeing:
            self._calls += 1
            return self._stop_at is not None and self._calls >= self._stop_at

    # -- in the thread of messages -----------------------------------------------------------------

    def _say_calls(self, notice: dict[str, Any]) -> None:
        if self._waits or self._stop_at is not None:
            return  # a scheduler sends the signal to every process
        assert self._beats is not None
        self._agreeing.acquire()
        self._waits = True
        self.signal = self.signal or signal.Signals(notice["signal"])
        self._beats.say("calls", self._calls)
        if self._beats.rank == 0:
            threading.Thread(target=self._decide, args=(self._beats,), daemon=True).start()

    def _decide(self, beats: Heartbeats) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            calls = beats.wait_for_all("calls", HOURS * 3600.0)
            beats.post({"kind": "stop at", "call": max(calls.values()) + 1})

    def _stop_there(self, notice: dict[str, Any]) -> None:
        if self._waits:
            self._stop_at, self._waits = notice["call"], False
            self._agreeing.release()
