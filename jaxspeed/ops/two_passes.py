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


def sums_kept(fn: Callable[..., Any], args: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """What `fn` gives, and the array of rank 3 that it keeps for its derivative."""
    out, pullback = jax.vjp(fn, *args)
    leaves = jax.tree.leaves(pullback)
    (sums,) = (leaves[i] for i in _kept(leaves, args) if leaves[i].ndim == 3)
    return out, sums


def gradients_from(
    fn: Callable[..., Any], args: Sequence[jax.Array], kept: Sequence[jax.Array], d_out: jax.Array
) -> Any:
    """The gradients of `args`, where `kept` is what `fn` keeps beside them; all differ in rank.

    The forward pass is traced, but of its results nothing is read: compilers leave it out.
    """
    _, pullback = jax.vjp(fn, *args)
    leaves, tree = jax.tree.flatten(pullback)
    left = {x.ndim: x for x in kept}
    for i in _kept(leaves, args):
        value = left.pop(leaves[i].ndim)
        assert (value.shape, value.dtype) == (leaves[i].shape, leaves[i].dtype)
        leaves[i] = value
    assert not left, "the kernel keeps less than was given"
    return jax.tree.unflatten(tree, leaves)(d_out)


def _kept(leaves: Sequence[Any], args: Sequence[jax.Array]) -> list[int]:
    """Which of what a derivative holds are neither its arguments nor placeholders nor tables."""
    return [
        i
        for i, leaf in enumerate(leaves)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
        and leaf.size
        and not any(leaf is arg for arg in args)
    ]
