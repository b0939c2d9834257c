"""From a split to batches on the devices, read ahead of the step in a thread."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxspeed.data.corpus import check_batch
from jaxspeed.data.samples import Batch
from jaxspeed.data.split import Positions, Split

Read = Callable[[Positions], Batch]
Place = Callable[[Read], Any]


def placer(batch_shardings: Callable[[Any], Any], batch_size: int) -> Place:
    """Makes a global batch of which each process reads the rows that its own devices hold.

    `batch_shardings` says where each array of a batch of such shapes lives
    (`program.batch_shardings`); its first dim is the batch's.
    """

    def place(read: Read) -> Any:
        none = read(slice(0, 0))
        shapes = {
            name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype)
            for name, x in none.items()
        }
        shardings = batch_shardings(shapes)
        rows = _rows_here(shardings, shapes)
        local = read(rows)

        def array(name: str) -> jax.Array:
            def part(index: Any) -> np.ndarray:  # of one device
                first, *rest = index
                start, stop, _ = first.indices(batch_size)
                # rows is sorted and holds all of [start, stop).
                at = int(np.searchsorted(rows, start))
                return local[name][(slice(at, at + stop - start), *rest)]

            return jax.make_array_from_callback(shapes[name].shape, shardings[name], part)

        return {name: array(name) for name in shapes}

    return place


def _rows_here(shardings: Any, shapes: Any) -> np.ndarray:
    """The rows of the global batch, ascending, that any device of this process holds."""
    here: set[int] = set()
    for name, sharding in shardings.items():
        shape = shapes[name].shape
        for index in sharding.addressable_devices_indices_map(shape).values():
            here.update(range(*index[0].indices(shape[0])))
    return np.asarray(sorted(here), np.int64)


class Feeder:
    """Iterates over (placed batch, tokens or samples in it) from a step on, without end.

    `place(read)` puts a batch on the devices; `read(rows)` reads those rows of it. What goes wrong
    in the thread is raised by the `next` that would have returned that batch.
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
        self.wait_seconds = 0.0  # that `next` has waited in all
        self._count = batch_size * (split.tokens_each or 1)
        self._ready: deque[Any] = deque()
        self._prefetch = max(prefetch, 1)
        self._changed = threading.Condition()
        self._closed = False
        self._failed: BaseException | None = None
        batches = _batches(split, batch_size, place, start_step)
        # A daemon: a run that is broken off does not wait for it.
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
        """Ends the thread; one that is in the middle of a slow read is left to end by itself."""
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


def _batches(split: Split, batch_size: int, place: Place, start_step: int) -> Iterator[Any]:
    step = start_step
    while True:
        yield place(lambda rows, step=step: split.batch(step, batch_size, rows))  # type: ignore[misc]
        step += 1
