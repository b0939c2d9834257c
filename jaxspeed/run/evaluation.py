"""Evaluation: the loss on held-out samples, exact for any loss and batch size."""

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from jaxspeed.data import Split, placer
from jaxspeed.engine import Engine
from jaxspeed.errors import DataError
from jaxspeed.jaxpr.paused_collector import paused_collector
from jaxspeed.train_state.staged_init import compile_ahead
from jaxspeed.user_models.config_model import resolve_model

log = logging.getLogger("jaxspeed")


def evaluate(
    engine: Engine,
    held_out: Split,
    most: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Total loss over total weight of all samples, or of the first `most` batches.

    So the result does not depend on padding, masks and the batch size. None if `stop()` was true
    between two batches.
    """
    batches = _marked(engine, held_out) if _knows_marks(engine) else _as_they_are(engine, held_out)
    total = weight = 0.0
    with engine.evaluating():
        for batch, samples in itertools.islice(batches, most):
            metrics = engine.eval_batch(batch)
            share = float(metrics["weight"]) if samples is None else samples
            total += float(metrics["loss"]) * share
            weight += share
            if stop():
                return None
    return {"eval_loss": total / weight if weight else float("nan"), "eval_weight": weight}


def compile_evaluation(engine: Engine, held_out: Split) -> Callable[[], Any]:
    """Start to compile evaluation, in the background of the step; what is returned waits for it."""
    program, marked = engine.program, _knows_marks(engine)
    count = _batch_size(engine) if marked else min(_batch_size(engine), _shared(engine, held_out))
    if program.serving or not count:  # several programs, or an error of the evaluation
        return lambda: None
    shapes = held_out.shapes(count, padded=marked)
    batch = program.abstract_batch(program.read_batch(shapes, None, abstract=True))
    once = engine.gather_once
    with program.set_mesh(), paused_collector():
        if once is None:
            return compile_ahead(program.mesh, program.evaluate, engine.state, batch)
        gathers = once.compile_ahead()
        evaluates = compile_ahead(program.mesh, once.evaluate, once.shapes, batch)
        return lambda: (gathers(), evaluates())


def _knows_marks(engine: Engine) -> bool:
    """Whether the loss ignores masked samples, as those of token and label families do."""
    model = engine.config.model
    if model is None or model.family in (None, "mlp"):
        return False
    return resolve_model(engine.config)[1] is engine.program.objective.loss_fn


def _marked(engine: Engine, held_out: Split) -> Iterator[tuple[Any, None]]:
    """Every sample; the last batch is padded with samples of zero weight."""
    size = _batch_size(engine)
    place = placer(engine.program.batch_shardings, size)
    for index in range(held_out.batches(size)):
        yield place(lambda rows, index=index: held_out.padded(index, size, rows)), None  # type: ignore[misc]


def _as_they_are(engine: Engine, held_out: Split) -> Iterator[tuple[Any, float | None]]:
    """For any loss: a smaller last batch, without the samples that do not divide over ranks."""
    size, ranks, shared = _batch_size(engine), engine.program.ranks, _shared(engine, held_out)
    if not shared:
        raise DataError(
            f"data.held_out: {held_out.samples} samples are fewer than the {ranks} data ranks; "
            "a larger fraction or more data would do"
        )
    if shared < held_out.samples:
        log.info(
            "evaluation omits %d of %d held-out samples, which do not divide over %d data ranks",
            held_out.samples - shared,
            held_out.samples,
            ranks,
        )
    is_sum = None
    for start in range(0, shared, size):
        count = min(size, shared - start)
        place = placer(engine.program.batch_shardings, count)
        batch = place(lambda rows, a=start, n=count: held_out.slice(a, n, rows))  # type: ignore[misc]
        is_sum = _is_sum(engine, batch) if is_sum is None else is_sum
        yield batch, None if is_sum else count


def _shared(engine: Engine, held_out: Split) -> int:
    """The number of samples that divide over the data ranks."""
    return held_out.samples // engine.program.ranks * engine.program.ranks


def _is_sum(engine: Engine, batch: Any) -> bool:
    """Whether the loss returns a weight; the weight of a mean is its number of samples."""
    program = engine.program
    rest = (program.state.variables, batch, jnp.asarray(0), jnp.asarray(0))
    return program.objective.trace(rest, train=False).is_sum


def _batch_size(engine: Engine) -> int:
    batch = engine.program.batch
    return batch.train // batch.accumulation
