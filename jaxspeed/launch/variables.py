"""Environment variables between a launcher and its processes."""

import contextlib
import os
from pathlib import Path

COORDINATOR, COUNT, RANK = VARIABLES = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
)
BIND = "JAX_COORDINATOR_BIND_ADDRESS"  # where process 0 listens, if not at COORDINATOR
TOKEN = "JAXSPEED_TOKEN"  # by which the processes of a run know each other
PROGRESS = "JAXSPEED_PROGRESS_FILE"
LAUNCHER = "JAXSPEED_LAUNCHER"  # its command line up to `--`, for commands that are shown


def report_progress(step: int) -> None:
    """Report the step of the newest checkpoint to the launcher, which counts restarts by it."""
    if (path := os.environ.get(PROGRESS)) and os.environ.get(RANK, "0") == "0":
        with contextlib.suppress(OSError):
            Path(path).write_text(str(step))


def report_stops(stops: bool) -> None:
    """Report whether this process ends by itself after a signal, once it has saved.

    Then the launcher waits for that, and otherwise kills the process.
    """
    if path := os.environ.get(PROGRESS):
        file = file_of_stops(path, os.environ.get(RANK, "0"))
        with contextlib.suppress(OSError):
            file.touch() if stops else file.unlink(missing_ok=True)


def file_of_stops(progress: str, rank: int | str) -> Path:
    """The file that is there while a process ends by itself after a signal."""
    return Path(f"{progress}-stops-{rank}")
