"""A step with state on a disk: gradients, then buckets, of which the next is read meanwhile.

The update waits for all gradients (the global norm clips them, and decides whether the step is
skipped), and then for the disk: this host work is on the path of the step. A skipped step reads and
writes nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.disk.disk_array import DiskBucket, is_on_disk
from jaxspeed.disk.tier import Results
from jaxspeed.offload.offloaded_update import Updated
from jaxspeed.traced_loss.accumulate import Sums
from jaxspeed.train.phases import BATCH, METRICS, STATE, SUMS, VARIABLES, StepPhase
from jaxspeed.train.program import Program
from jaxspeed.train.update import ReducedGradients
from jaxspeed.train_state.state import Arrays, TrainState

REDUCED, SECONDS = "reduced", "seconds"
_METRICS = tuple(
    f"disk_{name}seconds" for name in ("", "read_", "compute_", "write_", "io_", "wait_")
)


def step_phases(program: Program) -> tuple[StepPhase, ...]:
    """The phases of a step on complete batches: one program, or those of state on a disk."""
    if program.update.tier is None:
        names = (STATE, BATCH), (STATE, METRICS), (STATE,)
        return (StepPhase("step", program.step, *names, mesh=program.mesh),)
    settled = partial(_settled, program)
    replicated = NamedSharding(program.mesh, PartitionSpec())
    second = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
    return (
        StepPhase(
            "gradients",
            program.jit(partial(_gradients, program)),
            (STATE, BATCH),
            (SUMS, VARIABLES, REDUCED),
            mesh=program.mesh,
        ),
        StepPhase(
            "update on disk",
            BucketUpdate(program),
            (STATE, SUMS, REDUCED),
            (STATE, SECONDS),
            (STATE,),
            shapes=lambda state, *_: (state, _seconds(second)),
        ),
        StepPhase(
            "settle",
            program.jit(settled, donate_argnums=0, out_shardings=(program.shardings, None)),
            (STATE, SUMS, VARIABLES, REDUCED, SECONDS),
            (STATE, METRICS),
            (STATE,),
            mesh=program.mesh,
        ),
    )


def _gradients(
    program: Program, state: TrainState, batch: Any
) -> tuple[Sums, Arrays, ReducedGradients]:
    """The reduced gradients, the variables after all micro-batches, and how to apply them."""
    sums, variables = program.summed(state, batch)
    reduced = program.update.reduced(state, sums)
    return sums._replace(grads=reduced.grads), variables, reduced._replace(grads={})


def _settled(
    program: Program,
    state: TrainState,
    sums: Sums,
    variables: Arrays,
    reduced: ReducedGradients,
    seconds: Arrays,
) -> Any:
    """(state, metrics), once all buckets are updated."""
    update = program.update
    assert update.streamed is not None
    state, finite = update.with_written(state, variables, reduced.finite), reduced.finite
    opt = program.layout.flat(state.opt)
    for path, value in update.streamed.shared(opt).outputs().items():
        opt[path] = jnp.where(finite, value, opt[path])
    moments = jax.tree.unflatten(program.layout.tree, opt.values())
    changed = Updated(state.params, state.master, moments, state.ema)
    after, metrics = update.settled(
        state, sums, variables, changed, reduced.norm, reduced.factor, finite
    )
    return after, metrics | seconds


def _seconds(*values: Any) -> Arrays:
    """Metrics of an update's times, in the order of `StepSeconds`, or one value for all."""
    return dict(zip(_METRICS, values * len(_METRICS) if len(values) == 1 else values))


class BucketUpdate:
    """`state, seconds = update(state, sums, reduced)`, bucket by bucket; it donates the state."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._updates: dict[Any, Callable[..., Any]] = {}  # by the slices of a bucket
        self._compiled: dict[str, Any] = {}  # by the lowered program

    def __call__(
        self, state: TrainState, sums: Sums, reduced: ReducedGradients
    ) -> tuple[TrainState, Arrays]:
        tier, streamed = self._program.update.tier, self._program.update.streamed
        assert tier is not None and streamed is not None
        step = int(state.step)
        if not bool(reduced.finite):
            tier.refuse_other(step)
            tier.step = step + 1
            return state, _seconds(np.float32(0))
        table, layout = self._program.table, self._program.layout
        opt = layout.flat(state.opt)
        fields = Updated(dict(state.params), dict(state.master), opt, dict(state.ema))
        shared = {path: x for path, x in opt.items() if streamed.owner(path) is None}

        def compute(bucket: DiskBucket, stored: Results) -> Results:
            carried = {}
            for path in dict.fromkeys(piece.path for piece in bucket.pieces):
                arrays = streamed.arrays_of(table[path], fields)
                carried[path] = {n: x for n, x in arrays.items() if not is_on_disk(x)}
            starts = [jnp.int32(p.rows.start if p.rows else 0) for p in bucket.pieces]
            grads = {path: sums.grads[path] for path in carried}
            rest = grads, shared, reduced.multiplier, starts
            rows, arrays_after = self._updated(bucket, stored, carried, rest)
            for path, updated in arrays_after.items():
                streamed.put(table[path], fields, updated)
            return rows

        tier.update(step, compute)
        moments = jax.tree.unflatten(layout.tree, fields.opt.values())
        params, master, _, average = fields
        after = replace(state, params=params, master=master, opt=moments, ema=average)
        assert tier.last is not None
        return after, _seconds(*map(np.float32, tier.last))

    def _updated(
        self, bucket: DiskBucket, stored: Results, carried: dict[str, Arrays], rest: Any
    ) -> tuple[Results, dict[str, Arrays]]:
        """`StreamedUpdate.update_rows` of a bucket, by a program for all with equal operations."""
        streamed, changed = self._program.update.streamed, (stored, carried)
        assert streamed is not None
        pieces = tuple((p.path, p.rows.count if p.rows else None) for p in bucket.pieces)
        leaves, tree = jax.tree.flatten(changed)
        others, tree_of_others = jax.tree.flatten(rest)
        if pieces not in self._updates:

            def update(leaves: Any, others: Any) -> Any:
                stored, carried = jax.tree.unflatten(tree, leaves)
                grads, *rest = jax.tree.unflatten(tree_of_others, others)
                after = streamed.update_rows(pieces, stored, carried, grads, *rest)
                return jax.tree.leaves(after)

            at = [x.sharding for x in leaves]
            run = self._program.jit(update, donate_argnums=0, out_shardings=at)
            lowered = run.lower(leaves, others)
            text = lowered.as_text()
            if text not in self._compiled:
                self._compiled[text] = lowered.compile()
            self._updates[pieces] = self._compiled[text]
        after: tuple[Results, dict[str, Arrays]] = jax.tree.unflatten(
            tree, self._updates[pieces](leaves, others)
        )
        return after
