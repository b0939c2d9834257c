"""LAMB's trust ratio per weight matrix (You et al., arXiv:1904.00962)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxspeed.optim.clipping import squared
from jaxspeed.optim.norms_and_biases import map_with_path


def scale_by_lamb_coefficient(
    min_coeff: float, max_coeff: float, stacked: Callable[[str], int]
) -> optax.GradientTransformation:
    """`clip(||p|| / ||u||, min_coeff, max_coeff) u`, the ratio being 1 where a norm is 0.

    As DeepSpeed's FusedLamb (csrc/lamb/fused_lamb_cuda_kernel.cu). Optax's `scale_by_trust_ratio`
    does not clip, and takes one norm over all layers of a stacked leaf.

    Args:
      min_coeff: the smallest ratio.
      max_coeff: the largest ratio.
      stacked: number of leading dims that index layers, by path; each layer is a matrix with
        separate norms.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scaled(path: str, u: jax.Array, p: jax.Array) -> jax.Array:
            dims = tuple(range(stacked(path), p.ndim))
            p_norm, u_norm = (
                jnp.sqrt(jnp.sum(squared(x), axis=dims, keepdims=True)) for x in (p, u)
            )
            either_zero = (p_norm == 0) | (u_norm == 0)
            ratio = p_norm / jnp.where(either_zero, 1, u_norm)
            return jnp.where(either_zero, 1, jnp.clip(ratio, min_coeff, max_coeff)) * u

        return map_with_path(scaled, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
