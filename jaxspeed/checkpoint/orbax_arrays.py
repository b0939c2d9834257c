"""Arrays on disk, by Orbax: each process writes its shards, each device reads its own."""

import asyncio
import contextlib
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from etils import epath

from jaxspeed.checkpoint.leaves import KeptLeaf
from jaxspeed.checkpoint.process_agreement import TIMEOUT_SECONDS

FOLDER = "arrays"
_CHUNK_BYTES = 32 << 20  # what is read at once where the cut is another, and by an export


class ArrayFiles:
    """Writes the arrays of one checkpoint at a time, in the background.

    Of Orbax this takes the handler alone: a checkpoint is committed as a whole, with what else is
    in it, and a process that fails tells the others at once.
    """

    def __init__(self) -> None:
        self._handler = _handler()
        self._writing: list[Any] = []
        self._quiet = contextlib.ExitStack()

    def begin(self, folder: epath.Path, arrays: Mapping[str, jax.Array]) -> None:
        """The arrays are in the host's memory once this returns; `folder` is there."""
        full = {name: x for name, x in arrays.items() if math.prod(x.shape)}
        ocp = _orbax()
        chunks = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in full}
        asked = ocp.args.PyTreeSave(full, save_args=chunks)
        self._quiet.enter_context(_told_once())
        begun = asyncio.run(self._handler.async_save(folder / FOLDER, args=asked))
        self._writing = [part for part in begun or [] if part is not None]

    def finish(self) -> None:
        """Until this process has written its part; raises what went wrong."""
        writing, self._writing = self._writing, []
        failures = [error for part in writing if (error := _failure(part))]
        if failures:
            raise failures[0]

    def merge(self, folder: epath.Path) -> None:
        """The parts of all processes become one: once all have finished, on one of them."""
        self._handler.finalize(folder / FOLDER)

    def end(self) -> None:
        """After what was begun has become a checkpoint, or has been cleared away."""
        self._quiet.close()

    def close(self) -> None:
        self._handler.close()


def _failure(part: Any) -> BaseException | None:
    try:
        part.result(timeout=TIMEOUT_SECONDS)
    except Exception as error:
        return error
    return None


@contextlib.contextmanager
def _told_once() -> Iterator[None]:
    """What fails in a thread of Orbax is raised, and need not be printed as well.

    Orbax 0.12 logs it with a traceback, and TensorStore reports each write that ends after the
    event loop that waited for it.
    """
    absl, report = logging.getLogger("absl"), sys.unraisablehook

    def is_new(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or "orbax" not in record.pathname

    def unraisable(what: Any) -> None:
        if str(what.exc_value) != "Event loop is closed":
            report(what)

    absl.addFilter(is_new)
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        sys.unraisablehook = report
        absl.removeFilter(is_new)


def read_arrays(folder: epath.Path, wanted: Mapping[str, KeptLeaf]) -> dict[str, jax.Array]:
    """Arrays by name in shape, dtype and sharding as wanted: cut or padded with zeros behind."""
    full = {name: leaf.stored for name, leaf in wanted.items() if math.prod(leaf.stored.shape)}
    ocp = _orbax()
    how = {
        name: ocp.ArrayRestoreArgs(
            sharding=x.sharding, global_shape=tuple(x.shape), dtype=x.dtype, strict=False
        )
        for name, x in full.items()
    }
    asked = ocp.args.PyTreeRestore(dict.fromkeys(full, 0), restore_args=how, partial_restore=True)
    handler = _handler()
    try:
        read: dict[str, jax.Array] = handler.restore(folder / FOLDER, args=asked)
        return read
    finally:
        handler.close()


def _handler() -> Any:
    # Trained weights hardly shrink, and compressing them would take the step's cores.
    return _orbax().PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)


def _orbax() -> Any:
    """Imported where it is used: that takes 0.3 s, and gives the root logger a handler (0.12.8),
    after which a user's own `logging.basicConfig` says nothing."""
    import orbax.checkpoint as ocp

    return ocp
