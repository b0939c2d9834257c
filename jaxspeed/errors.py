"""Exception classes: every error that jaxspeed raises on purpose."""


class JaxspeedError(Exception):
    """Base class of all errors that jaxspeed raises on purpose."""


class ConfigError(JaxspeedError, ValueError):
    """The config has an unknown, mistyped or impossible setting."""


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


class PretrainedError(JaxspeedError, ValueError):
    """A folder of pretrained weights cannot be read, or does not fit the model."""


class RunError(JaxspeedError, RuntimeError):
    """A run cannot start or continue."""


class StateLostError(RunError):
    """The processes that held a run's state have died; the run can resume from a checkpoint."""
