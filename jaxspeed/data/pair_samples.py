"""Samples of preferences: pairs of sequences, several of them packed in a row.

Each completion has a copy of its prompt, and both are a segment. A pair is never split among rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxspeed.config.run_sections import Data
from jaxspeed.data.complete_documents import Counts, Packing, best_fit
from jaxspeed.data.holdout import hold_out_samples
from jaxspeed.data.model_limits import PairForm, refuse_idle_keys
from jaxspeed.data.packing import Spans, Stream
from jaxspeed.data.samples import ALL, Batch
from jaxspeed.data.token_store import Documents
from jaxspeed.errors import DataError
from jaxspeed.objectives.padding import IGNORED
from jaxspeed.objectives.pairs import most_pairs

DIVIDED_AT_ONCE = 1000  # pairs, whose chosen completions are before their rejected ones, as in TRL


@dataclass(frozen=True)
class PairCounts(Counts):
    """Pairs, or completions with a label, and what became of those that cannot be used."""

    pairs: int = 0
    labelled: int = 0
    desirable: int = 0  # of these
    tokens: int = 0  # of the sequences, each a prompt and a completion
    trained: int = 0  # tokens that the loss counts
    longest: int = 0  # tokens of the longest sequence, before it was truncated
    truncated: int = 0  # pairs, or completions with a label
    equal: int = 0
    empty: int = 0
    filled: int = 0  # the prompt fills the context
    long: int = 0

    @property
    def samples(self) -> int:
        return self.pairs + self.labelled

    def __str__(self) -> str:
        shown = [f"{self.pairs:,} pair{'' if self.pairs == 1 else 's'}"]
        if self.labelled:
            plural = "" if self.labelled == 1 else "s"
            shown = [f"{self.labelled:,} completion{plural} ({self.desirable:,} desirable)"]
        shown += [f"{self.tokens:,} tokens", f"{self.trained:,} trained"]
        shown += [f"{self.truncated:,} truncated"] * bool(self.truncated)
        reasons = {
            "with equal completions": self.equal,
            "with an empty completion": self.empty,
            "whose prompt fills the context": self.filled,
            "too long": self.long,
        }
        why = ", ".join(f"{count:,} {name}" for name, count in reasons.items() if count)
        dropped = sum(reasons.values())
        return ", ".join(shown) + (f", {dropped:,} dropped ({why})" if dropped else "")


_IDLE = {
    "train_on": "the loss of a preference counts its completions",
    "untrained": "records without a completion are dropped and counted",
    "document_masks": "pairs are segments of a row",
}


def checked(pairs: PairForm, data: Data, targets: bool, batch_size: int | None) -> PairForm:
    """The form with its `kl_block`; DataError for keys that preferences do not have."""
    refuse_idle_keys(data, "preferences", _IDLE)
    if targets and not pairs.segments:
        raise DataError(
            "mesh.seq: only families read pairs as segments of a row, which seq shards; 1 would do"
        )
    if pairs.records != "unpaired":
        return pairs
    block = pairs.kl_block or batch_size
    if block is None or block < 2:
        raise DataError(
            f"objective.kl_block is {block}, by default train_batch_size: completions are "
            "mismatched among so many records; 2 or more would do"
        )
    return replace(pairs, kl_block=block)


class PairSequences(NamedTuple):
    """Prompts with a completion each: spans of the documents' tokens, and the records' values."""

    starts: np.ndarray  # int64 [pairs, sequences, 2]: of prompt and completion
    lengths: np.ndarray  # likewise
    values: np.ndarray  # fp32 [pairs]: margins; of completions with a label 1 or -1


def sequences_of(documents: Documents, records: np.ndarray, form: PairForm) -> PairSequences:
    """The sequences of records; of pairs as single completions in TRL's order."""
    assert documents.trained is not None
    count, pairs_wanted = documents.per_record, form.records == "preference"
    before = np.append(0, np.cumsum(documents.trained, dtype=np.int64))
    offsets = np.asarray(documents.offsets)
    completions = np.diff(before[offsets])
    prompts = (documents.lengths - completions).reshape(-1, count)[records]
    starts = offsets[:-1].reshape(-1, count)[records]
    ends = offsets[1:].reshape(-1, count)[records]
    none = np.zeros(len(documents.lengths) // count, np.float32)
    if pairs_wanted:
        prompts = np.repeat(prompts.min(axis=1, keepdims=True), count, axis=1)
        values = documents.values.get("margin", none)[records]
    elif count == 2:
        blocks = np.arange(len(records)) // DIVIDED_AT_ONCE
        order = np.lexsort([np.tile([0, 1], len(records)), np.repeat(blocks, 2)])
        prompts, starts, ends = (x.reshape(-1, 1)[order] for x in (prompts, starts, ends))
        values = np.tile(np.array([1, -1], np.float32), len(records))[order]
    else:
        values = np.where(documents.values["label"][records] > 0, 1, -1).astype(np.float32)
    middles = starts + prompts
    return PairSequences(
        np.stack([starts, middles], axis=-1),
        np.stack([prompts, ends - middles], axis=-1),
        values,
    )


def mismatched(sequences: PairSequences, block: int) -> PairSequences:
    """Each sequence, and beside it its prompt with the completion of the one before in its block.

    The first of a block has the last one's. A single sequence at the end belongs to the last block.
    """
    count = len(sequences.values)
    partners, firsts = np.arange(count) - 1, np.arange(0, count, block)
    if len(firsts) > 1 and count - firsts[-1] == 1:
        firsts = firsts[:-1]
    partners[firsts] = np.append(firsts[1:], count) - 1
    starts, lengths = (np.repeat(x, 2, axis=1) for x in (sequences.starts, sequences.lengths))
    for x in (starts, lengths):
        x[:, 1, 1] = x[partners, 0, 1]
    return sequences._replace(starts=starts, lengths=lengths)


def truncated(sequences: PairSequences, packing: Packing) -> PairSequences:
    """Sequences of at most seq_len + 1 tokens, truncated at their end or start."""
    size, at_start = packing.seq_len + 1, packing.truncate == "start"
    starts, lengths = sequences.starts.copy(), sequences.lengths.copy()
    over = np.maximum(lengths.sum(axis=-1) - size, 0)
    for part in (0, 1) if at_start else (1, 0):
        less = np.minimum(over, lengths[..., part])
        starts[..., part] += less * at_start
        lengths[..., part] -= less
        over = over - less
    return sequences._replace(starts=starts, lengths=lengths)


def row_length(form: PairForm, seq_len: int) -> int:
    """Inputs of a row, of which two sequences of seq_len + 1 tokens have room.

    A sequence's last token is only predicted, except where its end is read. Rows are then padded
    to a multiple of at most 128, so that attention kernels and shards of a sequence divide them.
    """
    length = 2 * (seq_len + form.reads_ends)
    multiple = min(128, 1 << (max(length // 16, 1).bit_length() - 1)) if form.reads_ends else 1
    return -(-length // multiple) * multiple


def blank_rows(form: PairForm, seq_len: int, count: int) -> Batch:
    """Rows of padding: inputs and targets [rows, length], or sequences [rows, 2, seq_len + 1]."""
    names = ["tokens", "mask"]
    if form.segments:
        shape: tuple[int, ...] = count, row_length(form, seq_len)
        names += ["targets", "segment_ids", "positions"]
    else:
        shape = count, 2, seq_len + 1
    rows = {name: np.zeros(shape, np.int32) for name in names}
    if form.segments:
        rows["targets"][:] = IGNORED
    if form.margins:
        rows["margins"] = np.zeros(shape, np.float32)
    if form.records == "unpaired":
        rows["desirable"] = np.zeros(shape, np.int32)
    return rows


class PackedPairs:
    """Sample i holds the pairs of bin i one after the other, and then padding.

    The arrays are those of `objectives/pairs.py`: pair p of a row has the segments 2 p + 1 and
    2 p + 2. They are inputs and targets, so that the last token of a sequence takes no room.

    Args:
      documents: of preferences.
      sequences: two of each pair, in the documents, of at most seq_len + 1 tokens.
      vocab_size: ids beyond are refused as they are read.
    """

    def __init__(
        self,
        documents: Documents,
        sequences: PairSequences,
        form: PairForm,
        packing: Packing,
        vocab_size: int | None,
    ) -> None:
        self._sequences, self._form, self._seq_len = sequences, form, packing.seq_len
        everything = Spans(np.zeros(1, np.int64), np.array([len(documents.tokens)]))
        self._stream = Stream(documents.tokens, everything, vocab_size, documents.name)
        length = row_length(form, packing.seq_len)
        self.tokens_each: int | None = length
        sizes = (sequences.lengths.sum(axis=-1) - (not form.reads_ends)).sum(axis=-1)
        if packing.together and form.segments:
            self.bins = best_fit(sizes, length, most_pairs(length, form.pairs_per_row))
        else:
            self.bins = [[i] for i in range(len(sizes))]

    def __len__(self) -> int:
        return len(self.bins)

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        batch = blank_rows(self._form, self._seq_len, len(ids))
        for row, sample in enumerate(ids):
            if self._form.segments:
                self._fill({name: x[row] for name, x in batch.items()}, self.bins[int(sample)])
            else:
                self._fill_apart({n: x[row] for n, x in batch.items()}, self.bins[int(sample)][0])
        return {name: x[:, positions] for name, x in batch.items()}

    def _fill(self, row: Batch, pairs: Sequence[int]) -> None:
        at, segment = 0, 1
        for pair in pairs:
            self._mark(row, pair, at)
            for tokens, prompt in self._read(pair):
                predicted = len(tokens) - 1
                count = predicted + self._form.reads_ends
                inside, targets = slice(at, at + count), slice(at, at + predicted)
                row["tokens"][inside] = tokens[:count]
                row["targets"][targets] = tokens[1:]
                row["mask"][targets] = np.arange(1, len(tokens)) >= prompt
                row["segment_ids"][inside] = segment
                row["positions"][inside] = np.arange(count)
                at, segment = at + count, segment + 1

    def _fill_apart(self, row: Batch, pair: int) -> None:
        self._mark({name: x[0] for name, x in row.items()}, pair, 0)
        for side, (tokens, prompt) in enumerate(self._read(pair)):
            row["tokens"][side, : len(tokens)] = tokens
            row["mask"][side, : len(tokens)] = np.arange(len(tokens)) >= prompt

    def _mark(self, row: Batch, pair: int, at: int) -> None:
        """Put the pair's value where it begins."""
        for name in row.keys() & {"desirable", "margins"}:
            row[name][at] = self._sequences.values[pair]

    def _read(self, pair: int) -> Iterator[tuple[np.ndarray, int]]:
        """The tokens of both sequences, and how many are of the prompt."""
        for starts, lengths in zip(self._sequences.starts[pair], self._sequences.lengths[pair]):
            parts = [
                self._stream.read(int(start), int(start + length))
                for start, length in zip(starts, lengths)
                if length
            ]
            yield np.concatenate(parts), int(lengths[0])


def pack_pairs(
    documents: Documents,
    form: PairForm,
    packing: Packing,
    held_out: float,
    vocab_size: int | None,
) -> tuple[PackedPairs, PackedPairs | None, PairCounts]:
    """Training samples, held-out ones, and what became of all records.

    Raises:
      DataError: the records are others than the objective reads, or none can be used.
    """
    check_kind(documents, form)
    apart = form.records == "unpaired"
    number = len(documents.lengths) // documents.per_record
    fewest = 2 if apart and documents.per_record == 1 else 1  # of which completions are mismatched
    counts, rows = PairCounts(**documents.dropped), []
    for records in hold_out_samples(number, held_out, fewest):
        sequences, counted = usable(documents, records, form, packing)
        counts += counted
        if apart:
            if len(sequences.values) == 1:
                raise DataError(
                    f"data: {documents.name}: one completion alone is left of a split, and none to "
                    "mismatch it with; more data, or another data.held_out, would do"
                )
            assert form.kl_block is not None
            sequences = mismatched(sequences, form.kl_block)
        sequences = truncated(sequences, packing)
        rows.append(PackedPairs(documents, sequences, form, packing, vocab_size))
    if not counts.samples:
        raise DataError(f"data: {documents.name}: nothing is left: {counts}")
    return rows[0], rows[1] if held_out else None, counts


def usable(
    documents: Documents, records: np.ndarray, form: PairForm, packing: Packing
) -> tuple[PairSequences, PairCounts]:
    """The sequences of records, not yet truncated, without those that cannot be used."""
    sequences = sequences_of(documents, records, form)
    size, (prompts, completions) = packing.seq_len + 1, np.moveaxis(sequences.lengths, -1, 0)
    is_long = np.any(prompts + completions > size, axis=1)
    # Nothing predicts the first token of a sequence.
    is_lonely = np.any((prompts == 0) & (completions == 1), axis=1)
    reasons = {
        "long": is_long & (form.reads_ends | (packing.truncate == "drop")),
        "filled": np.any(prompts >= size, axis=1) & (packing.truncate == "end"),
        "empty": is_lonely & (not form.reads_ends),
    }
    kept, dropped = np.ones(len(is_long), bool), {}
    for reason, which in reasons.items():
        dropped[reason] = int((kept & which).sum())
        kept &= ~which
    sequences, samples = PairSequences(*(array[kept] for array in sequences)), int(kept.sum())
    parts = truncated(sequences, packing).lengths
    of_kind = {"pairs": samples}
    if form.records == "unpaired":
        of_kind = {"labelled": samples, "desirable": int((sequences.values > 0).sum())}
    counts = PairCounts(
        **of_kind,
        tokens=int(parts.sum()),
        trained=int((parts[..., 1] - (parts[..., 0] == 0)).sum()),
        longest=int(sequences.lengths.sum(axis=-1).max(initial=0)),
        truncated=int((is_long & kept).sum()),
        **dropped,
    )
    return sequences, counts


def check_kind(documents: Documents, form: PairForm) -> None:
    """Raise DataError unless documents are of the preferences that an objective reads."""
    if documents.dropped and not len(documents.tokens):
        counts = PairCounts(**documents.dropped)
        raise DataError(f"data: {documents.name}: nothing is left: {counts}")
    if not documents.per_record:
        raise DataError(
            f"data: {documents.name} holds no preferences, which the objective reads: records of "
            "prompt, chosen and rejected, or of prompt, completion and label"
        )
    if documents.per_record == 1 and form.records == "preference":
        raise DataError(
            f"data: {documents.name} holds completions with a label, but the objective reads pairs:"
            ' chosen and rejected; "kto" reads labels'
        )
