"""Optimizer update that can be skipped (on fp16 overflow) without a copy of the state.

Selecting after the update would make XLA hold old and new moments at once: the new parameter is
computed from new moments, so they are computed twice, and the old ones copied before they are
overwritten. Here each leaf of the optimizer's state is selected where it is computed, and later
equations read the selected value, so the update stays one pass in place. In a skipped step, values
computed from it are meaningless and are not selected.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxspeed.jaxpr.evaluate import evaluate
from jaxspeed.jaxpr.traverse import is_var
from jaxspeed.placement.memory_kinds import in_memory_of, on_host


def guarded_update(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: Any,
    opt: Any,
    params: Any,
    keep: jax.Array,
    **extra: Any,
) -> tuple[Any, Any]:
    """(parameters, state) after one update where `keep` is true, else unchanged."""

    def update(grads: Any, opt: Any, params: Any) -> tuple[Any, Any]:
        updates, after = optimizer.update(grads, opt, params, **extra)
        return after, optax.apply_updates(params, updates)

    closed, shape = jax.make_jaxpr(update, return_shape=True)(grads, opt, params)
    states, args = jax.tree.leaves(opt), jax.tree.leaves((grads, opt, params))
    done = guarded(closed.jaxpr, closed.consts, args, states, jax.tree.leaves(params), keep)
    after, new = jax.tree.unflatten(jax.tree.structure(shape), done)
    return new, after


def guarded(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    states: Sequence[Any],
    params: Sequence[Any],
    keep: jax.Array,
) -> list[Any]:
    """Results of a traced update, (new states, new parameters), selected by `keep`.

    `states` and `params` are the old ones; `keep` is broadcast against each.
    """
    state_vars = zip(jaxpr.outvars, states)
    computed = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    selected = {v: before for v, before in state_vars if is_var(v) and v in computed}

    def select(var: Any, value: Any) -> Any:
        value = in_memory_of(value, keep)  # a constant is on the device
        return jnp.where(keep, value, selected[var]) if var in selected else value

    values = evaluate(jaxpr, consts, args, select, None if on_host(keep) else selected)
    return [  # values that are selected already are not selected again
        value
        if is_var(v) and selected.get(v) is before
        else jnp.where(keep, value, before).astype(before.dtype)
        for v, value, before in zip(jaxpr.outvars, values, [*states, *params], strict=True)
    ]
