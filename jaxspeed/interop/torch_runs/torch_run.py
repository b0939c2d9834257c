"""A run of torch at a checkpoint: parameters, moments, counts; a tensor's parts in files."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.safetensors import Tensor
from jaxspeed.interop.torch_runs.archives import MappedFile, StoredTensor


class TensorInParts(Protocol):
    """A tensor of which files have parts."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def files(self) -> set[MappedFile]: ...

    def array(self) -> np.ndarray:
        """The tensor: a view of its file where one part is all of it, else a new array."""


class Span(NamedTuple):
    """Consecutive elements of a flat tensor."""

    source: StoredTensor
    start: int
    length: int


class FlatTensor:
    """A tensor whose elements are in flat partitions, one after another."""

    def __init__(self, shape: tuple[int, ...], spans: Sequence[Span]) -> None:
        self.shape, self.spans = shape, [span for span in spans if span.length]
        dtypes = {span.source.dtype for span in spans}
        if len(dtypes) != 1 or sum(span.length for span in spans) != math.prod(shape):
            raise ValueError(f"its partitions are not those of a tensor {list(shape)}")
        for source, start, count in self.spans:
            if source.strides != (1,) or not 0 <= start < start + count <= source.size:
                raise ValueError(f"a partition of {source.size:,} ends before {start + count:,}")
        (self.dtype,) = dtypes

    @property
    def files(self) -> set[MappedFile]:
        return {span.source.file for span in self.spans}

    def array(self) -> np.ndarray:
        """The tensor."""
        parts = [source.array()[start : start + count] for source, start, count in self.spans]
        if len(parts) == 1:
            return parts[0].reshape(self.shape)
        flat = np.empty(math.prod(self.shape), jnp.dtype(self.dtype))
        if parts:
            np.concatenate(parts, out=flat)
        return flat.reshape(self.shape)


class Chunk(NamedTuple):
    """A box of a tensor, and what opens it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: MappedFile
    open: Callable[[], StoredTensor]


class ChunkedTensor:
    """A tensor in chunks that are a grid."""

    def __init__(self, shape: tuple[int, ...], dtype: str, chunks: Sequence[Chunk]) -> None:
        self.shape, self.dtype = shape, dtype
        self.chunks = [chunk for chunk in chunks if math.prod(chunk.sizes)]
        if not math.prod(shape):
            return
        starts = [
            sorted({chunk.offsets[dim] for chunk in self.chunks}) for dim in range(len(shape))
        ]
        ends = [
            dict(zip(some, [*some[1:], n], strict=True))
            for some, n in zip(starts, shape, strict=True)
        ]
        is_grid = not any(some[0] for some in starts) and all(
            start + size == of_dim[start]
            for chunk in self.chunks
            for start, size, of_dim in zip(chunk.offsets, chunk.sizes, ends, strict=True)
        )
        corners = {chunk.offsets for chunk in self.chunks}
        if not is_grid or not len(corners) == len(self.chunks) == math.prod(map(len, starts)):
            raise ValueError(f"its chunks are not those of a tensor {list(shape)}")

    @property
    def files(self) -> set[MappedFile]:
        return {chunk.file for chunk in self.chunks}

    def array(self) -> np.ndarray:
        """The tensor."""
        array: np.ndarray | None = None
        if len(self.chunks) > 1:
            array = np.empty(self.shape, jnp.dtype(self.dtype))
        for chunk in self.chunks:
            stored = chunk.open()
            if stored.shape != chunk.sizes or stored.dtype != self.dtype:
                raise PretrainedError(
                    f"{chunk.file.path}: has a {stored.dtype} {list(stored.shape)} where the "
                    f"checkpoint has a {self.dtype} {list(chunk.sizes)}"
                )
            if array is None:
                return stored.array()
            corner = zip(chunk.offsets, chunk.sizes, strict=True)
            array[tuple(slice(a, a + n) for a, n in corner)] = stored.array()
        return np.empty(self.shape, jnp.dtype(self.dtype)) if array is None else array


@dataclass
class TorchRun:
    """A run at a checkpoint.

    Attributes:
      kind: the format, for messages.
      parameters: by their names in torch, in the precision of their update where that is stored.
      moments: by torch's words, such as "exp_avg", and by the parameters' names.
      no_optimizer: why there are no moments; empty if there are.
      updates: number of completed updates of the optimizer.
      position: number of completed steps of the learning rate's schedule.
      scaler: of a dynamic loss scale, the fields of `LossScale`.
      inert: what was not read, by class, with its number.
    """

    folder: Path
    kind: str
    parameters: dict[str, TensorInParts] = field(default_factory=dict)
    moments: dict[str, dict[str, TensorInParts]] = field(default_factory=dict)
    no_optimizer: str = ""
    steps: int = 0
    skipped: int = 0
    updates: int = 0
    position: int | None = None
    samples: int | None = None
    tokens: int | None = None
    scaler: Mapping[str, float] | None = None
    inert: Counter[str] = field(default_factory=Counter)


class TorchTensors:
    """Tensors in parts, as a folder of tensors.

    What was assembled for one block is in memory until another tensor is read.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInParts]) -> None:
        self.path, self._parts = path, tensors
        self.tensors = {n: Tensor(n, x.shape, x.dtype) for n, x in tensors.items()}
        self._assembled: dict[str, np.ndarray] = {}
        self._used: set[MappedFile] = set()
        self._is_read = False

    def array(self, name: str) -> np.ndarray:
        """A tensor."""
        if name not in self._assembled:
            if self._is_read:
                self._assembled, self._is_read = {}, False
            self._used |= self._parts[name].files
            self._assembled[name] = self._parts[name].array()
        return self._assembled[name]

    def release(self) -> None:
        """Drop the pages of files that were used."""
        self._is_read = True
        for file in self._used:
            file.release()
        self._used = set()

    def digests(self) -> dict[str, str]:
        """None: what is read becomes a checkpoint of its own."""
        return {}


def shape_of(value: Any) -> tuple[int, ...]:
    """A shape that a file has."""
    shape = tuple(value)
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
        raise ValueError("a shape is no shape")
    return shape


def whole_number(value: Any) -> int:
    """A count that a file has as a number, or as a tensor."""
    if isinstance(value, StoredTensor):
        value = value.array().item()
    number = int(value)
    if number != value or not 0 <= number < 1 << 53:
        raise ValueError(f"a count is {value!r:.40}")
    return number


@contextmanager
def as_pretrained_error(where: object) -> Iterator[None]:
    """Raise a PretrainedError where a file has other values than its format says."""
    try:
        yield
    except PretrainedError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, OSError) as error:
        lacks = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise PretrainedError(
            f"{where}: is damaged, or of a version that is not read: {lacks}"
        ) from (None)
