"""Each optimizer equals its definition, transcribed here in plain numpy, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspeed.errors import ConfigError
from jaxspeed.optim import base_learning_rates, build_optimizer, build_schedule
from tests.optim.from_config import built

STEPS = 6
LR = 0.03


def tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {
        "layer": {"kernel": scale * rng.normal(size=(4, 6)), "bias": scale * rng.normal(size=6)},
        "tall": {"kernel": scale * rng.normal(size=(7, 3))},
    }


def run(optimizer, steps=STEPS):
    """Parameters after some updates with gradients that do not depend on them."""
    params = jax.tree.map(jnp.asarray, tree(0))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(steps):
        gradients = jax.tree.map(jnp.asarray, tree(1 + step, scale=0.3))
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


def expected(rule, steps=STEPS):
    """The same by `rule`, a function of a leaf's value and of its gradients."""
    gradients = [tree(1 + step, scale=0.3) for step in range(steps)]
    return jax.tree.map(lambda p, *g: rule(p.copy(), g), tree(0), *gradients)


def assert_equal(actual, reference, rtol=1e-11):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=rtol, atol=1e-13),
        actual,
        reference,
    )


def adam(p, gradients, *, lr=LR, betas=(0.9, 0.999), eps=1e-8, decay=0.0, l2=False, correct=True):
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, start=1):
        if l2:
            g = g + decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        m_hat = m / (1 - betas[0] ** t) if correct else m
        v_hat = v / (1 - betas[1] ** t) if correct else v
        step = m_hat / (np.sqrt(v_hat) + eps)
        p = p - lr * (step + (0.0 if l2 else decay * p))
    return p


def sgd(p, gradients, *, momentum=0.0, dampening=0.0, nesterov=False, decay=0.0):
    b = None
    for g in gradients:
        g = g + decay * p
        b = g if b is None else momentum * b + (1 - dampening) * g
        p = p - LR * (g + momentum * b if nesterov else b)
    return p


def adagrad(p, gradients, *, lr_decay=0.0, decay=0.0, start=0.0, eps=1e-10):
    total = np.full_like(p, start)
    for t, g in enumerate(gradients, start=1):
        g = g + decay * p
        total = total + g**2
        p = p - LR / (1 + (t - 1) * lr_decay) * g / (np.sqrt(total) + eps)
    return p


def lamb(
    p, gradients, *, betas=(0.9, 0.999), eps=1e-8, inside=False, decay=0.0, low=0.01, high=10.0,
    correct=True,
):  # fmt: skip
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = m / (np.sqrt(v + eps) if inside else np.sqrt(v) + eps) + decay * p
        size_p, size_u = np.linalg.norm(p), np.linalg.norm(u)
        ratio = 1.0 if size_p == 0 or size_u == 0 else min(max(size_p / size_u, low), high)
        lr = LR * np.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) if correct else LR
        p = p - lr * ratio * u
    return p


def lion(p, gradients, *, betas=(0.9, 0.999), decay=0.0):
    m = np.zeros_like(p)
    for g in gradients:
        p = p * (1 - LR * decay) - LR * np.sign(betas[0] * m + (1 - betas[0]) * g)
        m = betas[1] * m + (1 - betas[1]) * g
    return p


def muon(p, gradients, *, lr=LR, momentum=0.95, decay=0.0):
    """For `p  [in, out]`; the iteration in its plain form."""
    m = np.zeros_like(p)
    for g in gradients:
        m = momentum * m + (1 - momentum) * g
        x = (1 - momentum) * g + momentum * m
        x = x / (np.linalg.norm(x) + 1e-7)
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
        p = p * (1 - lr * decay) - lr * max(1, p.shape[1] / p.shape[0]) ** 0.5 * x
    return p


CASES = {
    "adam is adamw": ("Adam", {"weight_decay": 0.1}, adam, {"decay": 0.1}),
    "adam with l2": (
        "Adam",
        {"weight_decay": 0.1, "adam_w_mode": False},
        adam,
        {"decay": 0.1, "l2": True},
    ),
    "adamw": (
        "AdamW",
        {"betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.2},
        adam,
        {"betas": (0.8, 0.95), "eps": 1e-3, "decay": 0.2},
    ),
    "adam uncorrected": ("Adam", {"bias_correction": False}, adam, {"correct": False}),
    "sgd": ("SGD", {"weight_decay": 0.1}, sgd, {"decay": 0.1}),
    "sgd with momentum": (
        "SGD",
        {"momentum": 0.9, "weight_decay": 0.1},
        sgd,
        {"momentum": 0.9, "decay": 0.1},
    ),
    "sgd with nesterov": (
        "SGD",
        {"momentum": 0.9, "nesterov": True},
        sgd,
        {"momentum": 0.9, "nesterov": True},
    ),
    "sgd with dampening": (
        "SGD",
        {"momentum": 0.9, "dampening": 0.4},
        sgd,
        {"momentum": 0.9, "dampening": 0.4},
    ),
    "adagrad": ("Adagrad", {"weight_decay": 0.1}, adagrad, {"decay": 0.1}),
    "adagrad with lr_decay": (
        "Adagrad",
        {"lr_decay": 0.2, "initial_accumulator_value": 0.5, "eps": 1e-2},
        adagrad,
        {"lr_decay": 0.2, "start": 0.5, "eps": 1e-2},
    ),
    "lamb": ("Lamb", {"weight_decay": 0.1}, lamb, {"decay": 0.1}),
    "lamb, clipped above": ("Lamb", {"max_coeff": 0.2}, lamb, {"high": 0.2}),
    "lamb, clipped below": ("Lamb", {"min_coeff": 4.0}, lamb, {"low": 4.0}),
    "lamb, eps inside, uncorrected": (
        "Lamb",
        {"eps": 1e-2, "eps_inside_sqrt": True, "bias_correction": False},
        lamb,
        {"eps": 1e-2, "inside": True, "correct": False},
    ),
    "lion": ("Lion", {"weight_decay": 0.1}, lion, {"decay": 0.1}),
    "lion with betas": ("Lion", {"betas": [0.95, 0.98]}, lion, {"betas": (0.95, 0.98)}),
}


@pytest.mark.default_cases("sgd with dampening", "adagrad with lr_decay", every=2)
@pytest.mark.parametrize("name", CASES)
def test_updates_equal_the_formula(name):
    type_, params, reference, arguments = CASES[name]
    with jax.enable_x64(True):
        actual = run(built(type_, {"lr": LR, **params}).transform)
    assert_equal(actual, expected(functools.partial(reference, **arguments)))


def test_the_name_adamw_decides():
    with jax.enable_x64(True):
        coupled = {"lr": LR, "weight_decay": 0.1, "adam_w_mode": False}
        actual = run(build_optimizer("AdamW", coupled))
    assert_equal(actual, expected(functools.partial(adam, decay=0.1)))


@pytest.mark.parametrize("ns_method", ["gram", "standard"])
@pytest.mark.parametrize(
    "rates, muon_lr, adam_lr",
    [
        ({"lr": LR}, LR, LR),
        ({}, 0.02, 3e-4),
        ({"lr": 1.0, "muon_lr": 0.2, "adam_lr": 0.1}, 0.2, 0.1),
    ],
)
def test_muon_updates_hidden_matrices_and_adam_the_rest(ns_method, rates, muon_lr, adam_lr):
    def reference(p, gradients):
        if p.ndim == 2:
            return muon(p, gradients, lr=muon_lr, decay=0.1)
        return adam(p, gradients, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, decay=0.1)

    params = {**rates, "weight_decay": 0.1, "ns_method": ns_method}
    with jax.enable_x64(True):
        actual = run(built("Muon", params).transform)
    assert_equal(actual, expected(reference), rtol=1e-9)
    assert base_learning_rates("Muon", params) == {"muon_lr": muon_lr, "adam_lr": adam_lr}


@pytest.mark.parametrize(
    "type_, lr",
    [("Adam", 1e-3), ("AdamW", 1e-3), ("SGD", 1e-3), ("Adagrad", 1e-2), ("Lamb", 1e-3)],
)
def test_the_lr_defaults_are_those_of_torch_and_deepspeed(type_, lr):
    assert base_learning_rates(type_, {}) == {"lr": lr}
    with jax.enable_x64(True):
        assert_equal(run(build_optimizer(type_, {})), run(build_optimizer(type_, {"lr": lr})))
        assert not np.allclose(
            run(build_optimizer(type_, {}))["layer"]["bias"],
            run(build_optimizer(type_, {"lr": 2 * lr}))["layer"]["bias"],
            rtol=1e-6,
        )


@pytest.mark.parametrize("type_", ["adamw", "ADAM", "muon"])
def test_types_are_known_in_any_case(type_):
    build_optimizer(type_, {"lr": 1e-3})


def test_an_unknown_type_is_a_config_error():
    with pytest.raises(ConfigError, match=r"optimizer\.type: unknown 'Adan'"):
        build_optimizer("Adan", {})


def test_nesterov_without_momentum_is_a_config_error():
    with pytest.raises(ConfigError, match="nesterov"):
        build_optimizer("SGD", {"nesterov": True})


def test_switches_of_torchs_kernels_change_nothing():
    hints = {"torch_adam": True, "fused": None, "fp32_optimizer_states": True, "amsgrad": False}
    assert_equal(run(build_optimizer("Adam", hints)), run(build_optimizer("Adam", {})), rtol=0)


def test_a_variant_that_is_not_built_is_never_ignored():
    with pytest.raises(TypeError, match="amsgrad"):
        build_optimizer("Adam", {"amsgrad": True})


def test_the_first_update_has_the_schedules_first_lr():
    """A warm-up from 0 leaves the parameters alone in the first update and in the second."""
    schedule = build_schedule("WarmupLR", {"warmup_num_steps": 10, "warmup_type": "linear"})
    optimizer = build_optimizer("SGD", {"lr": LR}, schedule)
    with jax.enable_x64(True):
        assert_equal(run(optimizer, steps=2), tree(0))
        moved = jax.tree.map(lambda p, g: p - LR / 10 * g, tree(0), tree(3, scale=0.3))
        assert_equal(run(optimizer, steps=3), moved)


@pytest.mark.parametrize("type_", ["Adam", "Lamb", "Lion"])
def test_one_cycle_moves_the_betas(type_):
    """b1 is cycle_min_mom for the first update, then falls from cycle_max_mom; b2 is 0.99."""
    cycle = {"cycle_min_lr": LR, "cycle_max_lr": LR, "cycle_first_step_size": 4}
    schedule = build_schedule("OneCycle", cycle)
    b1 = [0.8, 0.875, 0.85, 0.825, 0.8, 0.825]

    def adam_or_lion(p, gradients):
        m, v = np.zeros_like(p), np.zeros_like(p)
        for t, g in enumerate(gradients, start=1):
            b = b1[t - 1]
            if type_ == "Lion":
                p = p - LR * np.sign(b * m + (1 - b) * g)
                m = 0.99 * m + 0.01 * g
                continue
            m, v = b * m + (1 - b) * g, 0.99 * v + 0.01 * g**2
            if type_ == "Adam":
                u = m / (1 - b**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
            else:
                u = m / (np.sqrt(v) + 1e-8)
                ratio = min(max(np.linalg.norm(p) / np.linalg.norm(u), 0.01), 10.0)
                u = u * ratio * np.sqrt(1 - 0.99**t) / (1 - b**t)
            p = p - LR * u
        return p

    with jax.enable_x64(True):
        actual = run(build_optimizer(type_, {"betas": [0.5, 0.5]}, schedule))
        fixed = run(build_optimizer(type_, {"lr": LR, "betas": [0.5, 0.5]}))
    assert_equal(actual, expected(adam_or_lion))
    assert not np.allclose(actual["layer"]["kernel"], fixed["layer"]["kernel"], rtol=1e-6)


@pytest.mark.parametrize(
    "type_, params, torch_name",
    [
        ("Adam", {"weight_decay": 0.1, "adam_w_mode": False}, "Adam"),
        ("AdamW", {"weight_decay": 0.1, "betas": [0.8, 0.9]}, "AdamW"),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "SGD"),
        ("SGD", {"momentum": 0.9, "dampening": 0.3}, "SGD"),
        ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1}, "Adagrad"),
    ],
)
def test_updates_equal_torchs(references, type_, params, torch_name):
    theirs = {name: value for name, value in params.items() if name != "adam_w_mode"}
    wanted = references.call(
        "optimizers.updated",
        optimizer=torch_name,
        arguments={"lr": LR, **theirs},
        leaves=jax.tree.leaves(tree(0)),
        gradients=[jax.tree.leaves(tree(1 + step, scale=0.3)) for step in range(STEPS)],
    )
    with jax.enable_x64(True):
        actual = jax.tree.leaves(run(build_optimizer(type_, {"lr": LR, **params})))
    assert_equal(actual, wanted)
