"""The safetensors format: 8 bytes of length, a JSON header, the tensors one after another.

Files are mapped into memory: only the pages that are read or written are transferred, and none is
anonymous memory. The library `safetensors` reads slices of tensors but not views, and writes only
tensors that are all in memory; tests compare with it.
"""

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import jax.numpy as jnp
import numpy as np

from jaxspeed.errors import CheckpointError, PretrainedError

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {name: jnp.dtype(dtype) for dtype, name in _NAMES.items()}
_MAX_HEADER = 100_000_000  # bytes; the library's limit


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry in the header."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # NumPy's name

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def check_dtype(name: str, dtype: str) -> None:
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{name} is {dtype}, which safetensors does not have; it has {', '.join(_NAMES)}"
        )


class TensorFile:
    """A file of tensors; `array` is a view of the file, of which only used parts are read."""

    def __init__(self, path: Path, start: int, places: Mapping[str, tuple[Tensor, int]]) -> None:
        self.path = path
        self.tensors = {name: tensor for name, (tensor, _) in places.items()}
        self._places = places
        self._start = start
        self._mapped: mmap.mmap | None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """A file to read, of which only the header is read.

        Raises:
          PretrainedError: it is not of this format, or not complete.
        """
        try:
            with path.open("rb") as file:
                found = cls(path, *_read_header(file, path.stat().st_size))
        except OSError as error:
            raise PretrainedError(f"{path}: {error.strerror or error}") from None
        except _BadHeader as problem:
            raise PretrainedError(f"{path}: {problem}") from None
        return found

    @classmethod
    def create(cls, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Self:
        """A file to write, whose name ends in `.partial` until `finish`."""
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        places = {}
        offset = 0
        for name, tensor in tensors.items():
            end = offset + tensor.nbytes
            header[tensor.name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            places[name] = (tensor, offset)
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that what follows is aligned
        made = cls(path.with_name(f"{path.name}.partial"), 8 + len(text), places)
        with made.path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            file.flush()
            size = 8 + len(text) + offset
            if hasattr(os, "posix_fallocate"):  # so that a full disk is an error, not a signal
                os.posix_fallocate(file.fileno(), 0, size)
            file.truncate(size)
        with made.path.open("r+b") as file:
            made._mapped = mmap.mmap(file.fileno(), 0)
        return made

    def array(self, name: str) -> np.ndarray:
        if self._mapped is None:
            with self.path.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        tensor, offset = self._places[name]
        dtype = jnp.dtype(tensor.dtype)
        count = math.prod(tensor.shape)
        if count == 0:
            return np.empty(tensor.shape, dtype)
        flat = np.frombuffer(self._mapped, dtype, count, self._start + offset)
        return flat.reshape(tensor.shape)

    def release(self) -> None:
        """Unmap the pages that were used; what was written is in the system's page cache."""
        if self._mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def finish(self, path: Path) -> None:
        """Give a written file its name."""
        self._mapped = None
        os.replace(self.path, path)


class _BadHeader(Exception):
    """What is wrong with a header."""


def _read_header(file: BinaryIO, size: int) -> tuple[int, dict[str, tuple[Tensor, int]]]:
    """(where the tensors start, the tensors with their offsets)."""
    if size < 8:
        raise _BadHeader(f"has {size} bytes, and is no safetensors file")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _MAX_HEADER):
        raise _BadHeader(f"is truncated or no safetensors file (header of {length:,} bytes)")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = [(name, *_entry(entry)) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _BadHeader(f"its header is damaged ({type(error).__name__}: {error})") from None
    end = 0
    places = {}
    for name, dtype, shape, start, stop in sorted(entries, key=lambda each: each[3]):
        if dtype not in _DTYPES:
            raise _BadHeader(f"{name} has dtype {dtype}, which is not supported")
        tensor = Tensor(name, shape, _DTYPES[dtype].name)
        if start != end or stop - start != tensor.nbytes:
            raise _BadHeader(
                f"{name} {list(shape)} {dtype} has bytes {start:,} to {stop:,}: {tensor.nbytes:,} "
                f"from {end:,} were expected"
            )
        places[name] = (tensor, start)
        end = stop
    if 8 + length + end != size:
        raise _BadHeader(
            f"has {size:,} bytes, but its header names {8 + length + end:,}: it is "
            + ("truncated" if size < 8 + length + end else "damaged")
        )
    return 8 + length, places


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    shape = tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"shape {shape}, bytes {start} to {stop}")
    return str(entry["dtype"]), shape, start, stop
