"""Exception classes, one for every error that jaxspeed raises on purpose, and exit codes."""

import enum
import sysconfig
from pathlib import Path

# Frames of a traceback in here are not the user's.
LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")),
    str(Path(__file__).parent),
    "<",
)


class JaxspeedError(Exception):
    """Base class of all errors that jaxspeed raises on purpose."""


class ConfigError(JaxspeedError, ValueError):
    """The config has an unknown, mistyped or impossible setting."""


class UsageError(JaxspeedError, AttributeError, TypeError):
    """A call that is written otherwise in jaxspeed."""


class PlacementError(JaxspeedError, ValueError):
    """The mesh, the model and the devices do not fit together."""


class ModelError(JaxspeedError, ValueError):
    """The given model, loss or optimizer cannot be used."""


class BatchError(JaxspeedError, ValueError):
    """A batch does not have the shape or type that the step needs."""


class OutOfMemoryError(JaxspeedError, MemoryError):
    """A program needs more bytes than its device has."""


class DataError(JaxspeedError, ValueError):
    """The data cannot be read, or does not fit the model."""


class CheckpointError(JaxspeedError, RuntimeError):
    """A checkpoint cannot be written, or must not be trusted."""


class PeerError(CheckpointError):
    """Another process of the run could not do its part."""


class PretrainedError(JaxspeedError, ValueError):
    """A folder of pretrained weights cannot be read, or does not fit the model."""


class RunError(JaxspeedError, RuntimeError):
    """A run cannot start or continue."""


class StateLostError(RunError):
    """The processes that held a run's state have died; the run can resume from a checkpoint."""


class DiskError(RunError):
    """State on a disk cannot be stored, read or written."""


class DivergedError(RunError):
    """The loss or the gradients stayed non-finite."""


class ExitCode(enum.IntEnum):
    """How a process of `jaxspeed` ended, for schedulers and launchers."""

    SUCCESS = 0
    CRASH = 1  # a failed check or run
    CONFIG = 2  # a config or usage error: the same again would fail again
    DIVERGED = 3  # the loss stayed non-finite
    HANG = 4  # the watchdog ended it
    PEER = 5  # another process failed
    PREEMPTED = 75  # asked to stop, and the state is saved: start again to go on (EX_TEMPFAIL)


def exit_code(error: BaseException) -> ExitCode:
    """Exit code of a process that this exception ends."""
    if isinstance(error, DivergedError):
        return ExitCode.DIVERGED
    if isinstance(error, PeerError):
        return ExitCode.PEER
    if isinstance(error, (RunError, CheckpointError, OutOfMemoryError)):
        return ExitCode.CRASH
    return ExitCode.CONFIG if isinstance(error, JaxspeedError) else ExitCode.CRASH
