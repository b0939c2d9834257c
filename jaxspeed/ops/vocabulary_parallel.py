"""Vocabulary-parallel, chunked log-sum-exp and target logits of a language model's head.

The loss of a token with hidden state h needs of its logits l = W h + b only

    lse = log sum_v exp(l_v),   the target's l_y,   and for label smoothing  sum_v l_v

and its entropy, with m the maximum of the logits, only  sum_v exp(l_v - m) (l_v - m)  besides.
With a threshold, sums of exp are over the target and the logits from m - threshold on: m is then
computed before, in a scan of its own.

The head is scanned in chunks with an online log-sum-exp; the backward pass recomputes a chunk's
logits. Where mesh axes shard the vocabulary (tensor, and pipe, whose stages share the head), each
of their T devices has a T-th of the rows of W and does this for them; the T maxima and sums of a
token are combined after the scan (Megatron-LM, arXiv:1909.08053, section 3). That is written as a
batch over a leading dim T, which is sharded, so that there is no communication inside the scan, and
its gradient of h is all-reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.errors import ModelError
from jaxspeed.ops.free_axes import over_vocabulary
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.grad_barrier import grads_together

# Columns: 256 MiB of fp32 logits for 8192 tokens, and a matmul that fills any MXU.
AUTO_CHUNK = 8192
LANES = 128  # a padded chunk is a multiple of this, the width of a TPU register
LOWEST_BELOW = -1000  # of a logit below the maximum, so that p log p is finite; exp of it is 0
NO_THRESHOLD = 1e30  # below the largest logit: it leaves all

Statistic = Literal["logit_sum", "entropy", "is_top"]


class VocabularySums(NamedTuple):
    """Sums over the vocabulary, for each token; a `Statistic` that is not requested is None."""

    lse: jax.Array
    target_logit: jax.Array
    logit_sum: jax.Array | None = None
    entropy: jax.Array | None = None
    is_top: jax.Array | None = None  # whether the target is the argmax


class _Running(NamedTuple):
    """The online log-sum-exp's carry: sum_v exp(l_v) is exp(top) total."""

    top: jax.Array
    total: jax.Array
    target_logit: jax.Array
    logit_sum: jax.Array | None
    below: jax.Array | None  # sum_v exp(l_v - top) (l_v - top)
    place: jax.Array | None  # of the target: 1 if it is the argmax, -1 if it is behind it, else 0


def chunks_of(vocab: int, chunk: int | None = None) -> tuple[int, int]:
    """(number of chunks, columns of each) for a vocabulary; the last one may be padded.

    By default the fewest chunks of at most `AUTO_CHUNK` columns, or up to twice as many if that
    divides the vocabulary evenly, because padding copies the head once.
    """
    if chunk is not None:
        if chunk < 1:
            raise ModelError(f"chunk is {chunk}: it is a number of vocabulary columns, at least 1")
        chunk = min(chunk, vocab)
        return -(-vocab // chunk), chunk
    fewest = -(-vocab // AUTO_CHUNK)
    for count in range(fewest, 2 * fewest + 1):
        if vocab % count == 0:
            return count, vocab // count
    size = -(-vocab // fewest)
    size = -(-size // LANES) * LANES
    return -(-vocab // size), size


@dataclass(frozen=True)
class VocabularyChunks:
    """How a head's rows are scanned: `count` chunks of `size` rows of each shard, zero-padded.

    With more than one of the `parts` shards, all that is scanned has a leading dim of them.
    """

    vocab: int
    parts: int
    count: int
    size: int

    @classmethod
    def of(cls, vocab: int, parts: int, chunk: int | None) -> VocabularyChunks:
        return cls(vocab, parts, *chunks_of(-(-vocab // parts), chunk))

    @property
    def rows(self) -> int:
        """Rows of one shard; the last ones may have fewer."""
        return -(-self.vocab // self.parts)

    @property
    def padded(self) -> bool:
        return self.count * self.size * self.parts > self.vocab

    @property
    def starts(self) -> jax.Array:
        """The first row of each chunk, among those of a shard."""
        return jnp.arange(self.count) * self.size

    def first(self, ndim: int) -> jax.Array:
        """The first row of each shard: [parts, ...] of values with so many dims of tokens."""
        return self.rows * jnp.arange(self.parts).reshape(self.parts, *[1] * ndim)

    def real(self, start: jax.Array, ndim: int) -> jax.Array:
        """Which columns of a chunk's logits are of the vocabulary."""
        rows: jax.Array | int = self.vocab
        if self.parts > 1:
            rows = jnp.clip(self.vocab - self.first(ndim), 0, self.rows)[..., None]
        return start + jnp.arange(self.size) < rows

    def on_shards(self, hidden: jax.Array) -> jax.Array:
        """The hidden states for each shard."""
        if self.parts == 1:
            return hidden
        hidden = jnp.broadcast_to(hidden, (self.parts, *hidden.shape))
        return constrain(hidden, over_vocabulary(hidden.ndim, 0), "vocabulary.parts")

    def split(self, x: jax.Array) -> jax.Array:
        """x [vocab, ...] as [count, size, ...] or [count, parts, size, ...].

        No step moves rows between shards, or under ZeRO 3 changes the stored sharding.
        """
        if self.parts == 1:
            return _padded(x, 0, self.count * self.size).reshape(
                self.count, self.size, *x.shape[1:]
            )
        x = _padded(x, 0, self.parts * self.rows).reshape(self.parts, self.rows, *x.shape[1:])
        x = _padded(x, 1, self.count * self.size)
        return x.reshape(self.parts, self.count, self.size, *x.shape[2:]).swapaxes(0, 1)

    def scan[Carry](self, body: Callable[[Carry, Any], Carry], start: Carry, xs: Any) -> Carry:
        """Fold the chunks; a single one without a loop, and without recomputation."""
        if self.count == 1:
            return body(start, jax.tree.map(lambda x: x[0], xs))
        return lax.scan(jax.checkpoint(lambda seen, x: (body(seen, x), None)), start, xs)[0]


def sums_over_vocabulary(
    hidden: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
    *,
    dtype: jnp.dtype,
    soft_cap: float | None = None,
    temperature: float | jax.Array = 1.0,
    chunk: int | None = None,
    also: Collection[Statistic] = (),
    parts: int = 1,
    thresholds: jax.Array | None = None,
) -> VocabularySums:
    """The sums for hidden [..., embed], weight [vocab, embed], bias [vocab] and targets [...].

    `parts` is the number of shards of the vocabulary, and `chunk` the columns per chunk of a shard.
    `thresholds` [...] are how far below the largest logit those are that count.
    The logit of a target outside [0, vocab) is undefined.
    """
    chunks = VocabularyChunks.of(weight.shape[0], parts, chunk)
    chunk = chunks.size
    lowest = jnp.finfo(dtype).min
    tokens_ndim = targets.ndim
    if parts > 1:  # of another shard: outside, or in padding, whose logits are 0
        targets = targets - chunks.first(tokens_ndim)
    hidden = chunks.on_shards(hidden)
    operand_dtype = hidden.dtype
    # The gradient of `hidden` is a sum over chunks: as a fp32 loop constant it is summed in fp32.
    wide_hidden = hidden.astype(dtype)

    def logits_of_chunk(hidden: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        return logits_of(hidden.astype(operand_dtype), weight, bias, dtype, soft_cap, temperature)

    biases = None if bias is None else chunks.split(bias)
    scanned = chunks.split(weight), biases, chunks.starts
    least = None
    if thresholds is not None:  # no gradient flows through the choice of the logits

        def largest(seen: jax.Array, xs: Any) -> jax.Array:
            *operands, start = xs
            logits = logits_of_chunk(hidden, *operands)
            if chunks.padded:
                logits = jnp.where(chunks.real(start, tokens_ndim), logits, lowest)
            return jnp.maximum(seen, jnp.max(logits, axis=-1))

        hidden, xs = lax.stop_gradient((hidden, scanned))
        top = chunks.scan(largest, jnp.full(targets.shape, lowest, dtype), xs)
        least = (jnp.max(top, axis=0) if parts > 1 else top) - lax.stop_gradient(thresholds)

    def body(seen: _Running, xs: tuple[jax.Array, jax.Array | None, jax.Array]) -> _Running:
        chunk_weight, chunk_bias, start = xs
        # XLA unrolls a loop of few chunks, and with the head's gradient offloaded at the end of the
        # step, the logits of all chunks would stay live until then (seen on TPU compiles).
        hidden, chunk_weight = grads_together(wide_hidden, chunk_weight)
        logits = logits_of_chunk(hidden, chunk_weight, chunk_bias)
        here = (targets >= start) & (targets < start + chunk)
        target_logit = seen.target_logit + jnp.where(here, pick(logits, targets - start), 0)
        logit_sum, place = seen.logit_sum, seen.place
        real = chunks.real(start, tokens_ndim)
        if logit_sum is not None:
            logit_sum += jnp.sum(jnp.where(real, logits, 0) if chunks.padded else logits, axis=-1)
        if least is not None:
            is_target = start + jnp.arange(chunk) == targets[..., None]
            real &= (logits >= least[..., None]) | is_target
        if chunks.padded or least is not None:
            logits = jnp.where(real, logits, lowest)
        # The maximum only keeps exp in range: lse does not depend on it, so it has no gradient.
        highest = jnp.max(logits, axis=-1)
        top = lax.stop_gradient(jnp.maximum(seen.top, highest))
        if place is not None:
            argmax = start + jnp.argmax(logits, axis=-1)
            behind = (argmax < targets).astype(dtype)
            place = jnp.where(highest > seen.top, (argmax == targets) - behind, place)
        total, below = _relative_to(top, seen)
        lower = logits - top[..., None]
        exps = jnp.exp(lower)
        if least is not None:  # where none is kept so far, top is as low
            exps = jnp.where(real, exps, 0)
        total += jnp.sum(exps, axis=-1)
        if below is not None:
            below += jnp.sum(exps * jnp.maximum(lower, LOWEST_BELOW), axis=-1)
        return _Running(top, total, target_logit, logit_sum, below, place)

    zeros = jnp.zeros(targets.shape, dtype)
    start = _Running(
        jnp.full(targets.shape, lowest, dtype),
        zeros,
        zeros,
        zeros if "logit_sum" in also else None,
        zeros if "entropy" in also else None,
        zeros if "is_top" in also else None,
    )
    seen = chunks.scan(body, start, scanned)
    if parts > 1:
        seen = _combined(seen)
    log_total = jnp.log(seen.total)
    return VocabularySums(
        seen.top + log_total,
        seen.target_logit,
        seen.logit_sum,
        None if seen.below is None else log_total - seen.below / seen.total,
        None if seen.place is None else seen.place == 1,
    )


def _padded(x: jax.Array, dim: int, size: int) -> jax.Array:
    if x.shape[dim] == size:
        return x
    behind = [(0, size - n if d == dim else 0, 0) for d, n in enumerate(x.shape)]
    return lax.pad(x, jnp.zeros((), x.dtype), behind)  # jnp.pad would hide it inside a jit


def _combined(seen: _Running) -> _Running:
    """Combine the shards, [parts, ...], of a log-sum-exp."""
    top = jnp.max(seen.top, axis=0)
    total, below = _relative_to(top, seen)
    # Of equal maxima the first is the argmax: a shard that has one before the target adds -1.
    place = None if seen.place is None else jnp.where(seen.top == top, seen.place, 0)
    sums = (total, seen.target_logit, seen.logit_sum, below, place)
    return _Running(top, *jax.tree.map(lambda x: jnp.sum(x, axis=0), sums))


def _relative_to(top: jax.Array, seen: _Running) -> tuple[jax.Array, jax.Array | None]:
    """`total` and `below` for another `top`."""
    scale = jnp.exp(seen.top - top)
    total = seen.total * scale
    if seen.below is None:
        return total, None
    return total, seen.below * scale + total * jnp.maximum(seen.top - top, LOWEST_BELOW)


def logits_of(
    hidden: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    dtype: jnp.dtype,
    soft_cap: float | jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
) -> jax.Array:
    """hidden [..., embed] times weight [columns, embed] plus bias, accumulated in `dtype`.

    Then capped, and divided by the temperature.

    Hidden [parts, ..., embed] and weight [parts, columns, embed] are batched over parts.

    The gradient of logits is fp32, and by default JAX widens the bf16 operand of the backward
    matmuls to match (jax issue 24047): half the speed on a GPU. Naming the algorithm narrows the
    gradient instead, as in any bf16 layer. For fp16 no such algorithm lowers on CPU and TPU.
    """
    bf16 = hidden.dtype == weight.dtype == jnp.bfloat16
    over_parts = tuple(range(weight.ndim - 2))
    logits = lax.dot_general(
        hidden,
        weight,
        (((hidden.ndim - 1,), (weight.ndim - 1,)), (over_parts, over_parts)),
        precision=lax.DotAlgorithmPreset.BF16_BF16_F32 if bf16 else None,
        preferred_element_type=dtype,
    )
    if bias is not None:
        between = tuple(range(bias.ndim - 1, logits.ndim - 1))
        logits += jnp.expand_dims(bias.astype(dtype), between)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if isinstance(temperature, jax.Array):
        return logits / lax.stop_gradient(temperature).astype(dtype)
    return logits if temperature == 1 else logits / temperature


def pick(logits: jax.Array, index: jax.Array) -> jax.Array:
    """logits[..., index], with the index clipped into range."""
    index = jnp.clip(index, 0, logits.shape[-1] - 1)
    return jnp.take_along_axis(logits, index[..., None], axis=-1, mode="clip")[..., 0]
