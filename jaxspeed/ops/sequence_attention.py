"""Attention over sequences that the `seq` axis of the mesh shards, in four kinds.

P devices of the axis have 1/P of the positions each. Volumes are what a device receives forward, of
N positions and h numbers a position and query head:

| kind | exchanges | volume |
|---|---|---|
| gather | all keys and values | 2 g N h (P-1)/P, g = key heads / heads |
| ring | keys and values, from device to device, a hop while the one before is computed | the same |
| ulysses | positions for heads, and back | (2 + 2 g) N h/P (P-1)/P, g = max(key heads, P) / heads |
| both | heads in groups, and keys and values around the ring of groups | |

In groups of U devices, those of one group have the same positions and other heads after the
exchange, and P/U groups form a ring (`sequence_passes`): U is P for Ulysses and 1 for gather and
ring. The exchanges stand outside of the attention's two passes, whose residuals therefore have the
heads' layout: the backward pass does not repeat them.

A sequence that P does not divide is padded. An attention that no kernel computes is run by its own
program, from blocks of its rows (`attention_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import SEQ, TENSOR
from jaxspeed.errors import ModelError
from jaxspeed.ops import splash
from jaxspeed.ops.attention import copies_of, repeated, repeated_for_sharding
from jaxspeed.ops.attention_call import AttentionForm
from jaxspeed.ops.attention_rows import by_rows
from jaxspeed.ops.free_axes import free_axes, free_sample_axes
from jaxspeed.ops.mask import Segments
from jaxspeed.ops.sequence_passes import DevicePasses, SequenceShards
from jaxspeed.ops.two_passes import in_two_passes

Kind = Literal["gather", "ulysses", "ring", "both"]
Layout = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class SequenceForm:
    """How one attention runs over the axis.

    Attributes:
      layout: the order of the tokens. Contiguous: device r of P has the r-th part. Zig-zag: of 2 P
        chunks device r has chunks r and 2 P - 1 - r, and all arrays are permuted so.
      ulysses: for "both", the size of the groups that exchange heads; the ring has P / ulysses.
    """

    kind: Kind
    layout: Layout = "contiguous"
    ulysses: int = 1

    def group(self, parts: int) -> int:
        """The size of the groups that exchange heads."""
        return {"ulysses": parts, "both": self.ulysses}.get(self.kind, 1)


def refusal(
    form: AttentionForm,
    how: SequenceForm,
    *,
    heads: int,
    seq: int,
    kv_seq: int,
    parts: int,
    tensor: int = 1,
) -> str | None:
    """Why an attention cannot run so over `parts` devices, and what can; None if it can.

    Args:
      heads, seq, kv_seq: query heads, positions of queries and of keys, of all devices.
      tensor: the size of the axis that shards the heads.
    """
    if form.rows is not None and how.kind != "gather":
        return (
            f"{how.kind} takes causal, window and segment masks, soft caps and sinks, and this "
            "attention's scores have something else between its products: use gather or auto"
        )
    group = how.group(parts)
    device_heads = heads // tensor if heads % tensor == 0 else heads
    if parts % group:
        return f"groups of {group} devices do not divide seq {parts}"
    if device_heads % group:
        of_device = (
            f" ({device_heads} on each device of tensor {tensor})" if device_heads != heads else ""
        )
        fitting = [n for n in range(2, parts) if parts % n == 0 == device_heads % n]
        both = f", kind both with groups of {fitting[-1]}" if fitting else ""
        return (
            f"{heads} query heads{of_device} do not divide by {group} devices that exchange heads: "
            f"use ring or gather{both}"
        )
    if how.layout == "zigzag":
        if seq != kv_seq:
            return f"zigzag needs as many keys ({kv_seq}) as queries ({seq}): use contiguous"
        if seq % (2 * parts):
            return f"zigzag has {2 * parts} chunks, which do not divide {seq}: use contiguous"
    return None


def over_sequence(
    form: AttentionForm, how: SequenceForm, body: Callable[..., jax.Array], *operands: jax.Array
) -> jax.Array:
    """The attention `body(*operands)` of global arrays, over the free `seq` axis of the mesh."""
    free = free_axes()
    parts = free.get(SEQ, 1)
    if parts == 1:
        return body(*operands)
    q, k, v, *others = operands
    heads, tensor = q.shape[2], free.get(TENSOR, 1)
    seq, kv_seq = q.shape[1], k.shape[1]
    lengths = {"seq": seq, "kv_seq": kv_seq}
    if why := refusal(form, how, heads=heads, parts=parts, tensor=tensor, **lengths):
        raise ModelError(f"attention over seq {parts}: {why}")
    if form.rows is not None:
        return by_rows(body, (1, None, None, *form.rows), *operands)
    dtype = jax.eval_shape(body, *operands).dtype
    q, k, v = (x.astype(jnp.result_type(q, k, v)) for x in (q, k, v))
    k, v = repeated_for_sharding(q, k, v)
    sinks = others.pop() if form.sinks else None
    segments = Segments(*others) if form.segments else None
    if how.layout == "contiguous":  # the chunks of others would be elsewhere
        q, k, v, segments = _padded(q, k, v, segments, parts, causal=form.mask.causal)

    of_heads = TENSOR if tensor > 1 and heads % tensor == 0 == k.shape[2] % tensor else None
    samples = free_sample_axes(len(q))
    spec = P(samples or None, SEQ, of_heads)
    of_ids = P(samples or None, SEQ) if segments is not None else None
    specs: Any = spec, spec, spec, of_ids, P(of_heads) if sinks is not None else None
    sums = P(samples or None, of_heads, SEQ)

    def on_devices(fn: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            fn,
            in_specs=ins,
            out_specs=outs,
            axis_names=set(free),
            check_vma=False,  # a Pallas call does not declare over which axes its results vary
        )

    group = how.group(parts)
    shards = SequenceShards(parts, group, how.layout == "zigzag", samples)
    passes = DevicePasses(form, shards, seq, kv_seq, gathers=how.kind == "gather")
    attend = in_two_passes(
        on_devices(passes.forward, specs, (spec, sums)),
        on_devices(passes.backward, (*specs, spec, sums, spec), (spec, spec, spec, specs[-1])),
    )
    if group == 1:
        return attend(q, k, v, segments, sinks)[:, :seq].astype(dtype)

    def exchanged(x: jax.Array, there: Any, back: Any) -> jax.Array:
        """`there(x)` on each device; `back` is its transpose."""
        there, back = (on_devices(fn, (spec,), spec) for fn in (there, back))
        exchange: Any = jax.custom_vjp(there)
        exchange.defvjp(lambda x: (there(x), None), lambda _, d_x: (back(d_x),))
        return exchange(x)

    def by_heads(x: jax.Array) -> jax.Array:
        x_heads, of_q = (n // (tensor if of_heads else 1) for n in (x.shape[2], heads))
        copies = copies_of(of_q, x_heads, group)

        def there(x: jax.Array) -> jax.Array:
            return shards.heads_for_positions(repeated(x, copies))

        def back(d_x: jax.Array) -> jax.Array:
            d_x = shards.positions_for_heads(d_x)
            if copies == 1:
                return d_x
            wide = jnp.promote_types(d_x.dtype, jnp.float32)
            by_copy = d_x.reshape(*d_x.shape[:2], x_heads, copies, -1)
            return jnp.sum(by_copy, axis=3, dtype=wide).astype(d_x.dtype)

        return exchanged(x, there, back)

    out = attend(by_heads(q), by_heads(k), by_heads(v), segments, sinks)
    out = exchanged(out, shards.positions_for_heads, shards.heads_for_positions)
    return out[:, :seq].astype(dtype)


def _padded(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    parts: int,
    *,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, Segments | None]:
    """Operands of lengths that `parts` divides; no query sees a key that is added."""
    seq, kv_seq = q.shape[1], k.shape[1]
    # A kernel for TPUs has full blocks, but short sequences are not worth more of them.
    block = splash.LANES if splash.generation() is not None else 1
    unit = parts * (block if min(seq, kv_seq) >= block * parts else 1)
    more_q, more_k = -seq % unit, -kv_seq % unit
    if not more_q and not more_k:
        return q, k, v, segments
    if more_k and not (causal and seq <= kv_seq):
        if segments is None:
            segments = Segments(*(jnp.zeros(x.shape[:2], jnp.int32) for x in (q, k)))
        ids, kv_ids = (x.astype(jnp.int32) for x in segments)
        other = jnp.broadcast_to(jnp.max(ids) + 1, (len(k), more_k))
        segments = Segments(ids, jnp.concatenate([kv_ids, other], axis=1))
    elif segments is not None:
        segments = Segments(segments.q, jnp.pad(segments.kv, ((0, 0), (0, more_k)), mode="edge"))
    if segments is not None:
        segments = Segments(jnp.pad(segments.q, ((0, 0), (0, more_q)), mode="edge"), segments.kv)
    q, k, v = (
        jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))
        for x, more in ((q, more_q), (k, more_k), (v, more_k))
    )
    return q, k, v, segments
