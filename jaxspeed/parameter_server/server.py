"""A server's programs: the mean of pushes, the update, and what workers pull of it.

They run on the mesh of all servers, or in the process of one server on its own pieces. There the
global norm is not computed locally: `reduce` gives each server's sum of squares, and all servers
receive all sums, so that either all of them apply a step, or none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.objectives.terms_and_metrics import results
from jaxspeed.optim import global_norm
from jaxspeed.placement.memory_kinds import in_host, on_device
from jaxspeed.traced_loss.accumulate import Sums, accumulate, per_weight, running_mean
from jaxspeed.train.bucketed_update import BucketedUpdate, UpdateBuckets
from jaxspeed.train.program import Metrics, Program
from jaxspeed.train_state.state import Arrays, TrainState, wide_dtype


@dataclass(frozen=True)
class ServerStep:
    """The compiled functions of servers whose state is that of `program`. Holds no array."""

    program: Program
    bucket_paths: Sequence[Sequence[str]] = ()  # of an update in buckets

    def mean(self, pushes: Iterable[Sums]) -> Sums:
        """The weighted mean of pushes in this order, in the dtype of the updated arrays.

        Each is taken when it is added, so that two are in memory at once.
        """
        one_by_one = iter(pushes)
        total = next(one_by_one)
        for number, push in enumerate(one_by_one):
            if number == 0:
                total = total._replace(grads=self._widen(total.grads))
            total = self.fold(total, push)
        return total

    @cached_property
    def _widen(self) -> Any:
        wide = {row.path: wide_dtype(row) for row in self.program.table if row.leaf.trainable}

        def widen(grads: Arrays) -> Arrays:
            narrow = {path: x for path, x in grads.items() if x.dtype != wide[path]}
            widened = compiled(narrow) if narrow else {}
            return {path: widened.get(path, x) for path, x in grads.items()}

        compiled = jax.jit(lambda grads: {path: x.astype(wide[path]) for path, x in grads.items()})
        return widen

    @cached_property
    def fold(self) -> Any:
        """`(sums so far, a push) -> sums`; donates the gradients so far."""

        def fold(grads: Arrays, seen: Sums, new: Sums) -> Sums:
            return folded(seen._replace(grads=grads), new)

        compiled = jax.jit(self.program.in_mesh(fold), donate_argnums=0)
        return lambda seen, new: compiled(seen.grads, seen._replace(grads={}), new)

    @cached_property
    def reduce(self) -> Any:
        """`(pushes, factor) -> (their scaled mean, the sum of squares of its gradients)`."""

        def reduce(pushes: Sequence[Sums], factor: Any) -> tuple[Sums, jax.Array]:
            mean = self.mean(pushes)
            sums = damped(mean._replace(grads=self._widen(mean.grads)), factor)
            return sums, global_norm(sums.grads) ** 2

        return jax.jit(reduce)

    @cached_property
    def apply(self) -> Any:
        """`(state, sums, factor, norm) -> (state, metrics)`: one update; donates the state.

        `factor` multiplies the gradients. `norm` is that over all servers; None: this program's.
        """

        def apply(
            state: TrainState, sums: Sums, factor: Any, norm: Any
        ) -> tuple[TrainState, Metrics]:
            return self.program.update(state, damped(sums, factor), state.variables, norm)

        replicated = NamedSharding(self.program.mesh, PartitionSpec())
        return jax.jit(
            self.program.in_mesh(apply),
            donate_argnums=0,
            out_shardings=(self.program.shardings, replicated),
        )

    @cached_property
    def publish(self) -> Any:
        """`(state) -> parameters` that workers pull: on the device, in the dtype of layers."""
        table = self.program.table
        rows = [r for r in table if r.source.dtype != r.read.dtype or in_host(r.source)]
        at = {
            row.path: table.sharding(row.source).with_memory_kind(row.read.memory_kind)
            for row in rows
        }

        def cast(sources: Arrays) -> Arrays:
            return {row.path: on_device(sources[row.path]).astype(row.read.dtype) for row in rows}

        compiled = jax.jit(cast, out_shardings=at)

        def publish(state: TrainState) -> Arrays:
            sources = state.sources(table)
            return {**sources, **compiled({row.path: sources[row.path] for row in rows})}

        return publish

    def abstract(self, pushed: Sums, paths: Sequence[str]) -> tuple[Any, ...]:
        """The argument shapes of `apply`, or of an update of the bucket of these paths."""
        table, state, mesh = self.program.table, self.program.state, self.program.mesh

        def at(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        def as_it_arrives(path: str) -> jax.ShapeDtypeStruct:
            row = table[path]
            return at(row.shape(row.source), wide_dtype(row), row.source.spec)

        grads = {path: as_it_arrives(path) for path in paths}
        if self.buckets is not None:
            return (*BucketedUpdate(self.buckets, state).arguments(paths), grads)
        scalars = pushed._replace(grads={})
        sums = jax.tree.map(lambda x: at(x.shape, x.dtype, PartitionSpec()), scalars)
        return state, sums._replace(grads=grads), jnp.float32(1), None

    @cached_property
    def buckets(self) -> UpdateBuckets | None:
        """The update in buckets; None where it depends on all gradients."""
        return UpdateBuckets(self.program, self.bucket_paths) if self.bucket_paths else None


def damped(sums: Sums, factor: Any) -> Sums:
    """Multiply gradients by `factor`: 1, but for stale ones and those of another loss scale.

    Those without a weight are 0.
    """
    factor = jnp.where(sums.weight > 0, factor, 0)
    grads = {path: x * factor.astype(x.dtype) for path, x in sums.grads.items()}
    return sums._replace(grads=grads)


def folded(seen: Sums, new: Sums) -> Sums:
    """The weighted mean of two workers' sums, as micro-batches accumulate."""
    sums, share = accumulate(seen, new)
    grads = {path: running_mean(x, new.grads[path], share) for path, x in seen.grads.items()}
    return sums._replace(grads=grads)


@jax.jit
def folded_losses(seen: Sums, new: Sums) -> Sums:
    """`folded`, compiled, of sums without gradients."""
    return folded(seen, new)


@jax.jit
def mean_loss(sums: Sums) -> Metrics:
    """Loss, weight and metrics of sums without gradients."""
    loss = per_weight(sums.total, sums.weight)
    return {**results(sums.metrics), "loss": loss, "weight": sums.weight}
