"""Packing of complete documents, as conversations are: none is split among samples.

Other than those that `Windows` concatenates, a document longer than a sample is truncated, and a
mask has the tokens that the loss counts.
"""

import bisect
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from jaxspeed.data.holdout import hold_out_samples
from jaxspeed.data.packing import Spans, Stream
from jaxspeed.data.samples import ALL, Batch
from jaxspeed.data.token_store import Documents

Truncate = Literal["end", "start", "drop"]


@dataclass(frozen=True)
class Packing:
    """How token documents become samples; `truncate` and `together` are of complete documents."""

    seq_len: int
    segments: bool
    truncate: Truncate = "end"
    together: bool = True  # several of them in a sample


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

    def __str__(self) -> str:
        out = {"truncated": self.truncated, "dropped": self.dropped}
        plural = "" if self.samples == 1 else "s"
        shown = [f"{self.samples:,} conversation{plural}", f"{self.tokens:,} tokens"]
        shown += [f"{self.trained:,} trained"]
        return ", ".join([*shown, *(f"{n:,} {name}" for name, n in out.items() if n)])


class CompleteDocuments:
    """Sample i holds the documents of bin i one after the other, and then padding.

    Args:
      documents: with a mask.
      spans: the documents in it, of at most seq_len + 1 tokens each.
      vocab_size: ids beyond are refused as they are read.
    """

    def __init__(
        self, documents: Documents, spans: Spans, packing: Packing, vocab_size: int | None
    ) -> None:
        assert documents.trained is not None
        self.tokens_each: int | None = packing.seq_len
        self._trained, self._spans, self._segments = documents.trained, spans, packing.segments
        self._stream = Stream(documents.tokens, spans, vocab_size, documents.name)
        unpacked = [[i] for i in range(len(spans.lengths))]
        self._bins = best_fit(spans.lengths, packing.seq_len + 1) if packing.together else unpacked

    def __len__(self) -> int:
        return len(self._bins)

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        """tokens and mask, and segment_ids and positions if enabled: int32 [samples, seq_len + 1].

        A document is a segment, and its positions begin with 0. The mask has what the loss counts:
        nothing predicts a document's first token, also where documents are not segments.
        """
        assert self.tokens_each is not None
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
        return batch


def pack_documents(
    documents: Documents, packing: Packing, held_out: float, vocab_size: int | None
) -> tuple[CompleteDocuments, CompleteDocuments | None, np.ndarray, DocumentCounts]:
    """Training samples, held-out ones, the training's count of each trained id, and all counts."""
    assert documents.trained is not None
    fitting, counts = fit(documents, packing)
    train, held = hold_out_samples(len(fitting.starts), held_out, fewest=1)

    def samples(chosen: np.ndarray) -> CompleteDocuments:
        spans = Spans(fitting.starts[chosen], fitting.lengths[chosen])
        return CompleteDocuments(documents, spans, packing, vocab_size)

    is_train = np.zeros(len(documents.tokens) + 1, np.int8)
    np.add.at(is_train, fitting.starts[train] + 1, 1)
    np.add.at(is_train, fitting.starts[train] + fitting.lengths[train], -1)
    counted = (np.cumsum(is_train[:-1]) > 0) & documents.trained
    ids = np.bincount(documents.tokens[counted].astype(np.int64))
    return samples(train), samples(held) if held_out else None, ids, counts


def fit(documents: Documents, packing: Packing) -> tuple[Spans, DocumentCounts]:
    """The documents truncated to seq_len + 1 tokens, without those that are dropped."""
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
    counts = DocumentCounts(
        samples=int(kept.sum()),
        tokens=int(lengths[kept].sum()),
        trained=int(trained[kept].sum()),
        longest=longest,
        truncated=int((over & kept).sum()),
        dropped=int((~kept).sum()),
    )
    return Spans(starts[kept], lengths[kept]), counts


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
