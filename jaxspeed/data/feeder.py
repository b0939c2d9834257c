"""Prefetch batches onto the devices in a background thread; per-process reading of their parts."""

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxspeed.data.corpus import check_batch
from jaxspeed.data.samples import ALL, Batch
from jaxspeed.data.split import Rows, Split

Read = Callable[[Rows, slice], Batch]  # some rows of a batch, and some of the positions
Place = Callable[[Read], Any]


def placer(batch_shardings: Callable[[Any], Any], batch_size: int) -> Place:
    """Make a function that builds global batches; each process reads only its devices' part.

    `batch_shardings` maps the arrays of a batch to their shardings (`program.batch_shardings`);
    dim 0 is the batch dim, and dim 1 may be one of positions.
    """

    def place(read: Read) -> Any:
        none = read(slice(0, 0), ALL)
        shapes = {
            name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype)
            for name, x in none.items()
        }
        shardings = batch_shardings(shapes)
        rows, positions = _here(shardings, shapes)
        local = read(rows, positions)

        def array(name: str) -> jax.Array:
            def shard(index: Any) -> np.ndarray:  # of one device
                first, *rest = index
                start, stop, _ = first.indices(batch_size)
                # rows is sorted and holds all of [start, stop).
                at = int(np.searchsorted(rows, start))
                if rest:
                    begin, end, _ = rest[0].indices(shapes[name].shape[1])
                    rest[0] = slice(begin - positions.start, end - positions.start)
                return local[name][(slice(at, at + stop - start), *rest)]

            return jax.make_array_from_callback(shapes[name].shape, shardings[name], shard)

        return {name: array(name) for name in shapes}

    return place


def reader(arrays: Batch) -> Read:
    """What reads a part of arrays in memory, for a `placer`."""

    def read(rows: Rows, positions: slice) -> Batch:
        return {n: x[rows] if x.ndim == 1 else x[rows][:, positions] for n, x in arrays.items()}

    return read


def _here(shardings: Any, shapes: Any) -> tuple[np.ndarray, slice]:
    """The rows of the global batch on this process's devices, ascending, and the positions there.

    All positions, if arrays differ in what they have of dim 1.
    """
    rows: set[int] = set()
    spans: set[tuple[int, int, int]] = set()  # length of dim 1, and a start and stop in it
    for name, sharding in shardings.items():
        shape = shapes[name].shape
        indices = sharding.addressable_devices_indices_map(shape).values()
        for index in indices:
            rows.update(range(*index[0].indices(shape[0])))
        if len(shape) > 1:
            parts = [index[1].indices(shape[1]) for index in indices]
            spans.add((shape[1], min(p[0] for p in parts), max(p[1] for p in parts)))
    positions = ALL
    if len(spans) == 1:
        ((_, start, stop),) = spans
        positions = slice(start, stop)
    return np.asarray(sorted(rows), np.int64), positions


class Feeder:
    """Infinite iterator over (placed batch, its number of tokens or samples) from a step on.

    `place(read)` puts a batch on the devices; `read` reads a part of it. An exception in the thread
    is raised by the `next` that would have returned that batch.

    Not Grain's `ThreadPrefetchIterDataset` (0.2.18): its `close` waits for a read that never ends,
    a consumer that waits is not woken by it, and hangs if the thread ends by a BaseException.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        place: Place,
        *,
        start_step: int = 0,
        prefetch: int = 2,
    ) -> None:
        check_batch(split, batch_size)
        self.wait_seconds = 0.0  # total time that `next` waited
        self._count = batch_size * (split.tokens_each or 1)
        self._ready: deque[Any] = deque()
        self._prefetch = max(prefetch, 1)
        self._changed = threading.Condition()
        self._closed = False
        self._failed: BaseException | None = None
        batches = (
            place(functools.partial(split.batch, step, batch_size))
            for step in itertools.count(start_step)
        )
        # A daemon: an interrupted run does not wait for it.
        self._thread = threading.Thread(
            target=self._fill, args=(batches,), name="jaxspeed-data", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> "Feeder":
        return self

    def __next__(self) -> tuple[Any, int]:
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._failed or self._closed)
            self.wait_seconds += time.perf_counter() - start
            if self._closed:
                raise StopIteration
            if self._ready:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return batch, self._count
            assert self._failed is not None
            raise self._failed

    def close(self, seconds: float = 5.0) -> None:
        """Stop the thread; one that is in a slow read is not waited for."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def __enter__(self) -> "Feeder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, batches: Iterator[Any]) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed or len(self._ready) < self._prefetch
                    )
                    if self._closed:
                        return
                batch = next(batches)
                with self._changed:
                    if self._closed:
                        return
                    self._ready.append(batch)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failed = error
                self._changed.notify_all()
