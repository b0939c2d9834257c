"""What Ray's errors mean: a process that died, what was lost on the way, or what one raised."""

from typing import Any

from jaxspeed.errors import JaxspeedError, RunError


class PushLostError(Exception):
    """A gradient was computed and did not reach the servers, whose state is as it was."""


def died(ray: Any, error: BaseException) -> str | None:
    """Why a process is no more; None where the error says something else."""
    kinds = ray.exceptions
    error = _first(ray, error)
    if isinstance(error, kinds.RayActorError | kinds.WorkerCrashedError | kinds.OutOfMemoryError):
        return _reason(str(error))
    return None


def lost(ray: Any, error: BaseException) -> bool:
    """Whether something that was computed is no longer anywhere."""
    return isinstance(_first(ray, error), ray.exceptions.ObjectLostError)


def raised(ray: Any, error: Exception, who: str) -> JaxspeedError:
    """What a process raised, as an error of this one: the user's own words once, and where."""
    cause = _first(ray, error)
    if isinstance(cause, JaxspeedError):
        return cause
    head = f"{who}: {type(cause).__name__}: {str(cause).strip()}"
    if isinstance(error, ray.exceptions.RayTaskError) and cause is not error:
        return RunError(f"{head}\n{_trace(str(error))}")
    return RunError(head)


def _first(ray: Any, error: BaseException) -> BaseException:
    """Where it began: what a call raised because of its arguments has their error as its cause."""
    while isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
        error = error.cause
    return error


def _reason(text: str) -> str:
    """The telling part of what Ray says of a death."""
    for line in text.splitlines():
        _, found, detail = line.partition("Worker exit detail: ")
        if found:
            return detail.split(" Some common causes", 1)[0].strip().rstrip(".")
    return text.strip().splitlines()[0]


def _trace(text: str) -> str:
    """The remote traceback, without Ray's head line and its colours."""
    plain = text.replace("\x1b[36m", "").replace("\x1b[39m", "")
    return "\n".join(plain.splitlines()[1:])
