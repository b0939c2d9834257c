"""Global norm of gradients, and gradient clipping."""

from typing import Any

import jax
import jax.numpy as jnp

_EPS = 1e-6  # DeepSpeed's, in `unscale_and_clip_grads` and `clip_tensors_by_global_norm`


def global_norm(tree: Any) -> jax.Array:
    """The L2 norm of all leaves, with complex magnitudes, computed in float32 at least.

    It is finite only if every element is, so the overflow check needs no second pass.
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
    """The factor that clips gradients of this global norm; max_norm 0 disables clipping."""
    if max_norm <= 0:
        return jnp.ones_like(norm)
    return jnp.minimum(1, max_norm / (norm + _EPS))


def clip_by_norm(tree: Any, norm: jax.Array, max_norm: float) -> tuple[Any, jax.Array]:
    """`factor tree` and `factor = min(1, max_norm / (norm + 1e-6))`; max_norm 0 disables clipping.

    DeepSpeed divides by `max(1, (norm + 1e-6) / max_norm)`, which is the same.

    Args:
      tree: gradients.
      norm: their global norm, which the caller computes for its metrics.
      max_norm: static.

    Returns:
      The clipped tree with unchanged dtypes, and the factor: norm * factor is the clipped norm.
    """
    if max_norm <= 0:
        return tree, jnp.ones_like(norm)
    factor = clip_factor(norm, max_norm)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), tree), factor
