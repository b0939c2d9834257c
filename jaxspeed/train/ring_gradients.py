"""Gradients of one step, reduced over the data ranks by rings (`parallel.data_reduction: ring`).

Each rank computes its part of the batch in a region that is manual over the data axes. Where ranks
hold full gradients (ZeRO 0 and 1) they are reduced once a step, otherwise after each micro-batch.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspeed.axes import summing_axes
from jaxspeed.errors import ModelError
from jaxspeed.placement.batch_dims import sample_specs
from jaxspeed.placement.specs import spec_axes
from jaxspeed.ring_reduction.reduction import PER_RANK, Reduction
from jaxspeed.ring_reduction.rings import INNER, NO_RANK, OUTER, data_spec
from jaxspeed.ring_reduction.unit_exchange import RingExchange
from jaxspeed.traced_loss.accumulate import Sums, micro_batch_shapes, micro_batches, unit_of
from jaxspeed.traced_loss.loss import Loss, TermWeights
from jaxspeed.train.gradients import Gradients
from jaxspeed.train_state.state import Arrays
from jaxspeed.zero3 import InOrder


@dataclass(frozen=True, kw_only=True)
class RingGradients(Gradients):
    """`__call__(sources, variables, batch, step, scale, errors) -> (Sums, variables)`."""

    ring: Reduction

    def __post_init__(self) -> None:
        paths = [r.path for r in self.table if spec_axes(r.read.spec).intersection(summing_axes())]
        if paths:
            raise ModelError(
                f'parallel.data_reduction "ring": {paths[0]} is sharded over an axis that shards '
                'the batch, so that no rank has it; use "xla"'
            )

    def __call__(
        self,
        sources: Arrays,
        variables: Arrays,
        batch: Any,
        step: Any,
        scale: Any,
        ring_errors: Any = (),
    ) -> tuple[Sums, Arrays]:
        self._refuse_mixed_samples(variables, batch, step)
        variables = self.traced_loss.with_squares(sources, variables)
        errors = dict(ring_errors)
        weights = self._mean_weights_of_ranks(variables, batch, step)
        return self._by_rings(sources, variables, batch, step, scale, errors, weights), variables

    def _refuse_mixed_samples(self, variables: Arrays, batch: Any, step: Any) -> None:
        part = micro_batch_shapes(batch, self.accumulation)
        rest = (variables, part, jnp.asarray(step), jnp.asarray(0))
        program = self.traced_loss.trace(rest, train=True)
        if program.own_axes.collective:
            raise ModelError(
                'parallel.data_reduction "ring": the loss reduces over the axis '
                f"{program.own_axes.collective[0]!r}, which means the entire micro-batch, and each "
                'rank sees only its own samples; use "xla"'
            )
        if program.written:
            raise ModelError(
                'parallel.data_reduction "ring": the training pass changes variables of the model '
                "(the statistics of a BatchNorm, say), and each rank sees only its own samples; a "
                'normalisation without running statistics works, or "xla"'
            )
        by_parts = self.traced_loss.by_parts(rest, train=True, manual=summing_axes())
        by_parts.refuse_mixed('parallel.data_reduction "ring"', "each rank", 'use "xla"')

    def _by_rings(
        self,
        sources: Arrays,
        variables: Arrays,
        batch: Any,
        step: Any,
        scale: Any,
        errors: Arrays,
        weights: TermWeights | None,
    ) -> Sums:
        """All micro-batches, reduced once a step where ranks hold full gradients, else each."""

        def some(count: int, batch: Any, index: Any, errors: Arrays) -> Sums:
            return self._of_ranks(
                sources, variables, batch, step, index, scale, errors, count, weights
            )

        if self.accumulation == 1 or not self.table.grads_sharded:
            return some(self.accumulation, batch, 0, errors)
        micro = micro_batches(batch, self.accumulation, self.table.ranks)

        def compute(variables: Arrays, batch: Any, index: Any, errors: Any) -> tuple[Sums, Arrays]:
            return some(1, batch, index, errors), variables

        return self._accumulate(
            sources, variables, micro, step, scale, placed=True, compute=compute, errors=errors
        )[0]

    def _of_ranks(
        self,
        sources: Arrays,
        variables: Arrays,
        batch: Any,
        step: Any,
        first: Any,
        scale: Any,
        errors: Arrays,
        count: int,
        weights: TermWeights | None,
    ) -> Sums:
        """`count` micro-batches from the `first`, of which each rank computes its part.

        Units that are gathered (ZeRO 3) use rings within the pass, so that their gradients leave
        it as sums over ranks.
        """
        rings = self.ring.rings
        exchanged = {row.path for row in self.table if row.gathered}
        # Not closed over: inside, an array's type has the data axes as manual.
        every = variables, jnp.asarray(step), jnp.asarray(first), jnp.asarray(scale), weights

        def local(inner: Any, outer: Any, sources: Arrays, every: Any, batch: Any) -> Sums:
            variables, step, first, scale, weights = every
            ranks = rings.ranks(inner, outer)
            rank = ranks.outer * rings.levels.inner.size + ranks.inner
            ring = RingExchange(rings, (inner, outer))
            exchange: Any = InOrder(ring, rings.ordered) if rings.in_order else ring
            of_rank = replace(self, traced_loss=self.traced_loss.with_exchange(exchange))

            def unit_of_ranks(loss: Loss) -> jax.Array:
                return unit_of(ring.weight_of_ranks(loss))

            def compute(variables: Arrays, batch: Any, index: Any, _: Any) -> tuple[Sums, Arrays]:
                # Numbered over all ranks, so that each draws different random numbers.
                number = (first + index) * rings.count + rank
                way: dict[str, Any] = {"weight_of": unit_of_ranks} if exchanged else {}
                return of_rank._micro(
                    sources, variables, batch, step, number, scale, weights=weights, **way
                )

            if count == 1:
                sums, _ = compute(variables, batch, 0, {})
            else:
                micro = micro_batches(batch, count, 1)
                sums, _ = of_rank._accumulate(
                    sources, variables, micro, step, scale, placed=False, compute=compute
                )
            # The next ring depends on the entire pass.
            after = rings.after_arrays(ranks, sums.grads).inner
            total = jnp.where(after == NO_RANK, jnp.zeros_like(sums.total), sums.total)
            sums = sums._replace(total=total)
            grads = {p: g if p in exchanged else g[None] for p, g in sums.grads.items()}
            scalars = jax.tree.map(lambda x: x[None], sums._replace(grads={}))
            return scalars._replace(grads=grads)

        trained = [row.path for row in self.table if row.leaf.trainable]
        specs = {
            row.path: jax.tree.map(
                lambda at: data_spec(at.spec), self.table.stored(row, row.source).shardings
            )
            for row in self.table
        }
        of_ranks: Any = PER_RANK
        parts: Sums = jax.shard_map(
            local,
            mesh=self.table.mesh,
            in_specs=(
                PartitionSpec(INNER),
                PartitionSpec(OUTER),
                specs,
                PartitionSpec(),
                sample_specs(batch),
            ),
            out_specs=Sums(
                {path: specs[path] if path in exchanged else of_ranks for path in trained},
                of_ranks,
                of_ranks,
                of_ranks,
                of_ranks,
            ),
            axis_names=set(summing_axes()),
            check_vma=False,
        )(*rings.rank_ids(), sources, every, batch)
        done = {path: grad for path, grad in parts.grads.items() if path in exchanged}
        rest = {path: grad for path, grad in parts.grads.items() if path not in exchanged}
        sums = self.ring(parts._replace(grads=rest, errors=errors), scale, weighed=bool(exchanged))
        return sums._replace(grads={path: (done | sums.grads)[path] for path in trained})
