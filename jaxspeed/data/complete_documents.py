"""Packing of complete documents, as conversations are: none is split among samples.

Other than those that `Windows` concatenates, a document longer than a sample is truncated, and a
mask has the tokens that the loss counts.
"""

import bisect
import functools
import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from jaxspeed.data.holdout import hold_out_samples
from jaxspeed.data.packing import Spans, Stream
from jaxspeed.data.samples import ALL, IMAGE_ROWS, PATCHES, Batch, of_images
from jaxspeed.data.token_store import Documents
from jaxspeed.vision import ImageProcessor, ImageSource, pixels_of

log = logging.getLogger("jaxspeed")
SHOWN = 10  # records that are named of those that are left out
Truncate = Literal["end", "start", "drop"]


@dataclass(frozen=True)
class Packing:
    """How token documents become samples; `truncate` and `together` are of complete documents."""

    seq_len: int
    segments: bool
    truncate: Truncate = "end"
    together: bool = True  # several of them in a sample
    images: ImageProcessor | None = None
    patches: int | None = None  # of a sample at most; None: those of the one with most


class Counts:
    """What is counted of documents: a dataclass of numbers, which are added, and the `longest`."""

    longest: int

    def __add__(self, other: Self) -> Self:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return type(self)(**sums | {"longest": max(self.longest, other.longest)})


@dataclass(frozen=True)
class DocumentCounts(Counts):
    """Complete documents, and what became of those that do not fit."""

    samples: int = 0  # documents that are trained or evaluated on
    tokens: int = 0  # of these
    trained: int = 0  # tokens that the loss counts
    longest: int = 0  # tokens of the longest document, before it was truncated
    truncated: int = 0
    dropped: int = 0  # too long, or without a trained token that is not truncated
    images: int = 0  # of the documents that are trained or evaluated on

    def __str__(self) -> str:
        out = {"truncated": self.truncated, "dropped": self.dropped}
        plural = "" if self.samples == 1 else "s"
        shown = [f"{self.samples:,} conversation{plural}", f"{self.tokens:,} tokens"]
        shown += [f"{self.trained:,} trained"]
        shown += [f"{self.images:,} image{'' if self.images == 1 else 's'}"] * bool(self.images)
        return ", ".join([*shown, *(f"{n:,} {name}" for name, n in out.items() if n)])


class CompleteDocuments:
    """Sample i holds the documents of bin i one after the other, and then padding.

    Args:
      documents: with a mask.
      spans: the documents in it, of at most seq_len + 1 tokens each.
      vocab_size: ids beyond are refused as they are read.
      numbers: that of each document in the spans; by default all, in order.
    """

    def __init__(
        self,
        documents: Documents,
        spans: Spans,
        packing: Packing,
        vocab_size: int | None,
        numbers: np.ndarray | None = None,
    ) -> None:
        assert documents.trained is not None
        self.tokens_each: int | None = packing.seq_len
        self._trained, self._spans, self._segments = documents.trained, spans, packing.segments
        self._stream = Stream(documents.tokens, spans, vocab_size, documents.name)
        unpacked = [[i] for i in range(len(spans.lengths))]
        self._processor, self._images = packing.images, None
        patches = None
        if documents.images is not None and packing.images is not None:
            every = range(len(spans.lengths)) if numbers is None else numbers
            self._images = [documents.images[i] for i in every]
            patches = np.array([_rows(images, packing.images) for images in self._images], int)
        self._bins, room = unpacked, packing.seq_len + 1
        if packing.together and patches is not None and (most := packing.patches) is not None:
            # Each takes the larger of its shares of both, so that a bin has enough of each.
            self._bins = best_fit(np.maximum(spans.lengths * most, patches * room), room * most)
        elif packing.together:
            self._bins = best_fit(spans.lengths, room)
        if patches is not None:
            fullest = max((int(patches[rows].sum()) for rows in self._bins), default=0)
            self._patches = packing.patches or fullest

    def __len__(self) -> int:
        return len(self._bins)

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        """tokens and mask, and segment_ids and positions if enabled: int32 [samples, seq_len + 1].

        A document is a segment, and its positions begin with 0. The mask has what the loss counts:
        nothing predicts a document's first token, also where documents are not segments.
        """
        assert self.tokens_each is not None
        if self._images is not None and positions != ALL:
            batch = self.read(ids)
            return {n: x if of_images(n) else x[:, positions] for n, x in batch.items()}
        here = range(self.tokens_each + 1)[positions]
        names = ["tokens", *["segment_ids", "positions"] * self._segments, "mask"]
        batch = {name: np.zeros((len(ids), len(here)), np.int32) for name in names}
        for row, sample in enumerate(ids):
            at = -here.start  # where the document begins, from the first position that is read
            for number, document in enumerate(self._bins[int(sample)], 1):
                begin, end = map(int, self._stream.edges[document : document + 2])
                skip, count = max(-at, 0), min(end - begin, len(here) - at)
                if skip < count:
                    inside, start = slice(at + skip, at + count), int(self._spans.starts[document])
                    batch["tokens"][row, inside] = self._stream.read(begin + skip, begin + count)
                    trained = self._trained[start + skip : start + count]
                    batch["mask"][row, inside] = trained
                    if skip == 0:
                        batch["mask"][row, at] = 0
                    if self._segments:
                        batch["segment_ids"][row, inside] = number
                        batch["positions"][row, inside] = np.arange(skip, count)
                at += end - begin
        return batch if self._images is None else self._with_images(ids, batch)

    def _with_images(self, ids: np.ndarray, batch: Batch) -> Batch:
        """The batch with its images' patches, and the row of features of each token, or -1."""
        assert self._images is not None and self._processor is not None
        processor = self._processor
        is_image = batch["tokens"] == processor.token_id
        rows = np.where(is_image, np.cumsum(is_image, axis=1, dtype=np.int32) - 1, np.int32(-1))
        patches = np.zeros((len(ids), self._patches, processor.patch), np.float32)
        sources = [
            (row, source)
            for row, sample in enumerate(ids)
            for document in self._bins[int(sample)]
            for source in self._images[document]
        ]
        filled = np.zeros(len(ids), np.int64)
        decoded = decoder().map(lambda x: processor.patches(pixels_of(x[1])), sources)
        for (row, _), image in zip(sources, decoded):
            patches[row, filled[row] : filled[row] + len(image)] = image
            filled[row] += len(image)
        sizes: list[list[tuple[int, int]]] = [[] for _ in ids]
        for row, source in sources:
            sizes[row].append((source.width, source.height))
        batch = batch | {IMAGE_ROWS: rows, PATCHES: patches}
        return batch | processor.beside(batch, sizes)


def most_patches(processor: ImageProcessor, seq_len: int) -> int:
    """The patches of as many images as fit into a sample of so many tokens, but at least of one."""
    expansion = processor.expansion(2, 2)
    return max((seq_len + 1) // expansion.tokens, 1) * expansion.rows


def _rows(images: Sequence[ImageSource], processor: ImageProcessor) -> int:
    """The patches of images."""
    return sum(processor.expansion(image.width, image.height).rows for image in images)


@functools.cache
def decoder() -> ThreadPoolExecutor:
    """The threads that decode images: Pillow and NumPy run without the interpreter's lock."""
    return ThreadPoolExecutor(min(os.cpu_count() or 1, 16), thread_name_prefix="images")


def pack_documents(
    documents: Documents, packing: Packing, held_out: float, vocab_size: int | None
) -> tuple[CompleteDocuments, CompleteDocuments | None, np.ndarray, DocumentCounts]:
    """Training samples, held-out ones, the training's count of each trained id, and all counts."""
    assert documents.trained is not None
    fitting, numbers, counts = fit(documents, packing)
    train, held = hold_out_samples(len(fitting.starts), held_out, fewest=1)

    def samples(chosen: np.ndarray) -> CompleteDocuments:
        spans = Spans(fitting.starts[chosen], fitting.lengths[chosen])
        return CompleteDocuments(documents, spans, packing, vocab_size, numbers[chosen])

    is_train = np.zeros(len(documents.tokens) + 1, np.int8)
    np.add.at(is_train, fitting.starts[train] + 1, 1)
    np.add.at(is_train, fitting.starts[train] + fitting.lengths[train], -1)
    counted = (np.cumsum(is_train[:-1]) > 0) & documents.trained
    ids = np.bincount(documents.tokens[counted].astype(np.int64))
    return samples(train), samples(held) if held_out else None, ids, counts


def fit(documents: Documents, packing: Packing) -> tuple[Spans, np.ndarray, DocumentCounts]:
    """The documents truncated to seq_len + 1 tokens, without those that are dropped; their numbers.

    No image is truncated.
    """
    assert documents.trained is not None
    size, how = packing.seq_len + 1, packing.truncate
    starts, lengths = np.asarray(documents.offsets[:-1]), documents.lengths
    longest, over = int(lengths.max(initial=0)), lengths > size
    if how == "start":
        starts = starts + np.maximum(lengths - size, 0)
    lengths = np.minimum(lengths, size)
    before = np.append(0, np.cumsum(documents.trained, dtype=np.int64))
    trained = before[starts + lengths] - before[starts + 1]  # nothing predicts the first
    kept = (trained > 0) & ~(over & (how == "drop"))
    images = np.zeros(len(starts), np.int64)
    if documents.images is not None and packing.images is not None:
        images = np.array([len(x) for x in documents.images])
        kept &= ~_losing_images(documents, starts, lengths, over, packing)
    counts = DocumentCounts(
        samples=int(kept.sum()),
        tokens=int(lengths[kept].sum()),
        trained=int(trained[kept].sum()),
        longest=longest,
        truncated=int((over & kept).sum()),
        dropped=int((~kept).sum()),
        images=int(images[kept].sum()),
    )
    return Spans(starts[kept], lengths[kept]), np.flatnonzero(kept), counts


def _losing_images(
    documents: Documents,
    starts: np.ndarray,
    lengths: np.ndarray,
    over: np.ndarray,
    packing: Packing,
) -> np.ndarray:
    """bool [documents]: those that would lose tokens of images, or have too many patches."""
    processor = packing.images
    assert processor is not None and documents.images is not None
    before = np.append(0, np.cumsum(documents.tokens == processor.token_id, dtype=np.int64))
    ends = starts + lengths
    lost = before[ends] - before[starts] < np.diff(before[documents.offsets])
    rows = np.array([_rows(images, processor) for images in documents.images])
    many = rows > (packing.patches or math.inf)
    for what, chosen in (
        (f"is longer than data.seq_len {packing.seq_len:,}, and would lose an image", lost & over),
        (f"has more patches than data.patches {packing.patches}", many),
    ):
        named = [documents.images[i][0].where for i in np.flatnonzero(chosen).tolist()]
        for where in named[:SHOWN]:
            log.warning("data: %s: its conversation is left out: it %s", where, what)
        if len(named) > SHOWN:
            log.warning("data: and %d more", len(named) - SHOWN)
    return lost | many


def best_fit(lengths: np.ndarray, size: int, most: int | None = None) -> list[list[int]]:
    """Assign documents to bins of `size` tokens: the longest first, each to the fullest it fits.

    A bin has at most `most` of them.
    """
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # bins by the number of tokens that fit
    rooms: list[int] = []  # the keys of `with_room`, ascending
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            room, chosen = size, len(bins)
            bins.append([])
        else:
            room = rooms[at]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del with_room[rooms.pop(at)]
        bins[chosen].append(document)
        if (left := room - length) and len(bins[chosen]) != most:
            if left not in with_room:
                bisect.insort(rooms, left)
            with_room.setdefault(left, []).append(chosen)
    return bins
