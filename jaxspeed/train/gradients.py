"""Gradients of one step: accumulation over micro-batches, reduction over the data ranks.

Reduction per micro-batch: each gradient is all-reduced or reduce-scattered (ZeRO 2 and 3) as it is
produced, into its `grad` placement. Reduction per step (ZeRO 0 and 1, where the loss allows it):
each data rank accumulates the partial gradients of its part of the batch, and the ranks' partial
gradients are summed after the loop.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspeed.axes import SEQ, TENSOR, sample_axes, summing_axes
from jaxspeed.errors import ModelError
from jaxspeed.objectives.terms_and_metrics import of_none
from jaxspeed.offload import StreamedArray, mean_in_host, zeros_in_host
from jaxspeed.pipeline import Pipeline
from jaxspeed.placement.batch_dims import sample_specs
from jaxspeed.placement.codec import pad
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.memory_kinds import in_host, on_device, to_host
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import reduction_dtype
from jaxspeed.placement.specs import spec_axes
from jaxspeed.placement.table import PlacementTable
from jaxspeed.traced_loss.accumulate import (
    Sums,
    accumulate,
    micro_batch_shapes,
    micro_batches,
    per_weight,
    running_mean,
    shares,
    unit_of,
)
from jaxspeed.traced_loss.loss import Loss, TermWeights
from jaxspeed.traced_loss.micro_batch_loss import MicroBatchLoss
from jaxspeed.train_state.state import Arrays

MICRO_BATCHES = "micro_batches"  # the named scope of the loop in a compiled program
Reduction = Literal["step", "micro_batch"]
Micro = Callable[[Arrays, Any, Any, Any], tuple[Sums, Arrays]]


@dataclass(frozen=True)
class Gradients:
    """`__call__(sources, variables, batch, step, scale) -> (Sums, variables)`."""

    traced_loss: MicroBatchLoss
    accumulation: int
    wanted_reduction: Literal["auto", "step", "micro_batch"] = "auto"
    pipeline: Pipeline | None = None  # where the mesh has stages
    parts: int = 1  # of a micro-batch, on one device

    @property
    def table(self) -> PlacementTable:
        return self.traced_loss.table

    def __call__(
        self,
        sources: Arrays,
        variables: Arrays,
        batch: Any,
        step: Any,
        scale: Any,
        ring_errors: Any = (),
    ) -> tuple[Sums, Arrays]:
        del ring_errors  # only `RingGradients` uses them
        variables = self.traced_loss.with_squares(sources, variables)
        if self.pipeline:
            layout = self.pipeline.layout
            sources = layout.by_stage(sources, step)
            sums, variables = self._looped(sources, variables, batch, step, scale)
            return sums._replace(grads=self._every(layout.by_path(sums.grads, step))), variables
        if self.accumulation == 1:
            return self._micro(sources, variables, batch, step, 0, scale, lambda loss: loss.weight)
        return self._looped(sources, variables, batch, step, scale)

    def of_part(
        self, sources: Arrays, variables: Arrays, part: Any, step: Any, scale: Any, first: Any
    ) -> Sums:
        """The sums of one worker's part of the batch, on its device or mesh.

        `first` is the number of its first micro-batch among those of all parts; random numbers
        derive from it.
        """
        variables = self.traced_loss.with_squares(sources, variables)
        if self.accumulation == 1:
            return self._micro(sources, variables, part, step, first, scale)[0]
        if self.table.mesh.size > 1:
            return self._looped(sources, variables, part, step, scale, first)[0]
        micro = micro_batches(part, self.accumulation, 1)
        sums = self._accumulate(sources, variables, micro, step, scale, placed=False, first=first)
        return sums[0]

    def _every(self, grads: Arrays) -> Arrays:
        """Add zeros for the trained parameters that the loss does not read."""
        rows = [row for row in self.table if row.leaf.trainable]
        zeros = {
            row.path: jnp.zeros(row.shape(row.grad), row.grad.dtype)
            for row in rows
            if row.grad and row.path not in grads
        }
        return {row.path: (grads | zeros)[row.path] for row in rows}

    def _looped(
        self,
        sources: Arrays,
        variables: Arrays,
        batch: Any,
        step: Any,
        scale: Any,
        first: Any = 0,
    ) -> tuple[Sums, Arrays]:
        """All micro-batches. With a pipeline, sources and gradients are laid out by stage."""
        self._refuse_trained_weight(variables, batch, step)
        if self.reduction(variables, batch, step)[0] == "step":
            return self._once_a_step(sources, variables, batch, step, scale), variables
        ranks = self.table.ranks
        micro = micro_batches(batch, self.accumulation, ranks)
        return self._accumulate(sources, variables, micro, step, scale, placed=True, first=first)

    def _refuse_trained_weight(self, variables: Arrays, batch: Any, step: Any) -> None:
        part = micro_batch_shapes(batch, self.accumulation)
        rest = (variables, part, jnp.asarray(step), jnp.asarray(0))
        program = self.traced_loss.trace(rest, train=True)
        names = program.weight_parameters
        if names and not program.loss_outputs.terms:  # `mean_weights` refuses those with others
            raise ModelError(
                "loss_fn returned (sum, weight), and the weight depends on parameters that are "
                f"trained ({listed(names)}): over several micro-batches, or stages of a pipeline, "
                "the gradient of sum / weight is not the sum of theirs. Set "
                "gradient_accumulation_steps 1 without stages; or return (sum, "
                "jax.lax.stop_gradient(weight)), or the mean alone"
            )

    def reduction(self, variables: Arrays, batch: Any, step: Any) -> tuple[Reduction, str]:
        """When gradients are reduced, and why."""
        ranks = self.table.ranks
        if self.accumulation == 1 or ranks == 1:
            return "micro_batch", "there is one micro-batch or one data rank"
        if self.table.grads_sharded:
            return "micro_batch", "ZeRO stages 2 and 3 shard gradients"
        if any(row.grad and in_host(row.grad) for row in self.table):
            return "micro_batch", "gradients are offloaded to host memory as they are produced"
        if any(spec_axes(row.read.spec).intersection(summing_axes()) for row in self.table):
            return "micro_batch", "a parameter is sharded over an axis that shards the batch"
        if self.pipeline:
            # Manual inside each rank's part, with the manual axes `replica`, `data`, `pipe`. XLA
            # aborts where that is not the mesh's order ("Manual axes must be sorted by mesh axis
            # index", jax 0.11.2 and 0.12.0.1).
            return "micro_batch", "XLA aborts on stages inside a rank's part"
        if min(self.table.mesh.shape[axis] for axis in (SEQ, TENSOR)) > 1:
            # "Check failed: partition_group_list.num_replica_groups() * ..." (jax 0.12.0.1)
            return "micro_batch", "XLA aborts on seq and tensor together inside a rank's part"
        part = micro_batch_shapes(batch, self.accumulation)
        rest = (variables, part, jnp.asarray(step), jnp.asarray(0))
        program = self.traced_loss.trace(rest, train=True)
        if self.wanted_reduction == "micro_batch":
            return "micro_batch", "parallel.gradient_reduction sets it"
        if self.wanted_reduction == "step" and not program.own_axes.collective:
            by_parts = self.traced_loss.by_parts(rest, train=True, manual=sample_axes())
            where = 'parallel.gradient_reduction "step"'
            by_parts.refuse_mixed(where, "each data rank", 'use "auto"')
            return "step", "parallel.gradient_reduction sets it"
        if not program.is_sum:
            return "micro_batch", "the loss is not a (sum, weight)"
        if program.written:
            return "micro_batch", "the training pass changes the model's statistics"
        if program.draws_random_numbers:
            return "micro_batch", "the training pass draws random numbers"
        if why := self.traced_loss.by_parts(rest, train=True, manual=sample_axes()).not_once:
            return "micro_batch", why
        return "step", "the loss is a weighted sum over samples"

    def _micro(
        self,
        sources: Arrays,
        variables: Arrays,
        batch: Any,
        step: Any,
        micro: Any,
        scale: Any,
        weight_of: Callable[[Loss], jax.Array] = lambda loss: unit_of(loss.weight),
        weights: TermWeights | None = None,
    ) -> tuple[Sums, Arrays]:
        """One micro-batch: gradients of scale * total / `weight_of`(loss).

        `weights` are the mean weights of all, if the loss has several terms.
        """
        trained = {row.path for row in self.table if row.leaf.trainable}

        # Parameters that an earlier micro-batch's loss wrote are among the variables.
        sources = {path: variables.get(path, value) for path, value in sources.items()}
        state = {path: value for path, value in variables.items() if path not in sources}

        def scaled(active: Arrays) -> tuple[jax.Array, tuple[Loss, Arrays]]:
            every = {path: active.get(path, value) for path, value in sources.items()}
            loss, after = self._loss(every, state, batch, step, micro)
            loss = loss.folded(weights)
            if type(loss.total) is not type(next(iter(active.values()))):  # not differentiated
                raise ModelError(
                    "the loss does not depend on any trained parameter: loss_fn(model, batch) has "
                    "to call the model and return a loss of its output"
                )
            share = per_weight(scale, weight_of(loss))
            return loss.total * share.astype(loss.total.dtype), (loss, after)

        active = {path: value for path, value in sources.items() if path in trained}
        grads, (loss, after) = jax.grad(scaled, has_aux=True)(active)
        grads = {path: self._padded_in_host(path, steepest(g)) for path, g in grads.items()}
        return Sums(grads, loss.total, loss.weight, loss.metrics), {**variables, **after}

    def _loss(
        self, sources: Arrays, state: Arrays, batch: Any, step: Any, micro: Any
    ) -> tuple[Loss, Arrays]:
        """The loss of one micro-batch: of its parts, which do not depend on each other.

        XLA:CPU runs what is independent at once, where it would divide each operation of an entire
        micro-batch among the cores and wait for the slowest.
        """
        if self.parts == 1:
            return self.traced_loss(sources, state, batch, step, micro, True)
        losses = []
        self._refuse_dependent_parts((state, batch, jnp.asarray(step), jnp.asarray(0)))
        parts = micro_batches(batch, self.parts, 1)
        for number in range(self.parts):
            part = jax.tree.map(lambda x, at=number: x[at], parts)
            of_all = micro * self.parts + number  # random numbers derive from it
            losses.append(self.traced_loss(sources, state, part, step, of_all, True)[0])
        return functools.reduce(lambda seen, new: accumulate(seen, new)[0], losses), {}

    def _refuse_dependent_parts(self, rest: tuple[Any, ...]) -> None:
        where = f"parallel.batch_parts {self.parts}"
        program = self.traced_loss.trace(rest, train=True)
        if not program.is_sum:
            raise ModelError(f"{where}: the loss is not a (sum, weight); remove it")
        if program.written:
            raise ModelError(
                f"{where}: the training pass changes the model's statistics; remove it"
            )
        by_parts = self.traced_loss.by_parts(rest, train=True, parts=self.parts)
        by_parts.refuse_mixed(where, "each part", "remove it")

    def _padded_in_host(self, path: str, grad: jax.Array) -> jax.Array:
        """A gradient, in the shape of its shards in host memory where it was offloaded.

        It has the shape of the parameter, which is not padded where it is stored unsharded.
        """
        at = self.table[path].grad
        if at is None or not in_host(at) or grad.shape == (shape := self.table[path].shape(at)):
            return grad
        return to_host(pad(on_device(grad), shape), self.table.sharding(at))

    def _accumulate(
        self,
        sources: Arrays,
        variables: Arrays,
        micro: Any,
        step: Any,
        scale: Any,
        placed: bool,
        compute: Micro | None = None,
        errors: Any = (),
        first: Any = 0,
        weights: TermWeights | None = None,
    ) -> tuple[Sums, Arrays]:
        """The loop over micro-batches [accumulation, ...]; `placed` pins the accumulators.

        `compute(variables, batch, number, errors so far)` does one, by default `_micro`; `first` is
        the number of the first; `weights` are the mean weights of all, by default of these.
        """
        if self.pipeline:
            with jax.named_scope(MICRO_BATCHES):
                sums, after = self.pipeline.gradients(sources, variables, micro, step, scale)
            grads = jax.tree.map(steepest, sums.grads)
            return sums._replace(grads=grads), {**variables, **after}

        def place(path: str, grad: jax.Array) -> jax.Array:
            row = self.table[path]
            assert row.grad is not None
            if in_host(row.grad):  # offloaded as it was produced
                return grad
            grad = grad.astype(row.grad.dtype)
            if not placed:
                return grad
            grad = pad(grad, row.shape(row.grad))
            return constrain(grad, self.table.sharding(row.grad), "accumulate")

        if not compute and weights is None:
            weights = self.traced_loss.mean_weights(variables, micro, step)

        def plain(variables: Arrays, batch: Any, index: Any, _: Any) -> tuple[Sums, Arrays]:
            return self._micro(sources, variables, batch, step, index, scale, weights=weights)

        run = compute or plain

        def body(carry: tuple[Sums, Arrays], xs: Any) -> tuple[tuple[Sums, Arrays], None]:
            seen, variables = carry
            index, batch = xs
            new, variables = run(variables, batch, index, seen.errors)
            sums, share = accumulate(seen, new)

            def added(path: str, grad: jax.Array) -> jax.Array:
                placement = self.table[path].grad
                if placement and in_host(placement):
                    return mean_in_host(seen.grads[path], grad, self._streamed_array(path), share)
                return place(path, running_mean(seen.grads[path], place(path, grad), share))

            grads = {path: added(path, grad) for path, grad in new.grads.items()}
            return (sums._replace(grads=grads, errors=new.errors), variables), None

        indices = first + jnp.arange(self.accumulation)
        zero, written = self._zeros(run, variables, micro, errors, place)
        variables = {**{path: sources[path] for path in written}, **variables}
        with jax.named_scope(MICRO_BATCHES):
            (sums, variables), _ = jax.lax.scan(body, (zero, variables), (indices, micro))
        # Here too, else the compiler may shard accumulators like the optimizer's state (stage 1).
        grads = {path: place(path, grad) for path, grad in sums.grads.items()}
        if placed:  # otherwise the caller has the weight of all
            grads = {p: self._of_a_weight(p, grad, sums.weight) for p, grad in grads.items()}
        return sums._replace(grads=grads), variables

    def _of_a_weight(self, path: str, grad: jax.Array, weight: jax.Array) -> jax.Array:
        """The gradient; 0 if the weight is 0, but for those in host memory."""
        at = self.table[path].grad
        return grad if at and in_host(at) else jnp.where(weight > 0, grad, jnp.zeros_like(grad))

    def _zeros(
        self, run: Micro, variables: Arrays, micro: Any, errors: Arrays, place: Any
    ) -> tuple[Sums, set[str]]:
        """The initial sums, and the parameters that the loss writes."""
        first = jax.tree.map(lambda x: x[0], micro)
        shape, after = jax.eval_shape(run, variables, first, jnp.asarray(0), errors)

        def zero(path: str, grad: Any) -> jax.Array:
            placement = self.table[path].grad
            if placement and in_host(placement):
                stacked = bool(self.table[path].leaf.stacked)
                return zeros_in_host(self._streamed_array(path), placement.dtype, stacked)
            return place(path, jnp.zeros(grad.shape, grad.dtype))

        sums: Sums = of_none(shape._replace(grads={}))
        grads = {path: zero(path, g) for path, g in shape.grads.items()}
        return sums._replace(grads=grads, errors=errors), after.keys() - variables.keys()

    def _streamed_array(self, path: str) -> StreamedArray:
        """The host memory layout of a parameter's gradient."""
        row = self.table[path]
        assert row.grad is not None
        return StreamedArray(row.shape(row.grad), self.table.sharding(row.grad))

    def _once_a_step(
        self, sources: Arrays, variables: Arrays, batch: Any, step: Any, scale: Any
    ) -> Sums:
        """Partial gradients of each data rank, summed over the ranks after the loop.

        A rank has entire sequences: over their axis each micro-batch's gradients are summed by XLA.
        """

        # Not closed over: inside, an array's type has the data axes as manual.
        weights = self._mean_weights_of_ranks(variables, batch, step)
        every = variables, jnp.asarray(step), jnp.asarray(scale), weights

        def local(sources: Arrays, every: Any, batch: Any) -> Any:
            variables, step, scale, weights = every
            micro = micro_batches(batch, self.accumulation, 1)
            sums, _ = self._accumulate(
                sources, variables, micro, step, scale, placed=False, weights=weights
            )
            return jax.tree.map(lambda x: x[None], sums)

        mesh, ranks = self.table.mesh, sample_axes()
        parts: Sums = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), sample_specs(batch)),
            out_specs=PartitionSpec(ranks),
            axis_names=set(ranks),
            check_vma=False,
        )(sources, every, batch)
        share, weight = shares(parts.weight)  # [ranks], []

        def mean(part: jax.Array, wire: Any = None) -> jax.Array:  # [ranks, ...]
            weighed = part * share.reshape(-1, *[1] * (part.ndim - 1))
            weighed = weighed.astype(reduction_dtype(part.dtype, wire))
            # Not jnp.sum, which widens 16-bit numbers before the reduction.
            zero = jnp.zeros((), weighed.dtype)
            return jax.lax.reduce(weighed, zero, jax.lax.add, (0,)).astype(part.dtype)

        def of_metric(part: jax.Array) -> jax.Array:  # it may be 0 / 0 where nothing weighs
            return mean(jnp.where(parts.weight > 0, part, 0))

        return Sums(
            {path: mean(part, self.traced_loss.wire) for path, part in parts.grads.items()},
            parts.total.sum(),
            weight,
            {name: metric.over_parts(of_metric) for name, metric in parts.metrics.items()},
        )

    def _mean_weights_of_ranks(
        self, variables: Arrays, batch: Any, step: Any
    ) -> TermWeights | None:
        """The mean weights of the ranks' parts of micro-batches, if the loss has several terms."""
        ranks = self.table.ranks
        weights = self.traced_loss.mean_weights(
            variables, micro_batches(batch, self.accumulation, ranks), step
        )
        return jax.tree.map(lambda x: x / ranks, weights)


def steepest(grad: jax.Array) -> jax.Array:
    """The direction of steepest ascent.

    For a complex parameter x + i y the conjugate of JAX's gradient dL/dx - i dL/dy.
    """
    return jnp.conj(grad)
