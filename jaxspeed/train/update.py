"""The optimizer update: unscale and clip reduced gradients, update the state or skip the step."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxspeed.disk.tier import DiskTier
from jaxspeed.objectives.terms_and_metrics import results
from jaxspeed.offload.offloaded_update import StreamedUpdate, Updated
from jaxspeed.ops.materialize import materialize
from jaxspeed.optim import clip_factor, ema, global_norm, loss_scale
from jaxspeed.optim.skippable_update import guarded_update
from jaxspeed.placement.codec import pad, unpad
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.placement.mesh import simulated
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.placement.rows import Row
from jaxspeed.placement.table import PlacementTable
from jaxspeed.ring_reduction import Reduction
from jaxspeed.traced_loss.accumulate import Sums, per_weight
from jaxspeed.train_state.opt_layout import OptLayout
from jaxspeed.train_state.optimizer import RunOptimizer
from jaxspeed.train_state.state import Arrays, TrainState, native_tree, updated_values, wide_dtype
from jaxspeed.user_models import Model
from jaxspeed.user_models.rng import is_key

Metrics = dict[str, jax.Array]


class ReducedGradients(NamedTuple):
    """Gradients of a step, and how they are applied."""

    grads: Arrays
    norm: jax.Array
    factor: jax.Array  # of clipping
    multiplier: jax.Array | None  # of clipping and scale, if there is any
    finite: jax.Array  # whether the step is taken


@dataclass(frozen=True)
class Update:
    """`__call__(state, sums, variables, norm) -> (state, metrics)`.

    `norm` is the global norm of the gradients, where this program has only some of them.
    """

    table: PlacementTable
    model: Model
    layout: OptLayout
    optimizer: RunOptimizer
    gradient_factor: float = 1  # the data-parallel size where gradients are summed, not averaged
    skip_non_finite: bool = True
    streamed: StreamedUpdate | None = None  # with state in host memory, encoded, or on a disk
    ring: Reduction | None = None  # where parameters are all-gathered by rings
    tier: DiskTier | None = None  # with state on a disk: see `disk_phases.py`

    def __call__(
        self, state: TrainState, sums: Sums, variables: Arrays, norm: Any = None
    ) -> tuple[TrainState, Metrics]:
        grads, norm, factor, multiplier, finite = self.reduced(state, sums, norm)
        state = self.with_written(state, variables, finite)
        update = self.streamed or self._resident
        changed = update(grads, multiplier, state, finite)
        params = self._gathered_over_old(changed.params, state.params, finite)
        changed = changed._replace(params=params)
        return self.settled(state, sums, variables, changed, norm, factor, finite)

    def reduced(self, state: TrainState, sums: Sums, norm: Any = None) -> "ReducedGradients":
        """The gradients sharded as the optimizer's state, and how they are applied."""
        unscale = self.gradient_factor / state.loss_scale.scale
        scaled = {path: self._reduced(path, grad) for path, grad in sums.grads.items()}
        norm = (self._norm(scaled) if norm is None else norm) * unscale
        finite = jnp.isfinite(norm) if self.skip_non_finite else jnp.asarray(True)
        factor = clip_factor(norm, self.optimizer.clipping)
        unscaled = self.gradient_factor == 1 and self.optimizer.rule == loss_scale.StaticRule()
        # One multiplication for clipping and scale, fused into the update.
        multiplier = factor * unscale if self.optimizer.clipping or not unscaled else None
        return ReducedGradients(scaled, norm, factor, multiplier, finite)

    def with_written(self, state: TrainState, variables: Arrays, finite: jax.Array) -> TrainState:
        """Take over the parameters that the loss wrote, unless the step is skipped."""
        written = {
            path: jnp.where(finite, variables[path], old)
            for path, old in state.params.items()
            if path in variables
        }
        return replace(state, params=state.params | written) if written else state

    def _gathered_over_old(self, params: Arrays, before: Arrays, finite: jax.Array) -> Arrays:
        """Gathered parameters, written over the old ones by an operation that reads both.

        If a gather itself wrote into the buffer of the old parameter, XLA:TPU would copy that at
        the start of the step (libtpu 0.0.52): 2 bytes per parameter. In a skipped step a gathered
        parameter is the old one already. Elsewhere nothing is added: XLA:GPU gathers several at
        once, which then would all be buffers besides the old ones.
        """
        gathered = dict(params)
        for row in self.table:
            if not (row.leaf.trainable and row.param and row.opt) or in_host(row.param):
                continue
            if row.param.spec != row.opt.spec:
                over_old = partial(_over_old, at=self.table.sharding(row.param))
                args = params[row.path], before[row.path], finite
                gathered[row.path] = jax.lax.platform_dependent(
                    *args, tpu=over_old, default=lambda new, old, finite: new
                )
        return gathered

    def settled(
        self,
        state: TrainState,
        sums: Sums,
        variables: Arrays,
        changed: Updated,
        norm: jax.Array,
        factor: jax.Array,
        finite: jax.Array,
    ) -> tuple[TrainState, Metrics]:
        """The next state with what the optimizer changed, and the step's metrics.

        `variables` are those after all micro-batches; the model's `after_step()` reads them.
        """
        scale = state.loss_scale.scale
        model_variables = {path: variables[path] for path in state.variables}
        variables = model_variables | self.model.after_step(model_variables, state.step)
        after = replace(
            state,
            step=state.step + 1,
            skipped=state.skipped + (1 - finite.astype(jnp.int32)),
            **changed._asdict(),
            variables={
                path: old if is_key(old) else jnp.where(finite, variables[path], old)
                for path, old in state.variables.items()
            },
            loss_scale=loss_scale.update(state.loss_scale, finite, self.optimizer.rule),
            ring_errors={
                name: jnp.where(finite, sums.errors[name], old)
                for name, old in state.ring_errors.items()
            },
        )
        metrics = {
            "loss": per_weight(sums.total, sums.weight),
            "weight": sums.weight,
            "grad_norm": norm,
            "grad_norm_clipped": norm * factor,
            **self.optimizer.learning_rates(state.step - state.skipped),
            "loss_scale": scale,
            "skipped": ~finite,
            "skipped_steps": after.skipped,
        }
        return after, {**results(sums.metrics), **metrics}

    def _reduced(self, path: str, grad: jax.Array) -> jax.Array:
        """Reshard a gradient as the optimizer's state; leave an offloaded one in host memory.

        Cast to the dtype of the updated array, unless the update is streamed.
        """
        row = self.table[path]
        assert row.opt is not None and row.grad is not None
        if in_host(row.grad):
            return grad
        grad = pad(grad, row.shape(row.opt))
        at = self.table.sharding(row.opt).with_memory_kind(row.read.memory_kind)
        grad = constrain(grad, at, "reduce")
        if self.streamed:
            return grad
        grad = grad.astype(wide_dtype(row))
        # The norm and each array of the optimizer's state read it.
        return materialize(grad) if simulated(self.table.mesh) else grad

    def _norm(self, grads: Arrays) -> jax.Array:
        """The global norm of the gradients in the dtype of the updated arrays."""
        rows = {path: self.table[path] for path in grads}
        at = {path: self.table.sharding(row.opt) for path, row in rows.items() if row.opt}
        if not self.streamed:
            return global_norm(grads, at)
        here, offloaded = {}, {}
        for path, grad in grads.items():
            row = rows[path]
            if row.grad and in_host(row.grad):
                offloaded[path] = grad
            else:
                here[path] = grad.astype(wide_dtype(row))
        norm = global_norm(here, {path: at[path] for path in here})
        if not offloaded:
            return norm
        squares = norm * norm
        for path, grad in offloaded.items():
            squares = self.streamed.with_squares(squares, rows[path], grad)
        return jnp.sqrt(squares)

    def _resident(
        self, grads: Arrays, factor: jax.Array | None, state: TrainState, finite: jax.Array
    ) -> Updated:
        """The update of state in device memory."""
        if factor is not None:
            grads = {path: g * factor.astype(g.dtype) for path, g in grads.items()}
        trained = [row for row in self.table if row.leaf.trainable]
        old = {row.path: updated_values(state, row) for row in trained}
        new, opt = self._optimize(grads, state, old, finite)
        master = {row.path: new[row.path] for row in trained if row.master}
        params = state.params | self._cast_and_gather(new)
        average = state.ema
        if self.optimizer.ema_decay is not None:
            moved = ema.update(state.ema, new, self.optimizer.ema_decay)
            average = jax.tree.map(lambda a, b: jnp.where(finite, a, b), moved, state.ema)
        return Updated(params, master, opt, average)

    def _cast_and_gather(self, new: Arrays) -> Arrays:
        """The updated parameters as layers read them: cast, and all-gathered under ZeRO 1 and 2.

        The cast happens on the shards; the step's output sharding makes XLA gather, or rings do.
        """
        read = {row.path: row.param for row in self.table if row.leaf.trainable and row.param}
        narrow = {path: new[path].astype(param.dtype) for path, param in read.items()}
        if self.ring:
            return self.ring.gather_updated(narrow)
        return {path: unpad(x, self.table[path].shape(read[path])) for path, x in narrow.items()}

    def _optimize(
        self, grads: Arrays, state: TrainState, old: Arrays, finite: jax.Array
    ) -> tuple[Arrays, Any]:
        """Run the optimizer on logical leaves: unpadded, in the model's tree."""

        def logical(values: Arrays) -> Any:
            shapes = {path: self.table[path].leaf.shape for path in values}
            flat = {path: unpad(value, shapes[path]) for path, value in values.items()}
            return native_tree(self.model, flat)

        args = (logical(grads), self.layout.logical(state.opt), logical(old))
        transform = self.optimizer.transform
        params, opt = guarded_update(transform, *args, keep=finite, placements=self.table)
        stored = self.layout.stored(opt, state.opt, finite)
        return self._as_stored(flat_with_paths(params)), stored

    def _as_stored(self, values: Arrays) -> Arrays:
        """Pad to the shapes of the optimizer's state."""

        def padded(row: Row, value: jax.Array) -> jax.Array:
            assert row.opt is not None
            return pad(value, row.shape(row.opt))

        return {path: padded(self.table[path], value) for path, value in values.items()}


def _over_old(new: jax.Array, old: jax.Array, finite: jax.Array, at: NamedSharding) -> jax.Array:
    return jnp.where(finite, constrain(new, at, "update.gather"), old)
