"""Sampling rules: from logits [rows, vocab] to one token of each row, and its log-probability.

The rules are applied in the order of transformers: repetition penalty, temperature, top-k, top-p,
min-p. Each removes tokens by a logit of -inf.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.errors import ConfigError
from jaxspeed.ops.vocabulary_parallel import NO_THRESHOLD

# By rule: what it is, and whether a value is allowed.
_ALLOWED = {
    "temperature": ("a number from 0 (the most likely token)", lambda x: 0 <= x < np.inf),
    "top_k": ("an integer from 1", lambda x: x == int(x) >= 1),
    "top_p": ("a number above 0, up to 1", lambda x: 0 < x <= 1),
    "min_p": ("a number from 0 to 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("a number above 0", lambda x: 0 < x < np.inf),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; None leaves a rule out.

    Raises:
      ConfigError: a value that its rule does not allow.
    """

    temperature: float = 0.8  # 0: the most likely token
    top_k: int | None = None  # of the k most likely tokens
    top_p: float | None = None  # of the fewest tokens with this probability together
    min_p: float | None = None  # of tokens with this share of the most likely one's probability
    repetition_penalty: float | None = None  # of tokens in the prompt and the text so far

    def __post_init__(self) -> None:
        for name, (wanted, allowed) in _ALLOWED.items():
            value = getattr(self, name)
            if value is None and name != "temperature":
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not np.isfinite(value) or not allowed(value):
                raise ConfigError(f"{name.replace('_', '-')}: {value!r}; it is {wanted}")

    @property
    def rules(self) -> dict[str, np.ndarray]:
        """The rules that change something, with their values: another value compiles nothing."""
        neutral = {"temperature": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.temperature == 0:  # the rest never removes the most likely token
            values = {"repetition_penalty": self.repetition_penalty}
        return {
            name: np.asarray(x, np.int32 if name == "top_k" else np.float32)
            for name, x in values.items()
            if x is not None and x != neutral.get(name)
        }


class Drawn(NamedTuple):
    """A token of each row, and of which distribution it was drawn.

    Rules keep the logits above a threshold, so two numbers describe that distribution.

    Attributes:
      tokens: int [rows].
      logprobs: fp32 [rows], in the distribution that was drawn from; of the most likely token
        (temperature 0) that of the softmax of the logits.
      thresholds: fp32 [rows], how far below the largest of the logits / temperature the threshold
        is: midway between the least that was kept and the largest that was dropped, so that
        another program, with other rounding, keeps the same. NO_THRESHOLD where nothing is dropped.
    """

    tokens: jax.Array
    logprobs: jax.Array
    thresholds: jax.Array


def draw(
    logits: jax.Array,
    rules: Mapping[str, jax.Array],
    keys: jax.Array,
    seen: jax.Array | None = None,
) -> Drawn:
    """One token of each row.

    Args:
      logits: [rows, vocab], in fp32.
      rules: of `Sampling.rules`; without a temperature the most likely token.
      keys: [rows], the random key of each row's draw.
      seen: [rows, vocab], the tokens that the repetition penalty is for.
    """
    if "repetition_penalty" in rules and seen is not None:
        logits = penalized(logits, seen, rules["repetition_penalty"])
    kept = logits = logits / rules.get("temperature", 1)
    if "top_k" in rules:
        kept = among_top_k(kept, rules["top_k"])
    if "top_p" in rules:
        kept = among_top_p(kept, rules["top_p"])
    if "min_p" in rules:
        kept = above_min_p(kept, rules["min_p"])
    if "temperature" in rules:
        # Gumbel's trick: argmax(l + g) is distributed as softmax(l).
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], logits.dtype))(keys)
        tokens = jnp.argmax(kept + noise, axis=-1)
    else:
        tokens = jnp.argmax(kept, axis=-1)
    at_token = jnp.take_along_axis(kept, tokens[:, None], axis=-1)[:, 0]
    logprobs = at_token - jax.nn.logsumexp(kept, axis=-1)
    thresholds = jnp.full_like(logprobs, NO_THRESHOLD)
    if rules.keys() & {"top_k", "top_p", "min_p"}:
        is_kept = kept > -jnp.inf
        least = jnp.min(jnp.where(is_kept, logits, jnp.inf), axis=-1)
        dropped = jnp.max(jnp.where(is_kept, -jnp.inf, logits), axis=-1)
        below = jnp.max(logits, axis=-1) - (least + dropped) / 2
        thresholds = jnp.minimum(below, thresholds)
    return Drawn(tokens.astype(jnp.int32), logprobs, thresholds)


def penalized(logits: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """l / penalty of a seen token if l > 0, else l * penalty (CTRL, arXiv:1909.05858)."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def among_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Tokens whose logit is at least the k-th largest."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    last = jnp.minimum(k, logits.shape[-1]) - 1
    return _kept(logits, logits >= jnp.take(ordered, last, axis=-1)[..., None])


def among_top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Tokens before which the more likely ones have a probability below p (arXiv:1904.09751)."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    shares = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    least = jnp.min(jnp.where(before < p, ordered, jnp.inf), axis=-1, keepdims=True)
    return _kept(logits, logits >= least)


def above_min_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Tokens of probability at least p times that of the most likely one (arXiv:2407.01082)."""
    return _kept(logits, logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(p))


def _kept(logits: jax.Array, keep: jax.Array) -> jax.Array:
    return jnp.where(keep, logits, -jnp.inf)
