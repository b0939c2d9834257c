"""The work that the peers of `peers_cpu.py` have in common."""

from collections.abc import Callable, Iterator
from typing import Any

LAYERS, WIDTH, HEADS, VOCAB, SEQ, BATCH = 6, 384, 6, 8192, 256, 8
RATE, DECAY, EPS = 1e-3, 0.1, 1e-5
Step = Callable[[Any], float]  # from a batch [batch, seq + 1] to its loss


def batches() -> Iterator[Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(0, VOCAB, (BATCH, SEQ + 1), dtype=np.int32)
