"""Return forms of a loss function, and their weighted average.

`loss`, `(sum, weight)` or `(sum, weight, auxiliary)`; each may come with `{name: value}` metrics. A
`(sum, weight)` loss is averaged as total sum over total weight across micro-batches and devices, so
that padding and ignored tokens never depend on how the batch is split. A plain `loss` is a mean
with weight 1. An auxiliary term is of an entire micro-batch, and all micro-batches count alike:

    loss of a step = sum_i total_i / sum_i weight_i + mean_i auxiliary_i
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspeed.errors import ModelError
from jaxspeed.metric_names import NAMES

FORMS = (
    "it may return a scalar loss, (sum, weight) or (sum, weight, auxiliary), each of them with a "
    "dict of metrics or without"
)


@dataclass(frozen=True)
class Outputs:
    """Arrays of any shape, which a function of the model returns in place of a loss."""

    arrays: dict[str, jax.Array]


class Loss(NamedTuple):
    """Loss of one micro-batch as (sum, weight), which can be added."""

    total: jax.Array  # float32 at least, []
    weight: jax.Array  # of the same dtype, []
    metrics: dict[str, jax.Array]
    auxiliary: jax.Array | None = None  # of the same dtype, []; None if it has no such term

    def with_auxiliary(self, unit: jax.Array | None) -> "Loss":
        """The loss with its auxiliary term in the total, and the weight with which it is averaged.

        Args:
          unit: the mean weight of the step's micro-batches; None: there is only this one.
        """
        if self.auxiliary is None:
            return self
        if unit is None:
            unit = self.weight
        share = jnp.where(self.weight > 0, self.weight / jnp.where(unit > 0, unit, 1), 0)
        return Loss(
            self.total + self.auxiliary * unit,
            unit,
            # Their averages stay those by weight.
            {name: jnp.where(share > 0, x * share, 0) for name, x in self.metrics.items()},
        )


def parse_loss(result: Any, stop_weight: bool = True) -> tuple[Loss, bool]:
    """Parse the return value of a loss function: (loss, whether it was (sum, weight)).

    Args:
      stop_weight: stop the gradient of the weight.

    Raises:
      ModelError: it has any other form.
    """
    if isinstance(result, Outputs):
        return Loss(jnp.zeros(()), jnp.ones(()), result.arrays), False
    metrics: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) >= 2 and isinstance(result[-1], Mapping):
        *head, metrics = result
        result = head[0] if len(head) == 1 else tuple(head)
    is_sum = isinstance(result, tuple)
    parts = result if is_sum else (result, 1.0)
    if len(parts) not in (2, 3) or any(isinstance(p, (tuple, list, dict, str)) for p in parts):
        raise ModelError(f"loss_fn returned {_describe(result)}; {FORMS}")
    first = "a sum" if is_sum else "a loss"
    values = [_number(p, "loss_fn returned", FORMS) for p in parts]
    for what, value in zip((first, "a weight", "an auxiliary term"), values, strict=False):
        if value.shape:
            raise ModelError(
                f"loss_fn returned {what} of shape {value.shape}; it must be a scalar: average "
                "over the samples, or return (values.sum(), number_of_values)"
            )
    if not jnp.issubdtype(values[0].dtype, jnp.floating):
        raise ModelError(f"loss_fn returned a loss of dtype {values[0].dtype}; it must be floating")
    total = values[0].astype(jnp.promote_types(values[0].dtype, jnp.float32))
    weight, *auxiliary = (value.astype(total.dtype) for value in values[1:])
    shown = {
        str(name): _number(value, f"loss_fn's metric {name!r} is", "metrics are scalars")
        for name, value in metrics.items()
    }
    for name, value in shown.items():
        if name in NAMES:
            raise ModelError(
                f"loss_fn's metric {name!r} has the name of one of the step's own "
                f"({', '.join(NAMES)}); give it another"
            )
        if value.shape:
            raise ModelError(
                f"loss_fn's metric {name!r} has shape {value.shape}; metrics are scalars"
            )
    floats = {name: value.astype(jnp.float32) for name, value in shown.items()}
    if stop_weight:
        weight = jax.lax.stop_gradient(weight)
    floats = jax.lax.stop_gradient(floats)
    return Loss(total, weight, floats, *auxiliary), is_sum


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
