"""Optax transformations for DeepSpeed's and torch's update formulas that Optax lacks.

Each is an `optax.GradientTransformation`, to be chained with Optax's. `p` is a parameter, `g` its
gradient, `u` the update so far, `t` the number of the update, from 1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxspeed.optim.clipping import squared
from jaxspeed.optim.norms_and_biases import map_with_path
from jaxspeed.optim.owners import Unrounded

Step = jax.typing.ArrayLike  # the number of optimizer updates that were completed before this one


def in_float32(
    inner: optax.GradientTransformation, moment_dtype: jax.typing.DTypeLike | None
) -> optax.GradientTransformation:
    """Store moments in `moment_dtype` (None: the parameter's), and compute in float32 at least.

    As DeepSpeed's fused kernels do: they load a bf16 moment, compute in float32, and round once
    when storing. (Optax's `mu_dtype` covers only the first moment and multiplies in it.) If
    everything is float32 or float64 already, this adds no operation. `Unrounded` state stays as it
    is.
    """

    def widen(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)) if _floating(x) else x, tree
        )

    def init(params: Any) -> Any:
        state = inner.init(params)
        if moment_dtype is None:
            return state
        return jax.tree.map(
            lambda x: x.astype(moment_dtype) if _floating(x) else x,
            state,
            is_leaf=lambda x: isinstance(x, Unrounded),
        )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        wide = None if params is None else widen(params)
        takes_more = optax.with_extra_args_support(inner)
        updates, new_state = takes_more.update(widen(updates), widen(state), wide, **extra)
        return updates, jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _floating(x: Any) -> bool:
    # A leaf without a dtype is a placeholder of `optax.tree.map_params`.
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def add_weight_decay(weight_decay: Callable[[str], float]) -> optax.GradientTransformation:
    """`u + weight_decay(path) p`: L2 before the moments, decoupled after them.

    Optax's `add_decayed_weights` has one value for all leaves of a mask.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def decayed(path: str, u: jax.Array, p: jax.Array) -> jax.Array:
            decay = weight_decay(path)
            return u + decay * p if decay else u

        return map_with_path(decayed, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_rate(
    lr: Callable[[Step], jax.typing.ArrayLike], factor: Callable[[str], float]
) -> optax.GradientTransformation:
    """`-lr(step) factor(path) u`, the last transformation of every chain.

    Optax's `scale_by_schedule` with a factor for each leaf.
    """

    def init(params: Any) -> optax.ScaleByScheduleState:
        return optax.ScaleByScheduleState(count=jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        rate = -jnp.asarray(lr(state.count))
        updates = map_with_path(lambda path, u: (rate * factor(path)).astype(u.dtype) * u, updates)
        return updates, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def with_scheduled_betas(
    make: Callable[[Any, Any], optax.GradientTransformation],
    betas: Callable[[Step], tuple[Any, Any]],
) -> optax.GradientTransformation:
    """Update by `make(*betas(step))`; the state must count updates as `count`.

    (`optax.inject_hyperparams` would store the values and a second count in the state.)
    """

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        transformation = optax.with_extra_args_support(make(*betas(state.count)))
        return transformation.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(make(0.0, 0.0).init, update)


def scale_by_raw_moments(
    b1: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    eps: float,
    *,
    eps_inside_sqrt: bool = False,
) -> optax.GradientTransformation:
    """Adam's direction without bias correction, `m / (sqrt(v) + eps)`, or `m / sqrt(v + eps)`.

        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2

    Optax's `scale_by_adam` always corrects. This is FusedAdam with `bias_correction: false`, and
    the direction of FusedLamb, which corrects in the learning rate.
    """
    outside, inside = (0.0, eps) if eps_inside_sqrt else (eps, 0.0)

    def init(params: Any) -> optax.ScaleByAdamState:
        return optax.scale_by_adam().init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + inside) + outside), mu, nu)
        return updates, optax.ScaleByAdamState(optax.safe_increment(state.count), mu, nu)

    return optax.GradientTransformation(init, update)


class ScaleByAdagradState(NamedTuple):
    """State of `scale_by_adagrad`."""

    step: jax.Array  # int32 [], updates completed
    sum_of_squares: Any  # as the parameters


def scale_by_adagrad(
    eps: float, lr_decay: float, initial_accumulator_value: float
) -> optax.GradientTransformation:
    """torch.optim.Adagrad: `s = s + g^2`, `u = g / (sqrt(s) + eps) / (1 + (t - 1) lr_decay)`.

    Optax's `scale_by_rss` has eps inside the root.
    """

    def init(params: Any) -> ScaleByAdagradState:
        return ScaleByAdagradState(
            step=jnp.zeros([], jnp.int32),
            sum_of_squares=optax.tree.full_like(params, initial_accumulator_value),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        total = jax.tree.map(
            lambda s, g: s + squared(g).astype(s.dtype), state.sum_of_squares, updates
        )
        slower = 1 + state.step * lr_decay
        updates = jax.tree.map(
            lambda g, s: g / ((jnp.sqrt(s) + eps) * slower.astype(g.dtype)), updates, total
        )
        return updates, ScaleByAdagradState(optax.safe_increment(state.step), total)

    return optax.GradientTransformation(init, update)


class DampedTraceState(NamedTuple):
    """State of `damped_trace`."""

    step: jax.Array  # int32 [], updates completed
    trace: Any  # as the parameters


def damped_trace(momentum: float, dampening: float) -> optax.GradientTransformation:
    """torch's momentum with dampening: `b = g` at first, then `b = momentum b + (1 - dampening) g`.

    Optax's `trace` has no dampening.
    """

    def init(params: Any) -> DampedTraceState:
        return DampedTraceState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(updates: Any, state: DampedTraceState, params: Any = None) -> tuple[Any, Any]:
        share = jnp.where(state.step == 0, 1, 1 - dampening)
        trace = jax.tree.map(
            lambda g, b: momentum * b + share.astype(g.dtype) * g, updates, state.trace
        )
        return trace, DampedTraceState(optax.safe_increment(state.step), trace)

    return optax.GradientTransformation(init, update)


def scale_by_lamb_coefficient(
    min_coeff: float, max_coeff: float, stacked: Callable[[str], int]
) -> optax.GradientTransformation:
    """`clip(||p|| / ||u||, min_coeff, max_coeff) u`, the ratio being 1 where a norm is 0.

    As DeepSpeed's FusedLamb (csrc/lamb/fused_lamb_cuda_kernel.cu). Optax's `scale_by_trust_ratio`
    does not clip, and takes one norm over all layers of a stacked leaf.

    Args:
      min_coeff: the smallest ratio.
      max_coeff: the largest ratio.
      stacked: number of leading dims that index layers, by path; each layer is a matrix with
        separate norms.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scaled(path: str, u: jax.Array, p: jax.Array) -> jax.Array:
            dims = tuple(range(stacked(path), p.ndim))
            p_norm, u_norm = (
                jnp.sqrt(jnp.sum(squared(x), axis=dims, keepdims=True)) for x in (p, u)
            )
            either_zero = (p_norm == 0) | (u_norm == 0)
            ratio = p_norm / jnp.where(either_zero, 1, u_norm)
            return jnp.where(either_zero, 1, jnp.clip(ratio, min_coeff, max_coeff)) * u

        return map_with_path(scaled, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
