"""Files of `torch.save`: archives with a pickle and the bytes of its tensors, which are mapped."""

import io
import math
import mmap
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.torch_runs.pickles import (
    MOST_BYTES,
    Name,
    PickleError,
    PickleReader,
    hashable,
)

_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexFloat": "complex64",
}  # fmt: skip
_LOCAL_HEADER = 30
_MOST_DIMS = 64
_OBJECTS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "torch.distributed.checkpoint.metadata.",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
)


class MappedFile:
    """A file, of which only the pages that are used are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: mmap.mmap | None = None
        try:
            self.size = path.stat().st_size
        except OSError as error:
            raise PretrainedError(f"{path}: {error.strerror}") from None

    @property
    def mapped(self) -> mmap.mmap:
        if self._mapped is None:
            try:
                with self.path.open("rb") as file:
                    self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise PretrainedError(f"{self.path}: cannot be read: {error}") from None
        return self._mapped

    def release(self) -> None:
        """Unmap the pages that were used."""
        if self._mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, whose elements are all within it."""

    file: MappedFile
    start: int  # in bytes
    dtype: str  # NumPy's name
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def files(self) -> set[MappedFile]:
        return {self.file}

    def array(self) -> np.ndarray:
        """A view of the file."""
        dtype = jnp.dtype(self.dtype)
        if not self.size:
            return np.empty(self.shape, dtype)
        count = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        flat = np.frombuffer(self.file.mapped, dtype, count, self.start)
        strides = [step * dtype.itemsize for step in self.strides]
        return np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=False)


@dataclass(frozen=True)
class _Storage:
    file: MappedFile
    start: int
    dtype: str
    size: int  # in elements


class TorchArchive:
    """A file of `torch.save`, or what it wrote at a place in a file.

    Attributes:
      inert: the classes and functions that its pickle names and that are not read.
    """

    def __init__(self, file: MappedFile, start: int = 0, length: int | None = None) -> None:
        self.file = file
        self._start, self._length = start, file.size - start if length is None else length
        if not 0 <= start <= start + self._length <= file.size:
            raise PretrainedError(f"{self}: is not within the {file.size:,} bytes of its file")
        self.inert = Counter[str]()

    def __str__(self) -> str:
        is_all = (self._start, self._length) == (0, self.file.size)
        at = "" if is_all else f" at {self._start:,}, {self._length:,} bytes"
        return f"{self.file.path}{at}"

    @cached_property
    def _records(self) -> Mapping[str, tuple[int, int]]:
        """(start in the file, length) of each member of the archive, without its folder."""
        view = memoryview(self.file.mapped)[self._start : self._start + self._length]
        records: dict[str, tuple[int, int]] = {}
        try:
            if self._length == 0 or bytes(view[:2]) != b"PK":
                raise PretrainedError(
                    f"{self}: is no archive of torch.save; files of torch before 1.6, and damaged "
                    "ones, are not read"
                )
            with zipfile.ZipFile(_Window(view)) as archive:
                members = archive.infolist()
            for member in members:
                name = member.filename.partition("/")[2]
                at = member.header_offset
                header = bytes(view[at : at + _LOCAL_HEADER])
                if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04" or name in records:
                    raise PretrainedError(f"{self}: its member {name!r} is not where it says")
                if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                    raise PretrainedError(
                        f"{self}: {name} is compressed or encrypted, which torch never does"
                    )
                lengths = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
                begin = at + _LOCAL_HEADER + sum(lengths)
                if member.file_size != member.compress_size or not (
                    0 <= at < begin <= begin + member.file_size <= self._length
                ):
                    raise PretrainedError(f"{self}: {name} is not within its file")
                records[name] = self._start + begin, member.file_size
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, OverflowError) as bad:
            if isinstance(bad, PretrainedError):
                raise
            raise PretrainedError(f"{self}: is truncated or damaged: {bad}") from None
        return records

    def _bytes(self, name: str) -> bytes | None:
        if name not in self._records:
            return None
        start, length = self._records[name]
        if length > MOST_BYTES:
            raise PretrainedError(f"{self}: {name} has {length:,} bytes")
        return self.file.mapped[start : start + length]

    @cached_property
    def value(self) -> Any:
        """The saved object, whose tensors are `StoredTensor`.

        Raises:
          PretrainedError: it is damaged, or has what is not read.
        """
        pickled = self._bytes("data.pkl")
        if pickled is None or self._bytes("byteorder") not in (None, b"little"):
            raise PretrainedError(f"{self}: has no data.pkl of a little-endian machine")
        return read_pickle(pickled, str(self), self.inert, self._storage)

    def _storage(self, reference: Any) -> _Storage:
        kind, storage, key, _, size = reference
        element = storage.text.removeprefix("torch.").removesuffix("Storage")
        if kind != "storage" or not isinstance(key, str):
            raise PickleError("refers to what is no storage")
        if element not in _STORAGES:
            raise PickleError(f"has a storage of {storage.text}, which is not read")
        dtype = _STORAGES[element]
        start, length = self._records[f"data/{key}"]
        _check_sizes(size)
        if size * jnp.dtype(dtype).itemsize > length:
            raise PickleError(
                f"has a storage of {size:,} {dtype}, for which it has {length:,} bytes"
            )
        return _Storage(self.file, start, dtype, size)


def read_pickle(
    data: bytes,
    where: str,
    inert: Counter[str],
    storage: Callable[[Any], Any] | None = None,
) -> Any:
    """The object of a pickle of torch's or DeepSpeed's; `inert` counts what is not read."""
    reader = PickleReader(_CONSTRUCTORS, _OBJECTS, storage, inert)
    try:
        return reader.read(data)
    except PickleError as error:
        raise PretrainedError(f"{where}: its pickle {error}") from None


def load(path: Path, inert: Counter[str]) -> Any:
    """The object that `torch.save` wrote to a file."""
    archive = TorchArchive(MappedFile(path))
    try:
        return archive.value
    finally:
        inert.update(archive.inert)


class _Window(io.RawIOBase):
    """Bytes as a file."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        if self._at < 0:
            raise ValueError("an offset before the file")
        return self._at

    def readinto(self, buffer: Any) -> int:
        some = self._view[self._at : self._at + len(buffer)]
        buffer[: len(some)] = some
        self._at += len(some)
        return len(some)


def _check_sizes(*sizes: Any) -> None:
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in sizes):
        raise PickleError("has a size that is no number of elements")


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Any:
    """torch._utils._rebuild_tensor_v2."""
    if not isinstance(storage, _Storage):
        raise PickleError("has a tensor without a storage")
    shape, strides = tuple(shape), tuple(strides)
    _check_sizes(offset, *shape, *strides)
    if len(shape) != len(strides) or len(shape) > _MOST_DIMS:
        raise PickleError("has a tensor whose strides do not fit its shape")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if (math.prod(shape) and last >= storage.size) or math.prod(shape) > storage.size:
        raise PickleError(f"has a tensor {list(shape)} beyond its storage of {storage.size:,}")
    start = storage.start + offset * jnp.dtype(storage.dtype).itemsize
    return StoredTensor(storage.file, start, storage.dtype, shape, strides)


def _parameter(tensor: Any, *_: Any) -> Any:
    """torch._utils._rebuild_parameter."""
    return tensor


def _of_type(function: Any, _: Any, arguments: Any, *__: Any) -> Any:
    """torch._tensor._rebuild_from_type_v2: a tensor with attributes, which are not read."""
    if function not in map(Name, _TENSORS) or type(arguments) is not tuple:
        raise PickleError("has a tensor of a kind that is not read")
    return _TENSORS[function.text](*arguments)


def _dict(pairs: Any = ()) -> dict[Any, Any]:
    """collections.OrderedDict."""
    return {hashable(key): value for key, value in pairs}


def _size(sizes: Any = ()) -> tuple[int, ...]:
    """torch.Size."""
    _check_sizes(*sizes)
    return tuple(sizes)


def _stage(number: Any) -> int:
    """deepspeed.runtime.zero.config.ZeroStageEnum."""
    _check_sizes(number)
    return int(number)


def _layout(name: Any) -> Name:
    """torch.serialization._get_layout."""
    return Name(str(name)[:99]) if isinstance(name, str) else Name("")


_TENSORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
}
_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    **_TENSORS,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "collections.OrderedDict": _dict,
    "torch.Size": _size,
    "torch.serialization._get_layout": _layout,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _stage,
    **dict.fromkeys(("__builtin__.set", "builtins.set"), lambda items=(): [*items]),
}
