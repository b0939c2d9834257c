"""`DiskTier`: the buckets of one program's state, read, computed on and written in a pipeline."""

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspeed.disk.direct_file import DirectFile, Span, Transfer, aligned_buffer
from jaxspeed.disk.disk_array import BucketArray, DiskArray, DiskBucket, assembled
from jaxspeed.disk.scratch import Scratch
from jaxspeed.errors import DiskError

Results = Sequence[dict[str, jax.Array]]  # of each piece of a bucket, by role
Spans = dict[str, list[Span]]


@dataclass(frozen=True)
class DiskOptions:
    """Where the state is and how it is transferred."""

    path: str
    buffers: int = 4  # buckets in host memory at once
    threads: int = 2


class StepSeconds(NamedTuple):
    """Seconds of an update: of each kind of work while any of it ran, and in all.

    `waiting` were those before it, for a checkpoint that was still being written.
    """

    total: float = 0
    reading: float = 0
    computing: float = 0
    writing: float = 0
    transfers: float = 0  # reading or writing
    waiting: float = 0


class DiskTier:
    """The file of a process, opened when it is first used; buffers are mapped then.

    A program has one, with the values of one state: a fresh or restored state replaces them.

    Attributes:
      step: of the train state that has these values; None while they are replaced.
      last: the seconds of the last update.
    """

    def __init__(self, buckets: Sequence[DiskBucket], options: DiskOptions) -> None:
        self.buckets, self.options = buckets, options
        self.step: int | None = None
        self.last: StepSeconds | None = None
        self._lost: BaseException | None = None
        self._held = threading.Lock()  # while values are replaced, or a checkpoint is written
        self._replaced = threading.Lock()  # while they are replaced,
        self._writer: int | None = None  # by this thread

    @property
    def nbytes(self) -> int:
        """Bytes of the file of this process."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def buffer_bytes(self) -> int:
        """Host memory of the buffers."""
        return self.options.buffers * max((bucket.nbytes for bucket in self.buckets), default=0)

    @cached_property
    def places(self) -> Mapping[str, Sequence[tuple[DiskBucket, BucketArray]]]:
        """Where the parts of each array are."""
        places: dict[str, list[tuple[DiskBucket, BucketArray]]] = {}
        for bucket in self.buckets:
            for piece in bucket.pieces:
                for x in piece.arrays:
                    places.setdefault(x.name, []).append((bucket, x))
        return places

    @cached_property
    def arrays(self) -> dict[str, DiskArray]:
        """All arrays, by name."""
        firsts = {name: parts[0][1] for name, parts in self.places.items()}
        store = weakref.ref(self)
        return {
            name: DiskArray(name, first.full_shape, first.dtype, first.sharding, store)
            for name, first in firsts.items()
        }

    # -- arrays ---------------------------------------------------------------------------------

    def read(self, name: str) -> jax.Array:
        """An array, on the devices."""
        parts = self.places[name]
        _, first = parts[0]
        shape = first.full_shape
        local = [np.empty(first.sharding.shard_shape(shape), first.dtype) for _ in first.shards]
        with nullcontext() if self._writer == threading.get_ident() else self._replaced:
            self.refuse_lost()
            for bucket, x in parts:
                with self._buffer() as buffer:
                    part = buffer[x.offset : x.offset + x.nbytes]
                    self._file.read(bucket.offset + x.offset, part).wait()
                    for to, view in zip(local, x.views(buffer), strict=True):
                        rows = x.rows.of(to) if x.rows else to
                        np.copyto(rows, view.reshape(rows.shape))
        return assembled(shape, first.sharding, local, first.shards)

    def write(self, name: str, value: jax.Array) -> None:
        """Replace an array, once no checkpoint is written."""
        with self.replacing(of_all=False):
            for bucket, x in self.places[name]:
                with self._buffer() as buffer:
                    x.store(value, buffer, of_all=True)
                    part = buffer[x.offset : x.offset + x.nbytes]
                    self._file.write(bucket.offset + x.offset, part).wait()

    def read_all(self) -> Iterator[tuple[DiskBucket, np.ndarray]]:
        """Each bucket with a buffer that holds it until the next one, which is read meanwhile."""
        self.refuse_lost()
        reads = deque[tuple[DiskBucket, np.ndarray, Transfer]]()
        waiting = deque(bucket for bucket in self.buckets if bucket.nbytes)
        try:
            while waiting or reads:
                while waiting and len(reads) < 2:
                    bucket, buffer = waiting.popleft(), self._free.get()
                    read = self._file.read(bucket.offset, buffer[: bucket.nbytes])
                    reads.append((bucket, buffer, read))
                bucket, buffer, read = reads[0]
                read.wait()
                yield bucket, buffer
                self._free.put(reads.popleft()[1])
            self.refuse_lost()
        finally:
            for _, buffer, read in reads:
                _ended(read.wait)
                self._free.put(buffer)

    def hold(self, step: int) -> ExitStack:
        """Keep the values of a step as they are until this is closed; an update waits for that."""
        with ExitStack() as stack:
            stack.enter_context(self._held)
            self.refuse_other(step)
            return stack.pop_all()

    @contextmanager
    def replacing(self, *, of_all: bool = True, step: int | None = None) -> Iterator[None]:
        """Context in which arrays are written, all or some; if it fails, the state is lost."""
        if self._writer == threading.get_ident():
            yield
            return
        with self._held, self._replaced:
            if of_all:
                self._lost = self.step = None
            else:
                self.refuse_lost()
            if step is not None:
                self.refuse_other(step)
            self._writer = threading.get_ident()
            try:
                yield
                self._file.seal()
            except BaseException as error:
                self._lost = error
                raise
            finally:
                self._writer = None

    # -- updates --------------------------------------------------------------------------------

    def update(self, step: int, compute: Callable[[DiskBucket, Results], Results]) -> None:
        """Replace the arrays of each bucket, in their order, by what `compute` returns for them.

        The next buckets are read, and the last ones written, while one is computed. The values are
        those of `step`, and of the step after it from then on.

        Raises:
          DiskError: a part of the state is lost: from then on each call raises it.
        """
        start = time.perf_counter()
        with self.replacing(of_all=False, step=step):
            self._update(compute, time.perf_counter() - start)
            self.step = step + 1

    def _update(self, compute: Callable[[DiskBucket, Results], Results], waited: float) -> None:
        spans: Spans = {kind: [] for kind in ("read", "compute", "write")}
        start = time.perf_counter()
        reads, writes = deque[tuple[np.ndarray, Transfer]](), list[Future[None]]()
        try:
            waiting = deque(bucket for bucket in self.buckets if bucket.nbytes)
            for bucket in self.buckets:
                if not bucket.nbytes:
                    compute(bucket, bucket.arrays(np.empty(0, np.uint8)))
                    continue
                self._read_ahead(waiting, reads)
                buffer, read = reads.popleft()
                try:
                    spans["read"].append(read.wait())
                    self._read_ahead(waiting, reads)
                    dispatched = time.perf_counter()
                    results = compute(bucket, bucket.arrays(buffer))
                except BaseException:
                    self._free.put(buffer)
                    raise
                job = (bucket, buffer, results, dispatched, spans)
                writes.append(self._storing.submit(self._store, *job))
                del results, job
                while writes and writes[0].done():
                    writes.pop(0).result()
            for write in writes:
                write.result()
        finally:
            for buffer, read in reads:
                _ended(read.wait)
                self._free.put(buffer)
            for write in writes:
                _ended(write.result)
        reading, computing, writing = map(_union, spans.values())
        moved = _union([*spans["read"], *spans["write"]])
        total = time.perf_counter() - start
        self.last = StepSeconds(total, reading, computing, writing, moved, waited)

    def _read_ahead(
        self, waiting: deque[DiskBucket], reads: deque[tuple[np.ndarray, Transfer]]
    ) -> None:
        """Start to read buckets into the free buffers; wait for one if nothing is being read."""
        while waiting:
            try:
                buffer = self._free.get(block=not reads)
            except queue.Empty:
                return
            bucket = waiting.popleft()
            reads.append((buffer, self._file.read(bucket.offset, buffer[: bucket.nbytes])))

    def _store(
        self,
        bucket: DiskBucket,
        buffer: np.ndarray,
        results: Results,
        dispatched: float,
        spans: Spans,
    ) -> None:
        """Write a bucket once it is computed, and free its buffer, which the computation read."""
        try:
            jax.block_until_ready(results)
            spans["compute"].append((dispatched, time.perf_counter()))
            bucket.store(results, buffer)
            spans["write"].append(self._file.write(bucket.offset, buffer[: bucket.nbytes]).wait())
        finally:
            self._free.put(buffer)

    # -- the file -------------------------------------------------------------------------------

    @cached_property
    def _file(self) -> DirectFile:
        self._scratch = Scratch(self.options.path, jax.process_index())
        return DirectFile(self._scratch.folder / "state", self.nbytes, self.options.threads)

    @cached_property
    def _free(self) -> "queue.SimpleQueue[np.ndarray]":
        """The buffers that are not in use."""
        free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        most = max(bucket.nbytes for bucket in self.buckets)
        for _ in range(self.options.buffers):
            free.put(aligned_buffer(most))
        return free

    @cached_property
    def _storing(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(2, thread_name_prefix="jaxspeed-store")

    @contextmanager
    def _buffer(self) -> Iterator[np.ndarray]:
        buffer = self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)

    def refuse_other(self, step: int) -> None:
        """Raise DiskError unless the values are those of this step."""
        self.refuse_lost()
        if self.step != step:
            raise DiskError(
                f"the state under nvme_path {self.options.path} is of step {self.step}, not of "
                f"step {step}: a step was interrupted, or another state of the same program has "
                "replaced it; restore the newest checkpoint"
            )

    def refuse_lost(self) -> None:
        """Raise DiskError if values were lost, and no other state has been written since."""
        if self._lost is None and self._writer is None and "_file" in self.__dict__:
            try:
                self._file.refuse_changed()
            except DiskError as error:
                self._lost = error
                raise
        if self._lost is not None:
            raise DiskError(
                f"the state under nvme_path {self.options.path} was lost earlier ({self._lost}); "
                "restore the newest checkpoint"
            ) from self._lost

    @property
    def folder(self) -> os.PathLike[str] | None:
        """The scratch folder, once there is one."""
        return self._scratch.folder if "_file" in self.__dict__ else None

    def close(self) -> None:
        """Close the file and remove its folder; another state opens another."""
        with self._held, self._replaced:
            if "_file" in self.__dict__:
                self._lost = DiskError("its engine was closed")
                self._file.close()
                self._scratch.close()
                for name in ("_file", "_free", "_storing"):
                    self.__dict__.pop(name, None)


def _ended(wait: Callable[[], Any]) -> None:
    """Wait, whatever it raises: the first failure is raised already."""
    with suppress(BaseException):
        wait()


def _union(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of the spans was running."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
