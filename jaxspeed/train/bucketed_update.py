"""Bucketed update of synchronous servers: some parameters are pulled while others are pushed.

Possible where no parameter's update depends on all gradients: no clipping by the global norm, no
skipping of non-finite steps, and an optimizer whose update of one parameter reads nothing of
another (read from its traced program, as for state in host memory).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.offload.offloaded_update import EMA, GRAD, OPT, UPDATED, StreamedUpdate, Updated
from jaxspeed.optim.loss_scale import StaticRule
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.placement.rows import Row
from jaxspeed.traced_loss.accumulate import Sums
from jaxspeed.train.program import Metrics, Program
from jaxspeed.train_state.state import Arrays, TrainState, updated_values, wide_dtype

COUNT = 4  # buckets: all pulls but those of the last overlap with pushes


def bucket_paths(program: Program) -> tuple[tuple[str, ...], ...]:
    """Paths by bucket, of about equal bytes; () where the update depends on all gradients.

    Last layers come first, as gradients are produced.
    """
    update, optimizer = program.update, program.optimizer
    if update.skip_non_finite or optimizer.clipping or optimizer.rule != StaticRule():
        return ()
    if update.streamed or program.layout.packed or separated_update(program).full_update.mixed():
        return ()
    rows = [row for row in program.table if row.leaf.trainable][::-1]
    sizes = [math.prod(row.leaf.shape) for row in rows]
    buckets: list[list[str]] = [[] for _ in range(COUNT)]
    before = 0
    for row, size in zip(rows, sizes, strict=True):
        buckets[before * COUNT // sum(sizes)].append(row.path)
        before += size
    return tuple(tuple(paths) for paths in buckets if paths)


def separated_update(program: Program) -> StreamedUpdate:
    """The optimizer's update, separated per parameter."""
    parts = (program.table, program.model, program.layout, program.optimizer.transform)
    return StreamedUpdate(*parts, by_layer=False, ema_decay=program.optimizer.ema_decay)


@dataclass(frozen=True)
class UpdateBuckets:
    """An update partitioned into buckets, with its compiled programs on the servers."""

    program: Program
    paths: Sequence[Sequence[str]]  # by bucket; of a server, those that it owns

    @cached_property
    def streamed(self) -> StreamedUpdate:
        return separated_update(self.program)

    @cached_property
    def update(self) -> Any:
        """`(arrays by path, shared, gradients) -> (arrays, published parameters, sum of squares)`.

        `shared` are the optimizer's leaves that belong to no parameter. Donates the arrays.
        """
        return jax.jit(self.program.in_mesh(self._updated), donate_argnums=0)

    def _updated(
        self, arrays: dict[str, Arrays], shared: Arrays, grads: Arrays
    ) -> tuple[dict[str, Arrays], Arrays, jax.Array]:
        values = self.streamed.shared(shared)
        factor = self.program.update.gradient_factor
        multiplier = None if factor == 1 else jnp.asarray(factor, jnp.float32)
        after, published, squares = {}, {}, jnp.zeros(())
        for path, grad in grads.items():
            row = self.program.table[path]
            after[path] = self.streamed.update_one(
                row, {GRAD: grad, **arrays[path]}, values, multiplier
            )
            if row.updated.dtype != row.read.dtype:
                published[path] = after[path][UPDATED].astype(row.read.dtype)
            wide = grad.astype(wide_dtype(row)) * factor
            squares = squares + jnp.sum(jnp.square(wide))
        return after, published, squares

    @cached_property
    def settle(self) -> Any:
        """`(rest of the state, shared, sums, squares) -> (rest, shared, metrics)`, at the end."""

        def settle(rest: TrainState, shared: Arrays, sums: Sums, squares: Sequence[Any]) -> Any:
            norm, yes = jnp.sqrt(sum(squares)), jnp.asarray(True)
            none = Updated({}, {}, (), {})
            update = self.program.update
            settled = update.settled(rest, sums, rest.variables, none, norm, jnp.ones(()), yes)
            return settled[0], self.streamed.shared(shared).outputs(), settled[1]

        return jax.jit(self.program.in_mesh(settle))


class BucketedUpdate:
    """One update in progress."""

    def __init__(self, buckets: UpdateBuckets, state: TrainState) -> None:
        self.buckets = buckets
        self._old = state
        self._opt = flat_with_paths(state.opt)
        self._after: dict[str, Arrays] = {}
        self._read: Arrays = {}  # as layers read them, where that is another dtype
        self._squares: list[jax.Array] = []
        owner = buckets.streamed.owner
        self._shared = {path: x for path, x in self._opt.items() if owner(path) is None}

    def arguments(self, paths: Iterable[str]) -> tuple[Any, ...]:
        """What `update` takes before the gradients of these parameters."""
        return {path: self._arrays(path) for path in paths}, self._shared

    def bucket(self, grads: Arrays) -> Arrays:
        """Update some parameters; return them as workers pull them."""
        updates, published, squares = self.buckets.update(*self.arguments(grads), grads)
        self._after |= updates
        self._read |= published
        self._squares.append(squares)
        return {path: published.get(path, updates[path][UPDATED]) for path in grads}

    @property
    def squares(self) -> jax.Array:
        """The sum of squares of the last bucket's gradients."""
        return self._squares[-1]

    def finish(
        self, sums: Sums, squares: Sequence[Any] | None = None
    ) -> tuple[TrainState, Metrics]:
        """The state after all buckets, and metrics; `sums` without gradients.

        `squares` are those of all servers, where these have only some of the parameters.
        """
        old = self._old
        empty = replace(old, params={}, master={}, opt=(), ema={})
        rest, shared, metrics = self.buckets.settle(
            empty, self._shared, sums, self._squares if squares is None else squares
        )
        params, master, average = dict(old.params), dict(old.master), dict(old.ema)
        opt = {**self._opt, **shared}
        for path, arrays in self._after.items():
            row = self._row(path)
            (master if row.master else params)[path] = arrays[UPDATED]
            if row.master and row.param:
                params[path] = self._read[path]
            opt |= {n.removeprefix(OPT): x for n, x in arrays.items() if n.startswith(OPT)}
            if EMA in arrays:
                average[path] = arrays[EMA]
        tree = self.buckets.program.layout.tree
        moments = jax.tree.unflatten(tree, list(opt.values()))
        state = replace(rest, params=params, master=master, opt=moments, ema=average)
        return state, metrics

    def _row(self, path: str) -> Row:
        return self.buckets.program.table[path]

    def _arrays(self, path: str) -> Arrays:
        """One parameter's arrays in the state."""
        owner = self.buckets.streamed.owner
        arrays = {UPDATED: updated_values(self._old, self._row(path))}
        if self._old.ema:
            arrays[EMA] = self._old.ema[path]
        return arrays | {OPT + name: x for name, x in self._opt.items() if owner(name) == path}
