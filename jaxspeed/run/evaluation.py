"""Evaluation: the loss on held-out samples, exact for any loss and batch size."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspeed.data import Split, placer
from jaxspeed.engine import Engine
from jaxspeed.errors import DataError
from jaxspeed.jaxpr.paused_collector import paused_collector
from jaxspeed.objectives import WithoutWeight, objective_of
from jaxspeed.objectives.terms_and_metrics import TOTALS, Metric
from jaxspeed.train.phases import BATCH
from jaxspeed.train_state.staged_init import compile_ahead

log = logging.getLogger("jaxspeed")


@dataclass
class Evaluated:
    """Loss and other metrics of samples: totals over the total weight, or as they are declared."""

    weight: float = 0.0  # what the loss was divided by: the tokens or labels that count
    sums: dict[str, float] = field(default_factory=dict)
    declared: dict[str, Metric] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float], weight: float) -> None:
        """Add the means of further samples, of this weight together."""
        self.weight += weight
        for name, mean in metrics.items() if weight else ():  # without weight it is 0 / 0
            self.sums[name] = self.sums.get(name, 0.0) + mean * weight

    def join(self, metrics: Mapping[str, Metric], copies: int) -> None:
        """Add declared metrics of further samples, of which there are so many copies."""
        for name, metric in metrics.items():
            if metric.kind in ("ratio", "sum"):
                metric = jax.tree.map(lambda x: x / copies, metric)
            seen = self.declared.get(name)
            self.declared[name] = metric if seen is None else seen.combined(metric)

    @property
    def means(self) -> dict[str, float]:
        """The loss, and the loss function's own metrics."""
        declared = {name: float(metric.result) for name, metric in self.declared.items()}
        terms = {name: x.coefficient for name, x in self.declared.items() if x.coefficient}
        if not self.weight and not terms:
            return {"loss": math.nan, **declared}
        means = {name: total / self.weight for name, total in self.sums.items() if self.weight}
        if terms:
            means["loss"] = sum(declared[name] * x for name, x in terms.items())
        return means | declared


class Part(NamedTuple):
    """A batch of an evaluation.

    Attributes:
      samples: its weight, if that is not what the loss returns.
      copies: how many there are of each sample.
    """

    batch: Any
    samples: int | None = None
    copies: int = 1


def evaluate(
    engine: Engine,
    held_out: Split,
    most: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluated | None:
    """Total loss over total weight of all samples, or of the first `most` batches.

    So the result does not depend on padding, masks and the batch size. None if `stop()` was true
    between two batches.
    """
    pad = _pads(engine)
    parts = _padded(engine, held_out, pad) if pad else _as_they_are(engine, held_out)
    evaluated = Evaluated()
    with engine.evaluating():
        for batch, samples, copies in itertools.islice(parts, most):
            values = jax.device_get(engine.eval_totals(batch))
            declared = values.pop(TOTALS, {})
            evaluated.join(declared, copies)
            undeclared = {name: x for name, x in values.items() if name not in declared}
            metrics = {name: float(value) for name, value in undeclared.items()}
            weight = metrics.pop("weight")
            evaluated.add(metrics, (weight if samples is None else samples) / copies)
            if stop():
                return None
    return evaluated


def compile_evaluation(engine: Engine, held_out: Split) -> Callable[[], Any]:
    """Start to compile evaluation, in the background of the step; what is returned waits for it."""
    program, pad = engine.program, _pads(engine)
    count = _batch_size(engine) if pad else min(_batch_size(engine), _shared(engine, held_out))
    if not program.on_one_mesh or not count:  # several programs, or an error of the evaluation
        return lambda: None
    shapes = held_out.shapes(count, pad)
    values = program.values(program.read_batch(shapes, None, abstract=True))
    once, waits = engine.gather_once, list[Callable[[], Any]]()
    with program.set_mesh(), paused_collector():
        for phase in program.array_phases:
            read = [values[name] for name in phase.reads]
            waits.append(compile_ahead(program.mesh, phase.function, *read))
            values[BATCH] = program.abstract_batch(jax.eval_shape(phase.function, *read))
        if once is not None:
            waits.append(once.compile_ahead())
        evaluate, state = (once.evaluate, once.shapes) if once else (program.evaluate, engine.state)
        waits.append(compile_ahead(program.mesh, evaluate, state, values[BATCH]))
        return lambda: [wait() for wait in waits]


def _pads(engine: Engine) -> WithoutWeight | None:
    """How the objective marks samples as padding; None where it does not, or is a function."""
    objective = objective_of(engine.program.traced_loss.loss_fn)
    return None if objective is None else objective.without_weight


def _padded(engine: Engine, held_out: Split, pad: WithoutWeight) -> Iterator[Part]:
    """Every sample; the last batch is padded with samples of zero weight."""
    size = _batch_size(engine)
    place = placer(engine.program.batch_shardings, size)
    for index in range(held_out.batches(size)):
        yield Part(place(partial(held_out.padded, index, size, pad=pad)))


def _as_they_are(engine: Engine, held_out: Split) -> Iterator[Part]:
    """Batches for any loss: the last one smaller, then each sample that ranks cannot share.

    Such a sample is a batch of copies, one for each rank; if the loss mixes samples it is omitted.
    """
    program, size, shared = engine.program, _batch_size(engine), _shared(engine, held_out)
    is_sum = None
    for start in range(0, shared, size):
        count = min(size, shared - start)
        place = placer(program.batch_shardings, count)
        batch = place(partial(held_out.slice, start, count))
        is_sum = _is_sum(engine, batch) if is_sum is None else is_sum
        yield Part(batch, None if is_sum else count)
    if shared == held_out.samples:
        return
    ranks, few = program.ranks, held_out.samples - shared
    copied = placer(program.batch_shardings, ranks)
    first = copied(partial(held_out.copies, shared, ranks))
    if why := program.traced_loss.by_parts(_rest(engine, first), False).mixes:
        if not shared:
            raise DataError(
                f"data: {few} samples to evaluate on are fewer than the {ranks} data ranks, and "
                f"{why}; more of them would do"
            )
        log.info(
            "evaluation omits %d of %d held-out samples, which do not divide over %d data ranks: "
            "%s", few, held_out.samples, ranks, why,
        )  # fmt: skip
        return
    is_sum = _is_sum(engine, first)
    for sample in range(shared, held_out.samples):
        batch = copied(partial(held_out.copies, sample, ranks))
        yield Part(batch, None if is_sum else ranks, ranks)


def _shared(engine: Engine, held_out: Split) -> int:
    """The number of samples that divide over the data ranks."""
    return held_out.samples // engine.program.ranks * engine.program.ranks


def _rest(engine: Engine, batch: Any) -> tuple[Any, ...]:
    """What a loss is traced for, beside the parameters."""
    return *engine.program.loss_inputs(batch), jnp.asarray(0), jnp.asarray(0)


def _is_sum(engine: Engine, batch: Any) -> bool:
    """Whether the loss returns a weight; the weight of a mean is its number of samples."""
    return engine.program.traced_loss.trace(_rest(engine, batch), train=False).is_sum


def _batch_size(engine: Engine) -> int:
    batch = engine.program.batch
    return batch.train // batch.accumulation
