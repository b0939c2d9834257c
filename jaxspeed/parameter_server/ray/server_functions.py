"""Compiled functions of a server: sum pushes, update, publish, save and restore its state.

    reduce   pushes of all workers -> gradients, and the sum of their squares
    apply    gradients, the sums of squares of all servers -> the next state, and metrics

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
from jaxspeed.parameter_server.ray.server_program import ServerUpdate
from jaxspeed.train.program import Metrics, Program


class LossScalars(NamedTuple):
    """The scalars of a push: loss, weight, metrics and loss scale."""

    total: Any  # of the loss
    weight: Any
    metrics: Mapping[str, Any]
    scale: Any  # the loss scale of the push


class Published(NamedTuple):
    """What workers pull from one server."""

    params: Arrays  # its rows of the trained parameters, as layers read them
    step: Any  # the version
    scale: Any  # the loss scale


def combine_scalars(scalars: Sequence[LossScalars]) -> tuple[LossScalars, np.ndarray]:
    """The combined scalars of one update's pushes, and each one's weight share over its scale."""
    weights = np.array([one.weight for one in scalars], np.float32)
    weight = weights.sum()
    shares = weights / weight if weight > 0 else np.zeros_like(weights)
    metrics = {
        name: sum(np.float32(one.metrics[name]) * share for one, share in zip(scalars, shares))
        for name in scalars[0].metrics
    }
    total = sum(np.float32(one.total) for one in scalars)
    scales = np.array([one.scale for one in scalars], np.float32)
    return LossScalars(total, weight, metrics, scales[0]), shares / scales


@dataclass(frozen=True)
class ServerFunctions:
    """The compiled functions of one server's parameters."""

    program: Program

    @cached_property
    def reduce(self) -> Any:
        """(pushes by worker, their shares, the current loss scale) -> (gradients, sum of squares).

        Summed in worker order, in the dtype of the updated arrays. A share is divided by the scale
        under which its push was computed, which another version may have changed since.
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
        """(state, gradients, sums of squares of all servers, scalars) -> (state, metrics)."""
        update = self.program.update
        assert isinstance(update, ServerUpdate)

        def apply(
            state: TrainState, grads: Arrays, squares: jax.Array, scalars: LossScalars
        ) -> tuple[TrainState, Metrics]:
            total, weight = jnp.asarray(scalars.total), jnp.asarray(scalars.weight)
            sums = Sums(grads, total, weight, dict(scalars.metrics))
            return replace(update, norm=jnp.sqrt(jnp.sum(squares)))(state, sums, {})

        return jax.jit(apply, donate_argnums=0)

    def published(self, state: TrainState) -> Published:
        """The trained parameters as layers read them, on the host."""
        trained = (row.path for row in self.program.table if row.leaf.trainable)
        params = {path: np.asarray(state.params[path]) for path in trained}
        return Published(params, np.asarray(state.step), np.asarray(state.loss_scale.scale))

    def frozen(self, state: TrainState) -> Arrays:
        """The rows of frozen parameters, on the host."""
        rest = (row.path for row in self.program.table if not row.leaf.trainable)
        return {path: np.asarray(state.params[path]) for path in rest}

    def saved(self, state: TrainState) -> Arrays:
        """The state by checkpoint names, on the host."""
        return {name: np.asarray(x) for name, x in saved_arrays(self.program, state).items()}

    def restored(self, saved: Mapping[str, np.ndarray]) -> TrainState:
        """The state of these arrays, in buffers that updates can donate."""
        read = {name: jnp.asarray(x) for name, x in saved.items()}
        mine, params = donatable_arrays(self.program, read, saved_leaves(self.program))
        return as_state(self.program, mine, params)
