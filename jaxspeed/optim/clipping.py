"""The global norm of gradients, and clipping by it."""

from typing import Any

import jax
import jax.numpy as jnp

_EPS = 1e-6  # DeepSpeed's: in `unscale_and_clip_grads` and `clip_tensors_by_global_norm` alike


def global_norm(tree: Any) -> jax.Array:
    """The L2 norm of all leaves as one vector, squared and summed in float32 at least.

    Of complex numbers the magnitudes count.

    It is finite only if every element is: the check for an overflow needs no second pass.
    """
    squares = [jnp.sum(squared(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def squared(x: jax.Array) -> jax.Array:
    """|x|^2, element by element, in float32 at least."""
    if jnp.iscomplexobj(x):
        return squared(x.real) + squared(x.imag)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * x


def clip_factor(norm: jax.Array, max_norm: float) -> jax.Array:
    """What gradients of this global norm are multiplied with; max_norm 0 is no clipping."""
    if max_norm <= 0:
        return jnp.ones_like(norm)
    return jnp.minimum(1, max_norm / (norm + _EPS))


def clip_by_norm(tree: Any, norm: jax.Array, max_norm: float) -> tuple[Any, jax.Array]:
    """`factor tree` and `factor = min(1, max_norm / (norm + 1e-6))`; max_norm 0 is no clipping.

    DeepSpeed divides by `max(1, (norm + 1e-6) / max_norm)`, which is the same.

    Args:
      tree: gradients.
      norm: their global norm, as the caller has it already for its metrics.
      max_norm: static.

    Returns:
      The clipped tree, each leaf in its own dtype, and the factor: norm * factor is what is left.
    """
    if max_norm <= 0:
        return tree, jnp.ones_like(norm)
    factor = clip_factor(norm, max_norm)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), tree), factor
