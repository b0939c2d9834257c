"""Held-out split of a corpus for evaluation: a function of the corpus, not of a run's seed.

So runs with different seeds are evaluated on the same samples.
"""

import numpy as np

from jaxspeed.data.packing import Spans

SEED = 0x6865_6C64


def hold_out_documents(offsets: np.ndarray, share: float) -> tuple[Spans, Spans]:
    """Split into (train, held out), in the corpus's order: complete documents, drawn at random.

    Where documents are too few or too uneven to come near the share, the end of the corpus is held
    out instead, and the document at the split ends there.
    """
    starts, lengths = np.asarray(offsets[:-1], np.int64), np.diff(offsets)
    wanted = share * int(offsets[-1])
    drawn = np.random.default_rng(SEED).permutation(len(starts))
    sums = np.cumsum(lengths[drawn])
    number = int(np.argmin(np.abs(sums - wanted))) + 1
    if abs(int(sums[number - 1]) - wanted) > wanted / 4:
        return _split_at(starts, lengths, int(offsets[-1]) - round(wanted))
    held = np.zeros(len(starts), bool)
    held[drawn[:number]] = True
    return Spans(starts[~held], lengths[~held]), Spans(starts[held], lengths[held])


def _split_at(starts: np.ndarray, lengths: np.ndarray, at: int) -> tuple[Spans, Spans]:
    ends = starts + lengths
    before, after = starts < at, ends > at
    first = Spans(starts[before], np.minimum(ends[before], at) - starts[before])
    begin = np.maximum(starts[after], at)
    return first, Spans(begin, ends[after] - begin)


def hold_out_samples(samples: int, share: float, fewest: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Split ids of samples into (train, held out), each in ascending order.

    Where the share is of less than `fewest`, the last ones are held out, if more are left.
    """
    held = np.zeros(samples, bool)
    drawn = np.random.default_rng(SEED).permutation(samples)
    held[drawn[: round(share * samples)]] = True
    if share and held.sum() < fewest < samples - held.sum():
        held[:] = np.arange(samples) >= samples - fewest
    return np.flatnonzero(~held), np.flatnonzero(held)
