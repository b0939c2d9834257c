"""Documents end to end, cut into windows: against a few lines of plain Python."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.data.complete_documents import CompleteDocuments, Packing
from jaxspeed.data.holdout import hold_out_documents, hold_out_samples
from jaxspeed.data.packing import Spans, Stream, entropy
from jaxspeed.data.samples import ArrayRows, Chain, Marked, Windows
from jaxspeed.data.split import Split
from jaxspeed.data.synthetic import Counting
from jaxspeed.data.token_store import Documents
from jaxspeed.ops.next_tokens import IGNORED, split_batch

documents_ = st.lists(
    st.lists(st.integers(1, 250), min_size=1, max_size=40), min_size=1, max_size=12
)


def array_of(documents):
    offsets = np.cumsum([0, *map(len, documents)])
    return np.array(list(chain.from_iterable(documents)), np.uint8), offsets


def windows(documents, seq_len, *, kept=None, segments=True, pad_last=False):
    tokens, offsets = array_of(documents)
    kept = list(range(len(documents))) if kept is None else kept
    spans = Spans(offsets[:-1][kept], np.diff(offsets)[kept])
    return Windows(Stream(tokens, spans), seq_len, segments=segments, pad_last=pad_last)


def packed_plainly(documents, seq_len, pad_last):
    """(tokens, segment ids, mask) of each sample, one token at a time."""
    flat = [(token, d) for d, document in enumerate(documents) for token in document]
    samples = []
    start = 0
    while start + 1 < len(flat):
        here = flat[start : start + seq_len + 1]
        if len(here) < seq_len + 1 and not pad_last:
            break
        names = sorted({d for _, d in here})
        padding = [0] * (seq_len + 1 - len(here))
        samples.append(
            (
                [token for token, _ in here] + padding,
                [1 + names.index(d) for _, d in here] + padding,
                [1] * len(here) + padding,
            )
        )
        start += seq_len
    return samples


@given(documents=documents_, seq_len=st.integers(1, 33), pad_last=st.booleans())
def test_packing_is_as_written_plainly(documents, seq_len, pad_last):
    w = windows(documents, seq_len, pad_last=pad_last)
    plain = packed_plainly(documents, seq_len, pad_last)
    assert len(w) == len(plain)
    batch = w.read(np.arange(len(w)))
    for row, (tokens, segments, mask) in enumerate(plain):
        assert batch["tokens"][row].tolist() == tokens
        assert batch["segment_ids"][row].tolist() == segments
        if pad_last:
            assert batch["mask"][row].tolist() == mask
    assert ("mask" in batch) == pad_last


@given(documents=documents_, seq_len=st.integers(1, 33), data=st.data())
def test_documents_may_lie_anywhere_in_the_array(documents, seq_len, data):
    kept = sorted(data.draw(st.sets(st.integers(0, len(documents) - 1), min_size=1)))
    ids = np.arange(len(windows([documents[i] for i in kept], seq_len)))
    here = windows(documents, seq_len, kept=kept).read(ids)
    alone = windows([documents[i] for i in kept], seq_len).read(ids)
    assert all((here[name] == alone[name]).all() for name in alone)


@given(documents=documents_, seq_len=st.integers(1, 33), batch_size=st.integers(1, 7))
def test_once_predicts_each_held_out_token_once_as_language_models_read_it(
    documents, seq_len, batch_size
):
    """Each token but a document's first, which nothing before it predicts."""
    split = Split([windows(documents, seq_len, pad_last=True)], seed=0, shuffle=False)
    targets = []
    for batch in split.once(batch_size):
        assert {x.shape for x in batch.values()} == {(batch_size, seq_len + 1)}
        targets += np.asarray(split_batch(batch).targets).ravel().tolist()
    expected = [token for document in documents for token in document[1:]]
    assert [t for t in targets if t != IGNORED] == expected


@given(documents_, st.integers(1, 30), st.booleans(), st.booleans(), st.data())
def test_a_part_of_the_positions_is_read_as_it_is_in_the_whole(
    documents, seq_len, segments, flag, data
):
    tokens, offsets = array_of([*documents, [], *documents])
    trained = np.asarray(data.draw(st.lists(st.booleans(), **exactly(len(tokens)))))
    held = Documents("tokens", tokens, offsets, "", 250, None, trained)
    lengths = np.minimum(np.diff(offsets), seq_len + 1)
    packing = Packing(seq_len, segments, together=flag)
    stream = Stream(tokens, Spans(offsets[:-1], np.diff(offsets)))
    packed = Windows(stream, seq_len, segments=segments, pad_last=flag)
    conversations = CompleteDocuments(held, Spans(offsets[:-1], lengths), packing, None)
    arrays = {"x": np.arange(3 * (seq_len + 1)).reshape(3, -1), "y": np.arange(3)}
    for samples in (
        packed,
        conversations,
        Marked(packed),
        Chain([packed, conversations]),
        Counting(4, seq_len, 50, segments=segments, masked=flag),
        ArrayRows(arrays),
    ):
        if not len(samples):
            continue
        ids = np.asarray(data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=4)), int)
        whole, parts = samples.read(ids), Split([samples], seed=0, shuffle=False, targets=True)
        start = data.draw(st.integers(0, seq_len - 1))
        stop = data.draw(st.integers(start + 1, seq_len))
        read = samples.read(ids, slice(start, stop))
        cut = parts.copies(0, 3, slice(1), slice(start, stop))
        for name, x in whole.items():
            np.testing.assert_array_equal(read[name], x if x.ndim == 1 else x[:, start:stop])
        for name, x in parts.copies(0, 3).items():
            of_part = x[:1] if x.ndim == 1 else x[:1, start:stop]
            np.testing.assert_array_equal(cut[name], of_part)


def exactly(size):
    return {"min_size": size, "max_size": size}


def test_without_document_masks_a_sample_is_one_sequence():
    batch = windows([[1, 2, 3], [4, 5]], 4, segments=False).read(np.arange(1))
    assert set(batch) == {"tokens"} and batch["tokens"].tolist() == [[1, 2, 3, 4, 5]]


def test_the_counts_and_entropy_of_a_stream_follow_the_formula():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, 5000).astype(np.uint8)
    stream = Stream(ids, Spans(np.array([0, 3000]), np.array([1000, 2000])))
    kept = np.concatenate([ids[:1000], ids[3000:]])
    p = np.array([(kept == i).mean() for i in range(50)])
    assert entropy(stream.counts()) == pytest.approx(-(p * np.log(p)).sum(), abs=1e-12)


def test_of_a_long_stream_a_sample_is_counted(monkeypatch):
    monkeypatch.setattr("jaxspeed.data.packing.COUNTED", 4000)
    monkeypatch.setattr("jaxspeed.data.packing.BLOCK", 100)
    ids = np.random.default_rng(0).integers(0, 4, 40_000).astype(np.uint8)
    counts = Stream(ids, Spans(np.array([0]), np.array([40_000]))).counts()
    assert counts.sum() == 4000
    assert entropy(counts) == pytest.approx(np.log(4), abs=0.01)


# -- holding out --------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), share=st.floats(0.01, 0.5))
def test_each_token_is_either_trained_on_or_held_out(lengths, share):
    offsets = np.cumsum([0, *lengths])
    train, held = hold_out_documents(offsets, share)
    covered = np.zeros(offsets[-1], int)
    for spans in (train, held):
        for start, length in zip(spans.starts, spans.lengths):
            covered[start : start + length] += 1
            assert length > 0
            # No span goes from one document into the next.
            first, last = np.searchsorted(offsets, [start, start + length - 1], "right")
            assert first == last
    assert (covered == 1).all()
    wanted = share * offsets[-1]
    assert abs(held.lengths.sum() - wanted) <= max(wanted / 4, 1)


def test_complete_documents_from_all_over_the_corpus_are_held_out():
    offsets = np.arange(0, 10_001, 10)
    _, held = hold_out_documents(offsets, 0.1)
    assert set(held.lengths) == {10} and len(held.starts) == 100
    assert abs(held.starts.mean() - 5000) < 1000


def test_of_one_document_the_end_is_held_out():
    train, held = hold_out_documents(np.array([0, 1000]), 0.2)
    assert (train.starts.tolist(), train.lengths.tolist()) == ([0], [800])
    assert (held.starts.tolist(), held.lengths.tolist()) == ([800], [200])


def test_samples_that_stand_for_themselves_are_drawn():
    train, held = hold_out_samples(1000, 0.1)
    assert sorted([*train, *held]) == list(range(1000)) and len(held) == 100
    assert abs(held.mean() - 500) < 100
