"""Samples with random access: windows of packed tokens, rows of arrays, subsets, chains."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxspeed.data.packing import Stream
from jaxspeed.objectives.padding import IGNORED, Batch

ALL = slice(0, None)
# Arrays of models that read images begin so: those of patches, and of tokens.
PATCH, IMAGE = "patch", "image_"
PATCHES, IMAGE_ROWS = "patches", "image_rows"


class Samples(Protocol):
    """`tokens_each` is the number of tokens that a sample predicts; None for other samples.

    `read` returns the arrays of these samples, [samples, ...]; of those with a dim 1 only
    `positions` of it, from a start on.
    """

    tokens_each: int | None

    def __len__(self) -> int: ...
    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch: ...


class Windows:
    """Sample i predicts the tokens at positions i * seq_len + 1 to (i + 1) * seq_len of a stream.

    So each token is predicted once. An incomplete last sample is dropped, or with `pad_last` it is
    padded and every sample has a mask of the real tokens.
    """

    def __init__(self, stream: Stream, seq_len: int, *, segments: bool, pad_last: bool) -> None:
        self.stream = stream
        self.tokens_each: int | None = seq_len
        self._segments = segments
        self._masked = pad_last
        predicted = max(len(stream) - 1, 0)
        self._length = -(-predicted // seq_len) if pad_last else predicted // seq_len

    def __len__(self) -> int:
        return self._length

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        """tokens, and segment_ids and mask if enabled: int32 [samples, seq_len + 1]."""
        seq_len = self.tokens_each
        assert seq_len is not None
        here = range(seq_len + 1)[positions]
        names = ["tokens"] + ["segment_ids"] * self._segments + ["mask"] * self._masked
        batch = {name: np.zeros((len(ids), len(here)), np.int32) for name in names}
        for row, sample in enumerate(ids):
            first = int(sample) * seq_len
            start, stop = first + here.start, min(first + here.stop, len(self.stream))
            if start >= stop:  # padding alone
                continue
            batch["tokens"][row, : stop - start] = self.stream.read(start, stop)
            if self._segments:
                batch["segment_ids"][row, : stop - start] = self.stream.segments(start, stop, first)
            if self._masked:
                batch["mask"][row, : stop - start] = 1
        return batch


class ArrayRows:
    """Rows of arrays by name; uint8 images become floats from -1 to 1."""

    tokens_each: int | None = None

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        return {
            name: _prepared(name, array[ids] if array.ndim == 1 else array[ids, positions])
            for name, array in self._arrays.items()
        }


def _prepared(name: str, x: np.ndarray) -> np.ndarray:
    if name == "images" and x.dtype == np.uint8:
        return x.astype(np.float32) / 127.5 - 1
    if x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        return x.astype(np.int32)
    return x.astype(np.float32) if x.dtype == np.float64 else x


class Subset:
    """The samples with these numbers."""

    def __init__(self, samples: Samples, ids: np.ndarray) -> None:
        self._samples = samples
        self._ids = ids
        self.tokens_each: int | None = samples.tokens_each

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        return self._samples.read(self._ids[ids], positions)


class Marked:
    """Samples of tokens with the mask and positions of conversations: every token counts."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.tokens_each: int | None = samples.tokens_each

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        # Where a document begins is known from the positions before.
        batch = self._samples.read(ids, slice(0, positions.stop))
        if "segment_ids" in batch:
            segments, places = batch["segment_ids"], np.arange(batch["tokens"].shape[1])
            begins = np.diff(segments, axis=1, prepend=-1) != 0
            first = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
            batch["positions"] = (places - first).astype(np.int32)
        batch = {"mask": np.ones_like(batch["tokens"]), **batch}
        return {name: x[:, positions] for name, x in batch.items()}


def _alike(parts: Sequence[Samples]) -> list[Samples]:
    """The parts, those of texts with the arrays of conversations where others are of these."""
    names = [part.read(np.zeros(0, np.int64)).keys() for part in parts] if len(parts) > 1 else []
    wanted = {name for present in names for name in present} & {"mask", "positions"}
    if not wanted:
        return list(parts)
    lack = ["tokens" in present and not wanted <= present for present in names]
    return [Marked(part) if lacks else part for part, lacks in zip(parts, lack)]


class Chain:
    """Concatenation of several parts."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.parts = _alike(parts)
        self._blank = _image_arrays(self.parts)
        self.edges = np.cumsum([0, *map(len, self.parts)])
        self.tokens_each: int | None = self.parts[0].tokens_each

    def __len__(self) -> int:
        return int(self.edges[-1])

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        if len(self.parts) == 1:
            return self.parts[0].read(ids, positions)
        part = np.searchsorted(self.edges, ids, "right") - 1
        batch: Batch = {}
        for i in np.unique(part) if len(ids) else [0]:
            here = np.flatnonzero(part == i)
            arrays = self.parts[i].read(ids[here] - self.edges[i], positions)
            for name, rows in self._completed(arrays).items():
                if name not in batch:
                    batch[name] = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
                batch[name][here] = rows
        return batch

    def _completed(self, arrays: Batch) -> Batch:
        """The arrays of a part, with those of images if another part has some."""
        if not self._blank:
            return arrays
        completed, tokens = dict(arrays), arrays["tokens"]
        for name, blank in self._blank.items():
            if of_images(name):
                fill = 0 if name == PATCHES else -1
                completed[name] = np.full((len(tokens), *blank.shape[1:]), fill, blank.dtype)
                if name in arrays:
                    completed[name][:, : arrays[name].shape[1]] = arrays[name]
            elif name not in arrays and name == IMAGE_ROWS:
                completed[name] = np.full_like(tokens, -1)
            elif name not in arrays:  # positions, which text has alike along all of them
                numbers = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
                places = arrays.get("positions", numbers)[..., None]
                completed[name] = np.repeat(places, blank.shape[2], axis=2).astype(blank.dtype)
        return completed


def of_images(name: str) -> bool:
    """Whether an array has the patches of images, and no tokens."""
    return name.startswith(PATCH)


def _image_arrays(parts: Sequence[Samples]) -> Batch:
    """The arrays of images of no sample, with the most rows that a part has."""
    empty = [part.read(np.zeros(0, np.int64)) for part in parts] if len(parts) > 1 else []
    named = [(n, x) for arrays in empty for n, x in arrays.items() if n.startswith((PATCH, IMAGE))]
    return dict(sorted(named, key=lambda pair: pair[1].shape[1]))


def with_targets(batch: Batch) -> Batch:
    """A batch of tokens [batch, seq + 1] as inputs and targets, all arrays [batch, seq].

    The targets are those of `models.language.split_batch`: of the next document's first token there
    is none.
    """
    arrays = {n: x if n == "mask" or of_images(n) else x[:, :-1] for n, x in batch.items()}
    arrays["targets"] = batch["tokens"][:, 1:]
    if "segment_ids" in batch:
        segments = batch["segment_ids"]
        same = segments[:, 1:] == segments[:, :-1]
        arrays["targets"] = np.where(same, arrays["targets"], IGNORED)
    if "mask" in batch:  # of what is predicted
        arrays["mask"] = batch["mask"][:, 1:]
    return arrays
