"""Return forms of a loss function, and their weighted average.

`loss`, `(sum, weight)`, `(sum, weight, auxiliary)` or `Terms`; each may come with `{name: value}`
metrics. A `(sum, weight)` loss is averaged as total sum over total weight across micro-batches and
devices, so that padding and ignored tokens never depend on how the batch is split. A plain `loss`
is a mean with weight 1. Of several terms each is averaged by its own weight. An auxiliary term is
of an entire micro-batch, and all micro-batches count alike:

    loss of a step = sum over terms of sum_i total_i / sum_i weight_i, + mean_i auxiliary_i
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspeed.errors import ModelError
from jaxspeed.metric_names import NAMES
from jaxspeed.objectives.terms_and_metrics import TOTALS, Metric, Terms

FORMS = (
    "it may return a scalar loss, (sum, weight), (sum, weight, auxiliary) or Terms, each of them "
    "with a dict of metrics or without"
)


@dataclass(frozen=True)
class Outputs:
    """Arrays of any shape, which a function of the model returns in place of a loss."""

    arrays: dict[str, jax.Array]


class Term(NamedTuple):
    """A further term of a loss; one without a weight is of an entire micro-batch (auxiliary)."""

    total: jax.Array  # of the loss's dtype, []
    weight: jax.Array | None


class Loss(NamedTuple):
    """Loss of one micro-batch as (sum, weight), which can be added."""

    total: jax.Array  # float32 at least, []
    weight: jax.Array  # of the same dtype, []
    metrics: dict[str, Metric]
    terms: tuple[Term, ...] = ()  # the others

    @property
    def auxiliary(self) -> bool:
        """Whether a term is of an entire micro-batch."""
        return any(term.weight is None for term in self.terms)

    def folded(self, weights: "TermWeights | None") -> "Loss":
        """The loss with all terms in one total, and the weight by which it is averaged.

        Args:
          weights: the mean weights of the step's micro-batches; None: there is only this one.
        """
        if not self.terms:
            return self
        base, of_terms = weights or TermWeights(self.weight, tuple(x.weight for x in self.terms))
        if others := [weight for weight in of_terms if weight is not None]:
            some = jnp.any(jnp.stack(others) > 0).astype(base.dtype)
            base = jnp.where(base > 0, base, some)
        total = self.total
        for term, weight in zip(self.terms, of_terms, strict=True):
            total = total + term.total * (base if weight is None else _per(base, weight))
        share = _per(self.weight, base)

        def by_share(metric: Metric) -> Metric:
            """Its average stays that by the loss's weight."""
            if metric.kind != "mean":
                return metric
            return replace(metric, value=jnp.where(share > 0, metric.value * share, 0))

        metrics = {name: by_share(metric) for name, metric in self.metrics.items()}
        return Loss(total, base, metrics)


def _per(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x / weight`, and 0 where the weight is 0."""
    return jnp.where(weight > 0, x / jnp.where(weight > 0, weight, 1), 0)


class TermWeights(NamedTuple):
    """The mean weights of a step's micro-batches, of the loss and of its other terms."""

    loss: jax.Array
    terms: tuple[jax.Array | None, ...]


def parse_loss(result: Any, stop_weight: bool = True) -> tuple[Loss, bool]:
    """Parse the return value of a loss function: (loss, whether it was (sum, weight)).

    Args:
      stop_weight: stop the gradient of the weight.

    Raises:
      ModelError: it has any other form.
    """
    if isinstance(result, Outputs):
        return Loss(
            jnp.zeros(()), jnp.ones(()), {k: Metric(x) for k, x in result.arrays.items()}
        ), False
    metrics: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) >= 2 and isinstance(result[-1], Mapping):
        *head, metrics = result
        result = head[0] if len(head) == 1 else tuple(head)
    if isinstance(result, Terms):
        loss, averages = _parse_terms(result)
        if twice := averages.keys() & metrics.keys():
            raise ModelError(f"loss_fn returned a term and a metric of the name {min(twice)!r}")
        # The average of an only term is the loss.
        metrics, is_sum = {**(averages if len(averages) > 1 else {}), **metrics}, True
    else:
        is_sum = isinstance(result, tuple)
        loss = _parse_sum(result if is_sum else (result, 1.0), is_sum)
    if stop_weight:
        loss = loss._replace(weight=jax.lax.stop_gradient(loss.weight))
    shown = {str(name): _metric(str(name), value) for name, value in metrics.items()}
    return loss._replace(metrics=jax.lax.stop_gradient(shown)), is_sum


def _parse_sum(parts: tuple[Any, ...], is_sum: bool) -> Loss:
    """A loss of a sum, a weight and perhaps an auxiliary term."""
    if len(parts) not in (2, 3) or any(isinstance(p, (tuple, list, dict, str)) for p in parts):
        returned = parts if is_sum else parts[0]
        raise ModelError(f"loss_fn returned {_describe(returned)}; {FORMS}")
    first = "a sum" if is_sum else "a loss"
    total, weight, *auxiliary = _scalars(parts, (first, "a weight", "an auxiliary term"))
    return Loss(total, weight, {}, tuple(Term(x, None) for x in auxiliary))


def _parse_terms(terms: Terms) -> tuple[Loss, dict[str, Metric]]:
    """A loss of several terms, and the average of each."""
    all_terms: list[Term] = []
    averages: dict[str, Metric] = {}
    for name, parts in terms.items():
        if not isinstance(parts, tuple) or len(parts) not in (2, 3):
            raise ModelError(
                f"loss_fn's term {name!r} is {_describe(parts)}; a term is (sum, weight) or (sum, "
                "weight, coefficient)"
            )
        coefficient = parts[2] if len(parts) > 2 else 1.0
        if not isinstance(coefficient, int | float):
            raise ModelError(
                f"the coefficient of loss_fn's term {name!r} is {_describe(coefficient)}; it is a "
                "number of Python's: multiply the sum by one that changes"
            )
        names = f"a sum of {name!r}", f"a weight of {name!r}"
        if parts[1] is None and all_terms:  # of an entire micro-batch
            (total,) = _scalars(parts[:1], names)
            all_terms.append(Term(total * coefficient, None))
            averages[name] = Metric(total)
            continue
        total, weight = _scalars(parts[:2], names)
        all_terms.append(Term(total * coefficient, weight))
        averages[name] = Metric(total, weight, "ratio", float(coefficient))
    if not all_terms:
        raise ModelError("loss_fn returned Terms without a term")
    dtype = jnp.result_type(*(term.total for term in all_terms))
    (total, weight), *others = jax.tree.map(lambda x: x.astype(dtype), all_terms)
    stopped = (term._replace(weight=jax.lax.stop_gradient(term.weight)) for term in others)
    return Loss(total, weight, {}, tuple(stopped)), averages


def _scalars(parts: tuple[Any, ...], names: tuple[str, ...]) -> list[jax.Array]:
    """Parts of a loss, of which the first is a total, in its dtype."""
    values = [_number(p, "loss_fn returned", FORMS) for p in parts]
    for what, value in zip(names, values, strict=False):
        if value.shape:
            raise ModelError(
                f"loss_fn returned {what} of shape {value.shape}; it must be a scalar: average "
                "over the samples, or return (values.sum(), number_of_values)"
            )
    if not jnp.issubdtype(values[0].dtype, jnp.floating):
        raise ModelError(f"loss_fn returned a loss of dtype {values[0].dtype}; it must be floating")
    dtype = jnp.promote_types(values[0].dtype, jnp.float32)
    return [value.astype(dtype) for value in values]


def _metric(name: str, returned: Any) -> Metric:
    metric = returned if isinstance(returned, Metric) else Metric(returned)
    if name in NAMES or name == TOTALS:
        raise ModelError(
            f"loss_fn's metric {name!r} has the name of one of the step's own "
            f"({', '.join(NAMES)}); give it another"
        )

    def scalar(value: Any) -> Any:
        if isinstance(value, tuple) and metric.kind == "ratio":  # of a difference of two means
            return tuple(map(scalar, value))
        number = _number(value, f"loss_fn's metric {name!r} is", "metrics are scalars")
        if number.shape:
            raise ModelError(
                f"loss_fn's metric {name!r} has shape {number.shape}; metrics are scalars"
            )
        return number.astype(jnp.float32)

    weight = None if metric.weight is None else scalar(metric.weight)
    return replace(metric, value=scalar(metric.value), weight=weight)


def _number(value: Any, what: str, wanted: str) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise ModelError(f"{what} {_describe(value)}; {wanted}") from None


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"
