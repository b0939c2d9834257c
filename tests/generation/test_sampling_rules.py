"""Each sampling rule is its formula, written in NumPy, and that of transformers."""

import jax
import numpy as np
import pytest

from jaxspeed.errors import ConfigError
from jaxspeed.generation import Sampling
from jaxspeed.generation import sampling_rules as rules

LOGITS = 3 * np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
SEEN = np.random.default_rng(1).random(LOGITS.shape) < 0.3


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def top_k(row, k):
    return set(np.argsort(-row)[:k])


def top_p(row, p):
    kept, total = set(), 0.0
    for token in np.argsort(-row):
        if total < p:
            kept.add(token)
        total += softmax(row)[token]
    return kept


def min_p(row, p):
    shares = softmax(row)
    return {i for i, share in enumerate(shares) if share >= p * shares.max()}


@pytest.mark.parametrize(
    ("rule", "formula", "values"),
    [
        (rules.among_top_k, top_k, (1, 3, 50, 80)),
        (rules.among_top_p, top_p, (1e-6, 0.3, 0.9, 1.0)),
        (rules.above_min_p, min_p, (0.01, 0.2, 1.0)),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_a_rule_keeps_the_tokens_of_its_formula(rule, formula, values):
    for value in values:
        found = np.asarray(rule(LOGITS, np.asarray(value)))
        for row, kept in zip(LOGITS, found, strict=True):
            assert set(np.flatnonzero(np.isfinite(kept))) == formula(row, value)
            assert (kept[np.isfinite(kept)] == row[np.isfinite(kept)]).all()


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    found = np.asarray(rules.penalized(LOGITS, SEEN, np.float32(1.5)))
    wanted = np.where(SEEN & (LOGITS > 0), LOGITS / 1.5, LOGITS)
    wanted = np.where(SEEN & (LOGITS <= 0), LOGITS * 1.5, wanted)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "processor"),
    [
        ("top_k", 7, "TopKLogitsWarper"),
        ("top_p", 0.7, "TopPLogitsWarper"),
        ("min_p", 0.1, "MinPLogitsWarper"),
        ("repetition_penalty", 1.7, "RepetitionPenaltyLogitsProcessor"),
    ],
)
def test_a_rule_is_that_of_transformers(references, name, value, processor):
    text = np.random.default_rng(2).integers(0, 50, (4, 9))
    wanted = references.call(
        "sampling.processed", processor=processor, value=value, text=text, logits=LOGITS
    )
    own = {"top_k": rules.among_top_k, "top_p": rules.among_top_p, "min_p": rules.above_min_p}
    if name in own:
        found = own[name](LOGITS, np.asarray(value))
    else:
        seen = np.zeros(LOGITS.shape, bool)
        np.put_along_axis(seen, text, True, axis=1)
        found = rules.penalized(LOGITS, seen, np.float32(value))
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-6)


def test_tokens_are_drawn_with_the_probabilities_that_are_left():
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.95, min_p=0.02, repetition_penalty=1.3)
    count = 20_000
    row, seen = LOGITS[0], SEEN[0]
    keys = jax.random.split(jax.random.key(0), count)
    many = np.broadcast_to(row, (count, 50)), np.broadcast_to(seen, (count, 50))
    drawn = np.asarray(rules.draw(many[0], sampling.rules, keys, many[1]).tokens)
    left = np.where(seen, np.where(row > 0, row / 1.3, row * 1.3), row) / 0.7
    for kept in (top_k(left, 9), None, None):
        left = np.where([i in kept for i in range(50)], left, -np.inf) if kept else left
    for formula, value in ((top_p, 0.95), (min_p, 0.02)):
        kept = formula(left, value)
        left = np.where([i in kept for i in range(50)], left, -np.inf)
    shares = np.bincount(drawn, minlength=50) / count
    assert (shares[~np.isfinite(left)] == 0).all()
    np.testing.assert_allclose(shares, softmax(left), atol=0.015)  # 4 standard deviations


def test_temperature_0_takes_the_most_likely_token_whatever_the_other_rules():
    given = Sampling(0, top_k=3, top_p=0.5, min_p=0.5).rules
    found = rules.draw(LOGITS, given, jax.random.split(jax.random.key(0), 4))
    assert (np.asarray(found.tokens) == LOGITS.argmax(-1)).all() and given == {}


def test_values_without_effect_are_no_rules():
    given = Sampling(1.0, top_p=1.0, min_p=0.0, repetition_penalty=1.0).rules
    assert list(given) == ["temperature"]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", (-0.1, float("nan"), float("inf"), None, "1", True)),
        ("top_k", (0, -3, 2.5)),
        ("top_p", (0, 1.1, -1, float("nan"))),
        ("min_p", (-0.1, 1.5)),
        ("repetition_penalty", (0, -2, float("inf"))),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_name(name, bad):
    for value in bad:
        with pytest.raises(ConfigError, match=f"^{name.replace('_', '-')}: .*; it is an? "):
            Sampling(**{name: value})
