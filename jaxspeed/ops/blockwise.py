"""Attention by blocks of keys in XLA operations, for what the platform's kernel does not support.

The online softmax of FlashAttention (Dao et al., arXiv:2205.14135): one block of scores, linear in
the sequence's length, is live at a time in both passes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.ops.mask import Mask, Segments

BLOCKS = (512, 256, 128)
_LOWEST = -1e30


def supports(k: jax.Array) -> bool:
    """Whether blocks divide the keys; else they are one block."""
    return k.shape[1] % BLOCKS[-1] == 0


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(attention, log-sum-exp of each query's scores [batch, heads, seq]); shapes as there."""
    grouped = _grouped(q, k.shape[2])  # [batch, seq, kv_heads, group, head_dim]
    batch, seq, kv_heads, group, head_dim = grouped.shape

    def body(carry: Any, block: Any) -> Any:
        top, total, out = carry
        keys, values, start, ids = block
        s, _ = _scores(grouped, keys, start, _same(segments, ids), mask, scale, soft_cap)
        new_top = jnp.maximum(top, jnp.max(s, axis=-1))
        shares = jnp.exp(s - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        part = jnp.einsum(
            "bhgqk,bkhd->bhgqd", shares.astype(v.dtype), values, preferred_element_type=dtype
        )
        total = total * shrink + jnp.sum(shares, axis=-1)
        return (new_top, total, out * shrink[..., None] + part), None

    rows, dtype = (batch, kv_heads, group, seq), _accumulator(q)
    start = (
        jnp.full(rows, _LOWEST, dtype),
        jnp.zeros(rows, dtype),
        jnp.zeros((*rows, head_dim), dtype),
    )
    (top, total, out), _ = lax.scan(body, start, _blocks(k, v, segments))
    out = (out / total[..., None]).transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)
    return out, (top + jnp.log(total)).reshape(batch, kv_heads * group, seq)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    out: jax.Array,
    sums: jax.Array,
    d_out: jax.Array,
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, from the results of `forward`."""
    kv_heads = k.shape[2]
    grouped, d_grouped = _grouped(q, kv_heads), _grouped(d_out, kv_heads)
    batch, seq, _, group, _ = grouped.shape
    lse = sums.reshape(batch, kv_heads, group, seq)
    dtype = _accumulator(q)
    wide = d_out.astype(dtype) * out.astype(dtype)
    wide_sum: dict[str, Any] = {"preferred_element_type": dtype}
    delta = jnp.sum(_grouped(wide, kv_heads), axis=-1).transpose(0, 2, 3, 1)

    def body(d_q: jax.Array, block: Any) -> Any:
        keys, values, start, ids = block
        s, slope = _scores(grouped, keys, start, _same(segments, ids), mask, scale, soft_cap)
        shares = jnp.exp(s - lse[..., None])
        d_v = jnp.einsum("bhgqk,bqhgd->bkhd", shares.astype(v.dtype), d_grouped, **wide_sum)
        d_shares = jnp.einsum("bqhgd,bkhd->bhgqk", d_grouped, values, **wide_sum)
        d_s = (scale * slope * shares * (d_shares - delta[..., None])).astype(q.dtype)
        d_k = jnp.einsum("bhgqk,bqhgd->bkhd", d_s, grouped, **wide_sum)
        d_q += jnp.einsum("bhgqk,bkhd->bqhgd", d_s, keys, **wide_sum)
        return d_q, (d_k.astype(k.dtype), d_v.astype(v.dtype))

    start = jnp.zeros(grouped.shape, dtype)
    d_q, (d_k, d_v) = lax.scan(body, start, _blocks(k, v, segments))
    joined = (x.swapaxes(0, 1).reshape(k.shape) for x in (d_k, d_v))
    return (d_q.reshape(q.shape).astype(q.dtype), *joined)


def _accumulator(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    batch, seq, heads, head_dim = x.shape
    return x.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)


def _blocks(k: jax.Array, v: jax.Array, segments: Segments | None) -> Any:
    """(keys, values, position of the first, their segments) of each block."""
    size = next((b for b in BLOCKS if k.shape[1] % b == 0), k.shape[1])
    count = k.shape[1] // size

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)

    ids = None if segments is None else split(segments.kv)
    return split(k), split(v), size * jnp.arange(count), ids


def _same(segments: Segments | None, ids: jax.Array | None) -> jax.Array | None:
    """[batch, 1, 1, seq, block], True where query and key share a segment."""
    if segments is None or ids is None:
        return None
    return (segments.q[:, :, None] == ids[:, None, :])[:, None, None]


def _scores(
    q: jax.Array,
    k: jax.Array,
    start: jax.Array,
    same: jax.Array | None,
    mask: Mask,
    scale: float,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array | float]:
    """(scores [batch, kv_heads, group, seq, block], the derivative of their soft cap)."""
    s = scale * jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=_accumulator(q))
    slope: jax.Array | float = 1.0
    if soft_cap is not None:
        capped = jnp.tanh(s / soft_cap)
        s, slope = soft_cap * capped, 1 - capped**2
    distance = jnp.arange(q.shape[1])[:, None] - (start + jnp.arange(k.shape[1]))
    seen = distance >= 0 if mask.causal else jnp.ones_like(distance, bool)
    if mask.window is not None:
        seen &= jnp.abs(distance) < mask.window
    return jnp.where(seen if same is None else seen & same, s, _LOWEST), slope
