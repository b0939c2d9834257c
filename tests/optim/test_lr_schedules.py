"""Schedules equal DeepSpeed's, update by update: a scheduler that is stepped after each update."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.errors import ConfigError
from jaxspeed.optim import build_schedule
from tests.optim.from_config import built

BASE_LR = 0.02


def table(at_start, after, updates):
    """The value at each update: the constructor's for the first, then that for k = 0, 1, ..."""
    return [at_start] + [after(k) for k in range(updates - 1)]


def warmup(k, steps, kind):
    return math.log(k + 1) / math.log(steps) if kind == "log" else k / steps


def warmup_lr(updates, low=0.0, high=BASE_LR, steps=1000, kind="log"):
    steps = max(2, steps)

    def lr(k):
        return low + (high - low) * (warmup(k, steps, kind) if k < steps else 1.0)

    return table(low, lr, updates)


def warmup_decay_lr(updates, total, low=0.0, high=0.001, steps=1000, kind="log"):
    steps = max(2, steps)

    def lr(k):
        if k < steps:
            return low + (high - low) * warmup(k, steps, kind)
        return low + (high - low) * max(0.0, (total - k) / max(1.0, total - steps))

    return table(low, lr, updates)


def warmup_cosine_lr(updates, total, low=0.0, steps=1000, floor=0.0001, kind="log"):
    steps = max(2, steps)

    def lr(k):
        if k < steps:
            return BASE_LR * (low + (1 - low) * warmup(k, steps, kind))
        x = min(1.0, (k - steps + 1) / max(1, total - steps))
        return BASE_LR * max(0.0, floor + (1 - floor) * (1 + math.cos(math.pi * x)) / 2)

    return table(0.0, lr, updates)


def linear(updates, total, steps=0):
    def ratio(n):
        return n / max(1, steps) if n < steps else max(0.0, (total - n) / max(1, total - steps))

    return [BASE_LR * ratio(n) for n in range(updates)]


def range_test(updates, low, size, rate, stairs=False):
    def lr(k):
        interval = (k + 1) // size if stairs else (k + 1) / size
        return low * (1 + rate * interval)

    return table(low, lr, updates)


def one_cycle(
    updates,
    first,
    second,
    low,
    high,
    first_stairs=0,
    second_stairs=0,
    decay=(0.0, 0),
    b1s=(0.8, 0.9),
):
    """(lr, b1) by update, with b1 between `b1s` and the same decay rate for both."""
    (rate, size), (least, most) = decay, b1s

    def height(k):
        position = (k + 1) % (first + second)
        if position <= first:
            x, stairs = Fraction(position, first), first_stairs
        else:
            x, stairs = Fraction(first + second - position, second), second_stairs
        return float(Fraction(math.floor(x * stairs), stairs) if stairs else x)

    def interval(k):
        return (k - (first + second) + 1) / size if size else 0.0

    def lr(k):
        if k < first + second:
            return low + (high - low) * height(k)
        return low / (1 + rate * interval(k))

    def b1(k):
        if k < first + second:
            return most - (most - least) * height(k)
        return most * (1 + rate * interval(k))

    return table(low, lr, updates), table(least, b1, updates)


def curve(optimizer, updates):
    """All learning rates at once, traced, as the step would have them."""
    rates = jax.jit(lambda steps: optimizer.learning_rates(steps)["lr"])
    return np.asarray(rates(jnp.arange(updates)))


def assert_curve(type_, params, reference):
    scheduler = {"type": type_, "params": params}
    optimizer = built("SGD", {"lr": BASE_LR}, scheduler=scheduler)
    lrs = curve(optimizer, len(reference))
    assert lrs.dtype == np.float32
    np.testing.assert_allclose(lrs, reference, rtol=1e-6, atol=1e-12)
    with jax.enable_x64(True):
        np.testing.assert_allclose(curve(optimizer, len(reference)), reference, rtol=1e-12)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_lr(kind):
    params = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 7}
    reference = warmup_lr(20, 0.001, 0.01, 7, kind)
    assert_curve("WarmupLR", params | {"warmup_type": kind}, reference)
    assert reference[0] == reference[1] == 0.001
    assert reference[8:] == pytest.approx([0.01] * 12)


def test_warmup_is_logarithmic_over_1000_steps_to_the_optimizers_lr_by_default():
    assert_curve("WarmupLR", {}, warmup_lr(1100))


def test_a_warmup_of_one_step_takes_two():
    assert_curve("WarmupLR", {"warmup_num_steps": 1}, warmup_lr(5, steps=1))


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_decay_lr(kind):
    params = {"total_num_steps": 30, "warmup_num_steps": 10, "warmup_type": kind}
    params |= {"warmup_min_lr": 0.0001, "warmup_max_lr": 0.01}
    assert_curve("WarmupDecayLR", params, warmup_decay_lr(40, 30, 0.0001, 0.01, 10, kind))


def test_warmup_decay_lr_by_default_rises_to_a_thousandth():
    assert_curve("WarmupDecayLR", {"total_num_steps": 1500}, warmup_decay_lr(1600, 1500))


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_cosine_lr(kind):
    params = {"total_num_steps": 50, "warmup_num_steps": 10, "warmup_type": kind}
    params |= {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.01}
    assert_curve("WarmupCosineLR", params, warmup_cosine_lr(70, 50, 0.1, 10, 0.01, kind))


def test_warmup_cosine_lr_by_default():
    assert_curve("WarmupCosineLR", {"total_num_steps": 3000}, warmup_cosine_lr(3100, 3000))


@pytest.mark.parametrize("staircase", [False, True])
def test_lr_range_test(staircase):
    params = {"lr_range_test_min_lr": 0.003, "lr_range_test_step_size": 7}
    params |= {"lr_range_test_step_rate": 1.5, "lr_range_test_staircase": staircase}
    assert_curve("LRRangeTest", params, range_test(30, 0.003, 7, 1.5, staircase))


@pytest.mark.parametrize("steps", [0, 1, 4, 20])
def test_linear(steps):
    assert_curve(
        "linear", {"total_num_steps": 20, "warmup_num_steps": steps}, linear(30, 20, steps)
    )


def test_linear_has_no_warm_up_by_default():
    assert_curve("linear", {"total_num_steps": 9}, linear(12, 9))


def test_linear_is_the_schedule_of_transformers(references):
    lengths = [(20, 0), (20, 1), (20, 7), (3, 5), (1, 0)]
    theirs = references.call("trainer.linear_rates", lengths=lengths, lr=BASE_LR, updates=25)
    for (total, steps), rates in zip(lengths, theirs, strict=True):
        assert_curve("linear", {"total_num_steps": total, "warmup_num_steps": steps}, rates)


CYCLES = {
    "plain": ({"cycle_first_step_size": 10}, (10, 10)),
    "asymmetric": ({"cycle_first_step_size": 3, "cycle_second_step_size": 9}, (3, 9)),
    "no way down": ({"cycle_first_step_size": 5, "cycle_second_step_size": 0}, (5, 0)),
    "stairs": (
        {"cycle_first_step_size": 10, "cycle_second_step_size": 7, "cycle_first_stair_count": 3},
        (10, 7, 3, 3),
    ),
    "stairs down": (
        {"cycle_first_step_size": 9, "cycle_first_stair_count": 3, "cycle_second_stair_count": 0},
        (9, 9, 3, 0),
    ),
}


@pytest.mark.default_cases("decay0-plain", every=2)
@pytest.mark.parametrize("name", CYCLES)
@pytest.mark.parametrize("decay", [(0.0, 0), (0.5, 0), (0.5, 4)])
def test_one_cycle(name, decay):
    params, shape = CYCLES[name]
    params = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "decay_step_size": decay[1], **params}
    params |= {"decay_lr_rate": decay[0], "decay_mom_rate": decay[0]}
    first, second, *stairs = shape
    params |= {"cycle_min_mom": 0.6, "cycle_max_mom": 0.85}
    stairs = stairs or (0, 0)
    lrs, b1s = one_cycle(40, first, second, 0.001, 0.01, *stairs, decay=decay, b1s=(0.6, 0.85))
    assert_curve("OneCycle", params, lrs)
    np.testing.assert_allclose(first_betas(params, 40), b1s, rtol=1e-9)
    _, b2 = build_schedule("OneCycle", params).betas(0)
    assert float(b2) == pytest.approx(0.99)


def first_betas(params, updates):
    """Adam's b1 of each update with this cycle, read from its moments.

    A gradient of 1 has m_0 = 0 and m_t = b1_t m_(t-1) + 1 - b1_t, so that b1_t is the factor
    between 1 - m_(t-1) and 1 - m_t.
    """
    adam = built("Adam", {"betas": [0.3, 0.5]}, scheduler={"type": "OneCycle", "params": params})

    def step(state, _):
        _, state = adam.transform.update({"w": jnp.ones(())}, state, {"w": jnp.ones(())})
        return state, optax.tree.get(state, "mu")["w"]

    with jax.enable_x64(True):
        start = adam.transform.init({"w": jnp.ones(())})
        _, moments = jax.jit(lambda state: jax.lax.scan(step, state, None, updates))(start)
    missing = 1 - np.append(0.0, moments)
    return missing[1:] / missing[:-1]


def test_one_cycle_without_cycle_momentum_leaves_the_betas():
    params = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_momentum": False}
    np.testing.assert_allclose(first_betas(params, 5), [0.3] * 5, rtol=1e-9)


def test_without_a_scheduler_the_lr_is_the_optimizers():
    schedule = build_schedule(None, {})
    assert float(schedule.lr(jnp.int32(7), BASE_LR)) == np.float32(BASE_LR)
    assert schedule.betas is None


def test_an_unknown_type_is_a_config_error():
    with pytest.raises(ConfigError, match=r"scheduler\.type: unknown 'WarmUpLR'"):
        build_schedule("WarmUpLR", {})


@settings(max_examples=30, deadline=None)
@given(
    steps=st.integers(1, 5000),
    total=st.integers(1, 5000),
    kind=st.sampled_from(["log", "linear"]),
    update=st.integers(0, 12000),
)
def test_warmups_of_any_length_equal_the_reference(steps, total, kind, update):
    window = {"warmup_num_steps": steps, "warmup_type": kind}
    for type_, params, reference in (
        ("WarmupLR", window, warmup_lr(update + 1, steps=steps, kind=kind)),
        (
            "WarmupDecayLR",
            window | {"total_num_steps": total},
            warmup_decay_lr(update + 1, total, steps=steps, kind=kind),
        ),
        (
            "WarmupCosineLR",
            window | {"total_num_steps": total},
            warmup_cosine_lr(update + 1, total, steps=steps, kind=kind),
        ),
    ):
        with jax.enable_x64(True):
            lr = float(build_schedule(type_, params).lr(update, BASE_LR))
        assert lr == pytest.approx(reference[-1], rel=1e-11, abs=1e-16), type_


@settings(max_examples=30, deadline=None)
@given(
    first=st.integers(1, 300),
    second=st.integers(0, 300),
    stairs=st.integers(0, 20),
    update=st.integers(0, 900),
)
def test_cycles_of_any_shape_equal_the_reference(first, second, stairs, update):
    params = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": first}
    params |= {"cycle_second_step_size": second, "cycle_first_stair_count": stairs}
    lrs, b1s = one_cycle(update + 1, first, second, 0.001, 0.01, stairs, stairs)
    schedule = build_schedule("OneCycle", params)
    assert float(schedule.lr(jnp.int32(update), BASE_LR)) == pytest.approx(lrs[-1], rel=1e-6)
    assert float(schedule.betas(jnp.int32(update))[0]) == pytest.approx(b1s[-1], rel=1e-6)
