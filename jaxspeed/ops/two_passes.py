"""A kernel's backward pass from what its forward pass gave, without running that again.

A kernel keeps its result and a sum for each row of scores. JAX's kernels hold them where policies
that name activations do not reach, each in its own way. Here the two passes are functions, and
what goes from one to the other is an array like any other: it can have a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

NAME = "attention"
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]


def in_two_passes(forward: Callable[..., Any], backward: Callable[..., Any]) -> Attend:
    """Attention of (q, k, v, segments) from its two passes.

    `forward(q, k, v, segments)` gives (out, sums), and `backward(q, k, v, segments, out, sums,
    d_out)` the gradients of q, k and v. The result and the sums have the name: a policy that keeps
    it spares the backward pass the forward kernel.
    """

    def named(q: Any, k: Any, v: Any, segments: Any) -> tuple[jax.Array, Any]:
        out, sums = (checkpoint_name(x, NAME) for x in forward(q, k, v, segments))
        return out, (q, k, v, segments, out, sums)

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
        return named(q, k, v, segments)[0]

    attend.defvjp(named, lambda kept, d_out: (*backward(*kept, d_out), None))
    return attend


def gradients_from(
    fn: Callable[..., Any], args: Sequence[jax.Array], kept: Sequence[jax.Array], d_out: jax.Array
) -> Any:
    """The gradients of `args`, where `kept` is what `fn` keeps beside them; all differ in rank.

    The forward pass is traced, but of its results nothing is read: compilers leave it out.
    """
    _, pullback = jax.vjp(fn, *args)
    leaves, tree = jax.tree.flatten(pullback)
    left = {x.ndim: x for x in kept}
    for i, leaf in enumerate(leaves):
        is_real = jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size
        if is_real and not any(leaf is arg for arg in args):
            leaves[i] = left.pop(leaf.ndim)
    assert not left, "the kernel keeps less than was given"
    return jax.tree.unflatten(tree, leaves)(d_out)
