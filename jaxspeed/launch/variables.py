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
