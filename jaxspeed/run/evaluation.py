"""The loss on held-out samples."""

from jaxspeed.data import Split, placer
from jaxspeed.engine import Engine


def evaluate(engine: Engine, held_out: Split, most: int | None = None) -> dict[str, float]:
    """Total loss over total weight of all samples, or of the first `most` batches.

    So padding and masks count for nothing, and neither does how samples fall into batches.
    """
    program = engine.program
    size = program.batch.train // program.batch.accumulation
    place = placer(program.batch_shardings, size)
    total = weight = 0.0
    for index in range(min(held_out.batches(size), most or held_out.batches(size))):
        batch = place(lambda rows, index=index: held_out.padded(index, size, rows))  # type: ignore[misc]
        metrics = engine.eval_batch(batch)
        share = float(metrics["weight"])
        total += float(metrics["loss"]) * share
        weight += share
    return {"eval_loss": total / weight if weight else float("nan"), "eval_weight": weight}
