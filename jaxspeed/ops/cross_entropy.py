"""Cross-entropy of logits; fused with the head, in chunks of the vocabulary, and by token.

For one token with hidden state h, head W [vocab, embed] and target y, with l = W h + b:

    lse  = log sum_v exp(l_v)
    loss = lse - (1 - eps) l_y - eps mean_v(l_v) + z lse^2

eps is the label smoothing and z the weight of the z-loss (PaLM, arXiv:2204.02311, section 5). The
cross-entropies return the *sum* over the tokens that count and their number, so that a mean over
micro-batches and devices is taken once, at the end. `token_logprobs` returns l_y - lse for
each token.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxspeed.errors import ModelError
from jaxspeed.ops.free_axes import vocabulary_parts
from jaxspeed.ops.vocabulary_parallel import (
    LOWEST_BELOW,
    Statistic,
    VocabularySums,
    chunks_of,
    logits_of,
    pick,
    sums_over_vocabulary,
)

WeightLayout = Literal["vocab_embed", "embed_vocab"]


class TokenLogprobs(NamedTuple):
    """What `token_logprobs` returns, each with the shape of its targets, or None if not requested.

    `entropy` is that of the softmax in nats; `is_top` whether the target is the argmax.
    """

    logprobs: jax.Array
    entropy: jax.Array | None = None
    is_top: jax.Array | None = None
    mean_logit: jax.Array | None = None


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
    also: list[Statistic] = ["logit_sum"] if label_smoothing else []
    return _loss(
        _sums_of_logits(logits, labels, also),
        labels,
        logits.shape[-1],
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
    weight_layout: WeightLayout = "vocab_embed",
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
    also: list[Statistic] = ["logit_sum"] if label_smoothing else []
    sums, vocab = _vocabulary_sums(
        hidden,
        weight,
        targets,
        bias=bias,
        soft_cap=soft_cap,
        chunk=chunk,
        weight_layout=weight_layout,
        also=also,
    )
    return _loss(
        sums,
        targets,
        vocab,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def token_logprobs(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    thresholds: jax.Array | None = None,
    entropy: bool = False,
    is_top: bool = False,
    mean_logit: bool = False,
    bias: jax.Array | None = None,
    ignore_index: int = -100,
    soft_cap: float | None = None,
    chunk: int | None = None,
    weight_layout: WeightLayout = "vocab_embed",
) -> TokenLogprobs:
    """Log-probability of each target, without materializing all logits; more on request.

    Logits are (hidden @ weight.T + bias) / temperature. They are computed, recomputed and
    communicated as in `linear_cross_entropy`, which sums -logprobs of temperature 1.

    Args:
        hidden, weight, targets, bias, soft_cap, chunk, weight_layout: as in `linear_cross_entropy`.
            A cap comes before the temperature.
        temperature: above 0; a number or a scalar array, which has no gradient.
        thresholds: [...], from 0: log-probabilities and entropy are of the softmax of the target
            and of the logits at most so far below the largest, as for a token that was drawn from
            these alone. No gradient; the head is multiplied once more if it is in chunks.
        entropy: also return the entropy of the softmax, in nats, with its gradient.
        is_top: also return whether the target is the argmax, as bool.
        mean_logit: also return the mean of the logits over the vocabulary, with its gradient.
        ignore_index: tokens with this target are 0 (or False) in all results, without gradient.
            The log-probability of any other target outside [0, vocab) is NaN.

    Returns:
        `TokenLogprobs`, in fp32 (fp64 for fp64 operands).
    """
    temperature = _checked(temperature)
    sums, vocab = _vocabulary_sums(
        hidden,
        weight,
        targets,
        bias=bias,
        soft_cap=soft_cap,
        temperature=temperature,
        thresholds=thresholds,
        chunk=chunk,
        weight_layout=weight_layout,
        also=_also(entropy, is_top, mean_logit),
    )
    return _token_logprobs(sums, targets, vocab, ignore_index)


def logit_logprobs(
    logits: jax.Array,
    targets: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    thresholds: jax.Array | None = None,
    entropy: bool = False,
    is_top: bool = False,
    mean_logit: bool = False,
    ignore_index: int = -100,
) -> TokenLogprobs:
    """`token_logprobs` of a model that returns its logits [..., vocab]."""
    if logits.shape[:-1] != targets.shape:
        raise ModelError(f"logits {logits.shape} do not match targets {targets.shape}")
    logits = logits.astype(_accumulator(logits)) / _checked(temperature)
    sums = _sums_of_logits(logits, targets, _also(entropy, is_top, mean_logit), thresholds)
    return _token_logprobs(sums, targets, logits.shape[-1], ignore_index)


def _checked(temperature: float | jax.Array) -> float | jax.Array:
    """A temperature that logits can be divided by."""
    if jnp.ndim(temperature):
        raise ModelError(f"temperature has shape {jnp.shape(temperature)}: it should be a scalar")
    if isinstance(temperature, jax.Array):
        return temperature
    if not float(temperature) > 0:
        raise ModelError(f"temperature is {temperature}: logits are divided by it, so above 0")
    return float(temperature)


def _also(entropy: bool, is_top: bool, mean_logit: bool) -> list[Statistic]:
    requests: dict[Statistic, bool] = {
        "logit_sum": mean_logit,
        "entropy": entropy,
        "is_top": is_top,
    }
    return [name for name, asked in requests.items() if asked]


def _token_logprobs(
    sums: VocabularySums, targets: jax.Array, vocab: int, ignore_index: int
) -> TokenLogprobs:
    counted = targets != ignore_index
    logprobs = _nan_if_unknown(sums.target_logit - sums.lse, targets, vocab)
    mean = None if sums.logit_sum is None else sums.logit_sum / vocab
    values = TokenLogprobs(logprobs, sums.entropy, sums.is_top, mean)
    return jax.tree.map(lambda x: jnp.where(counted, x, jnp.zeros((), x.dtype)), values)


def _vocabulary_sums(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None,
    soft_cap: float | None,
    chunk: int | None,
    weight_layout: WeightLayout,
    temperature: float | jax.Array = 1.0,
    thresholds: jax.Array | None = None,
    also: Collection[Statistic],
) -> tuple[VocabularySums, int]:
    """The sums over the vocabulary for each token, and the vocabulary's size."""
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
        logits = logits_of(hidden, weight, bias, dtype, soft_cap, temperature)
        return _sums_of_logits(logits, targets, also, thresholds), vocab
    sums = sums_over_vocabulary(
        hidden,
        weight,
        bias,
        targets,
        dtype=dtype,
        soft_cap=soft_cap,
        temperature=temperature,
        chunk=chunk,
        parts=parts,
        also=also,
        thresholds=thresholds,
    )
    return sums, vocab


def _sums_of_logits(
    logits: jax.Array,
    targets: jax.Array,
    also: Collection[Statistic],
    thresholds: jax.Array | None = None,
) -> VocabularySums:
    """The sums over the vocabulary of logits [..., vocab]."""
    logit_sum = jnp.sum(logits, axis=-1) if "logit_sum" in also else None
    if thresholds is not None:
        least = jax.lax.stop_gradient(jnp.max(logits, axis=-1) - thresholds)[..., None]
        is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
        logits = jnp.where((logits >= least) | is_target, logits, jnp.finfo(logits.dtype).min)
    lse = jax.nn.logsumexp(logits, axis=-1)
    entropy = None
    if "entropy" in also:
        log_p = jnp.maximum(logits - lse[..., None], LOWEST_BELOW)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return VocabularySums(
        lse,
        pick(logits, targets),
        logit_sum,
        entropy,
        jnp.argmax(logits, axis=-1) == targets if "is_top" in also else None,
    )


def _accumulator(x: jax.Array) -> jnp.dtype:
    """fp32, or fp64 for fp64 operands."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _loss(
    sums: VocabularySums,
    targets: jax.Array,
    vocab: int,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[jax.Array, jax.Array]:
    """The module's formula, summed over the tokens that count."""
    loss = sums.lse - (1 - label_smoothing) * sums.target_logit
    if sums.logit_sum is not None:
        loss -= label_smoothing * sums.logit_sum / vocab
    if z_loss:
        loss += z_loss * jnp.square(sums.lse)
    counted = targets != ignore_index
    loss = jnp.where(counted, _nan_if_unknown(loss, targets, vocab), 0)
    # One sum, so that devices all-reduce both at once. (Two independent collectives can deadlock
    # the simulated devices of XLA:CPU.)
    both = jnp.stack([loss, counted.astype(loss.dtype)])
    total, weight = jnp.sum(both, axis=range(1, both.ndim))
    return total, weight


def _nan_if_unknown(values: jax.Array, targets: jax.Array, vocab: int) -> jax.Array:
    """Per-token values, with NaN where the target is outside of the vocabulary."""
    known = (targets >= 0) & (targets < vocab)
    return jnp.where(known, values, jnp.nan)
