"""Ends the processes of a local Ray with its driver: `python -I -S reaper.py PID:START ...`.

Standard input is a pipe whose other end only the driver has, so it ends with the driver, also after
`kill -9`. Most of Ray's processes end with it too; its agents would live, and listen, for another
minute, in which they try to report that Ray has ended (2.60).
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those that they have."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


def start_of(pid: int) -> str:
    """When a process started, in ticks; "" if there is none with this number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


@contextlib.contextmanager
def ended_with_this_process(pids: set[int]) -> Iterator[None]:
    """Kill these processes when this one is killed within the context."""
    known = [f"{pid}:{start_of(pid)}" for pid in sorted(pids)]
    with subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *known],
        stdin=subprocess.PIPE,
        start_new_session=True,  # no Ctrl-C reaches it
    ):
        yield


if __name__ == "__main__":
    sys.stdin.buffer.read()
    for word in sys.argv[1:]:
        pid, _, start = word.partition(":")
        if start and start_of(int(pid)) == start:
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
