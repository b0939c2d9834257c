"""Custom VJP of an attention kernel with named residuals, so that remat policies can save them.

A kernel saves its result and a sum for each row of scores. JAX's kernels hide them from policies
that save names, each in another way. Here the two passes are functions, and the residuals between
them are arrays with a checkpoint name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxspeed.jaxpr.primitives import TWO_PASSES

NAME = "attention"
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, Any], jax.Array]


def in_two_passes(forward: Callable[..., Any], backward: Callable[..., Any]) -> Attend:
    """Attention of (q, k, v, segments, sinks) from its two passes.

    `forward(q, k, v, segments, sinks)` returns (out, sums), and `backward(q, k, v, segments, sinks,
    out, sums, d_out)` the gradients of q, k, v and sinks. The result and the sums are named: under
    a policy that saves the name, the backward pass does not run the forward kernel again.
    """

    def named(q: Any, k: Any, v: Any, segments: Any, sinks: Any) -> tuple[jax.Array, Any]:
        out, sums = (checkpoint_name(x, NAME) for x in forward(q, k, v, segments, sinks))
        return out, (q, k, v, segments, sinks, out, sums)

    def attend(q: Any, k: Any, v: Any, segments: Any, sinks: Any) -> jax.Array:
        return named(q, k, v, segments, sinks)[0]

    def gradients(saved: Any, d_out: jax.Array) -> Any:
        *d_qkv, d_sinks = backward(*saved, d_out)
        return (*d_qkv, None, d_sinks)

    attend.__name__ = TWO_PASSES
    attention = jax.custom_vjp(attend)
    attention.defvjp(named, gradients)
    return attention


def with_sinks(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The passes of a kernel that knows no sinks, with sinks [heads] or None.

    A sink is one more score of each query, whose value is 0. With the log-sum-exp L of the others
    and L' = log(e^L + e^sink) the result is e^(L - L') times that of the kernel. The kernel's own
    backward pass, which needs only the result and L', is right for both.
    """

    def run(q: Any, k: Any, v: Any, segments: Any, sinks: Any) -> tuple[jax.Array, jax.Array]:
        out, sums = forward(q, k, v, segments)
        if sinks is None:
            return out, sums
        total = jnp.logaddexp(sums, sinks.astype(sums.dtype)[:, None])  # [batch, heads, seq]
        share = jnp.exp(sums - total).swapaxes(1, 2)[..., None]
        return (out * share).astype(out.dtype), total

    def run_backward(
        q: Any, k: Any, v: Any, segments: Any, sinks: Any, out: Any, sums: Any, d_out: Any
    ) -> tuple[Any, ...]:
        d_qkv = backward(q, k, v, segments, out, sums, d_out)
        if sinks is None:
            return (*d_qkv, None)
        wide = out.astype(sums.dtype) * d_out.astype(sums.dtype)
        shares = jnp.exp(sinks.astype(sums.dtype)[:, None] - sums)
        d_sinks = -jnp.sum(shares * jnp.sum(wide, axis=-1).swapaxes(1, 2), axis=(0, 2))
        return (*d_qkv, d_sinks.astype(sinks.dtype))

    return run, run_backward


def with_narrow_values(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The passes of a kernel whose values have as many dims as keys, with values of fewer dims.

    It gets zeros in the other dims, which are part of no argument and no result.
    """

    def padded(x: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, k.shape[-1] - x.shape[-1])))

    def run(q: Any, k: Any, v: Any, segments: Any) -> tuple[jax.Array, jax.Array]:
        if (dims := v.shape[-1]) == k.shape[-1]:
            return forward(q, k, v, segments)
        out, sums = forward(q, k, padded(v, k), segments)
        return out[..., :dims], sums

    def run_backward(
        q: Any, k: Any, v: Any, segments: Any, out: Any, sums: Any, d_out: Any
    ) -> tuple[jax.Array, ...]:
        if (dims := v.shape[-1]) == k.shape[-1]:
            return backward(q, k, v, segments, out, sums, d_out)
        v, out, d_out = (padded(x, k) for x in (v, out, d_out))
        d_q, d_k, d_v = backward(q, k, v, segments, out, sums, d_out)
        return d_q, d_k, d_v[..., :dims]

    return run, run_backward


def saved_sums(fn: Callable[..., Any], args: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(the result of `fn`, its residual of rank 3)."""
    out, pullback = jax.vjp(fn, *args)
    leaves = jax.tree.leaves(pullback)
    (sums,) = (leaves[i] for i in _residuals(leaves, args) if leaves[i].ndim == 3)
    return out, sums


def gradients_from(
    fn: Callable[..., Any], args: Sequence[jax.Array], saved: Sequence[jax.Array], d_out: jax.Array
) -> Any:
    """The gradients of `args`, with `saved` as the other residuals of `fn`; all differ in rank.

    The forward pass is traced, but its results are unused, so that compilers remove it.
    """
    _, pullback = jax.vjp(fn, *args)
    leaves, tree = jax.tree.flatten(pullback)
    left = {x.ndim: x for x in saved}
    for i in _residuals(leaves, args):
        value = left.pop(leaves[i].ndim)
        assert (value.shape, value.dtype) == (leaves[i].shape, leaves[i].dtype)
        leaves[i] = value
    assert not left, "the kernel saves less than was given"
    return jax.tree.unflatten(tree, leaves)(d_out)


def _residuals(leaves: Sequence[Any], args: Sequence[jax.Array]) -> list[int]:
    """Indices of a pullback's leaves that are neither arguments nor placeholders nor tables."""
    return [
        i
        for i, leaf in enumerate(leaves)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
        and leaf.size
        and not any(leaf is arg for arg in args)
    ]
