"""A preallocated file, read and written by threads without the page cache where that is possible.

Direct I/O (O_DIRECT) needs offsets, lengths and addresses that are multiples of the device's block.
Buffers are pages of their own, mapped once.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from jaxspeed.errors import DiskError

ALIGNMENT = 4096
THREADS = 4
_CHUNK = 8 << 20  # bytes that a thread transfers at once
_DIRECT = getattr(os, "O_DIRECT", 0)

Span = tuple[float, float]  # seconds of time.perf_counter, first and last


def aligned(nbytes: int) -> int:
    """The bytes that so many occupy in a file."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(nbytes: int) -> np.ndarray:
    """Bytes in pages of their own, which are unmapped with the last view of them."""
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_DONTFORK)  # direct I/O writes into pages that a child shares
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin for each transfer
    return np.frombuffer(pages, np.uint8)[:nbytes]


class Transfer:
    """Bytes on their way between a buffer and a file."""

    def __init__(self, chunks: Sequence[Future[Span]]) -> None:
        self._chunks = chunks

    def wait(self) -> Span:
        """Wait for all of them; when the first began and the last ended.

        Raises:
          DiskError: some could not be transferred.
        """
        spans, failure = list[Span](), None
        try:
            for chunk in self._chunks:
                try:
                    spans.append(chunk.result())
                except DiskError as error:
                    failure = failure or error
        finally:  # of Ctrl-C too: their buffer is used for something else from then on
            wait(self._chunks)
        if failure:
            raise failure
        return min(a for a, _ in spans), max(b for _, b in spans)


class DirectFile:
    """A new file of fixed size.

    Raises:
      DiskError: the disk has not so many bytes free, or the file cannot be created.
    """

    def __init__(self, path: Path, nbytes: int, threads: int = THREADS) -> None:
        self.path, self.nbytes = path, nbytes
        self._file = _allocated(path, nbytes)
        self._end = weakref.finalize(self, os.close, self._file)
        self.is_direct = _set_direct(path, self._file)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="jaxspeed-disk")
        self._stamp = self._current_stamp()

    def read(self, offset: int, buffer: np.ndarray) -> Transfer:
        """Start to fill a buffer with the bytes at an offset."""
        return self._start("reading", os.preadv, offset, buffer)

    def write(self, offset: int, buffer: np.ndarray) -> Transfer:
        """Start to write a buffer at an offset."""
        return self._start("writing", os.pwritev, offset, buffer)

    def seal(self) -> None:
        """Note that all writes are done; `refuse_changed` compares with this."""
        self._stamp = self._current_stamp()

    def refuse_changed(self) -> None:
        """Raise DiskError if the file was written to since `seal`."""
        if self._current_stamp() != self._stamp:
            raise DiskError(f"{self.path}: was changed by another process; {_RESTORE}")

    def close(self) -> None:
        """Wait for what is in progress, and close the file; a second call is a no-op."""
        self._pool.shutdown()
        self._end()

    def _current_stamp(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def _start(
        self, doing: str, call: Callable[..., int], offset: int, buffer: np.ndarray
    ) -> Transfer:
        assert offset % ALIGNMENT == 0 and buffer.nbytes % ALIGNMENT == 0
        assert buffer.nbytes and offset + buffer.nbytes <= self.nbytes
        starts = range(0, buffer.nbytes, _CHUNK)
        chunks = ((offset + start, buffer[start : start + _CHUNK]) for start in starts)
        return Transfer(
            [self._pool.submit(self._transfer, doing, call, *chunk) for chunk in chunks]
        )

    def _transfer(
        self, doing: str, call: Callable[..., int], offset: int, buffer: np.ndarray
    ) -> Span:
        start, done = time.perf_counter(), 0
        try:
            while done < buffer.nbytes:
                count = call(self._file, [buffer[done:]], offset + done)
                done += count
                if count == 0 or (self.is_direct and done % ALIGNMENT):
                    raise DiskError(
                        f"{self.path}: {doing} {buffer.nbytes:,} bytes at {offset:,} ended after "
                        f"{done:,}: the file is shorter than it was, or the disk is failing; "
                        + _RESTORE
                    )
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "")
            raise DiskError(
                f"{self.path}: {doing} {buffer.nbytes:,} bytes at {offset:,} failed: "
                f"{error.strerror} ({name}); {_RESTORE}"
            ) from error
        return start, time.perf_counter()


_RESTORE = "the state there is lost, and the newest checkpoint restores it"


def _allocated(path: Path, nbytes: int) -> int:
    """A new file with blocks for so many bytes."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        opened = os.open(path, flags, 0o600)
    except OSError as error:
        raise DiskError(f"{path}: cannot be created ({error.strerror})") from error
    try:
        os.posix_fallocate(opened, 0, max(nbytes, 1))
    except OSError as error:
        os.close(opened)
        path.unlink()
        free = shutil.disk_usage(path.parent).free
        short = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        why = f"and {free:,} are free" if short else f"which failed ({error.strerror})"
        raise DiskError(
            f"nvme_path {path.parent.parent}: the optimizer's state needs {nbytes:,} bytes there, "
            f"{why}; free some, name another disk, or set offload_optimizer.ratio below 1"
        ) from error
    return opened


def _set_direct(path: Path, opened: int) -> bool:
    """Let an open file bypass the page cache; whether its file system can."""
    if not _DIRECT:
        return False
    flags = fcntl.fcntl(opened, fcntl.F_GETFL)
    try:
        fcntl.fcntl(opened, fcntl.F_SETFL, flags | _DIRECT)
        os.preadv(opened, [aligned_buffer(ALIGNMENT)], 0)
    except OSError:
        fcntl.fcntl(opened, fcntl.F_SETFL, flags)
        return False
    return True
