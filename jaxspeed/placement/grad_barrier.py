"""Optimization barrier on two gradients: a weight's is computed before backward continues.

XLA may delay the gradient of a weight until it is used, and keeps its operands alive until then.
The barrier makes the gradient of the other operand wait for the weight's.
"""

from typing import Any

import jax


@jax.custom_vjp
def grads_together(moving: Any, weight: Any) -> tuple[Any, Any]:
    """Return both unchanged; their gradients pass one optimization barrier."""
    return moving, weight


grads_together.defvjp(
    lambda *both: (both, None), lambda _, grads: jax.lax.optimization_barrier(grads)
)
