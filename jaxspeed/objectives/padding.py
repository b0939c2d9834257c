"""Padding: lengths of sequences, and samples without weight in the loss."""

from collections.abc import Callable

import numpy as np

Batch = dict[str, np.ndarray]
WithoutWeight = Callable[[Batch, np.ndarray], Batch]
IGNORED = -100  # a label that does not count
SMALLEST = 16  # of the lengths for which programs are compiled, which are powers of two


def bucket(length: int, most: int) -> int:
    """The length to which sequences are padded."""
    return min(max(1 << (length - 1).bit_length(), SMALLEST), max(most, 2))


def without_weight(batch: Batch, rows: np.ndarray) -> Batch:
    """The batch with zero loss weight for the rows [batch] that are True.

    Losses recognize them by `mask` 0 or labels of -100; a batch with neither gets a `mask` [batch].
    """
    marked = dict(batch)
    labels = [name for name in ("labels", "targets", "y") if _integers(batch.get(name))]
    for name in labels:
        marked[name] = np.where(_broadcastable(rows, batch[name]), IGNORED, batch[name])
    if "mask" in batch:
        marked["mask"] = np.where(_broadcastable(rows, batch["mask"]), 0, batch["mask"])
    elif "tokens" in batch:
        marked["mask"] = np.where(rows[:, None], 0, np.ones_like(batch["tokens"]))
    elif not labels:
        marked["mask"] = np.where(rows, 0, 1).astype(np.int32)
    return marked


def _integers(x: np.ndarray | None) -> bool:
    return x is not None and x.dtype.kind in "iu"


def _broadcastable(rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    return rows.reshape(-1, *[1] * (x.ndim - 1))
