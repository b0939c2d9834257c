"""Arrays that are computed for the rows of a split, and kept in a folder.

The folder has the files

  key.json   what the arrays depend on, and their shapes and dtypes
  rows       int64, the numbers of the rows in the order in which they were computed
  NAME       the array of this name of these rows, one after the other
  done.json  how many of these rows count

What a write that was interrupted has left is not counted: `done.json` is replaced after all others
have reached the disk.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxspeed.data.samples import ALL
from jaxspeed.errors import DataError, RunError
from jaxspeed.objectives.padding import Batch
from jaxspeed.placement.show import bytes_text

KEY, ROWS, DONE = "key.json", "rows", "done.json"
ARRAYS = "arrays"  # in the key


class ComputedRows:
    """Arrays of some rows of a split, in memory or memory-mapped.

    Args:
      samples: of the split.
      ids: the numbers of the rows.
      arrays: of these rows, in their order.
    """

    def __init__(self, samples: int, ids: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        self._places = np.full(samples, -1, np.int64)
        self._places[ids] = np.arange(len(ids))
        self._arrays = arrays

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        """The arrays of these rows; of those with a dim 1 only `positions` of it."""
        at = self._places[ids]
        if np.any(at < 0):
            names, row = ", ".join(self._arrays), int(ids[np.argmin(at)])
            raise DataError(f"data: {names} of sample {row} are not computed")
        return {
            name: np.asarray(x[at] if x.ndim == 1 else x[at, positions])
            for name, x in self._arrays.items()
        }


class RowStore:
    """The arrays of a split's rows in a folder, once it has begun."""

    def __init__(self, folder: Path, samples: int) -> None:
        self.folder, self._samples = folder, samples

    def unused(self, key: Mapping[str, Any]) -> str | None:
        """Why arrays with this key are to be computed; None if those in the folder have it."""
        before, now = self._read_json(KEY), _as_json(key)
        if before is None:
            return "there are none yet"
        if unlike := [name for name in now if before.get(name) != now[name]]:
            return f"those that are there are of another {', '.join(unlike)}"
        return None if self._is_intact() else "the files of those that are there are damaged"

    def begin(self, key: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        """Make a folder for arrays with this key, without those of before.

        Args:
          row: arrays of one row, or their shapes.

        Raises:
          RunError: it cannot be written.
        """
        described = {name: [x.dtype.name, *x.shape] for name, x in row.items()}
        with self._errors(0):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self._replace(DONE, 0)
            self._replace(KEY, {**_as_json(key), ARRAYS: described})

    @property
    def ids(self) -> np.ndarray:
        """The numbers of the rows that are there, in their order."""
        return self._map(ROWS)

    def rows(self) -> ComputedRows:
        """All that is there, memory-mapped."""
        arrays = {name: self._map(name) for name in self._layout}
        return ComputedRows(self._samples, arrays.pop(ROWS), arrays)

    def writer(self, more: int) -> "RowWriter":
        """Begin to add rows, at most so many.

        Raises:
          RunError: the disk is full, or the folder cannot be written.
        """
        with self._errors(more):
            if shutil.disk_usage(self.folder).free < sum(self._sizes(more).values()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return RowWriter(self, more)

    @property
    def _done(self) -> int:
        return int(self._read_json(DONE) or 0)

    @property
    def _layout(self) -> dict[str, np.dtype]:
        """What each file has of a row: a number, or an array as a dtype with its shape."""
        described = self._read_json(KEY)[ARRAYS].items()
        arrays = {name: np.dtype((dtype, tuple(shape))) for name, (dtype, *shape) in described}
        return {ROWS: np.dtype(np.int64), **arrays}

    def _sizes(self, rows: int) -> dict[str, int]:
        """The bytes of each file for so many rows."""
        return {name: rows * row.itemsize for name, row in self._layout.items()}

    def _is_intact(self) -> bool:
        """Whether there is all that counts."""
        for name, size in self._sizes(self._done).items():
            file = self.folder / name
            if size > (file.stat().st_size if file.exists() else 0):
                return False
        return True

    def _map(self, name: str) -> np.ndarray:
        row, rows = self._layout[name], self._done
        if rows * row.itemsize == 0:
            return np.zeros((rows, *row.shape), row.base)
        return np.memmap(self.folder / name, row, mode="r", shape=rows)

    def _read_json(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_text())
        except (OSError, ValueError):
            return None

    def _replace(self, name: str, value: Any) -> None:
        part = self.folder / f"{name}.part"
        with part.open("w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.folder / name)

    @contextmanager
    def _errors(self, more: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            needed = f"{bytes_text(sum(self._sizes(more).values()))} are needed" if more else ""
            raise RunError(
                f"run.output: {self.folder} cannot be written: {error.strerror}"
                + (f"; {needed} for {more:,} rows" if more else "")
            ) from None


class RowWriter:
    """Appends rows to the files of a store; they count from the next `sync` on."""

    def __init__(self, store: RowStore, more: int) -> None:
        self._store, self._more, self._count = store, more, store._done
        self._files = dict[str, IO[bytes]]()
        for name, size in store._sizes(self._count).items():
            self._files[name] = (store.folder / name).open("ab")
            self._files[name].truncate(size)  # what was written and does not count

    def add(self, ids: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        with self._store._errors(self._more):
            for name, x in {ROWS: ids.astype(np.int64), **arrays}.items():
                self._files[name].write(np.ascontiguousarray(x).data)
        self._count += len(ids)

    def sync(self) -> None:
        """Wait until all rows so far are on the disk, and count them."""
        with self._store._errors(self._more):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            self._store._replace(DONE, self._count)

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # what does not count, on a full disk
                file.close()


def _as_json(key: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(key, default=str)))
