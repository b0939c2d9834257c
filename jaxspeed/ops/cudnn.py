"""cuDNN's fused attention; documents that share a sequence are given to it by their offsets."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.ops import gpu, gpu_flash
from jaxspeed.ops.mask import KernelCall, Mask, Segments, not_estimated
from jaxspeed.ops.two_passes import gradients_from, saved_sums

FLASH: gpu.Capability = (8, 0)
# JAX tests offsets from this version on, with head dims of 64; larger ones than these are not
# supported on all GPUs. That offsets need Hopper it checks itself.
PACKED_VERSION, PACKED_HEAD_DIM = 90600, 128
MOST_ELEMENTS = 2**31  # of a device's queries: offsets are counted in elements, in 32 bits
# Per sequence. cuDNN's packed layout holds sums and a workspace for each document that there could
# be: of 32, 4 GB in a Llama of 1.2 billion parameters with 4 x 4,096 tokens, of 4, 0.5 GB. `triton`
# needs none, and skips what documents hide. Triton against cuDNN on an H200, forward and backward
# of 4,096 tokens in ms: with heads of 64, 4.0 and 3.4 for one document, 1.6 and 2.0 for three; with
# heads of 128, 6.4 and 2.5 for one, 1.9 and 1.4 for four, 1.1 and 1.5 for eight.
MOST_DOCUMENTS = 4


def supports(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None, mask: Mask
) -> bool:
    """Whether the installed cuDNN supports these shapes, dtypes and masks.

    What is not checked here is checked by JAX.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not gpu.is_at_least(FLASH):
        return False
    if mask.window is not None and not mask.causal:
        return False  # cuDNN's window looks back only
    # Documents of queries are those of keys, and what cuDNN does not take is for
    # `gpu_flash`.
    if segments is not None and not (
        q.shape[1] == k.shape[1] and q.shape[3] <= PACKED_HEAD_DIM and gpu_flash.supports(q, k)
    ):
        return False
    try:
        if segments is not None and gpu.cudnn_version() < PACKED_VERSION:
            return False
        passes = functools.partial(_tried, mask=mask)
        jax.eval_shape(passes, q, k, v, segments)
    except (NotImplementedError, RuntimeError, ValueError):
        return False  # no cuDNN, or unsupported shapes
    return True


def _tried(q: Any, k: Any, v: Any, segments: Segments | None, mask: Mask) -> Any:
    attend = functools.partial(_attend, mask=mask, scale=1.0)
    if segments is not None:
        attend = functools.partial(_packed, PackedDocuments.of(segments), mask=mask, scale=1.0)
    return jax.vjp(attend, q, k, v)[0]


def forward(
    call: KernelCall,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    """(attention, log-sum-exp of each query's scores [batch, heads, seq])."""
    form: dict[str, Any] = {"mask": call.mask, "scale": call.scale}
    if segments is None:
        # `return_residual` would round the sums to the dtype of q (jax 0.11.2 and 0.12.0.1).
        return saved_sums(functools.partial(_attend, **form), (q, k, v))
    if q.size >= MOST_ELEMENTS:
        return gpu_flash.kernel(q, k).forward(call, q, k, v, segments)
    documents = PackedDocuments.of(segments)

    def packed(q: Any, k: Any, v: Any, segments: Any) -> Any:
        attend = functools.partial(_packed, documents, **form)
        out, sums = saved_sums(attend, (q, *_repeated(q, k, v)))
        return out, documents.by_token(sums)

    other = not_estimated(functools.partial(gpu_flash.kernel(q, k).forward, call))
    return lax.cond(documents.fit, packed, other, q, k, v, segments)


def backward(
    call: KernelCall,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    out: jax.Array,
    sums: jax.Array,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, from the results of `forward`."""
    form: dict[str, Any] = {"mask": call.mask, "scale": call.scale}
    if segments is None:
        attend = functools.partial(_attend, **form)
        return gradients_from(attend, (q, k, v), (out, sums), d_out)
    if q.size >= MOST_ELEMENTS:
        return gpu_flash.kernel(q, k).backward(call, q, k, v, segments, out, sums, d_out)
    documents = PackedDocuments.of(segments)

    def packed(q: Any, k: Any, v: Any, segments: Any, out: Any, sums: Any, d_out: Any) -> Any:
        attend = functools.partial(_packed, documents, **form)
        saved = out, documents.by_document(sums)
        d_q, *d_kv = gradients_from(attend, (q, *_repeated(q, k, v)), saved, d_out)
        grouped = (x.reshape(*k.shape[:3], -1, k.shape[3]) for x in d_kv)
        return d_q, *(jnp.sum(x, axis=3, dtype=jnp.float32).astype(k.dtype) for x in grouped)

    other = not_estimated(functools.partial(gpu_flash.kernel(q, k).backward, call))
    return lax.cond(documents.fit, packed, other, q, k, v, segments, out, sums, d_out)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, scale: float) -> jax.Array:
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=mask.causal,
        local_window_size=mask.sides(),
        implementation="cudnn",
    )


# -- the packed layout -----------------------------------------------------------------------------


class PackedDocuments(NamedTuple):
    """The documents of each sequence: its runs of equal segment ids, in order.

    Attributes:
      starts, lengths: [batch, MOST_DOCUMENTS], -1 where there is no document.
      document: [batch, seq], a token's document in its sequence.
      fit: whether these are the segments of all sequences: at most MOST_DOCUMENTS runs, each of an
        id of its own, of queries and keys alike.
    """

    starts: jax.Array
    lengths: jax.Array
    document: jax.Array
    fit: jax.Array

    @classmethod
    def of(cls, segments: Segments) -> PackedDocuments:
        ids = segments.q
        batch, seq = ids.shape
        begins = jnp.concatenate([jnp.full((batch, 1), True), ids[:, 1:] != ids[:, :-1]], axis=1)
        find = functools.partial(jnp.nonzero, size=MOST_DOCUMENTS, fill_value=seq)
        starts = jax.vmap(lambda x: find(x)[0])(begins).astype(jnp.int32)
        there = starts < seq
        ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=seq)
        names = jnp.take_along_axis(ids, jnp.minimum(starts, seq - 1), axis=1)
        alike = (names[:, :, None] == names[:, None]) & there[:, :, None] & there[:, None]
        fit = jnp.all(begins.sum(1) <= MOST_DOCUMENTS) & (alike.sum() == there.sum())
        return cls(
            jnp.where(there, starts, -1),
            jnp.where(there, ends - starts, -1),
            jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1,
            fit & jnp.all(segments.q == segments.kv),
        )

    @property
    def offsets(self) -> jax.Array:
        """[batch, MOST_DOCUMENTS + 1], as JAX takes them."""
        return jnp.pad(self.starts, ((0, 0), (0, 1)), constant_values=-1)

    # cuDNN numbers the documents through the batch, and has sums [documents, heads, seq], a
    # document's from 0 on.

    def by_token(self, sums: jax.Array) -> jax.Array:
        """[batch, heads, seq], from cuDNN's."""
        counts = self.document[:, -1] + 1
        row = (jnp.cumsum(counts) - counts)[:, None] + self.document
        place = jnp.arange(self.document.shape[1]) - jnp.take_along_axis(
            self.starts, self.document, axis=1
        )
        return sums[row, :, place].swapaxes(1, 2)

    def by_document(self, sums: jax.Array) -> jax.Array:
        """cuDNN's, from [batch, heads, seq]; what stands behind a document's end is not read."""
        starts = self.starts.reshape(-1)
        (which,) = jnp.nonzero(starts >= 0, size=starts.size, fill_value=0)
        wide = jnp.concatenate([sums, jnp.zeros_like(sums)], axis=2)

        def one(sequence: jax.Array, start: jax.Array) -> jax.Array:
            first, size = (sequence, 0, start), (1, *sums.shape[1:])
            return lax.dynamic_slice(wide, first, size)[0]

        return jax.vmap(one)(which // MOST_DOCUMENTS, starts[which])


def _packed(
    documents: PackedDocuments, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, scale: float
) -> jax.Array:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    kind = fused.MaskType.PADDING_CAUSAL if mask.causal else fused.MaskType.PADDING
    return fused.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=documents.lengths,
        kv_seqlen=documents.lengths,
        q_offsets=documents.offsets,
        kv_offsets=documents.offsets,
        scale=scale,
        mask_type=kind,
        sliding_window_length=mask.window,
    )


def _repeated(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """Keys and values with as many heads as queries.

    JAX multiplies the offsets of keys by the number of key heads (0.11.2, 0.12.0.1); that cuDNN's
    gradients are right with fewer of them has not been seen on a GPU.
    """
    return [jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v)]
