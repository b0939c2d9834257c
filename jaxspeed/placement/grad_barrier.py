"""Optimization barrier on gradients: a weight's is computed before backward continues.

XLA may delay the gradient of a weight until it is used, and keeps its operands alive until then.
The barrier makes the gradient of the other operand wait for the weight's.
"""

from typing import Any

import jax


@jax.custom_vjp
def grads_together(moving: Any, *weights: Any) -> tuple[Any, ...]:
    """Return all unchanged; their gradients pass one optimization barrier."""
    return moving, *weights


grads_together.defvjp(
    lambda *given: (given, None), lambda _, grads: jax.lax.optimization_barrier(grads)
)
