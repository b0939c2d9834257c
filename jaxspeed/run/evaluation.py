"""The loss on held-out samples."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from jaxspeed.engine import Engine


def evaluate(
    engine: Engine,
    batches: Iterable[Any],
    *,
    place: Callable[[Any], Any] = lambda batch: batch,
    most: int | None = None,
) -> dict[str, float]:
    """Total loss over total weight of the batches, so that padding and masks count for nothing."""
    total = weight = 0.0
    for batch in itertools.islice(batches, most):
        metrics = engine.eval_batch(place(batch))
        share = float(metrics["weight"])
        total += float(metrics["loss"]) * share
        weight += share
    return {"eval_loss": total / weight if weight else float("nan"), "eval_weight": weight}
