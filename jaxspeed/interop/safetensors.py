"""Files of tensors in the format safetensors: a JSON header, the tensors one after another.

The library `safetensors` reads headers and checks them against their files. Three things are done
here because it has no call for them: tensors as views of a mapped file, so that a transposed shard
reads only its own pages and none is anonymous memory; files that are written block by block, of
which the library wants all tensors in memory; and NumPy's names for bf16 and fp8.
"""

import hashlib
import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

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
_SAMPLED, _SAMPLE_BYTES = 64, 1024  # of a digest: tensors of a file, and bytes of each
_DTYPES = {name: jnp.dtype(dtype) for dtype, name in _NAMES.items()}


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

    def __init__(
        self,
        path: Path,
        start: int,
        places: Mapping[str, tuple[Tensor, int]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.metadata = dict(metadata or {})
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
        places, offset = {}, 0
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata()
                for name in file.offset_keys():  # one after another, without gaps
                    stored = file.get_slice(name)
                    if (dtype := stored.get_dtype()) not in _DTYPES:
                        raise PretrainedError(
                            f"{path}: {name} has dtype {dtype}, which is not supported"
                        )
                    tensor = Tensor(name, tuple(stored.get_shape()), _DTYPES[dtype].name)
                    places[name] = tensor, offset
                    offset += tensor.nbytes
            return cls(path, path.stat().st_size - offset, places, metadata)
        except OSError as error:
            raise PretrainedError(f"{path}: {error.strerror or error}") from None
        except SafetensorError as error:
            raise PretrainedError(f"{path}: {_reason(path, error)}") from None

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
        partial = cls(path.with_name(f"{path.name}.partial"), 8 + len(text), places)
        with partial.path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            file.flush()
            size = 8 + len(text) + offset
            if hasattr(os, "posix_fallocate"):  # so that a full disk is an error, not a signal
                os.posix_fallocate(file.fileno(), 0, size)
            file.truncate(size)
        with partial.path.open("r+b") as file:
            partial._mapped = mmap.mmap(file.fileno(), 0)
        return partial

    def part(self, names: Mapping[str, str]) -> "TensorFile":
        """Some of its tensors with other names, {name here: other name}."""
        places = {}
        for name, other in names.items():
            tensor, offset = self._places[name]
            places[other] = replace(tensor, name=other), offset
        return TensorFile(self.path, self._start, places)

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

    def digest(self) -> str:
        """The file's size, and a hash of its header and of a few values of up to 64 tensors.

        It reads little of the file. A model that was trained further has other values in each.
        """
        digest = hashlib.sha256()
        tensors = [place for place in self._places.values() if place[0].nbytes]
        with self.path.open("rb", buffering=0) as file:
            digest.update(file.read(self._start))
            for tensor, offset in tensors[:: max(1, -(-len(tensors) // _SAMPLED))]:
                file.seek(self._start + offset + tensor.nbytes // 2)
                digest.update(file.read(min(_SAMPLE_BYTES, tensor.nbytes - tensor.nbytes // 2)))
        return f"{self.path.stat().st_size} bytes, sha256 {digest.hexdigest()[:16]}"

    def release(self) -> None:
        """Unmap the pages that were used; what was written is in the system's page cache."""
        if self._mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def finish(self, path: Path) -> None:
        """Give a written file its name."""
        self._mapped = None
        os.replace(self.path, path)


def _reason(path: Path, error: SafetensorError) -> str:
    """The library's reason, or how many bytes are missing: most often a download ended early."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(8)
        if begin == b"version ":
            return "is a pointer of Git LFS, not the weights: `git lfs pull` fetches them"
        length = int.from_bytes(begin, "little")
        if length > size - 8:
            return f"has {size:,} bytes: it is truncated, or no safetensors file"
        header = file.read(length)
    try:
        ends = [
            entry["data_offsets"][1] for entry in json.loads(header).values() if "dtype" in entry
        ]
        named = 8 + length + max(ends)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        named = size
    if named != size:
        wrong = "truncated" if size < named else "damaged"
        return f"has {size:,} bytes, but its header names {named:,}: it is {wrong}"
    return f"its header is damaged: {error}"
