"""Files of `torch.save`: archives with a pickle and the bytes of its tensors, which are mapped."""

import math
import mmap
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspeed.interop.torch_runs.pickles import (
    MOST_BYTES,
    Name,
    PickleReader,
    as_pretrained_error,
)

_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool",
}  # fmt: skip
_LOCAL_HEADER = 30
_RECORDS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "torch.distributed.checkpoint.metadata.",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
)


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a mapped file, whose elements are all within it."""

    mapped: mmap.mmap
    start: int  # in bytes
    dtype: str  # NumPy's name
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements

    def array(self) -> np.ndarray:
        """A view of the file."""
        dtype = jnp.dtype(self.dtype)
        if not math.prod(self.shape):
            return np.empty(self.shape, dtype)
        count = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        flat = np.frombuffer(self.mapped, dtype, count, self.start)
        strides = [step * dtype.itemsize for step in self.strides]
        return np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=False)


class _Mapped(mmap.mmap):
    """A file of which zipfile does not read a directory of any size into memory."""

    def read(self, n: int | None = None, /) -> bytes:
        if n is not None and n > MOST_BYTES:
            raise ValueError(f"its directory has {n:,} bytes")
        return super().read(n)


@dataclass
class TorchFiles:
    """Reads files of `torch.save`."""

    inert: Counter[str] = field(default_factory=Counter)  # the names of what is not read
    assembled: dict[int, np.ndarray] = field(default_factory=dict)
    _mapped: list[mmap.mmap] = field(default_factory=list)
    _is_read: bool = False

    def load(self, path: Path, start: int = 0, length: int | None = None) -> Any:
        """The object of a file, or of a part of it; its tensors are `StoredTensor`."""
        where = f"{path}" if length is None else f"{path} at {start:,}"
        with as_pretrained_error(where):
            size = path.stat().st_size
            end = size if length is None else start + length
            if not 0 <= start < end <= size:
                raise ValueError(f"it has {size:,} bytes")
            first = start - start % mmap.ALLOCATIONGRANULARITY
            with path.open("rb") as file:
                read = mmap.ACCESS_READ
                mapped = _Mapped(file.fileno(), end - first, access=read, offset=first)
            if mapped[start - first : start - first + 2] != b"PK":
                raise ValueError("it is no archive of torch.save (of torch from 1.6)")
            members = _members(mapped)
            if length is None:
                self._mapped.append(mapped)
            begin, nbytes = members["data.pkl"]
            at, count = members.get("byteorder", (0, 0))
            if mapped[at : at + count] not in (b"", b"little"):
                raise ValueError("it is of a big-endian machine")
            pickled = mapped[begin : begin + min(nbytes, MOST_BYTES + 1)]
            return self.unpickled(pickled, lambda of: _storage(mapped, members, of))

    def unpickled(self, data: bytes, storage: Callable[[Any], Any] | None = None) -> Any:
        """The object of a pickle of torch's or DeepSpeed's."""
        if len(data) > MOST_BYTES:
            raise ValueError(f"a pickle has more than {MOST_BYTES:,} bytes")
        return PickleReader(data, _CONSTRUCTORS, _RECORDS, self.inert, storage).load()

    def array(self, tensor: Any) -> np.ndarray:
        """A tensor's array; those of one block are in memory until others are read."""
        if id(tensor) not in self.assembled:
            if self._is_read:
                self.assembled, self._is_read = {}, False
            self.assembled[id(tensor)] = tensor.array()
        return self.assembled[id(tensor)]

    def release(self) -> None:
        """Drop the pages of files that were used."""
        self._is_read = True
        for mapped in self._mapped if hasattr(mmap, "MADV_DONTNEED") else ():
            mapped.madvise(mmap.MADV_DONTNEED)


def _members(mapped: mmap.mmap) -> dict[str, tuple[int, int]]:
    """(start, length) of each member of an archive."""
    members: dict[str, tuple[int, int]] = {}
    file: Any = mapped
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    for entry in entries:
        name, at = entry.filename.partition("/")[2], entry.header_offset
        begin = at + _LOCAL_HEADER
        header = mapped[at:begin] if at >= 0 else b""
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04" or name in members:
            raise ValueError(f"{name} is not where it says, or twice")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError(f"{name} is compressed or encrypted, which torch never does")
        begin += sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
        if entry.file_size != entry.compress_size or begin + entry.file_size > len(mapped):
            raise ValueError(f"{name} is not within its file")
        members[name] = begin, entry.file_size
    return members


def sizes_of(values: Any) -> tuple[int, ...]:
    """Sizes that a file has."""
    sizes = tuple(values)
    if len(sizes) > 64 or not all(type(n) is int and 0 <= n < 1 << 62 for n in sizes):
        raise ValueError("has a size that is no number of elements")
    return sizes


def _storage(
    mapped: mmap.mmap, members: Mapping[str, tuple[int, int]], reference: Any
) -> StoredTensor:
    kind, storage, key, _, size = reference
    dtype = _STORAGES.get(storage.text.removeprefix("torch.").removesuffix("Storage"))
    if kind != "storage" or dtype is None or type(key) is not str:
        raise ValueError(f"has a storage of {storage.text}, which is not read")
    start, length = members[f"data/{key}"]
    (size,) = sizes_of((size,))
    if size * jnp.dtype(dtype).itemsize > length:
        raise ValueError(f"has {length:,} bytes of a storage of {size:,} {dtype}")
    return StoredTensor(mapped, start, dtype, (size,), (1,))


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
    """torch._utils._rebuild_tensor_v2."""
    shape, strides, (offset,) = sizes_of(shape), sizes_of(strides), sizes_of((offset,))
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    size = math.prod(shape)
    (most,) = storage.shape
    if storage.strides != (1,) or size > most or (size and last >= most):
        raise ValueError(f"has a tensor {list(shape)} that is not within its storage")
    start = storage.start + offset * jnp.dtype(storage.dtype).itemsize
    return StoredTensor(storage.mapped, start, storage.dtype, shape, strides)


_TENSORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
}
_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    **_TENSORS,
    # A tensor with attributes, which are not read.
    "torch._tensor._rebuild_from_type_v2": lambda of, _, x, *__: _TENSORS[of.text](*x[:8]),
    "collections.OrderedDict": lambda: {},  # noqa: PIE807 - without arguments, unlike dict
    "torch.Size": sizes_of,
    "torch.serialization._get_layout": lambda _: Name("a layout"),
    "deepspeed.runtime.zero.config.ZeroStageEnum": lambda number: sizes_of([number])[0],
    **dict.fromkeys(("__builtin__.set", "builtins.set"), lambda items=(): items),
}
