"""Synthetic samples with learnable structure: sample i is a function of i."""

from collections.abc import Iterator

import numpy as np

from jaxspeed.data.prompts import PromptRecord
from jaxspeed.data.samples import ALL, Batch
from jaxspeed.data.token_store import Masked, RecordTokens

NOISE = 0.1
SEED = 0x73796E


class Counting:
    """Sequences that count in steps of 1 to 7, modulo the vocabulary, with 10% noise."""

    def __init__(
        self, samples: int, seq_len: int, vocab_size: int, *, segments: bool, masked: bool
    ) -> None:
        self.tokens_each: int | None = seq_len
        self._samples, self._vocab_size = samples, vocab_size
        # As for packed documents: each sample is one complete document.
        self._also = ["segment_ids"] * segments + ["mask"] * masked

    def __len__(self) -> int:
        return self._samples

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        assert self.tokens_each is not None
        tokens = np.empty((len(ids), self.tokens_each + 1), np.int32)
        places = np.arange(self.tokens_each + 1)
        for row, sample in enumerate(ids):
            rng = np.random.default_rng([SEED, int(sample)])
            first, step = rng.integers(self._vocab_size), rng.integers(1, 8)
            counted = (first + step * places) % self._vocab_size
            random = rng.integers(self._vocab_size, size=places.size)
            tokens[row] = np.where(rng.random(places.size) < NOISE, random, counted)
        tokens = tokens[:, positions]
        return {"tokens": tokens} | {name: np.ones_like(tokens) for name in self._also}


def counting_pairs(samples: int, seq_len: int, vocab_size: int) -> Iterator[RecordTokens]:
    """Pairs whose chosen completion continues to count from the prompt on; the rejected is noise.

    Sequences have from half of seq_len + 1 tokens to all.
    """
    for sample in range(samples):
        rng = np.random.default_rng([SEED, sample])
        first, step = rng.integers(vocab_size), rng.integers(1, 8)
        chosen, rejected = rng.integers(max(seq_len // 2, 2), seq_len + 1, size=2) + 1
        counted = (first + step * np.arange(chosen)) % vocab_size
        prompt = int(min(chosen, rejected)) // 2
        noise = rng.integers(vocab_size, size=rejected - prompt)
        sequences = counted, np.append(counted[:prompt], noise)
        yield RecordTokens(tuple(Masked(x, np.arange(len(x)) >= prompt) for x in sequences))


def counting_prompts(samples: int, most: int, vocab_size: int) -> list[PromptRecord]:
    """Prompts of at most 16 ids that count; the column `ids` counts on from them.

    Their text is the ids as numbers, since they have no tokenizer.
    """
    records = []
    for sample in range(samples):
        rng = np.random.default_rng([SEED, sample])
        first, step = rng.integers(vocab_size), rng.integers(1, 8)
        length = int(rng.integers(1, max(min(most, 16), 1) + 1))
        counted = ((first + step * np.arange(length + 16)) % vocab_size).tolist()
        ids = tuple(counted[:length])
        columns = {"ids": counted[length:]}
        text = " ".join(map(str, ids))
        records.append(PromptRecord(text, ids, columns, f"synthetic, record {sample}"))
    return records


class Blots:
    """Images: one pattern per class plus noise."""

    tokens_each: int | None = None

    def __init__(self, samples: int, shape: tuple[int, int, int], classes: int) -> None:
        self._samples = samples
        self.classes = classes
        coarse = np.random.default_rng(SEED).normal(size=(classes, 4, 4, shape[2]))
        rows, columns = (np.arange(n) * 4 // n for n in shape[:2])
        self._patterns = coarse[:, rows][:, :, columns].astype(np.float32)

    def __len__(self) -> int:
        return self._samples

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        rngs = [np.random.default_rng([SEED, int(sample)]) for sample in ids]
        drawn = [rng.integers(len(self._patterns)) for rng in rngs]
        labels = np.asarray(drawn, np.int32)
        images = np.empty((len(ids), *self._patterns.shape[1:]), np.float32)
        for row, rng in enumerate(rngs):
            rng.standard_normal(out=images[row], dtype=np.float32)
        images += self._patterns[labels]
        return {"images": images[:, positions], "labels": labels}
