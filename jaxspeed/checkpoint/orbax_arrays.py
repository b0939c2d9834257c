"""Writing of array files, each process its shards: by Orbax, and by TensorStore in buckets."""

import asyncio
import contextlib
import logging
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from etils import epath

from jaxspeed.checkpoint.object_storage import is_local
from jaxspeed.checkpoint.process_agreement import TIMEOUT_SECONDS
from jaxspeed.checkpoint.tensorstore_arrays import CHUNK_BYTES, FOLDER, merge_arrays, write_arrays


class ArrayFiles:
    """Background writer of the arrays of one checkpoint at a time.

    It uses only Orbax's handler: a checkpoint is committed together with its other files, and a
    failure on one process is reported to the others at once.
    """

    def __init__(self) -> None:
        self._handler = _handler()
        self._writing: list[Any] = []
        self._from_disk: Callable[[], None] | None = None
        self._by_orbax = True
        self._quiet = contextlib.ExitStack()
        logging.getLogger("asyncio").addFilter(_no_array_of_a_failed_save)

    def begin(
        self,
        folder: epath.Path,
        arrays: Mapping[str, jax.Array],
        from_disk: Callable[[], None] | None = None,
    ) -> None:
        """Start writing to an existing `folder`; on return the arrays are in host memory.

        `from_disk` writes further arrays, which `finish` calls.
        """
        full = {name: x for name, x in arrays.items() if math.prod(x.shape)}
        self._from_disk, self._by_orbax = from_disk, is_local(folder) and from_disk is None
        if not self._by_orbax:
            self._writing = write_arrays(folder, full)
            return
        ocp = _orbax()
        chunks = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in full}
        args = ocp.args.PyTreeSave(full, save_args=chunks)
        self._quiet.enter_context(_without_orbax_errors_logged())
        futures = asyncio.run(self._handler.async_save(folder / FOLDER, args=args))
        self._writing = [future for future in futures or [] if future is not None]

    def finish(self) -> None:
        """Wait until this process has written its shards; raise the first failure."""
        from_disk, self._from_disk = self._from_disk, None
        if from_disk is not None:
            from_disk()
        writing, self._writing = self._writing, []
        failures = [error for future in writing if (error := _failure(future))]
        if failures:
            raise failures[0]

    def merge(self, folder: epath.Path) -> None:
        """Merge the files of all processes, on one process after all have finished."""
        if self._by_orbax:
            self._handler.finalize(folder / FOLDER)
        else:
            merge_arrays(folder)

    def end(self) -> None:
        """Called after the checkpoint was committed or abandoned."""
        self._quiet.close()

    def close(self) -> None:
        self._handler.close()


def _failure(future: Any) -> BaseException | None:
    try:
        future.result(timeout=TIMEOUT_SECONDS)
    except Exception as error:
        return error
    return None


def _no_array_of_a_failed_save(record: logging.LogRecord) -> bool:
    """Whether a log record is of no array of a failed save.

    The first array that fails is raised; asyncio logs the others once collected: a task, or the
    future of an array's writes, which is known by where Orbax raised its error.
    """
    trace = record.exc_info[2] if record.exc_info else None
    frames = traceback.walk_tb(trace)
    return not any(frame.f_globals.get("__name__", "").startswith("orbax.") for frame, _ in frames)


@contextlib.contextmanager
def _without_orbax_errors_logged() -> Iterator[None]:
    """Suppress logs of failures in Orbax's threads, since they are raised.

    Orbax 0.12 logs it with a traceback, and TensorStore reports each write that ends after the
    event loop that waited for it.
    """
    absl, report = logging.getLogger("absl"), sys.unraisablehook

    def keep(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or "orbax" not in record.pathname

    def unraisable(what: Any) -> None:
        if str(what.exc_value) != "Event loop is closed":
            report(what)

    absl.addFilter(keep)
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        sys.unraisablehook = report
        absl.removeFilter(keep)


def _handler() -> Any:
    # Trained weights hardly compress, and compression would take CPU time from the step.
    return _orbax().PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)


def _orbax() -> Any:
    """Import Orbax lazily.

    That takes 0.3 s and adds a handler to the root logger (0.12.8), after which a user's
    `logging.basicConfig` has no effect.
    """
    import orbax.checkpoint as ocp

    return ocp
