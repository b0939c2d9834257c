"""A run of torch at a checkpoint: parameters, moments, counts; a tensor's parts in files."""

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspeed.interop.torch_runs.archives import StoredTensor, TorchFiles

Span = tuple[StoredTensor, int, int]  # elements of a flat tensor: the first, and their number


@dataclass(frozen=True, eq=False)
class TensorInParts:
    """A tensor of which files have parts: where each is, among all elements or by dim, and what."""

    shape: tuple[int, ...]
    dtype: str
    parts: Sequence[tuple[slice | tuple[slice, ...], Callable[[], np.ndarray]]]

    def check(self) -> None:
        """Open all parts, as views of their files."""
        for _, read in self.parts:
            read()

    def array(self) -> np.ndarray:
        """The tensor: a view of its file where it has one part."""
        if len(self.parts) == 1:
            return self.parts[0][1]().reshape(self.shape)
        # Not from a heap, in which what is freed may stay.
        dtype = jnp.dtype(self.dtype)
        size = max(1, math.prod(self.shape) * dtype.itemsize)
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        full = np.frombuffer(memory, dtype, math.prod(self.shape)).reshape(self.shape)
        for at, read in self.parts:
            target = full.reshape(-1) if isinstance(at, slice) else full
            target[at] = read()
        return full


AnyTensor = StoredTensor | TensorInParts


def flat_tensor(shape: tuple[int, ...], spans: Sequence[Span]) -> TensorInParts:
    """A tensor whose elements are in flat partitions, one after another."""
    parts: list[Any] = []
    end = 0
    for source, start, length in spans:
        if source.strides != (1,) or start + length > source.shape[0]:
            raise ValueError(f"a partition ends before its element {start + length:,}")
        if length:
            parts.append((slice(end, end + length), partial(_elements, source, start, length)))
            end += length
    if end != math.prod(shape) or len({source.dtype for source, *_ in spans}) != 1:
        raise ValueError(f"its partitions are not those of a tensor {list(shape)}")
    return TensorInParts(shape, spans[0][0].dtype, parts)


def _elements(source: StoredTensor, start: int, length: int) -> np.ndarray:
    return source.array()[start : start + length]


@dataclass
class TorchRun:
    """A run at a checkpoint; parameters in the precision of their update where that is stored."""

    folder: Path
    parameters: dict[str, AnyTensor] = field(default_factory=dict)
    moments: dict[str, dict[str, AnyTensor]] = field(default_factory=dict)  # by "exp_avg", ...
    no_optimizer: str = ""  # what is missing, if there are no moments
    steps: int = 0
    skipped: int = 0
    updates: int = 0  # of the optimizer
    position: int | None = None  # completed steps of the schedule
    samples: int | None = None
    tokens: int | None = None
    scaler: Mapping[str, float] | None = None  # the fields of `LossScale`
    files: TorchFiles = field(default_factory=TorchFiles)

    def took(self, updates: set[int]) -> None:
        """Note how many updates the parts of the optimizer's state have had."""
        if len(updates) > 1:
            raise ValueError(f"parts of its optimizer have taken other steps: {sorted(updates)}")
        self.updates = updates.pop() if updates else self.steps - self.skipped


def number_of(value: Any) -> int:
    """A count that a file has as a number, or as a tensor."""
    if isinstance(value, AnyTensor):
        if math.prod(value.shape) != 1:
            raise ValueError("a count is no number")
        value = value.array().item()
    number = int(value)
    if number != value or not 0 <= number < 1 << 53:
        raise ValueError(f"a count is {value!r:.40}")
    return number
