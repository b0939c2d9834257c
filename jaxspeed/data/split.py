"""A split (train or held-out) of a corpus; its sample order is a function of seed and step."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from jaxspeed.data.computed_rows import ComputedRows
from jaxspeed.data.prompts import PromptRecord
from jaxspeed.data.samples import ALL, Batch, Chain, Samples, with_targets
from jaxspeed.objectives.padding import WithoutWeight, without_weight

Rows = slice | np.ndarray
Positions = slice


class Split:
    """Samples of one or more parts in an infinite order.

    Global batch t holds the samples at positions [t * batch_size, (t + 1) * batch_size) of the
    order: batches span epoch ends, and no sample is lost or repeated there. With `targets` a batch
    of tokens has them, and all its arrays are [batch, seq].

    A batch can be read in part: some rows, and of arrays with a dim 1 some positions of it.
    """

    def __init__(
        self,
        parts: Sequence[Samples],
        *,
        seed: int,
        shuffle: bool,
        weights: Sequence[float] | None = None,
        targets: bool = False,
    ) -> None:
        import grain  # with the first data: it loads slowly, and adds a handler to the root logger

        self._dataset = grain.MapDataset
        self._chain = Chain(parts)
        self.parts = self._chain.parts
        self._targets = targets
        self._weights = list(weights or [1.0] * len(self.parts))
        # Parts may be empty until they are checked: the order is built on first use.
        self._seeds = [_seed(seed, i) for i in range(len(self.parts))] if shuffle else None
        self._made: Any = None
        self._computed: tuple[ComputedRows, ...] = ()

    def with_rows(self, computed: ComputedRows) -> "Split":
        """The same samples, with these arrays beside those of the data."""
        split = copy.copy(self)
        split._computed = (*self._computed, computed)
        return split

    @property
    def tokens_each(self) -> int | None:
        """Number of tokens that a sample predicts; None if samples are not of tokens."""
        return self._chain.tokens_each

    @property
    def samples(self) -> int:
        """Total number of samples."""
        return len(self._chain)

    def __len__(self) -> int:
        """Samples in one epoch; of a mixture, until its first part is exhausted."""
        total = sum(self._weights)
        return min(int(len(p) * total / w) for p, w in zip(self.parts, self._weights))

    # -- infinite order (training) ----------------------------------------------------------------

    @property
    def _order(self) -> Any:
        """order[k] is the sample at position k."""
        if self._made is None:
            orders = []
            for i, (start, stop) in enumerate(pairwise(self._chain.edges)):
                ids = self._dataset.range(int(start), int(stop))
                orders.append((ids.shuffle(seed=self._seeds[i]) if self._seeds else ids).repeat())
            mixed = len(orders) > 1
            self._made = self._dataset.mix(orders, self._weights) if mixed else orders[0]
        return self._made

    def sample_ids(self, step: int, batch_size: int, rows: Rows | None = None) -> np.ndarray:
        """int64 [batch_size], or only of these rows of the global batch."""
        first = step * batch_size
        chosen = _chosen(batch_size, rows)
        return np.asarray([self._order[first + int(row)] for row in chosen], np.int64)

    def visited(self, steps: int, batch_size: int) -> np.ndarray:
        """The samples of the first steps, each once, in the data's order."""
        count = steps * batch_size
        if len(self.parts) == 1 and count >= self.samples:
            return np.arange(self.samples)
        return np.unique(self.sample_ids(0, count))

    def batch(
        self, step: int, batch_size: int, rows: Rows | None = None, positions: Positions = ALL
    ) -> Batch:
        """The global batch of a step, or only this part of it (no other is read)."""
        return self._read(self.sample_ids(step, batch_size, rows), positions)

    def shapes(
        self, batch_size: int, pad: WithoutWeight | None = None
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a global batch, or of one of `padded`, of which no sample is read."""
        none = slice(0, 0)
        empty = self.batch(0, 1, none) if pad is None else self.padded(0, 1, none, pad=pad)
        return {
            name: jax.ShapeDtypeStruct(
                (batch_size, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype)
            )
            for name, x in empty.items()
        }

    # -- each sample once (evaluation) ------------------------------------------------------------

    def batches(self, batch_size: int) -> int:
        """Number of batches that hold each sample once."""
        return -(-self.samples // batch_size)

    def padded(
        self,
        index: int,
        batch_size: int,
        rows: Rows | None = None,
        positions: Positions = ALL,
        *,
        pad: WithoutWeight = without_weight,
    ) -> Batch:
        """Batch `index` of a pass over each sample once, or only this part of it.

        The last batch is padded with samples to which `pad` gives zero weight.
        """
        ids = index * batch_size + _chosen(batch_size, rows)
        there = np.minimum(ids, self.samples - 1)
        # Also without padding: all batches have the same arrays, so the step compiles once.
        batch = pad(self._samples_of(there, positions), ids >= self.samples)
        return self._finished(batch, there, positions)

    def slice(
        self, start: int, count: int, rows: Rows | None = None, positions: Positions = ALL
    ) -> Batch:
        """Samples [start, start + count), or only this part of them."""
        return self._read(start + _chosen(count, rows), positions)

    def copies(
        self, sample: int, count: int, rows: Rows | None = None, positions: Positions = ALL
    ) -> Batch:
        """A batch of `count` copies of a sample, or only this part of it."""
        return self._read(np.full(len(_chosen(count, rows)), sample), positions)

    def of(self, ids: np.ndarray, rows: Rows | None = None, positions: Positions = ALL) -> Batch:
        """The samples with these numbers, or only this part of them."""
        return self._read(ids[_chosen(len(ids), rows)], positions)

    def _read(self, ids: np.ndarray, positions: Positions) -> Batch:
        return self._finished(self._samples_of(ids, positions), ids, positions)

    @property
    def _splits(self) -> bool:
        return self._targets and bool(self.tokens_each)

    def _samples_of(self, ids: np.ndarray, positions: Positions) -> Batch:
        if self._splits and positions.stop is not None:  # and what the last of them predicts
            positions = Positions(positions.start, positions.stop + 1)
        return self._chain.read(ids, positions)

    def _finished(self, batch: Batch, ids: np.ndarray, positions: Positions) -> Batch:
        """A batch with its targets, and the arrays that were computed for its samples."""
        batch = with_targets(batch) if self._splits else batch
        for computed in self._computed:
            batch |= computed.read(ids, positions)
        return batch

    @property
    def columns(self) -> list[str]:
        """The names of the columns that prompts have."""
        parts: list[Any] = self.parts
        return [*dict.fromkeys(name for part in parts for name in part.columns)]

    def prompts(self, ids: np.ndarray) -> list[PromptRecord]:
        """The prompts with these numbers, as of `sample_ids`.

        All have the same columns: one that a record lacks is None, as the library datasets has it.
        """
        parts: list[Any] = self.parts
        names, records = self.columns, []
        for i in ids.tolist():
            part = int(np.searchsorted(self._chain.edges, i, "right")) - 1
            record = parts[part].records[i - int(self._chain.edges[part])]
            columns = {name: record.columns.get(name) for name in names}
            records.append(replace(record, columns=columns))
        return records

    def once(self, batch_size: int) -> Iterator[Batch]:
        """Every sample once, in the corpus's order, in batches."""
        return (self.padded(i, batch_size) for i in range(self.batches(batch_size)))


def _chosen(batch_size: int, rows: Rows | None) -> np.ndarray:
    return np.arange(batch_size)[slice(None) if rows is None else rows]


def _seed(seed: int, part: int) -> int:
    """Hash a seed and a part's number to an independent seed.

    Grain adds the epoch number to the seed, so runs with adjacent seeds would share orders.
    """
    return int(np.random.SeedSequence([seed, part]).generate_state(1)[0])
