"""The end of a process because of a fault, of its own or of another one: message and exit code.

A *fault* is a dict that all processes receive and print: rank, host, section, what happened.
"""

import contextlib
import ctypes
import faulthandler
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

# JAX has no public name for its coordination client (0.11.2 and 0.12.0.1).
from jax._src import distributed

from jaxspeed.errors import ExitCode, JaxspeedError, RunError, exit_code
from jaxspeed.launch.address import Address
from jaxspeed.launch.environment import late_devices
from jaxspeed.run.heartbeats import Beat, Heartbeats, in_section

# Seconds in which process 0, which serves the messages, waits for the others to leave.
LEAVING = 5.0
# XLA's errors that may come from elsewhere, unlike RESOURCE_EXHAUSTED and INVALID_ARGUMENT.
_STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED)")


def fault_of(rank: int, beat: Beat | None, why: str, text: str) -> dict[str, Any]:
    """A fault: `why` is stuck, silent, dead or error."""
    place = {"host": beat["host"], "section": in_section(beat)} if beat else {}
    return {"kind": "fault", "rank": rank, "why": why, "text": text, **place}


def fault_by(error: BaseException, beats: Heartbeats, beat_here: Beat) -> dict[str, Any]:
    """The fault behind this process's exception: that of another whose devices are late, or it."""
    if late := late_devices(error):
        rank, time_out = late
        beat = None
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            beat = beats.of(rank)
        text = f"its devices have not started; JAX's time-out is {time_out}"
        return fault_of(rank, beat, "stuck", text)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return fault_of(beats.rank, beat_here, "error", text)


def message(fault: Mapping[str, Any]) -> str:
    """One line: which process, where, in which section, and what happened to it."""
    host = f" on {fault['host']}" if "host" in fault else ""
    section = f", in {fault['section']}" if "section" in fault else ""
    return f"jaxspeed: process {fault['rank']}{host}{section}: {fault['text']}"


def may_follow(error: BaseException) -> bool:
    """Whether the error may be that of a collective whose other side has ended.

    Gloo's is a ValueError (jax 0.11.2, 0.12.0.1).
    """
    return _STATUS.match(str(error)) is not None


class Ending:
    """Ends this process once, by the first fault."""

    def __init__(self, beats: Heartbeats | None, leave: Callable[[int], Any]) -> None:
        self._beats, self._exit = beats, leave
        self._rank = beats.rank if beats is not None else 0
        self._begun = threading.Lock()
        self._fault: dict[str, Any] | None = None
        self.failure: BaseException | None = None  # the main thread's exception

    def end(self, fault: dict[str, Any], served: bool = True) -> None:
        """Print the fault, and end this process; `served`: whether process 0 has answered."""
        if not self._begun.acquire(blocking=False):
            threading.Event().wait()  # another thread does
        self._fault = fault
        if fault["why"] in ("stuck", "silent"):
            _print(f"stacks of process {self._rank}:")
            with contextlib.suppress(Exception):  # standard error is closed
                faulthandler.dump_traceback(2, all_threads=True)
        _print("\n".join([message(fault), *fault.get("positions", [])]))
        if served and self._beats is not None:
            self._leave(self._beats, fault)
        self._exit(self._code(fault))

    def _code(self, fault: Mapping[str, Any]) -> int:
        is_here = fault["rank"] == self._rank
        if isinstance(self.failure, JaxspeedError) or (self.failure and is_here):
            return exit_code(self.failure)
        return ExitCode.HANG if fault["why"] == "stuck" and is_here else ExitCode.PEER

    def _leave(self, beats: Heartbeats, fault: Mapping[str, Any]) -> None:
        """Process 0 leaves last: it serves the messages."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            beats.say("left", True)
            absent = {fault["rank"]} if fault["why"] in ("dead", "silent") else set()
            if beats.rank == 0:
                beats.wait_for_all("left", LEAVING, absent)

    def name_process_0_at_abort(self, fault: Callable[[], dict[str, Any]]) -> None:
        """Print the fault where JAX aborts this process, which it does once process 0 has ended.

        JAX's `missed_heartbeat_callback` is not for Python (std::bad_cast in 0.11.2 and 0.12.0.1).
        """
        if self._rank == 0 or threading.current_thread() is not threading.main_thread():
            return
        library = ctypes.CDLL(None)
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int)

        def aborted(number: int) -> None:
            """Handle SIGABRT in the thread that called abort(); on return the process dies."""
            cause = self._fault
            if cause is None and not _answers(distributed.global_state.coordinator_address or ""):
                cause = fault()
            if cause is not None:
                _print(message(cause))
                self._exit(self._code(cause))

        self._aborted = kind(aborted)  # kept: C holds no reference
        library.signal.argtypes = [ctypes.c_int, kind]
        library.signal.restype = ctypes.c_void_p
        library.signal(signal.SIGABRT, self._aborted)


def _answers(address: str) -> bool:
    try:
        Address.parse(address).connected(2.0).close()
    except (OSError, RunError):
        return False
    return True


def _print(text: str) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
