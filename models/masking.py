"""What is to be predicted of a row of tokens: some of them, replaced, or spans of them.

A loss draws it from its own random key, which is a function of the seed, the step and the
micro-batch, so that it is the same on every mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .language import IGNORED

CONTEXT = ("mask", "segment_ids", "positions", "token_types")


@dataclass(frozen=True)
class Masking:
    """Fields of encoders whose loss chooses the tokens that are to be predicted."""

    mask_token_id: int | None = None  # the mask's token; None: batches have labels
    special_token_ids: tuple[int, ...] = ()  # never chosen
    mask_rate: float = 0.15

    def __post_init__(self) -> None:
        object.__setattr__(self, "special_token_ids", tuple(self.special_token_ids))
        if not 0 < self.mask_rate < 1:
            raise ValueError(f"mask_rate is {self.mask_rate}, which is not between 0 and 1")

    @property
    def corrupts_inputs(self) -> bool:
        """Whether samples are rows of tokens alone."""
        return self.mask_token_id is not None


def masked(
    tokens: jax.Array,
    key: jax.Array,
    *,
    mask_token: int,
    vocab_size: int,
    special: Sequence[int] = (),
    rate: float = 0.15,
    counts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(tokens [batch, seq] of which some are replaced, labels) as BERT has it.

    Of the tokens to be predicted, 80% become the mask's token and 10% any token. Those in `special`
    and where `counts` is 0 are never chosen; their label is -100.
    """
    tokens = jnp.asarray(tokens)
    for_choice, for_kind, for_token = jax.random.split(key, 3)
    chosen = jax.random.uniform(for_choice, tokens.shape) < rate
    for token in special:
        chosen &= tokens != token
    if counts is not None:
        chosen &= counts != 0
    kind = jax.random.uniform(for_kind, tokens.shape)
    drawn = jax.random.randint(for_token, tokens.shape, 0, vocab_size, tokens.dtype)
    replaced = jnp.where(kind < 0.8, mask_token, jnp.where(kind < 0.9, drawn, tokens))
    return jnp.where(chosen, replaced, tokens), jnp.where(chosen, tokens, IGNORED)


def masked_batch(
    config: Masking, vocab_size: int, batch: Mapping[str, jax.Array], key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(tokens, labels): those of the batch or, where the config has a mask's token, drawn ones."""
    tokens = batch["tokens"]
    if "labels" in batch or config.mask_token_id is None or key is None:
        return tokens, batch["labels"]
    return masked(
        tokens,
        key,
        mask_token=config.mask_token_id,
        vocab_size=vocab_size,
        special=config.special_token_ids,
        rate=config.mask_rate,
        counts=batch.get("mask"),
    )


def segments_of(mask: jax.Array | None, segment_ids: jax.Array | None) -> jax.Array | None:
    """Attention's segments [batch, seq]: padding is one of its own."""
    if mask is None:
        return segment_ids
    return jnp.where(mask != 0, 1 if segment_ids is None else segment_ids, -1)


@dataclass(frozen=True)
class Spans:
    """Fields of encoder-decoders whose loss replaces spans of tokens by sentinels."""

    first_sentinel_id: int | None = None  # later ones count down; None: batches are pairs
    noise_rate: float = 0.15  # of the tokens
    mean_span: float = 3.0  # their number in a span
    eos_token_id: int = 1  # ends inputs and targets

    def __post_init__(self) -> None:
        if not 0 < self.noise_rate < 1 or self.mean_span < 1:
            raise ValueError(
                f"noise_rate is {self.noise_rate}, which is not between 0 and 1, or mean_span "
                f"{self.mean_span} is below 1"
            )

    @property
    def corrupts_inputs(self) -> bool:
        """Whether samples are rows of tokens alone."""
        return self.first_sentinel_id is not None

    def pair(
        self, batch: Mapping[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """(inputs, targets, the inputs' mask) of a batch of pairs, or drawn from its tokens."""
        if "inputs" in batch or self.first_sentinel_id is None or key is None:
            return batch["inputs"], batch["targets"], batch.get("mask")
        return with_sentinels(
            batch["tokens"],
            key,
            first_sentinel=self.first_sentinel_id,
            end=self.eos_token_id,
            rate=self.noise_rate,
            mean_span=self.mean_span,
            counts=batch.get("mask"),
        )


def with_sentinels(
    tokens: jax.Array,
    key: jax.Array,
    *,
    first_sentinel: int,
    end: int,
    rate: float = 0.15,
    mean_span: float = 3.0,
    counts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(inputs, targets, mask of the inputs) of tokens [batch, seq], as T5 has them.

    A row alternates between spans that stay and spans that do not, of random lengths with fixed
    sums, so that all rows have equal numbers of spans and of tokens in them. A sentinel replaces
    each of the latter in the inputs, and each of the former in the targets.
    """
    tokens = jnp.asarray(tokens)
    seq = tokens.shape[1]
    noise = min(max(round(seq * rate), 1), seq - 1)
    spans = min(max(round(noise / mean_span), 1), noise, seq - noise)
    if spans > first_sentinel:
        raise ValueError(
            f"{spans} spans of {seq} tokens need more sentinels up to {first_sentinel}"
        )
    of_noise, of_rest = jax.random.split(key)
    rest = _lengths(of_rest, len(tokens), seq - noise, spans)
    ends = jnp.cumsum(rest + _lengths(of_noise, len(tokens), noise, spans), axis=1)
    begins = jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1) + rest
    places = jnp.arange(seq)[None, :, None]
    begun = jnp.sum(begins[:, None] <= places, axis=-1)  # spans that began, [batch, seq]
    ended = jnp.sum(ends[:, None] <= places, axis=-1)
    is_noise = begun > ended
    changes = is_noise[:, 1:] != is_noise[:, :-1]
    first = jnp.concatenate([jnp.ones_like(changes[:, :1]), changes], axis=1)
    in_inputs = jnp.where(is_noise, first_sentinel + 1 - begun, tokens)
    in_targets = jnp.where(is_noise, tokens, first_sentinel - ended)
    mask = None
    inputs = _kept(in_inputs, ~is_noise | first, seq - noise + spans, end)
    if counts is not None:
        in_targets = jnp.where(counts != 0, in_targets, IGNORED)
        mask = _kept((counts != 0).astype(jnp.int32), ~is_noise | first, seq - noise + spans, 1)
    return inputs, _kept(in_targets, is_noise | first, noise + spans, end), mask


def _lengths(key: jax.Array, rows: int, total: int, parts: int) -> jax.Array:
    """[rows, parts]: random lengths from 1 with this total, each division as likely."""
    draws = jax.random.uniform(key, (rows, total - 1))
    rank = jnp.argsort(jnp.argsort(draws, axis=1), axis=1)
    begins = jnp.concatenate([jnp.zeros((rows, 1), jnp.int32), rank < parts - 1], axis=1)
    part = jnp.cumsum(begins, axis=1)
    return jnp.sum(part[:, :, None] == jnp.arange(parts), axis=1)


def _kept(x: jax.Array, keep: jax.Array, count: int, end: int) -> jax.Array:
    """[batch, count + 1]: the `count` values of each row that are kept, in order, and the end."""
    order = jnp.argsort(~keep, axis=1, stable=True)[:, :count]
    values = jnp.take_along_axis(x, order, axis=1)
    return jnp.concatenate([values, jnp.full_like(values[:, :1], end)], axis=1)
