"""Each loss of a pair is its formula, in value and in its derivatives by log-probabilities."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.config.objective_options import OF_DELTA
from jaxspeed.objectives.pair_losses import (
    CPO_LOSSES,
    DIVERGENCES,
    PAIR_LOSSES,
    Pairs,
    kto,
    log_odds_ratio,
)

# The formulas of TRL 1.16, in fp64 and in plain terms. An expression without a cancellation is
# written for s and log s, so that fp64 holds them for any argument.


def s(x):
    return 1 / (1 + np.exp(-x)) if x >= 0 else np.exp(x) / (1 + np.exp(x))


def ls(x):
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


SCORES = {
    "reverse_kl": (lambda u, a: u, lambda u, a: 1.0),
    "forward_kl": (lambda u, a: 1 - math.exp(-u), lambda u, a: math.exp(-u)),
    "js_divergence": (lambda u, a: math.log(2) + ls(u), lambda u, a: s(-u)),
    "alpha_divergence": (
        lambda u, a: u if a == 1 else (math.exp((a - 1) * u) - 1) / (a - 1),
        lambda u, a: math.exp((a - 1) * u),
    ),
}


def of_delta(value, slope):
    """The loss of x = beta delta, and its derivatives by the scores."""

    def formula(uw, ul, fw, fl, nw, nl, b, e, t):
        x = b * (fw - fl)
        return value(x, e, t), b * slope(x, e, t), -b * slope(x, e, t), None, None

    return formula


def discopop_slope(x, e, t):
    m, dm = s(x / t), s(x / t) * s(-x / t) / t
    decay = math.exp(ls(x / t) - x)  # e^-x m
    return -s(-x) * (1 - m) + ls(x) * dm - decay + decay * s(-x / t) / t


# (loss, by f'(u_w), by f'(u_l), by u_w, by u_l); None where it does not depend on it.
def ipo(uw, ul, fw, fl, nw, nl, b, e, t):
    d = fw / nw - fl / nl - 1 / (2 * b)
    return d**2, 2 * d / nw, -2 * d / nl, None, None


def sigmoid_norm(uw, ul, fw, fl, nw, nl, b, e, t):
    x = b * (fw / nw - fl / nl)
    return -ls(x), -b * s(-x) / nw, b * s(-x) / nl, None, None


def nca_pair(uw, ul, fw, fl, nw, nl, b, e, t):
    c, r = b * uw, b * ul
    loss = -ls(c) - 0.5 * ls(-c) - 0.5 * ls(-r)
    return loss, None, None, b * (-s(-c) + 0.5 * s(c)), b * 0.5 * s(r)


def bco_pair(uw, ul, fw, fl, nw, nl, b, e, t):
    return -ls(b * uw) - ls(-b * ul), None, None, -b * s(-b * uw), b * s(b * ul)


def sppo_hard(uw, ul, fw, fl, nw, nl, b, e, t):
    w, r = uw - 1 / (2 * b), ul + 1 / (2 * b)
    return w**2 + r**2, None, None, 2 * w, 2 * r


def ds(x):
    return s(x) * s(-x)


def apo_zero(uw, ul, fw, fl, nw, nl, b, e, t):
    return s(-b * uw) + s(b * ul), None, None, -b * ds(b * uw), b * ds(b * ul)


def apo_down(uw, ul, fw, fl, nw, nl, b, e, t):
    d = b * (uw - ul)
    return s(b * uw) + s(-d), None, None, b * ds(b * uw) - b * ds(d), b * ds(d)


FORMULAS = {
    "sigmoid": of_delta(lambda x, e, t: -ls(x), lambda x, e, t: -s(-x)),
    "hinge": of_delta(lambda x, e, t: max(0.0, 1 - x), lambda x, e, t: -1.0 if x < 1 else 0.0),
    "ipo": ipo,
    "sigmoid_norm": sigmoid_norm,
    "exo_pair": of_delta(
        lambda x, e, t: s(x) * (ls(x) - math.log(1 - e)) + s(-x) * (ls(-x) - math.log(e)),
        lambda x, e, t: ds(x) * (ls(x) - math.log(1 - e) - ls(-x) + math.log(e)),
    ),
    "nca_pair": nca_pair,
    "robust": of_delta(
        lambda x, e, t: (-(1 - e) * ls(x) + e * ls(-x)) / (1 - 2 * e),
        lambda x, e, t: (-(1 - e) * s(-x) - e * s(x)) / (1 - 2 * e),
    ),
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": of_delta(
        lambda x, e, t: -ls(x) * s(-x / t) + math.exp(ls(x / t) - x), discopop_slope
    ),
}
CASES = [(name, "reverse_kl", 0.5) for name in PAIR_LOSSES]
CASES += [
    (name, divergence, alpha)
    for name in OF_DELTA
    for divergence, alpha in (
        ("forward_kl", 0.5),
        ("js_divergence", 0.5),
        ("alpha_divergence", 0.5),
        ("alpha_divergence", 1.0),
    )
]


def close(found, wanted):
    scale = np.maximum(np.abs(wanted), 1)
    np.testing.assert_allclose(np.asarray(found) / scale, wanted / scale, rtol=0, atol=1e-6)


# A log-ratio: usual, saturated, or none.
ratios = st.one_of(
    st.floats(-5, 5, width=32), st.sampled_from([0.0, -60.0, 60.0, -300.0, 300.0, 1e-4])
)


@pytest.mark.parametrize(("name", "divergence", "alpha"), CASES)
@settings(max_examples=40, deadline=None)
@given(
    chosen=ratios,
    rejected=ratios,
    tied=st.booleans(),
    tokens=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    beta=st.sampled_from([0.1, 0.5]),
    smoothing=st.sampled_from([0.001, 0.3]),
    tau=st.sampled_from([0.05, 1.0]),
)
def test_dpo_is_its_formula(
    name, divergence, alpha, chosen, rejected, tied, tokens, beta, smoothing, tau
):
    if divergence != "reverse_kl":  # e^300 is in no precision
        chosen, rejected = (max(-8.0, min(8.0, u)) for u in (chosen, rejected))
    u = np.asarray([chosen, chosen if tied else rejected], np.float32)
    with jax.enable_x64():
        found, slopes = found_of(name, divergence, alpha, u, tokens, beta, smoothing, tau)
    uw, ul = map(float, u)
    score, slope = SCORES[divergence]
    settings = (*tokens, beta, smoothing, tau)
    loss, *by = FORMULAS[name](uw, ul, score(uw, alpha), score(ul, alpha), *settings)
    by_scores, by_ratios = by[:2], by[2:]
    wanted = [
        slope(x, alpha) * of_score if of_score is not None else of_ratio
        for x, of_score, of_ratio in zip((uw, ul), by_scores, by_ratios, strict=True)
    ]
    close(found, loss)
    if not (name == "hinge" and abs(1 - beta * (score(uw, alpha) - score(ul, alpha))) < 1e-6):
        close(slopes, np.asarray(wanted))


def found_of(name, divergence, alpha, u, tokens, beta, smoothing, tau, dtype=jnp.float64):
    options = SimpleNamespace(beta=beta, label_smoothing=smoothing, discopop_tau=tau)

    def loss(u):
        scores = DIVERGENCES[divergence](u, alpha)
        counts = jnp.asarray(tokens, u.dtype)
        return PAIR_LOSSES[name](Pairs(*u, *scores, *counts), options)

    return jax.value_and_grad(loss)(jnp.asarray(u, dtype))


@pytest.mark.parametrize(("name", "divergence", "alpha"), CASES)
def test_in_fp32_nothing_overflows(name, divergence, alpha):
    values = (0.0, 1e-4, 5.0, -60.0, 60.0, -300.0, 300.0, -3e4, 3e4)
    pairs = jnp.asarray([(w, r) for w in values for r in values], jnp.float32).T

    def loss(u):
        options = SimpleNamespace(beta=0.1, label_smoothing=0.1, discopop_tau=0.05)
        scores = DIVERGENCES[divergence](u, alpha)
        counts = jnp.full_like(u, 7)
        return PAIR_LOSSES[name](Pairs(*u, *scores, *counts), options)

    values, back = jax.vjp(loss, pairs)
    (slopes,) = back(jnp.ones_like(values))
    assert not np.isnan(values).any()
    if name != "ipo" or divergence in ("reverse_kl", "js_divergence"):  # the square of e^80
        assert np.isfinite(values).all() and np.isfinite(slopes).all()


@pytest.mark.parametrize("sign", [1, -1])
@settings(max_examples=40, deadline=None)
@given(u=ratios, kl=st.sampled_from([0.0, 0.7, 40.0]), beta=st.sampled_from([0.1, 0.5]))
def test_kto_is_its_formula(sign, u, kl, beta):
    with jax.enable_x64():
        loss, slope = jax.value_and_grad(lambda x: kto(x, sign, kl, beta))(jnp.float64(u))
    if sign == 1:  # desirable
        wanted, by_ratio = 1 - s(beta * (u - kl)), -beta * ds(beta * (u - kl))
    else:
        wanted, by_ratio = 1 - s(beta * (kl - u)), beta * ds(beta * (kl - u))
    close(loss, np.float64(wanted))
    close(slope, np.float64(by_ratio))


MARGINS = {
    "sigmoid": lambda x, m, b, e, g: -(1 - e) * ls(x) - e * ls(-x),
    "simpo": lambda x, m, b, e, g: -(1 - e) * ls(x - g) - e * ls(g - x),
    "hinge": lambda x, m, b, e, g: max(0.0, 1 - x),
    "ipo": lambda x, m, b, e, g: (m - 1 / (2 * b)) ** 2,
}
SLOPES = {
    "sigmoid": lambda x, m, b, e, g: b * (-(1 - e) * s(-x) + e * s(x)),
    "simpo": lambda x, m, b, e, g: b * (-(1 - e) * s(g - x) + e * s(x - g)),
    "hinge": lambda x, m, b, e, g: -b if x < 1 else 0.0,
    "ipo": lambda x, m, b, e, g: 2 * (m - 1 / (2 * b)),
}


@pytest.mark.parametrize("name", CPO_LOSSES)
@settings(max_examples=40, deadline=None)
@given(
    margin=ratios,
    beta=st.sampled_from([0.1, 0.5]),
    smoothing=st.sampled_from([0.0, 0.3]),
    gamma=st.sampled_from([0.0, 0.5]),
)
def test_cpo_is_its_formula(name, margin, beta, smoothing, gamma):
    options = SimpleNamespace(beta=beta, label_smoothing=smoothing, simpo_gamma=gamma)
    with jax.enable_x64():
        loss, slope = jax.value_and_grad(CPO_LOSSES[name])(jnp.float64(margin), options)
    arguments = (beta * margin, margin, beta, smoothing, gamma)
    close(loss, np.float64(MARGINS[name](*arguments)))
    close(slope, np.float64(SLOPES[name](*arguments)))


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.floats(-30, -1e-3)] * 2), st.booleans())
def test_the_odds_ratio_is_its_formula(logps, tied):
    chosen, rejected = logps[0], logps[0] if tied else logps[1]
    with jax.enable_x64():
        found, slopes = jax.value_and_grad(log_odds_ratio, (0, 1))(
            jnp.float64(chosen), jnp.float64(rejected)
        )
    p, q = math.exp(chosen), math.exp(rejected)
    close(
        found, np.float64(math.log(p / -math.expm1(chosen)) - math.log(q / -math.expm1(rejected)))
    )
    wanted = 1 / -math.expm1(chosen), -1 / -math.expm1(rejected)
    np.testing.assert_allclose(np.asarray(slopes), wanted, rtol=1e-6)


def test_a_certain_completion_has_finite_odds():
    loss = jax.value_and_grad(lambda x: -jax.nn.log_sigmoid(log_odds_ratio(x, -1.0)))
    for certain in (0.0, -1e-8):
        assert all(np.isfinite(loss(jnp.float32(certain))))
