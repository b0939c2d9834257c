"""Cross-entropy, plain for classes and in chunks over the vocabulary for language models.

For one token with hidden state h, head W [vocab, embed] and target y, with l = W h + b:

    lse  = log sum_v exp(l_v)
    loss = lse - (1 - eps) l_y - eps mean_v(l_v) + z lse^2

eps is the label smoothing and z the weight of the z-loss (PaLM, arXiv:2204.02311, section 5). Both
functions here return the *sum* over the tokens that count and their number, so that a mean over
micro-batches and devices can be taken once, at the end, whatever the batch was cut into.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.errors import ModelError

AUTO_CHUNK = (
    8192  # columns: 256 MiB of fp32 logits for 8192 tokens, and a matmul that fills any MXU
)
LANES = 128  # a padded chunk is a multiple of this, the width of a TPU register


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
        target_logit=_pick(logits, labels),
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
    chunk: int | None = None,
    weight_layout: Literal["vocab_embed", "embed_vocab"] = "vocab_embed",
) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy(hidden @ weight.T + bias, targets)`, never holding all logits.

    The head is scanned in chunks of its vocabulary with an online log-sum-exp; the backward pass
    recomputes a chunk's logits, so that one chunk of logits, and under ZeRO 3 one chunk of the
    head, is alive at a time in both directions, for one more matmul with the head. Logits are
    accumulated in fp32, whatever the operands.

    Args:
        hidden: [..., embed].
        weight: [vocab, embed], or [embed, vocab] with `weight_layout="embed_vocab"`.
        targets: [...] integers; `ignore_index` marks tokens that do not count. Any other target
            outside [0, vocab) makes the sum NaN: a program on a device cannot raise.
        bias: [vocab], added to the logits.
        z_loss: weight of lse^2.
        label_smoothing: share of the target's probability that is spread over the vocabulary.
        chunk: columns at a time. By default about 8192, in a number that divides the vocabulary
            where there is one, else with the last chunk padded.

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
            f"hidden {hidden.shape} does not fit targets {targets.shape} and a head of "
            f"{vocab} x {embed}: it should be {(*targets.shape, embed)}"
        )
    n_chunks, chunk = chunks_of(vocab, chunk)
    dtype = _accumulator(hidden)
    if n_chunks == 1:  # whole either way: nothing to scan, and no logits to compute twice
        logits = _logits(hidden, weight, bias, dtype)
        return cross_entropy(
            logits,
            targets,
            ignore_index=ignore_index,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
        )
    padding = n_chunks * chunk - vocab
    if padding:
        weight = jnp.pad(weight, ((0, padding), (0, 0)))
        bias = bias if bias is None else jnp.pad(bias, (0, padding))
    lowest = jnp.finfo(dtype).min
    operand_dtype = hidden.dtype
    # The gradient of `hidden` is a sum over chunks: as a fp32 loop constant it is summed in fp32.
    wide_hidden = hidden.astype(dtype)

    def body(carry, xs):
        running_max, running_sum, target_logit, logit_sum = carry
        chunk_weight, chunk_bias, start = xs
        logits = _logits(wide_hidden.astype(operand_dtype), chunk_weight, chunk_bias, dtype)
        here = (targets >= start) & (targets < start + chunk)
        target_logit += jnp.where(here, _pick(logits, targets - start), 0)
        real = start + jnp.arange(chunk) < vocab  # only the last chunk has padding
        if label_smoothing:
            logit_sum += jnp.sum(jnp.where(real, logits, 0) if padding else logits, axis=-1)
        if padding:
            logits = jnp.where(real, logits, lowest)
        # The maximum only keeps exp in range: lse does not depend on it, so it has no gradient.
        new_max = lax.stop_gradient(jnp.maximum(running_max, jnp.max(logits, axis=-1)))
        running_sum *= jnp.exp(running_max - new_max)
        running_sum += jnp.sum(jnp.exp(logits - new_max[..., None]), axis=-1)
        return (new_max, running_sum, target_logit, logit_sum), None

    zeros = jnp.zeros(targets.shape, dtype)
    (top, total, target_logit, logit_sum), _ = lax.scan(
        jax.checkpoint(body, prevent_cse=False),
        (jnp.full(targets.shape, lowest, dtype), zeros, zeros, zeros),
        (
            weight.reshape(n_chunks, chunk, embed),
            None if bias is None else bias.reshape(n_chunks, chunk),
            jnp.arange(n_chunks) * chunk,
        ),
    )
    return _finish(
        targets,
        vocab,
        lse=top + jnp.log(total),
        target_logit=target_logit,
        logit_sum=logit_sum,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def chunks_of(vocab: int, chunk: int | None = None) -> tuple[int, int]:
    """(how many chunks, columns of each) for a vocabulary; the last one may be padded.

    Without a wish: the fewest chunks of at most `AUTO_CHUNK` columns, or up to twice as many if
    that divides the vocabulary evenly, because padding copies the head once.
    """
    if chunk is not None:
        if chunk < 1:
            raise ModelError(f"chunk is {chunk}: it counts columns of the vocabulary, at least 1")
        chunk = min(chunk, vocab)
        return -(-vocab // chunk), chunk
    fewest = -(-vocab // AUTO_CHUNK)
    for count in range(fewest, 2 * fewest + 1):
        if vocab % count == 0:
            return count, vocab // count
    size = -(-vocab // fewest)
    size = -(-size // LANES) * LANES
    return -(-vocab // size), size


def _accumulator(x: jax.Array) -> jnp.dtype:
    """fp32, or fp64 where the operands are."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _logits(
    hidden: jax.Array, weight: jax.Array, bias: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """hidden [..., embed] times weight [columns, embed] plus bias, accumulated in `dtype`.

    The gradient of logits is fp32, and by default JAX widens the bf16 operand of the backward
    matmuls to match (jax issue 24047): half the speed on a GPU. Naming the algorithm narrows the
    gradient instead, as in any bf16 layer. For fp16 no such algorithm lowers on CPU and TPU.
    """
    bf16 = hidden.dtype == weight.dtype == jnp.bfloat16
    logits = lax.dot_general(
        hidden,
        weight,
        (((hidden.ndim - 1,), (1,)), ((), ())),
        precision=lax.DotAlgorithmPreset.BF16_BF16_F32 if bf16 else None,
        preferred_element_type=dtype,
    )
    return logits if bias is None else logits + bias.astype(dtype)


def _pick(logits: jax.Array, index: jax.Array) -> jax.Array:
    """logits[..., index], with an index outside taken as the nearest one inside."""
    index = jnp.clip(index, 0, logits.shape[-1] - 1)
    return jnp.take_along_axis(logits, index[..., None], axis=-1, mode="clip")[..., 0]


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
    return jnp.sum(loss), jnp.sum(counted, dtype=loss.dtype)
