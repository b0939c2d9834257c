"""Splash attention, JAX's TPU kernel: scores stay in the core's VMEM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.ops.mask import Mask, Segments, computes_blocks
from jaxspeed.ops.two_passes import gradients_from

LANES = 128  # the width of a TPU register: blocks are multiples of it
_SAVED = "saved"  # checkpoint name of the kernel's result and sums, inside `backward`
BLOCKS = (512, 256, 128)  # larger ones reuse more of a block of keys; 512 fits every head_dim
# The first TPU for which libtpu 0.0.52 compiles matmuls of bf16 in a kernel: earlier ones get fp32.
MULTIPLIES_BF16 = 4
_assumed: ContextVar[int | None] = ContextVar("tpu_generation", default=None)


@contextmanager
def assumed(generation: int | None) -> Iterator[None]:
    """Context in which attention is traced for an absent TPU; None: that of an outer context."""
    token = _assumed.set(generation or _assumed.get())
    try:
        yield
    finally:
        _assumed.reset(token)


def generation() -> int | None:
    """The generation of the TPU for which the program is traced (3 of v3); None if unknown."""
    if (given := _assumed.get()) is not None:
        return given
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.local_devices()[0].device_kind if device is None else device.device_kind
    found = re.match(r"TPU v?(\d+)", kind)
    return int(found[1]) if found else None


def supports(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernel supports these shapes and dtypes."""
    full_blocks = q.shape[1] % LANES == 0 and k.shape[1] % LANES == 0
    return full_blocks and q.dtype in (jnp.float32, jnp.bfloat16)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(attention, log-sum-exp of each query's scores [batch, heads, seq]) of one device's shard.

    Shapes as in `attention`. `interpret` runs it without a TPU, slowly.
    """
    dtype = q.dtype
    q, k, v = _operands(q, k, v)
    kernel = _kernel(q, k, mask, interpret, save_residuals=True, attn_logits_soft_cap=soft_cap)
    with computes_blocks(mask.blocks(q.shape[1], k.shape[1], *_blocks(q, k))[0]):
        out, (sums,) = _over_batch(kernel, q, k, v, segments, scale)
    # The kernel returns each sum 128 times. Without a barrier XLA fuses the slice of one into the
    # backward pass, and so holds all until then: with heads of 128, twice the bytes of `out`.
    out, sums = jax.lax.optimization_barrier((out.astype(dtype), sums))
    return out.swapaxes(1, 2), sums


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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, from the results of `forward`."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        options = {"residual_checkpoint_name": _SAVED, "attn_logits_soft_cap": soft_cap}
        kernel = _kernel(q, k, mask, interpret, **options)
        return _over_batch(kernel, q, k, v, segments, scale)

    dtype = q.dtype
    q, k, v, out, d_out = _operands(q, k, v, out, d_out)
    saving = jax.checkpoint(attend, policy=jax.checkpoint_policies.save_only_these_names(_SAVED))
    with computes_blocks(mask.blocks(q.shape[1], k.shape[1], *_blocks(q, k))[0]):
        saved = out.swapaxes(1, 2), sums
        dq, dk, dv = gradients_from(saving, (q, k, v), saved, d_out.swapaxes(1, 2))
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)


def _operands(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays in the dtype of the kernel's matmuls."""
    chip = generation()
    if chip is None or chip >= MULTIPLIES_BF16:
        return arrays
    return tuple(x.astype(jnp.float32) for x in arrays)


def _blocks(q: jax.Array, k: jax.Array) -> tuple[int, int]:
    """The sizes of the blocks of queries and of keys."""
    block_q, block_kv = (next(b for b in BLOCKS if x.shape[1] % b == 0) for x in (q, k))
    return block_q, block_kv


def _kernel(q: jax.Array, k: jax.Array, mask: Mask, interpret: bool, **options: Any) -> Any:
    # Import Pallas lazily: that takes 0.2 s, and on a CPU it is not used.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    seq, kv_seq, heads = q.shape[1], k.shape[1], q.shape[2]
    sides = mask.sides() or ((None, 0) if mask.causal else None)
    shape = (seq, kv_seq)
    head_mask = splash.FullMask(shape) if sides is None else splash.LocalMask(shape, sides, 0)
    block_q, block_kv = _blocks(q, k)
    return splash.make_splash_mha(
        splash.MultiHeadMask([head_mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        interpret=interpret,
        **options,
    )


def _over_batch(
    kernel: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    scale: float,
) -> Any:
    """Adapt the kernel, which has no scale and no batch dim, and heads before the sequence."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    ids = None if segments is None else splash.SegmentIds(segments.q, segments.kv)
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    return jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q, k, v)), ids)
