"""What users see when something is wrong."""


class JaxspeedError(Exception):
    """The base of every error that jaxspeed raises on purpose."""


class ConfigError(JaxspeedError, ValueError):
    """The config asks for something that is unknown, mistyped or impossible."""


class PlacementError(JaxspeedError, ValueError):
    """The mesh, the model and the devices do not fit together."""


class ModelError(JaxspeedError, ValueError):
    """What was given as a model or a loss cannot be used as one."""


class BatchError(JaxspeedError, ValueError):
    """A batch does not have the shape or the type that the step needs."""


class OutOfMemoryError(JaxspeedError, MemoryError):
    """A program needs more bytes than its device has."""


class DataError(JaxspeedError, ValueError):
    """The data cannot be read, or does not fit the model."""


class CheckpointError(JaxspeedError, RuntimeError):
    """A checkpoint cannot be written, or must not be trusted."""


class RunError(JaxspeedError, RuntimeError):
    """A run cannot begin or go on."""


class StateLostError(RunError):
    """What held the state of a run has died: the run can go on from a checkpoint."""
