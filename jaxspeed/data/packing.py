"""Packing: documents concatenated and split into windows of equal length, with random access.

Grain's packing has none: samples could neither be shuffled globally nor continue at a step.
"""

from dataclasses import dataclass

import numpy as np

from jaxspeed.errors import DataError

# Enough for token frequencies, and fast: of more tokens, evenly spaced blocks are counted.
COUNTED = 1 << 26
BLOCK = 1 << 20


@dataclass(frozen=True)
class Spans:
    """Parts of a token array: [start, start + length) each, at most one document long."""

    starts: np.ndarray  # int64 [spans]
    lengths: np.ndarray  # int64 [spans]


class Stream:
    """Concatenation of the spans, with a position for each token.

    Args:
      vocab_size: ids beyond are refused as they are read: files may change or decay after they were
        opened, and lookups with such ids give wrong numbers without an error.
      name: of the tokens, in errors.
    """

    def __init__(
        self, tokens: np.ndarray, spans: Spans, vocab_size: int | None = None, name: str = "tokens"
    ) -> None:
        self.tokens = tokens
        self._vocab_size, self._name = vocab_size, name
        self.edges = np.zeros(len(spans.lengths) + 1, np.int64)  # positions
        np.cumsum(spans.lengths, out=self.edges[1:])
        # Spans that are adjacent in the array are read at once.
        ends = spans.starts + spans.lengths
        apart = np.flatnonzero(spans.starts[1:] != ends[:-1]) + 1
        first = np.append(0, apart) if len(spans.starts) else np.zeros(0, np.int64)
        self._run_starts = spans.starts[first]
        self._run_edges = np.append(self.edges[first], self.edges[-1])

    def __len__(self) -> int:
        return int(self.edges[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens at positions [start, stop).

        Raises:
          DataError: an id is not one of the vocabulary.
        """
        run = int(np.searchsorted(self._run_edges, start, "right")) - 1
        parts = []
        while start < stop:
            end = min(stop, int(self._run_edges[run + 1]))
            at = int(self._run_starts[run]) + start - int(self._run_edges[run])
            parts.append(self._checked(at, self.tokens[at : at + end - start]))
            start, run = end, run + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _checked(self, at: int, ids: np.ndarray) -> np.ndarray:
        if self._vocab_size is not None and ids.size:
            worst = int(ids.max())
            if worst < self._vocab_size and ids.dtype.kind == "i":
                worst = min(worst, int(ids.min()))
            if not 0 <= worst < self._vocab_size:
                at += int(np.argmax(ids == worst))
                raise DataError(
                    f"data: {self._name}: token {at:,} is {worst:,}, but ids go from 0 to "
                    f"{self._vocab_size - 1:,}: the file is damaged, or was changed since it was "
                    "opened"
                )
        return ids

    def segments(self, start: int, stop: int, first: int) -> np.ndarray:
        """int32 [stop - start]: the documents are numbered 1, 2, ... from position `first` on."""
        before, begin, end = np.searchsorted(self.edges, [first + 1, start + 1, stop])
        begins = np.zeros(stop - start, np.int32)
        begins[self.edges[begin:end] - start] = 1
        number = 1 + len(np.unique(self.edges[before:begin]))  # a document may have no tokens
        return np.cumsum(begins, dtype=np.int32) + np.int32(number)

    def counts(self) -> np.ndarray:
        """Count of each id, in all tokens or in a sample of them."""
        total = np.zeros(0, np.int64)
        every = max(1, -(-len(self) // COUNTED))
        for start in range(0, len(self), BLOCK * every):
            ids = self.read(start, min(start + BLOCK, len(self)))
            total = add_counts(total, np.bincount(ids.astype(np.int64)))
        return total


def entropy(counts: np.ndarray) -> float:
    """H = -sum p ln p, in nats."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def add_counts(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Add counts of ids from 0 on; the arrays may differ in length."""
    size = max(len(a), len(b))
    return np.pad(a, (0, size - len(a))) + np.pad(b, (0, size - len(b)))
