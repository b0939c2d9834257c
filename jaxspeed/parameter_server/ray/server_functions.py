"""What a server does, as functions of arrays: add up pushes, update, publish, give and take state.

    reduce   pushes of all workers -> gradients, and the sum of their squares
    apply    gradients, the sums of squares of all servers -> the next state, and what is published

Between the two every server learns the global norm, and so whether this step is skipped: either all
of them apply it, or none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.checkpoint.leaves import as_state, saved_arrays, saved_leaves
from jaxspeed.checkpoint.restore import donatable_arrays
from jaxspeed.objective.accumulate import Sums
from jaxspeed.objective.train_state import Arrays, TrainState, wide_dtype
from jaxspeed.optim import global_norm
from jaxspeed.parameter_server.ray.server_program import UpdateShare
from jaxspeed.train.program import Metrics, Program


class Told(NamedTuple):
    """What a push says beside its gradients."""

    total: Any  # of the loss
    weight: Any
    metrics: Mapping[str, Any]
    scale: Any  # of the loss, which may have changed since


class Published(NamedTuple):
    """What workers pull from one server."""

    params: Arrays  # its pieces of the trained parameters, as layers read them
    step: Any  # the version
    scale: Any  # the loss scale


def together(told: Sequence[Told]) -> tuple[Told, np.ndarray]:
    """What the pushes of one update say together, and the share of each, free of its scale."""
    weights = np.array([one.weight for one in told], np.float32)
    weight = weights.sum()
    shares = weights / weight if weight > 0 else np.zeros_like(weights)
    metrics = {
        name: sum(np.float32(one.metrics[name]) * share for one, share in zip(told, shares))
        for name in told[0].metrics
    }
    total = sum(np.float32(one.total) for one in told)
    scales = np.array([one.scale for one in told], np.float32)
    return Told(total, weight, metrics, scales[0]), shares / scales


@dataclass(frozen=True)
class ServerFunctions:
    """The compiled functions of one share."""

    program: Program

    @cached_property
    def reduce(self) -> Any:
        """(pushes by worker, the share of each, the scale of now) -> (gradients, their squares).

        Summed in the order of the workers, in the dtype of what is updated. A share is free of the
        scale under which its push was computed, which another version may have changed since.
        """
        wide = {row.path: wide_dtype(row) for row in self.program.table if row.leaf.trainable}

        def reduce(
            pushes: Sequence[Arrays], shares: jax.Array, scale: jax.Array
        ) -> tuple[Arrays, jax.Array]:
            shares = shares * scale
            grads = {
                path: sum(
                    push[path].astype(dtype) * share.astype(dtype)
                    for push, share in zip(pushes, shares, strict=True)
                )
                for path, dtype in wide.items()
            }
            return grads, global_norm(grads) ** 2

        return jax.jit(reduce)

    @cached_property
    def apply(self) -> Any:
        """(state, gradients, sums of squares of all servers, what was told) -> (state, metrics)."""
        update = self.program.update
        assert isinstance(update, UpdateShare)

        def apply(
            state: TrainState, grads: Arrays, squares: jax.Array, told: Told
        ) -> tuple[TrainState, Metrics]:
            total, weight = jnp.asarray(told.total), jnp.asarray(told.weight)
            sums = Sums(grads, total, weight, dict(told.metrics))
            return replace(update, norm=jnp.sqrt(jnp.sum(squares)))(state, sums, {})

        return jax.jit(apply, donate_argnums=0)

    def published(self, state: TrainState) -> Published:
        """On the host; what is frozen is not in it."""
        trained = (row.path for row in self.program.table if row.leaf.trainable)
        params = {path: np.asarray(state.params[path]) for path in trained}
        return Published(params, np.asarray(state.step), np.asarray(state.loss_scale.scale))

    def frozen(self, state: TrainState) -> Arrays:
        """The pieces of the parameters that are not trained, on the host."""
        rest = (row.path for row in self.program.table if not row.leaf.trainable)
        return {path: np.asarray(state.params[path]) for path in rest}

    def given(self, state: TrainState) -> Arrays:
        """The state as a checkpoint names it, on the host."""
        return {name: np.asarray(x) for name, x in saved_arrays(self.program, state).items()}

    def taken(self, kept: Mapping[str, np.ndarray]) -> TrainState:
        """The state of these arrays, in buffers that updates can use up."""
        read = {name: jnp.asarray(x) for name, x in kept.items()}
        mine, params = donatable_arrays(self.program, read, saved_leaves(self.program))
        return as_state(self.program, mine, params)
