"""Gradients of one step whose data ranks add them up around rings.

Each rank computes its own part of the batch in a region that is manual over the data axes. Where
ranks keep whole gradients (stages 0 and 1) they are added up once a step, elsewhere after each
micro-batch.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspeed.errors import ModelError
from jaxspeed.objective.accumulate import Sums, micro_batch_shapes, micro_batches
from jaxspeed.objective.train_state import Arrays
from jaxspeed.placement.mesh import DATA_AXES, data_parallel_size
from jaxspeed.ring_reduction.reduction import OF_RANKS, Reduction
from jaxspeed.ring_reduction.rings import DATA, NO_RANK, REPLICA, data_spec
from jaxspeed.ring_reduction.unit_exchange import RingExchange
from jaxspeed.train.gradients import Gradients, batch_specs


@dataclass(frozen=True, kw_only=True)
class RingGradients(Gradients):
    """`__call__(sources, variables, batch, step, scale, errors) -> (Sums, variables)`."""

    ring: Reduction

    def __call__(
        self,
        sources: Arrays,
        variables: Arrays,
        batch: Any,
        step: Any,
        scale: Any,
        ring_errors: Any = (),
    ) -> tuple[Sums, Arrays]:
        self._refuse_statistics(variables, batch, step)
        errors = dict(ring_errors)
        return self._around_rings(sources, variables, batch, step, scale, errors), variables

    def _refuse_statistics(self, variables: Arrays, batch: Any, step: Any) -> None:
        part = micro_batch_shapes(batch, self.accumulation)
        rest = (variables, part, jnp.asarray(step), jnp.asarray(0))
        if self.objective.trace(rest, train=True).written:
            raise ModelError(
                'parallel.data_reduction "ring": the training pass changes variables of the model '
                "(the statistics of a BatchNorm, say), and each rank sees only its own samples; a "
                'normalisation without running statistics does, or "xla"'
            )

    def _around_rings(
        self, sources: Arrays, variables: Arrays, batch: Any, step: Any, scale: Any, errors: Arrays
    ) -> Sums:
        """All micro-batches: added up once a step where ranks keep whole gradients, else each."""

        def some(count: int, batch: Any, index: Any, errors: Arrays) -> Sums:
            return self._of_ranks(sources, variables, batch, step, index, scale, errors, count)

        if self.accumulation == 1 or not self.table.grads_sharded:
            return some(self.accumulation, batch, 0, errors)
        micro = micro_batches(batch, self.accumulation, data_parallel_size(self.table.mesh))

        def one(variables: Arrays, batch: Any, index: Any, errors: Any) -> tuple[Sums, Arrays]:
            return some(1, batch, index, errors), variables

        return self._accumulate(
            sources, variables, micro, step, scale, placed=True, one=one, errors=errors
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
    ) -> Sums:
        """`count` micro-batches from the `first`, of which each rank computes its own part.

        Units that are gathered come and go around the rings themselves (ZeRO 3), so that their
        gradients leave the pass as sums over ranks.
        """
        rings = self.ring.rings
        exchanged = {row.path for row in self.table if row.gathered}
        # Not closed over: inside, an array's type says that the data axes are manual.
        every = variables, jnp.asarray(step), jnp.asarray(first), jnp.asarray(scale)

        def local(inner: Any, outer: Any, sources: Arrays, every: Any, batch: Any) -> Sums:
            variables, step, first, scale = every
            told = rings.told(inner, outer)
            rank = told.outer * rings.levels.inner.size + told.inner
            exchange = RingExchange(rings, (inner, outer)) if exchanged else None
            of_rank = replace(self, objective=self.objective.with_exchange(exchange))

            def one(variables: Arrays, batch: Any, index: Any, _: Any) -> tuple[Sums, Arrays]:
                # Numbered through over the ranks, so that each draws random numbers of its own.
                number = (first + index) * rings.count + rank
                among = {"among": exchange.over_ranks} if exchange else {}
                return of_rank._micro(sources, variables, batch, step, number, scale, **among)

            if count == 1:
                sums, _ = one(variables, batch, 0, {})
            else:
                micro = micro_batches(batch, count, 1)
                sums, _ = of_rank._accumulate(
                    sources, variables, micro, step, scale, placed=False, one=one
                )
            # So that what is handed round next waits for the whole pass.
            after = rings.once_there(told, sums.grads).inner
            total = jnp.where(after == NO_RANK, jnp.zeros_like(sums.total), sums.total)
            sums = sums._replace(total=total)
            grads = {p: g if p in exchanged else g[None] for p, g in sums.grads.items()}
            scalars = jax.tree.map(lambda x: x[None], sums._replace(grads={}))
            return scalars._replace(grads=grads)

        trained = [row.path for row in self.table if row.leaf.trainable]
        cuts = {row.path: data_spec(row) for row in self.table}
        of_ranks: Any = OF_RANKS
        parts: Sums = jax.shard_map(
            local,
            mesh=self.table.mesh,
            in_specs=(
                PartitionSpec(DATA),
                PartitionSpec(REPLICA),
                cuts,
                PartitionSpec(),
                batch_specs(batch),
            ),
            out_specs=Sums(
                {path: cuts[path] if path in exchanged else of_ranks for path in trained},
                of_ranks,
                of_ranks,
                of_ranks,
                of_ranks,
            ),
            axis_names=set(DATA_AXES),
            check_vma=False,
        )(*rings.numbers(), sources, every, batch)
        done = {path: grad for path, grad in parts.grads.items() if path in exchanged}
        rest = {path: grad for path, grad in parts.grads.items() if path not in exchanged}
        sums = self.ring(parts._replace(grads=rest, errors=errors), scale, weighed=bool(exchanged))
        return sums._replace(grads={path: (done | sums.grads)[path] for path in trained})
