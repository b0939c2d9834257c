"""Cross-entropy of logits, and fused linear cross-entropy in chunks of the vocabulary.

For one token with hidden state h, head W [vocab, embed] and target y, with l = W h + b:

    lse  = log sum_v exp(l_v)
    loss = lse - (1 - eps) l_y - eps mean_v(l_v) + z lse^2

eps is the label smoothing and z the weight of the z-loss (PaLM, arXiv:2204.02311, section 5). Both
functions return the *sum* over the tokens that count and their number, so that a mean over
micro-batches and devices is taken once, at the end.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxspeed.errors import ModelError
from jaxspeed.ops.free_axes import vocabulary_parts
from jaxspeed.ops.vocabulary_parallel import chunks_of, logits_of, pick, sums_over_vocabulary


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Summed cross-entropy of `logits` [..., classes] against integer `labels` [...].

    Returns:
        (sum, weight): the loss summed over labels other than `ignore_index`, and how many they are,
        in fp32 (fp64 for fp64 logits). A label outside [0, classes) makes the sum NaN.
    """
    logits = logits.astype(_accumulator(logits))
    return _finish(
        labels,
        logits.shape[-1],
        lse=jax.nn.logsumexp(logits, axis=-1),
        target_logit=pick(logits, labels),
        logit_sum=jnp.sum(logits, axis=-1) if label_smoothing else None,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    chunk: int | None = None,
    weight_layout: Literal["vocab_embed", "embed_vocab"] = "vocab_embed",
) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy(hidden @ weight.T + bias, targets)`, without materializing all logits.

    The head is scanned in chunks of its vocabulary with an online log-sum-exp; the backward pass
    recomputes a chunk's logits, so that one chunk of logits, and under ZeRO 3 one chunk of the
    head, is live at a time in both directions, for one more matmul with the head. Logits are
    accumulated in fp32, whatever the operands. With a tensor axis in the mesh, each of its devices
    computes the logits of its shard of the vocabulary, and sums per token are all-reduced.

    Args:
        hidden: [..., embed].
        weight: [vocab, embed], or [embed, vocab] with `weight_layout="embed_vocab"`.
        targets: [...] integers; tokens with `ignore_index` do not count. Any other target
            outside [0, vocab) makes the sum NaN: a program on a device cannot raise.
        bias: [vocab], added to the logits.
        z_loss: weight of lse^2.
        label_smoothing: fraction of the target's probability spread over the vocabulary.
        soft_cap: bound of the logits: soft_cap tanh(logits / soft_cap), after the bias.
        chunk: columns per chunk and device. By default about 8192, a divisor of the device's
            vocabulary if there is one, else with the last chunk padded.

    Returns:
        (sum, weight) as `cross_entropy`.
    """
    if weight_layout == "embed_vocab":
        weight = weight.T
    elif weight_layout != "vocab_embed":
        raise ModelError(
            f"weight_layout {weight_layout!r} is neither 'vocab_embed' nor 'embed_vocab'"
        )
    vocab, embed = weight.shape
    if hidden.shape != (*targets.shape, embed):
        raise ModelError(
            f"hidden {hidden.shape} does not match targets {targets.shape} and a head of "
            f"{vocab} x {embed}: it should be {(*targets.shape, embed)}"
        )
    dtype, parts = _accumulator(hidden), vocabulary_parts()
    if parts == 1 and chunks_of(vocab, chunk)[0] == 1:  # a single chunk
        logits = logits_of(hidden, weight, bias, dtype, soft_cap)
        return cross_entropy(
            logits,
            targets,
            ignore_index=ignore_index,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
        )
    sums = sums_over_vocabulary(
        hidden,
        weight,
        bias,
        targets,
        dtype=dtype,
        soft_cap=soft_cap,
        chunk=chunk,
        with_logit_sum=label_smoothing != 0,
        parts=parts,
    )
    return _finish(
        targets,
        vocab,
        lse=sums.lse,
        target_logit=sums.target_logit,
        logit_sum=sums.logit_sum,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def _accumulator(x: jax.Array) -> jnp.dtype:
    """fp32, or fp64 for fp64 operands."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _finish(
    targets: jax.Array,
    vocab: int,
    *,
    lse: jax.Array,
    target_logit: jax.Array,
    logit_sum: jax.Array | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[jax.Array, jax.Array]:
    """The module's formula, summed over the tokens that count."""
    loss = lse - (1 - label_smoothing) * target_logit
    if logit_sum is not None and label_smoothing:
        loss -= label_smoothing * logit_sum / vocab
    if z_loss:
        loss += z_loss * jnp.square(lse)
    counted = targets != ignore_index
    known = (targets >= 0) & (targets < vocab)
    loss = jnp.where(counted, jnp.where(known, loss, jnp.nan), 0)
    # One sum, so that devices all-reduce both at once. (Two independent collectives can deadlock
    # the simulated devices of XLA:CPU.)
    both = jnp.stack([loss, counted.astype(loss.dtype)])
    total, weight = jnp.sum(both, axis=range(1, both.ndim))
    return total, weight
