"""Loss scaling for fp16: a static scale, or exactly DeepSpeed's dynamic one.

As `DynamicLossScaler.update_scale` in deepspeed/runtime/fp16/loss_scaler.py (0.19.6), which ZeRO
uses. DeepSpeed's optimizer for stage 0 ignores hysteresis, unlike this one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspeed.errors import ConfigError

_FACTOR = 2.0


class LossScale(NamedTuple):
    """The loss scale's state."""

    scale: jax.Array  # float32 [], factor of the loss
    good_steps: jax.Array  # int32 [], clean steps since the start or the last overflow
    hysteresis_left: jax.Array  # int32 [], overflows until the scale falls; 1: the next one


@dataclass(frozen=True)
class StaticRule:
    """The same scale at every step."""

    scale: float = 1.0


@dataclass(frozen=True)
class DynamicRule:
    """Halve on overflow once the hysteresis is exhausted, double after a clean window."""

    initial_scale: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0


Rule = StaticRule | DynamicRule


def make_rule(
    *,
    loss_scale: float = 0,
    initial_scale_power: int = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1,
) -> Rule:
    """The rule for the keys of a config's `fp16` section; `loss_scale` 0 means dynamic.

    Raises:
      ConfigError: a window or a hysteresis below 1, with which the scale would never change.
    """
    if loss_scale != 0:
        return StaticRule(float(loss_scale))
    for name, value in (("loss_scale_window", loss_scale_window), ("hysteresis", hysteresis)):
        if value < 1:
            raise ConfigError(f"fp16.{name}: expected an integer >= 1, found {value!r}")
    return DynamicRule(
        initial_scale=2.0**initial_scale_power,
        window=loss_scale_window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive_hysteresis,
        min_scale=float(min_loss_scale),
    )


def init(rule: Rule) -> LossScale:
    """The state before the first step."""
    if isinstance(rule, StaticRule):
        scale, hysteresis = rule.scale, 1
    else:
        scale, hysteresis = rule.initial_scale, rule.hysteresis
    return LossScale(
        scale=jnp.asarray(scale, jnp.float32),
        good_steps=jnp.zeros((), jnp.int32),
        hysteresis_left=jnp.asarray(hysteresis, jnp.int32),
    )


def update(state: LossScale, finite: jax.Array, rule: Rule) -> LossScale:
    """The state after a step whose gradients were all `finite`, or were not.

    With `good_steps` = DeepSpeed's `(cur_iter - last_overflow_iter) - 1`:

    - overflow: with one hysteresis left, `scale = max(scale / 2, min_scale)`, else one less is
      left; halving does not reset the hysteresis.
    - clean: if `good_steps > 0 and good_steps % window == 0`, the scale doubles and the hysteresis
      is reset (with `consecutive_hysteresis`, after every clean step). So the first doubling is at
      clean step `window + 1`.
    """
    if isinstance(rule, StaticRule):
        return state
    left, full = state.hysteresis_left, jnp.int32(rule.hysteresis)

    falls = left == 1
    overflowed = LossScale(
        scale=jnp.where(falls, jnp.maximum(state.scale / _FACTOR, rule.min_scale), state.scale),
        good_steps=jnp.zeros_like(state.good_steps),
        hysteresis_left=jnp.where(falls, left, left - 1),
    )
    rises = (state.good_steps > 0) & (state.good_steps % rule.window == 0)
    clean = LossScale(
        scale=jnp.where(rises, state.scale * _FACTOR, state.scale),
        good_steps=state.good_steps + 1,
        hysteresis_left=jnp.where(rises | rule.consecutive_hysteresis, full, left),
    )
    return jax.tree.map(lambda yes, no: jnp.where(finite, yes, no), clean, overflowed)
