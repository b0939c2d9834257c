"""Return forms of a loss function, and their weighted average.

`loss`, or `(sum, weight)`; either may come with `{name: value}` metrics. A `(sum, weight)` loss is
averaged as total sum over total weight across micro-batches and devices, so that padding and
ignored tokens never depend on how the batch is split. A plain `loss` is a mean with weight 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspeed.errors import ModelError
from jaxspeed.metric_names import NAMES

FORMS = "it may return a scalar loss, (sum, weight), or either of them with a dict of metrics"


@dataclass(frozen=True)
class Outputs:
    """Arrays of any shape, which a function of the model returns in place of a loss."""

    arrays: dict[str, jax.Array]


class Loss(NamedTuple):
    """Loss of one micro-batch as (sum, weight), which can be added."""

    total: jax.Array  # float32 at least, []
    weight: jax.Array  # of the same dtype, []
    metrics: dict[str, jax.Array]


def parse_loss(result: Any) -> tuple[Loss, bool]:
    """Parse the return value of a loss function: (loss, whether it was (sum, weight)).

    Raises ModelError for any other form.
    """
    if isinstance(result, Outputs):
        return Loss(jnp.zeros(()), jnp.ones(()), result.arrays), False
    metrics: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) >= 2 and isinstance(result[-1], Mapping):
        *head, metrics = result
        result = head[0] if len(head) == 1 else tuple(head)
    is_sum = isinstance(result, tuple)
    parts = result if is_sum else (result, 1.0)
    if len(parts) != 2 or any(isinstance(p, (tuple, list, dict, str)) for p in parts):
        raise ModelError(f"loss_fn returned {_describe(result)}; {FORMS}")
    values = [_number(p, "loss_fn returned", FORMS) for p in parts]
    for what, value in zip(("loss" if not is_sum else "sum", "weight"), values, strict=True):
        if value.shape:
            raise ModelError(
                f"loss_fn returned a {what} of shape {value.shape}; it must be a scalar: average "
                "over the samples, or return (values.sum(), number_of_values)"
            )
    if not jnp.issubdtype(values[0].dtype, jnp.floating):
        raise ModelError(f"loss_fn returned a loss of dtype {values[0].dtype}; it must be floating")
    total = values[0].astype(jnp.promote_types(values[0].dtype, jnp.float32))
    weight = values[1].astype(total.dtype)
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
    return Loss(total, jax.lax.stop_gradient(weight), jax.lax.stop_gradient(floats)), is_sum


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
