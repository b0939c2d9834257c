"""The loss scale follows DeepSpeed's DynamicLossScaler, step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspeed.errors import ConfigError
from jaxspeed.optim import loss_scale
from tests.optim.from_config import built


def reference(overflows, *, scale, window, hysteresis, consecutive, minimum):
    """Scale and hysteresis after each step, counted as DeepSpeed counts: by iteration numbers."""
    last_overflow, left, trajectory = -1, hysteresis, []
    for iteration, overflow in enumerate(overflows):
        if overflow:
            if hysteresis == 1 or left == 1:
                scale = max(scale / 2, minimum)
            else:
                left -= 1
            last_overflow = iteration
        else:
            if consecutive:
                left = hysteresis
            stable = iteration - last_overflow - 1
            if stable > 0 and stable % window == 0:
                if not consecutive:
                    left = hysteresis
                scale *= 2
        trajectory.append((scale, left))
    return trajectory


def trajectory(rule, overflows):
    update = functools.partial(loss_scale.update, rule=rule)

    def step(state, overflow):
        state = update(state, ~overflow)
        return state, (state.scale, state.hysteresis_left)

    flags = jnp.asarray(overflows, dtype=bool)
    _, (scales, left) = jax.jit(lambda state: jax.lax.scan(step, state, flags))(
        loss_scale.init(rule)
    )
    return list(zip(np.asarray(scales).tolist(), np.asarray(left).tolist(), strict=True))


def scales(overflows, **fp16):
    rule = built(fp16={"enabled": True, **fp16}).rule
    return [scale for scale, _ in trajectory(rule, overflows)]


@settings(max_examples=40, deadline=None)
@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=40),
    clean_run=st.integers(0, 20),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    power=st.integers(0, 20),
    minimum=st.sampled_from([0.25, 1.0, 4.0]),
)
@example([True, True, False, True], 20, 3, 2, False, 16, 1.0)
def test_trajectories_equal_the_reference(
    overflows, clean_run, window, hysteresis, consecutive, power, minimum
):
    overflows = overflows + [False] * clean_run + overflows
    rule = loss_scale.make_rule(
        initial_scale_power=power,
        loss_scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_loss_scale=minimum,
    )
    assert trajectory(rule, overflows) == reference(
        overflows,
        scale=2.0**power,
        window=window,
        hysteresis=hysteresis,
        consecutive=consecutive,
        minimum=minimum,
    )


def test_the_defaults_are_deepspeeds():
    assert loss_scale.make_rule() == loss_scale.DynamicRule(2.0**16, 1000, 2, False, 1.0)


def test_the_first_overflow_uses_hysteresis_and_the_second_halves():
    assert scales([True, True, True]) == [2.0**16, 2.0**15, 2.0**14]


def test_the_scale_doubles_at_clean_step_window_plus_one_and_then_each_window():
    by_step = scales([False] * 10, initial_scale_power=4, loss_scale_window=3)
    assert by_step == [16, 16, 16, 32, 32, 32, 64, 64, 64, 128]


def test_a_fall_does_not_refill_the_hysteresis_but_a_doubling_does():
    overflows = [True, True, True, False, False, False, True, True]
    by_step = scales(overflows, initial_scale_power=4, loss_scale_window=2, hysteresis=2)
    assert by_step == [16, 8, 4, 4, 4, 8, 8, 4]


def test_consecutive_hysteresis_forgives_overflows_that_are_apart():
    apart = [True, False] * 4
    assert scales(apart, consecutive_hysteresis=True) == [2.0**16] * 8
    assert scales(apart)[-1] == 2.0**13


def test_the_scale_does_not_fall_below_its_minimum():
    assert scales([True] * 4, initial_scale_power=4, hysteresis=1, min_loss_scale=4) == [8, 4, 4, 4]


def test_a_static_scale_never_moves():
    rule = built(fp16={"enabled": True, "loss_scale": 128, "loss_scale_window": 1}).rule
    assert {scale for scale, _ in trajectory(rule, [True, True, False, False, False])} == {128.0}
    assert rule == loss_scale.StaticRule(128.0)


@pytest.mark.parametrize("name", ["loss_scale_window", "hysteresis"])
def test_a_rule_that_could_never_change_the_scale_is_a_config_error(name):
    with pytest.raises(ConfigError, match=rf"fp16\.{name}"):
        loss_scale.make_rule(**{name: 0})
