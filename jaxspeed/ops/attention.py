"""Attention for all models, with the kernel of the platform that the program is lowered for.

    out = softmax(cap(scale q k^T) + bias + mask) v,   cap(s) = soft_cap tanh(s / soft_cap)

where a soft cap and a bias may be given.

| lowered for | kernel | supports |
|---|---|---|
| TPU | splash attention (`jax.experimental.pallas`) | fp32, bf16; sequences that 128 divides |
| CUDA | cuDNN, if installed | bf16, fp16; no soft cap; few segments, from Hopper on |
| Hopper, else | `mosaic_gpu` (`jax.experimental.pallas`) | as `triton`: bf16, fp16, no wide heads |
| CUDA, else | `triton` (`jax.experimental.pallas`) | 128 queries and keys or more; from Ampere on |
| CPU | `row_blocks`, in XLA operations | fp32; where another platform has a kernel |
| any | `plain`, which materializes the scores | everything |

On TPU v2 and v3 splash attention multiplies bf16 as fp32.

Sinks (arXiv:2309.17453, as gpt-oss learns them) are one more score of each query and head, without
a value: they join what a kernel returns (`two_passes.with_sinks`).

Each kernel is two functions, `forward` and `backward`. All but cuDNN's take an `offset` of the
queries, which may be known at run time only: query i is then at position `offset + i`, and calls
for parts of the keys are merged by their log-sum-exps. `row_blocks` takes any dtype then.

The choice is made by `jax.lax.platform_dependent`: a program traced on a machine without
accelerators and lowered for a TPU gets the TPU's kernel. Unsupported inputs go to `plain`.

A tensor axis of the mesh that divides the query heads shards them, whatever the number of key heads
(`repeated_for_sharding`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxspeed.axes import SEQ
from jaxspeed.errors import ModelError
from jaxspeed.ops import cudnn, gpu_flash, mosaic_gpu, row_blocks, splash, triton
from jaxspeed.ops.attention_call import AttentionForm, attention_call
from jaxspeed.ops.free_axes import free_axes, tensor_parts
from jaxspeed.ops.mask import KernelCall, Mask, Segments
from jaxspeed.ops.per_device import over_batch_and_heads
from jaxspeed.ops.two_passes import (
    NAME,
    Attend,
    in_two_passes,
    with_narrow_values,
    with_sinks,
)

KERNELS = {
    "splash": splash,
    "cudnn": cudnn,
    "mosaic_gpu": mosaic_gpu,
    "triton": triton,
    "row_blocks": row_blocks,
}
# The dtype of fp32 operands under automatic mixed precision: a kernel, which has to be chosen when
# the loss is traced, cannot be cast later.
_autocast: ContextVar[Any] = ContextVar("autocast", default=None)
Implementation = Literal["plain", "splash", "cudnn", "mosaic_gpu", "triton", "row_blocks"]


# Whether an axis `seq` shards the sequences of what is traced: those of generation are replicated.
_over_sequences: ContextVar[bool] = ContextVar("over_sequences", default=True)


@contextlib.contextmanager
def over_sequences(sharded: bool) -> Iterator[None]:
    """Context in which an axis `seq` shards the sequences of attention, or does not."""
    token = _over_sequences.set(sharded)
    try:
        yield
    finally:
        _over_sequences.reset(token)


@contextlib.contextmanager
def autocast_to(dtype: Any) -> Iterator[None]:
    """Context in which attention of fp32 arrays takes operands of this dtype; None: as they are."""
    token = _autocast.set(dtype)
    try:
        yield
    finally:
        _autocast.reset(token)


def operand_dtype(dtype: Any) -> Any:
    """The dtype in which an operation that cannot be cast later takes operands of this dtype."""
    low = _autocast.get()
    return low if low is not None and dtype == jnp.float32 else dtype


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Scaled dot-product attention with grouped heads.

    Args:
        q: [batch, seq, heads, head_dim].
        k, v: [batch, kv_seq, kv_heads, head_dim]; kv_heads divides heads, and query head h reads
            key head h // (heads // kv_heads). Values may have fewer dims than keys.
        causal: query i sees keys j <= i.
        window: query i sees only keys with `|i - j| < window`, itself included.
        segment_ids: [batch, seq] integers; tokens see only their own segment.
        kv_segment_ids: [batch, kv_seq]; by default those of the queries. The output of a query
            that sees no key is finite but undefined, and differs between kernels.
        scale: of the scores; 1 / sqrt(head_dim) by default.
        soft_cap: bound of the scores, as in Gemma 2 (arXiv:2408.00118).
        sinks: [heads], a score of each head that no key has.
        bias: [heads, seq, kv_seq] or [batch, heads, seq, kv_seq], added to the scores; no kernel
            takes one, so that the scores are materialized.
        implementation: forces a kernel, for tests and comparisons.

    Returns:
        [batch, seq, heads, head_dim of v] in the dtype of q, with the checkpoint name "attention"
        for rematerialization policies.
    """
    _check(q, k, v, window, segment_ids, kv_segment_ids, sinks, bias)
    if (low := _autocast.get()) is not None and q.dtype == jnp.float32:
        out = attention(
            *(x.astype(low) for x in (q, k, v)),
            causal=causal,
            window=window,
            segment_ids=segment_ids,
            kv_segment_ids=kv_segment_ids,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
            bias=bias,
            implementation=implementation,
        )
        return out.astype(jnp.float32)
    mask = Mask(causal, window)
    segments: Segments | None = None
    if segment_ids is not None:
        segments = Segments(segment_ids, segment_ids if kv_segment_ids is None else kv_segment_ids)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if implementation is None and free_axes().get(SEQ, 1) > 1 and _over_sequences.get():
        form_of_call = AttentionForm(
            scale, mask, soft_cap, segments=segments is not None, sinks=sinks is not None
        )
        return _one_call(form_of_call, q, k, v, segments, sinks, bias)

    k, v = repeated_for_sharding(q, k, v)
    call = KernelCall(mask, scale, soft_cap)
    by_plain = _by_plain(call)

    if implementation is not None:
        if implementation not in ("plain", *KERNELS):
            raise ModelError(f"implementation {implementation!r} is none of {['plain', *KERNELS]}")
        if implementation == "cudnn" and soft_cap is not None:
            raise ModelError("cudnn has no soft cap")
        if implementation != "plain" and bias is not None:
            raise ModelError(f"{implementation} has no bias")
        if implementation == "plain":
            return checkpoint_name(by_plain(q, k, v, segments, sinks=sinks, bias=bias), NAME)
        attend = in_two_passes(*_two_passes(KERNELS[implementation], call))
        return attend(q, k, v, segments, sinks)

    if bias is not None:
        return checkpoint_name(by_plain(q, k, v, segments, sinks=sinks, bias=bias), NAME)
    fast: dict[str, Any] = {}
    if splash.supports(q, k):
        fast["tpu"] = splash
    if soft_cap is None and cudnn.supports(q, k, k, segments, mask):  # values get the dims of keys
        fast["cuda"] = cudnn
    elif gpu_flash.supports(q, k):
        fast["cuda"] = gpu_flash.kernel(q, k)
    if fast and jax.typeof(q).manual_axis_type.varying:
        # The kernels do not track which axes their results vary over: gradients would be wrong.
        warnings.warn(
            "attention inside a shard_map with check_vma=True materializes the scores on every "
            "platform; with check_vma=False it uses the platform's kernel",
            stacklevel=2,
        )
        fast = {}
    if fast:
        if row_blocks.supports(q, k):
            fast["cpu"] = row_blocks
        return _by_platform(fast, call)(q, k, v, segments, sinks)
    return checkpoint_name(by_plain(q, k, v, segments, sinks=sinks), NAME)


def _one_call(
    form: AttentionForm,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    sinks: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """Attention as one equation, which a pass replaces: sequences are sharded here."""
    operands = [*(segments or ()), *(x for x in (sinks, bias) if x is not None)]

    def body(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
        rest = iter(others)
        ids = None if segments is None else Segments(next(rest), next(rest))
        more: dict[str, Any] = {"mask": form.mask, "scale": form.scale, "soft_cap": form.soft_cap}
        more |= {"sinks": None if sinks is None else next(rest)}
        more |= {"bias": None if bias is None else next(rest)}
        k, v = repeated_for_sharding(q, k, v)
        return checkpoint_name(plain(q, k, v, ids, **more), NAME)

    if bias is not None:  # a general mask: only this program computes it
        of_others = [1, None] * (segments is not None) + [None] * (sinks is not None)
        rows = (*of_others, bias.ndim - 2)
        form = replace(form, segments=False, sinks=False, rows=rows)
    return attention_call(form, body, q, k, v, *operands)


def _by_plain(call: KernelCall) -> Callable[..., jax.Array]:
    return functools.partial(plain, mask=call.mask, scale=call.scale, soft_cap=call.soft_cap)


def _by_platform(kernels: Mapping[str, Any], call: KernelCall) -> Attend:
    """Attention by the platform's kernel, or by `plain` if it has none."""
    by_plain = _by_plain(call)

    def plain_forward(q: Any, k: Any, v: Any, segments: Any, sinks: Any) -> Any:
        batch, seq, heads, _ = q.shape
        # Its sums are not used: its backward pass recomputes the scores.
        out = by_plain(q, k, v, segments, sinks=sinks)
        return out, jnp.zeros((batch, heads, seq), jnp.float32)

    def plain_backward(
        q: Any, k: Any, v: Any, segments: Any, sinks: Any, out: Any, sums: Any, d: Any
    ) -> Any:
        def attend(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
            return by_plain(q, k, v, segments, sinks=sinks)

        return jax.vjp(attend, q, k, v, sinks)[1](d)

    passes = {platform: _two_passes(kernel, call) for platform, kernel in kernels.items()}

    def choose(of_plain: Any, number: int) -> Callable[..., Any]:
        by_platform = {platform: both[number] for platform, both in passes.items()}
        return lambda *args: lax.platform_dependent(*args, default=of_plain, **by_platform)

    return in_two_passes(choose(plain_forward, 0), choose(plain_backward, 1))


def _two_passes(kernel: Any, call: KernelCall) -> tuple[Callable[..., Any], ...]:
    """The passes of a kernel, on each device's batch and heads."""
    passes = [functools.partial(p, call) for p in (kernel.forward, kernel.backward)]
    if kernel is row_blocks:  # XLA partitions its operations
        return with_sinks(*passes)
    forward, backward = (
        functools.partial(over_batch_and_heads, one_pass, out_ranks=ranks)
        for one_pass, ranks in zip(passes, ((4, 3), (4, 4, 4)), strict=True)
    )
    return with_sinks(*with_narrow_values(forward, backward))


def plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Attention in XLA operations: scores and softmax in fp32, or fp64 for fp64 operands.

    `jax.nn.dot_product_attention` does the same and is used for fp32 and bf16: in fp16 it uses a
    matmul that does not lower on CPU, in fp64 it computes softmax in fp32 (jax 0.11.2,
    0.12.0.1), and it has neither soft cap nor sinks nor values with fewer dims than keys.
    """
    same = None if segments is None else segments.same()[:, None]  # [batch, 1, seq, kv_seq]
    in_jax = soft_cap is None and sinks is None and v.shape == k.shape
    if q.dtype in (jnp.float32, jnp.bfloat16) and in_jax:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            None if bias is None else bias.reshape(-1, *bias.shape[-3:]).astype(jnp.float32),
            same,
            scale=scale,
            is_causal=mask.causal,
            local_window_size=mask.sides(),
        )
    batch, seq, heads, head_dim = q.shape
    kv_seq, kv_heads = k.shape[1:3]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    scores = scale * jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k, preferred_element_type=dtype)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias.reshape(-1, *scores.shape[1:]).astype(dtype)
    seen = mask.dense(seq, kv_seq)
    seen = seen if same is None else seen & same[:, None]
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        by_head = sinks.astype(dtype).reshape(1, *scores.shape[1:3], 1, 1)
        more = jnp.broadcast_to(by_head, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, more], axis=-1)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)[..., :kv_seq]
    return jnp.einsum("bhgqk,bkhd->bqhgd", shares, v).reshape(batch, seq, heads, -1)


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    sinks: jax.Array | None,
    bias: jax.Array | None,
) -> None:
    ranks = q.ndim, k.ndim, v.ndim
    if ranks != (4, 4, 4) or k.shape[:3] != v.shape[:3] or k.shape[3] < v.shape[3]:
        raise ModelError(
            "attention takes q [batch, seq, heads, head_dim] and k, v [batch, seq, kv_heads, "
            f"head_dim], of which v may have fewer dims; got q {q.shape}, k {k.shape}, v {v.shape}"
        )
    batch, seq, heads, head_dim = q.shape
    if k.shape[0] != batch or k.shape[3] != head_dim or heads % k.shape[2]:
        raise ModelError(
            f"q {q.shape} and k {k.shape} do not match: batch and head_dim must be equal, and the "
            f"{k.shape[2]} key heads must divide the {heads} query heads"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ModelError(f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}")
    if sinks is not None and sinks.shape != (heads,):
        raise ModelError(f"sinks is {sinks.shape}, should be {(heads,)}, one score a query head")
    of_scores = heads, seq, k.shape[1]
    if bias is not None and bias.shape not in (of_scores, (batch, *of_scores)):
        raise ModelError(f"bias is {bias.shape}, should be {of_scores}, or of each sample")
    if window is not None and window < 1:
        raise ModelError(f"window is {window}: it counts the visible keys, at least 1 (itself)")
    if segment_ids is None:
        if kv_segment_ids is not None:
            raise ModelError("kv_segment_ids was given without segment_ids")
        return
    if kv_segment_ids is None and seq != k.shape[1]:
        raise ModelError(
            f"queries ({seq}) and keys ({k.shape[1]}) differ in length: give kv_segment_ids"
        )
    for name, ids, length in (
        ("segment_ids", segment_ids, seq),
        ("kv_segment_ids", kv_segment_ids, k.shape[1]),
    ):
        if ids is not None and ids.shape != (batch, length):
            raise ModelError(f"{name} is {ids.shape}, should be {(batch, length)}")


# -- key heads for devices that share the query heads ----------------------------------------------

# Each device has those that its queries read. Where there are fewer key heads than devices, or a
# number that they do not divide, all devices compute all of them, and some key heads are read on
# several devices.


def copies_of(heads: int, kv_heads: int, parts: int) -> int:
    """Copies of each key head for heads sharded over `parts` devices; 0: impossible."""
    copies = parts // math.gcd(parts, kv_heads)
    return copies if heads % (kv_heads * copies) == 0 else 0


def repeated_for_sharding(q: jax.Array, *keys: jax.Array) -> tuple[jax.Array, ...]:
    """Keys and values with heads repeated so that they can be sharded as those of q."""
    copies = copies_of(q.shape[2], keys[0].shape[2], tensor_parts()) or 1
    return tuple(repeated(x, copies) for x in keys)


def repeated(x: jax.Array, copies: int) -> jax.Array:
    """Keys or values [batch, seq, kv_heads, head_dim] with each head `copies` times in a row.

    A gather, whose result the compiler shards: each device selects its heads of x, and the gradient
    of x is one all-reduce. With `jnp.repeat`, a broadcast and a reshape, it would shard the heads
    of x as far as possible, and all-gather them for the copies.
    """
    if copies == 1:
        return x
    heads = np.arange(x.shape[2] * copies) // copies
    return x.at[:, :, heads].get(mode="promise_in_bounds", indices_are_sorted=True)
