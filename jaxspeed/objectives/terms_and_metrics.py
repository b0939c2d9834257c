"""What a loss returns beside a sum and its weight: several terms, and metrics of their own kind.

A metric's values of micro-batches, ranks and batches of an evaluation are combined by its kind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

TOTALS = "totals"  # of an evaluation: the metrics that further batches are combined with


class Terms(dict[str, tuple[Any, ...]]):
    """A loss of terms, by name: `(sum, weight)`, or `(sum, weight, coefficient)`.

    The loss of a step is the sum over terms of coefficient x total sum / total weight, over all
    micro-batches and devices. Each weight has to depend on the batch alone, as numbers of tokens or
    pairs do. The average of each of several terms is a metric of its name, and the first term's
    weight is that of the loss, by which metrics are averaged. A further term with the weight None
    is of an entire micro-batch, as the third part of (sum, weight, auxiliary) is.
    """


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "weight"],
    meta_fields=["kind", "coefficient"],
)
@dataclass(frozen=True)
class Metric:
    """A metric of some samples.

    Attributes:
      value: a sum if it has a weight of its own.
      weight: what the sum is divided by in the end.
      kind: how values are combined: mean by the loss's weight, or as the name says.
      coefficient: of the average of one of the loss's terms, with which it is in the loss.
    """

    value: Any
    weight: Any = None
    kind: Literal["mean", "ratio", "sum", "min", "max"] = "mean"
    coefficient: float = 0.0

    @property
    def result(self) -> Any:
        """The number that is reported."""
        if self.kind != "ratio":
            return self.value
        means = jax.tree.map(
            lambda x, w: jnp.where(w > 0, x / jnp.where(w > 0, w, 1), 0), self.value, self.weight
        )
        if not isinstance(means, tuple):
            return means
        both = jnp.logical_and(*(weight > 0 for weight in self.weight))
        return jnp.where(both, means[0] - means[1], 0)

    def __sub__(self, other: "Metric") -> "Metric":
        """The difference of two means, each by its own weight; 0 unless both have one."""
        return Metric((self.value, other.value), (self.weight, other.weight), "ratio")

    def combined(self, other: "Metric", mean: Callable[[Any, Any], Any] | None = None) -> "Metric":
        """The metric of the samples of both; `mean` is that of two means."""
        if self.kind == "mean":
            assert mean is not None
            return replace(self, value=mean(self.value, other.value))
        join = {"min": jnp.minimum, "max": jnp.maximum}.get(self.kind, jnp.add)
        return jax.tree.map(join, self, other)

    def over_parts(self, mean: Callable[[Any], Any]) -> "Metric":
        """The metric of all parts, whose values have a leading dim of parts."""
        if self.kind == "mean":
            return replace(self, value=mean(self.value))
        join = {"min": jnp.min, "max": jnp.max}.get(self.kind, jnp.sum)
        return jax.tree.map(lambda x: join(x, 0), self)

    def of_none(self) -> "Metric":
        """The metric of no samples."""
        start = {"min": jnp.inf, "max": -jnp.inf}.get(self.kind, 0)
        return jax.tree.map(lambda x: jnp.full(x.shape, start, x.dtype), self)


def Mean(total: Any, weight: Any) -> Metric:
    """A metric of a loss function: the sum of all samples over their weight."""
    return Metric(total, weight, "ratio")


def Sum(value: Any) -> Metric:
    """A metric of a loss function: the sum over all samples of a step or an evaluation."""
    return Metric(value, kind="sum")


def Min(value: Any) -> Metric:
    """A metric of a loss function: the least of all samples."""
    return Metric(value, kind="min")


def Max(value: Any) -> Metric:
    """A metric of a loss function: the largest of all samples."""
    return Metric(value, kind="max")


def of_none(tree: Any) -> Any:
    """Zeros of these shapes, and metrics of no samples."""

    def start(x: Any) -> Any:
        return x.of_none() if isinstance(x, Metric) else jnp.zeros(x.shape, x.dtype)

    return jax.tree.map(start, tree, is_leaf=lambda x: isinstance(x, Metric))


def results(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """The numbers that are reported."""
    return {name: metric.result for name, metric in metrics.items()}


def totals(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """What an evaluation returns beside results: those that a mean would not combine."""
    declared = {name: metric for name, metric in metrics.items() if metric.kind != "mean"}
    return {TOTALS: declared} if declared else {}
