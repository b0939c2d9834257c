"""Muon: orthogonalized momentum for the hidden weight matrices (Jordan et al., 2024).

Follows DeepSpeed (deepspeed/runtime/zero/muon/original_muon.py and `set_optimizer_flags` in
deepspeed/__init__.py). Optax's `scale_by_muon` corrects the momentum's bias, which changes the
weights of momentum and gradient in the Nesterov sum, and has no Gram iteration.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxspeed.optim.norms_and_biases import is_norm_or_bias, map_with_path
from jaxspeed.optim.owners import by_owners
from jaxspeed.placement.matrices import view_of
from jaxspeed.placement.paths import flat_with_paths

NewtonSchulz = Literal["gram", "standard"]

_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the quintic a x + b x^3 + c x^5
_ITERATIONS = 5
_RESTART = 2  # iterations after which the Gram iteration restarts from X, for stability


def uses_muon(path: str, ndim: int, inputs: int | None = None) -> bool:
    """Whether Muon updates a leaf; all others are updated by its Adam.

    DeepSpeed uses Muon for leaves with two dims or more and neither `embed` nor `lm_head` in the
    name. Here `wte`, `wpe` and a segment `head` or `classifier` are embeddings and heads too, and
    norms and biases are excluded, though a bias `[heads, head_dim]` has two dims, and so are the
    magnitudes of DoRA.

    Args:
      path: of the leaf.
      ndim: number of dims without those of stacked layers: 2, `[in, out]`, or 4, a convolution
        `[height, width, in, out]`.
      inputs: number of these dims that are inputs, if known: 1 for `[embed, heads, head_dim]`,
        whose matrix is embed x (heads head_dim). Any ndim is accepted then.
    """
    segments = path.lower().split("/")
    if any("embed" in segment or "lm_head" in segment for segment in segments):
        return False
    if {"wte", "wpe", "head", "classifier"}.intersection(segments):
        return False
    if segments[0] == "lora" and "magnitude" in segments[-2:]:  # perhaps of a range of layers
        return False
    return (ndim in (2, 4) or inputs is not None) and not is_norm_or_bias(path)


class MuonState(NamedTuple):
    """State of `scale_by_muon`."""

    momentum: Any  # as the parameters


def scale_by_muon(
    momentum: float,
    ns_method: NewtonSchulz,
    stacked: Callable[[str], int],
    inputs: Callable[[str], int | None] = lambda path: None,
    products: Any = None,
) -> optax.GradientTransformation:
    """Muon's direction `u = scale orthogonalize((1 - momentum) g + momentum m)`.

    Here `m = momentum m + (1 - momentum) g`, and scale is sqrt(max(1, out / in)), or
    sqrt(max(1, height / width)) for a convolution.

    Args:
      momentum: of the exponential average.
      ns_method: form of the Newton-Schulz iteration.
      stacked: number of leading dims that index layers, by path.
      inputs: number of dims after those that are inputs of the matrix; None if unknown.
    """

    def init(params: Any) -> MuonState:
        return MuonState(momentum=optax.tree.zeros_like(params))

    def update(
        updates: Any, state: MuonState, params: Any = None, *, placements: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        average = optax.tree.update_moment(updates, state.momentum, momentum, 1)
        nesterov = optax.tree.update_moment(updates, average, momentum, 1)
        leaves = flat_with_paths(nesterov)
        views = {
            path: view
            for path, u in leaves.items()
            if (view := view_of(u.shape, stacked(path), inputs(path)))
        }
        narrow = {path: u.astype(products or u.dtype) for path, u in leaves.items()}
        done = by_owners(
            lambda view, x: one_at_a_time(lambda x: orthogonalize(x, ns_method), x),
            views,
            narrow,
            placements,
        )

        def direction(path: str, u: jax.Array) -> jax.Array:
            rows, columns = views[path].matrix
            if u.ndim - stacked(path) == 4 and inputs(path) is None:
                columns, rows = u.shape[-4:-2]
            return max(1.0, columns / rows) ** 0.5 * done[path].astype(u.dtype)

        return map_with_path(direction, nesterov), MuonState(average)

    return optax.GradientTransformationExtraArgs(init, update)


def one_at_a_time(function, x):
    if x.shape[0] == 1 or x.shape[-1] * x.shape[-2] < 1 << 20:
        return function(x)
    return jax.lax.map(function, x)


def orthogonalize(x: jax.Array, ns_method: NewtonSchulz = "gram") -> jax.Array:
    """Approximate `U V^T` of the singular value decomposition `x = U S V^T`, x  [..., m, n].

    Matmuls have the platform's default precision (one bf16 pass on TPU, TF32 on GPU), where
    DeepSpeed casts to bf16 or fp16; sums are in the dtype of x.
    """
    narrow = x.dtype
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    transposed = x.shape[-2] > x.shape[-1]
    x = x.mT if transposed else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    # The Gram matrix of a square matrix is as large, without gain.
    use_gram = ns_method == "gram" and x.shape[-2] < x.shape[-1]
    x = _gram_newton_schulz(x) if use_gram else _newton_schulz(x, _ITERATIONS)
    return (x.mT if transposed else x).astype(narrow)


def _newton_schulz(x: jax.Array, iterations: int) -> jax.Array:
    """`x <- a x + b (x x^T) x + c (x x^T)^2 x`, each iteration."""
    for _ in range(iterations):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x


def _gram_newton_schulz(x: jax.Array) -> jax.Array:
    """The same polynomial, iterated on the small matrix `R = x x^T`.

    One iteration is `x <- P x` with `P = a I + b R + c R^2`, so that `R <- P R P` and the product
    Q of all P is applied to x once. (https://tridao.me/blog/2026/gram-newton-schulz)
    """
    for iterations in (_RESTART, _ITERATIONS - _RESTART):
        gram = x @ x.mT
        identity = jnp.eye(gram.shape[-1], dtype=x.dtype)
        q = identity
        for i in range(iterations):
            p = _A * identity + _B * gram + _C * gram @ gram
            q = p @ q if i else p
            gram = p @ gram @ p if i + 1 < iterations else gram
        x = q @ x
    return x
