"""Whether the loss of a batch is the sum of the losses of its parts, as its traces prove.

A micro-batch is the union of the i-th slices of all data ranks' parts. Ranks, rings, workers of a
parameter server and stages of a pipeline compute the (sum, weight) of their own samples, which are
added. That is right if the sum of all samples is the sum of the parts'.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxspeed.axes import summing_axes
from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.sample_independence import Analysis, UnlikeTracesError
from jaxspeed.jaxpr.sample_values import FREE, MEAN, MIXED, SUM, SampleValue, free, samples
from jaxspeed.jaxpr.single_sample import refuse_another_computation
from jaxspeed.objectives.terms_and_metrics import Metric

log = logging.getLogger("jaxspeed")


@dataclass(frozen=True)
class ByParts:
    """Why the loss, or a metric, is not the sum of those of the parts.

    Attributes:
      mixes: why the loss is not that sum; None if it is.
      mixing_metrics: by name, why a metric is not the average of the parts', by their weights.
      draws: whether numbers are drawn for each sample, of which each part draws its own.
    """

    mixes: str | None = None
    mixing_metrics: Mapping[str, str] = field(default_factory=dict)
    draws: bool = False

    @property
    def not_once(self) -> str | None:
        """Why the parts of a rank may not be added once a step, instead of each micro-batch's."""
        metrics = (f"the metric {name} {why}" for name, why in self.mixing_metrics.items())
        return self.mixes or next(metrics, None)

    def refuse_mixed(self, where: str, who: str, instead: str) -> None:
        """Raise a ModelError if the loss mixes samples, and name the metrics that do.

        Args:
          where: the setting by which each of `who` computes the loss of its own samples.
          instead: what would do.
        """
        if self.mixes:
            raise ModelError(
                f"{where}: {self.mixes}, and {who} has only its own samples; {instead}"
            )
        for name, why in self.mixing_metrics.items():
            log.warning(
                "%s: the metric %s %s; it is an average over what %s computes of its own samples",
                where, name, why, who,
            )  # fmt: skip


def by_parts(
    trace: Callable[[Any], Any],
    batch: Any,
    parts: int,
    differentiated: bool = True,
    trace_part: Callable[[Any], Any] | None = None,
) -> ByParts:
    """Compare the traces of a part's samples, which are run, and of the entire batch's.

    Args:
      trace: the traced loss (`LossProgram`) of a batch.
      batch: the entire batch.
      parts: the number of equal parts; of 1 or what does not divide it, the batch is a part itself.
      differentiated: whether gradients have to be sums over samples too.
      trace_part: the traced loss of a part, where it is another than `trace`.
    """
    sizes = {x.shape[0] for x in jax.tree.leaves(batch) if x.shape}
    if not sizes or 0 in sizes:
        return ByParts("the batch has no samples")
    batch_size = math.gcd(*sizes)
    divides = parts > 1 and batch_size % parts == 0
    of_part, total = (batch_size // parts, batch_size) if divides else (batch_size, 2 * batch_size)

    def traced(count: int) -> Any:
        def shape(x: Any) -> Any:
            lead = (x.shape[0] // batch_size * count,) if x.shape else ()
            return jax.ShapeDtypeStruct((*lead, *x.shape[1:]), x.dtype)

        try:
            return (trace_part or trace if count == of_part else trace)(jax.tree.map(shape, batch))
        except ModelError as error:
            raise ModelError(f"the loss cannot be traced for {count} samples ({error})") from error

    # A dim of one sample looks like others of size 1.
    counts = (of_part, total) if of_part > 1 else (total, 2 * total)
    analysis = Analysis(counts, frozenset(summing_axes()), differentiated)

    def compared(program: Any, twin: Any) -> ByParts:
        """By the traces of two numbers of samples."""
        if program.own_axes.collective:
            names = ", ".join(program.own_axes.collective)
            return ByParts(f"the loss reduces over {names}: the entire micro-batch")
        jaxpr, of_batch = program.closed.jaxpr, {v for v in program.batch if v.aval.shape}
        inputs = (samples() if v in of_batch else free(v.aval.ndim) for v in jaxpr.invars)
        outputs = analysis.run_closed(program.closed, twin.closed, inputs)
        loss, _ = jax.tree.unflatten(program.out_tree, outputs)
        if loss.auxiliary:
            return ByParts("the loss returns an auxiliary term, which is of an entire micro-batch")
        metrics = {}
        for name, metric in loss.metrics.items():
            why = _unlike_parts(metric, loss.weight)
            if why and metric.kind == "mean":
                metrics[name] = why
            elif why:  # combined as it is declared
                log.warning("the metric %s %s; ranks compute it of their own samples", name, why)
        every = [(loss.total, loss.weight), *loss.terms]
        draws = any(x.draws for pair in every for x in pair)
        reasons = filter(None, (_quotient_of_sums(*pair) for pair in every))
        return ByParts(next(reasons, None), metrics, draws)

    try:
        program, twin = map(traced, counts)
        comparison = compared(program, twin)
        if of_part == 1 and not comparison.mixes:
            counts = (1, total)
            refuse_another_computation(analysis, traced(1).closed, (program.closed, twin.closed))
        return comparison
    except ModelError as error:
        return ByParts(str(error))
    except UnlikeTracesError as error:
        return ByParts(
            f"the loss computes something else of {counts[0]} sample{'s' * (counts[0] > 1)} than "
            f"of {counts[1]}{error}"
        )


def _quotient_of_sums(total: SampleValue, weight: SampleValue) -> str | None:
    """Why total / weight of a batch is not the sum of the parts' totals over that of weights."""
    for name, x in (("sum", total), ("weight", weight)):
        if x.kind is MIXED:
            return f"the loss's {name} mixes samples ({x.why})"
        if x.kind not in (FREE, SUM):
            return (
                f"the loss's {name} is no sum over samples, but one that is divided by another or "
                "bounded (return (sum, weight), which is divided at the end of the step)"
            )
    if total.extent == weight.extent or total.zero:
        return None
    return (
        "the loss's sum and weight do not grow alike with the number of samples (return the mean "
        "alone, or the sum and what to divide it by)"
    )


def _unlike_parts(metric: Metric, weight: SampleValue) -> str | None:
    """Why a metric of a batch is not what its parts' are combined into."""
    if metric.kind == "mean":
        return _average(metric.value, weight)
    sums: list[SampleValue] = jax.tree.leaves(metric) if metric.kind in ("ratio", "sum") else []
    return next((f"mixes samples ({x.why})" for x in sums if x.kind is MIXED), None)


def _average(metric: SampleValue, weight: SampleValue) -> str | None:
    """Why a metric of a batch is not the average of its parts', weighted like the loss."""
    if metric.kind is MIXED:
        return f"mixes samples ({metric.why})"
    if metric.kind is MEAN and metric.root != weight.root:
        return "is divided by something else than the loss's weight"
    of_equal_parts = metric.kind is SUM and weight.kind is FREE
    if metric.kind is MEAN or metric.zero:
        return None
    if (metric.kind is FREE or of_equal_parts) and metric.extent == 0:
        return None
    return "is not divided by the loss's weight"
