"""What tests run in a process of its own: `python -m tests.checkpoint.child MODE FOLDER`."""

import resource
import signal
import sys

import jaxspeed
from tests.checkpoint import states


def too_large(folder: str) -> None:
    """A save that fits, and one whose files may not grow as large as they would."""
    engine = states.engine(stage=3)
    engine.save_checkpoint(folder, "small")
    engine.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    try:
        engine.save_checkpoint(folder, "large")
        engine.wait()
    except jaxspeed.CheckpointError as error:
        print(f"CheckpointError: {error}")


def for_ever(folder: str) -> None:
    engine = states.engine(stage=3)
    while True:
        step = int(engine.state.step)
        engine.save_checkpoint(folder, client_state={"step": step})
        states.steps(engine, step, 1)
        engine.wait()
        print(f"saved {step}", flush=True)


if __name__ == "__main__":
    {"too large": too_large, "for ever": for_ever}[sys.argv[1]](sys.argv[2])
