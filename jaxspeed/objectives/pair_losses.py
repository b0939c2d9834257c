"""Losses of pairs of completions, and of single ones, as functions of log-probabilities.

pi is the model, ref the reference; a pair has a chosen completion y_w and a rejected one y_l:

    u_w = log pi(y_w | x) - log ref(y_w | x)        u_l the same of y_l
    delta = f'(u_w) - f'(u_l)                       f of the divergence; reverse KL: f'(u) = u

Each function returns one loss for each pair, of any shape, and is finite in fp32 for any log-ratio.
s is the sigmoid. The formulas are those of TRL 1.16.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid

LARGEST_EXPONENT = 80.0  # e^80 is finite in fp32
LEAST = 1e-30  # of a completion that is certain, whose odds would be infinite


class Pairs(NamedTuple):
    """What is known of pairs, each array of one shape."""

    chosen: jax.Array  # u_w
    rejected: jax.Array  # u_l
    chosen_score: jax.Array  # f'(u_w)
    rejected_score: jax.Array  # f'(u_l)
    chosen_tokens: jax.Array  # of the completion
    rejected_tokens: jax.Array

    @property
    def delta(self) -> jax.Array:
        """f'(u_w) - f'(u_l)."""
        return self.chosen_score - self.rejected_score

    @property
    def delta_by_token(self) -> jax.Array:
        """The same, of scores divided by their completions' numbers of tokens."""
        of_chosen = self.chosen_score / jnp.maximum(self.chosen_tokens, 1)
        return of_chosen - self.rejected_score / jnp.maximum(self.rejected_tokens, 1)


class PairSettings(Protocol):
    """The options that the formulas have."""

    beta: float
    label_smoothing: float
    discopop_tau: float


# -- divergences -----------------------------------------------------------------------------------


def _exp(u: jax.Array) -> jax.Array:
    return jnp.exp(jnp.minimum(u, LARGEST_EXPONENT))


def reverse_kl(u: jax.Array, alpha: float) -> jax.Array:
    return u


def forward_kl(u: jax.Array, alpha: float) -> jax.Array:
    """1 - e^-u."""
    return 1 - _exp(-u)


def js_divergence(u: jax.Array, alpha: float) -> jax.Array:
    """log 2 + log s(u)."""
    return math.log(2) + log_sigmoid(u)


def alpha_divergence(u: jax.Array, alpha: float) -> jax.Array:
    """(e^((alpha - 1) u) - 1) / (alpha - 1); u for alpha 1, its limit."""
    a = alpha - 1
    return u if abs(a) < 1e-6 else jnp.expm1(jnp.minimum(a * u, LARGEST_EXPONENT)) / a


DIVERGENCES: dict[str, Callable[[jax.Array, float], jax.Array]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}

# -- DPO -------------------------------------------------------------------------------------------

# The margin of the first three is delta, of scores by token for ipo and sigmoid_norm.


def logistic(margin: jax.Array, o: Any) -> jax.Array:
    """-log s(beta margin) (DPO, arXiv:2305.18290)."""
    return -log_sigmoid(o.beta * margin)


def hinge(margin: jax.Array, o: Any) -> jax.Array:
    """max(0, 1 - beta margin) (SLiC, arXiv:2305.10425)."""
    return jax.nn.relu(1 - o.beta * margin)


def ipo(margin: jax.Array, o: Any) -> jax.Array:
    """(margin - 1 / (2 beta))^2 (IPO, arXiv:2310.12036)."""
    return jnp.square(margin - 1 / (2 * o.beta))


def exo_pair(p: Pairs, o: PairSettings) -> jax.Array:
    """s(x) (log s(x) - log(1 - e)) + s(-x) (log s(-x) - log e), x = beta delta.

    (EXO, arXiv:2402.00856.)
    """
    x, e = o.beta * p.delta, o.label_smoothing
    of_chosen = sigmoid(x) * (log_sigmoid(x) - math.log1p(-e))
    return of_chosen + sigmoid(-x) * (log_sigmoid(-x) - math.log(e))


def nca_pair(p: Pairs, o: PairSettings) -> jax.Array:
    """-log s(c) - log s(-c) / 2 - log s(-r) / 2, c = beta u_w, r = beta u_l (arXiv:2402.05369)."""
    c, r = o.beta * p.chosen, o.beta * p.rejected
    return -log_sigmoid(c) - log_sigmoid(-c) / 2 - log_sigmoid(-r) / 2


def robust(p: Pairs, o: PairSettings) -> jax.Array:
    """(-(1 - e) log s(x) + e log s(-x)) / (1 - 2 e), x = beta delta (arXiv:2403.00409)."""
    x, e = o.beta * p.delta, o.label_smoothing
    return (-(1 - e) * log_sigmoid(x) + e * log_sigmoid(-x)) / (1 - 2 * e)


def bco_pair(p: Pairs, o: PairSettings) -> jax.Array:
    """-log s(beta u_w) - log s(-beta u_l) (BCO, arXiv:2404.04656)."""
    return -log_sigmoid(o.beta * p.chosen) - log_sigmoid(-o.beta * p.rejected)


def sppo_hard(p: Pairs, o: PairSettings) -> jax.Array:
    """(u_w - 1 / (2 beta))^2 + (u_l + 1 / (2 beta))^2 (SPPO, arXiv:2405.00675)."""
    half = 1 / (2 * o.beta)
    return jnp.square(p.chosen - half) + jnp.square(p.rejected + half)


def apo_zero(p: Pairs, o: PairSettings) -> jax.Array:
    """1 - s(beta u_w) + s(beta u_l) (APO, arXiv:2408.06266)."""
    return sigmoid(-o.beta * p.chosen) + sigmoid(o.beta * p.rejected)


def apo_down(p: Pairs, o: PairSettings) -> jax.Array:
    """s(beta u_w) + 1 - s(beta (u_w - u_l)) (APO, arXiv:2408.06266)."""
    return sigmoid(o.beta * p.chosen) + sigmoid(-o.beta * (p.chosen - p.rejected))


def discopop(p: Pairs, o: PairSettings) -> jax.Array:
    """-log s(x) (1 - m) + e^-x m, x = beta delta, m = s(x / tau) (arXiv:2406.08414)."""
    x = o.beta * p.delta
    m = x / o.discopop_tau
    exponential = _exp(log_sigmoid(m) - x)
    return -log_sigmoid(x) * sigmoid(-m) + exponential


PAIR_LOSSES: dict[str, Callable[[Pairs, Any], jax.Array]] = {
    "sigmoid": lambda p, o: logistic(p.delta, o),
    "hinge": lambda p, o: hinge(p.delta, o),
    "ipo": lambda p, o: ipo(p.delta_by_token, o),
    "sigmoid_norm": lambda p, o: logistic(p.delta_by_token, o),
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "robust": robust,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
}

# -- without a reference ---------------------------------------------------------------------------


class MarginSettings(Protocol):
    """The options of CPO's formulas."""

    beta: float
    label_smoothing: float
    simpo_gamma: float


def cpo_logistic(margin: jax.Array, o: MarginSettings) -> jax.Array:
    """-(1 - e) log s(x) - e log s(-x), x = beta (log pi(y_w) - log pi(y_l)) (arXiv:2401.08417)."""
    return smoothed(o.beta * margin, o.label_smoothing)


def simpo(margin: jax.Array, o: MarginSettings) -> jax.Array:
    """The same of x - gamma, with log-probabilities by token (SimPO, arXiv:2405.14734)."""
    return smoothed(o.beta * margin - o.simpo_gamma, o.label_smoothing)


# Of the margin log pi(y_w) - log pi(y_l), for ipo and simpo by token.
CPO_LOSSES: dict[str, Callable[[jax.Array, Any], jax.Array]] = {
    "sigmoid": cpo_logistic,
    "hinge": hinge,
    "ipo": ipo,
    "simpo": simpo,
}


def smoothed(x: jax.Array, e: float) -> jax.Array:
    """-(1 - e) log s(x) - e log s(-x)."""
    return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)


def log_odds_ratio(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    """log odds(y_w) - log odds(y_l), odds = p / (1 - p) (ORPO, arXiv:2403.07691).

    Args:
      chosen, rejected: log p, the mean log-probability of a token, below 0.
    """
    return (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))


def log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - e^x) for x < 0."""
    x = jnp.minimum(x, -LEAST)
    small = x > -math.log(2)
    near = jnp.where(small, x, -1.0)  # each branch only sees what it is for
    far = jnp.where(small, -1.0, x)
    return jnp.where(small, jnp.log(-jnp.expm1(near)), jnp.log1p(-jnp.exp(far)))


# -- KTO -------------------------------------------------------------------------------------------


def kto(u: jax.Array, sign: jax.Array, kl: jax.Array | float, beta: float) -> jax.Array:
    """1 - s(beta (u - kl)) if desirable (sign 1), 1 - s(beta (kl - u)) if not (sign -1).

    (KTO, arXiv:2402.01306; with kl 0 the unpaired form of apo_zero.)
    """
    return sigmoid(-sign * beta * (u - kl))
