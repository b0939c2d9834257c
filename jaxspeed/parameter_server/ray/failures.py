"""Ray's errors: a process that died, an object that was lost, or an exception that was raised."""

from typing import Any

from jaxspeed.errors import JaxspeedError, RunError


def died(ray: Any, error: BaseException) -> str | None:
    """Why a process died; None where the error is another."""
    kinds = ray.exceptions
    error = _first(ray, error)
    if isinstance(error, kinds.RayActorError | kinds.WorkerCrashedError | kinds.OutOfMemoryError):
        return _reason(str(error))
    return None


def lost(ray: Any, error: BaseException) -> bool:
    """Whether an object was lost from the object store."""
    return isinstance(_first(ray, error), ray.exceptions.ObjectLostError)


def raised(ray: Any, error: Exception, who: str) -> JaxspeedError:
    """A process's exception as an error of this one: the user's own text, and the traceback."""
    cause = _first(ray, error)
    if isinstance(cause, JaxspeedError):
        return cause
    head = f"{who}: {type(cause).__name__}: {str(cause).strip()}"
    if isinstance(error, ray.exceptions.RayTaskError) and cause is not error:
        return RunError(f"{head}\n{_trace(str(error))}")
    return RunError(head)


def _first(ray: Any, error: BaseException) -> BaseException:
    """The root cause: a call that failed because of its arguments has their error as its cause."""
    while isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
        error = error.cause
    return error


def _reason(text: str) -> str:
    """The informative part of Ray's message about a death."""
    for line in text.splitlines():
        _, marker, detail = line.partition("WorkerActor exit detail: ")
        if marker:
            return detail.split(" Some common causes", 1)[0].strip().rstrip(".")
    return text.strip().splitlines()[0]


def _trace(text: str) -> str:
    """The remote traceback, without Ray's first line and its colours."""
    plain = text.replace("\x1b[36m", "").replace("\x1b[39m", "")
    return "\n".join(plain.splitlines()[1:])
