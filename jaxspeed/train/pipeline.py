"""The micro-batches of a step through a pipeline of stages, tick by tick as a schedule says.

In each tick every stage runs one chunk of the stack forward and one backward (`_Step.forward`,
`.backward`). Embedding, head and loss run in the global view, where all stages share them: the
vocabulary is cut over `pipe`, and parts without one have their samples cut over it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.ops.axes import free_axes
from jaxspeed.parallel.pipeline.arrange import Arrangement
from jaxspeed.parallel.pipeline.lanes import (
    PIPE,
    blank,
    from_one,
    hand_on,
    on_stages,
    read_slot,
    write_slot,
)
from jaxspeed.parallel.pipeline.opened import read_by
from jaxspeed.parallel.pipeline.parts import Parts, parts_of
from jaxspeed.parallel.pipeline.phases import Phase, phases
from jaxspeed.parallel.pipeline.schedule import Schedule, forward_only, schedule
from jaxspeed.parallel.tensor import with_crossings
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.mesh import DATA_AXES, data_parallel_size
from jaxspeed.placement.units import Stored, Way, run_sliced
from jaxspeed.placement.units.piece import Passes
from jaxspeed.train.loss import Loss
from jaxspeed.train.objective import Objective, Traced
from jaxspeed.train.state import Arrays, pad, unpad

Values = list[Any]


def micro_batches(batch: Any, count: int, ranks: int) -> Any:
    """A batch [samples, ...] as [count, samples / count, ...].

    Micro-batch i is the i-th slice of each of the `ranks`' own part, so nothing crosses devices.
    """

    def split(x: jax.Array) -> jax.Array:
        if not x.shape:
            return jnp.broadcast_to(x, (count,))
        parts = x.reshape(ranks, count, -1, *x.shape[1:])
        return jnp.moveaxis(parts, 0, 1).reshape(count, -1, *x.shape[1:])

    return jax.tree.map(split, batch)


@dataclass(frozen=True)
class Pipeline:
    """How the stack of a table is run over `pipe`."""

    objective: Objective
    name: str = "1f1b"
    chunks: int = 1
    recompute: str = "stage"  # or "layers", or "save"
    gather: str = "tick"  # or "step": when ZeRO 3 gathers a stage's weights

    @property
    def stages(self) -> int:
        return self.objective.table.mesh.shape[PIPE]

    @property
    def arrangement(self) -> Arrangement:
        return Arrangement(self.objective.table, self.chunks)

    def schedule(self, micro_batches: int) -> Schedule:
        return schedule(self.name, self.stages, micro_batches, self.chunks)

    def gradients(
        self, sources: Arrays, variables: Arrays, micro: Any, step: Any, scale: Any, placed: bool
    ) -> "Sums":
        """Gradients and loss of micro-batches [micro-batches, ...].

        `sources` are arranged, and so are the gradients.
        """
        count = jax.tree.leaves(micro)[0].shape[0]
        way = _Step(self, sources, variables, micro, step, True)
        return _Training(way, scale, placed).run(self.schedule(count))

    def evaluate(self, sources: Arrays, variables: Arrays, batch: Any, step: Any) -> Loss:
        """The loss of a batch in evaluation mode, in as many micro-batches as fill the stages.

        One that is no sum over samples, or that draws random numbers, is left whole.
        """
        whole = micro_batches(batch, 1, 1)
        sources = self.arrangement.arranged(sources)
        way = _Step(self, sources, variables, whole, step, False)
        ranks = data_parallel_size(self.objective.table.mesh)
        count = 1
        if way.program.is_sum and not way.program.draws_random_numbers and way.samples:
            share = way.samples // ranks
            count = max(n for n in range(1, 4 * self.stages + 1) if share % n == 0)
        if count > 1:
            parts = micro_batches(batch, count, ranks)
            way = _Step(self, sources, variables, parts, step, False)
        return _evaluated(way, forward_only(self.stages, count, self.chunks))


class Sums(NamedTuple):
    """What micro-batches add up to."""

    grads: Arrays  # weighted mean so far, times the loss scale
    total: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]  # weighted mean so far


class Now(NamedTuple):
    """One row of the table: each int32 [stages], micro -1 where idle."""

    micro: jax.Array
    chunk: jax.Array
    slot: jax.Array


class Tick(NamedTuple):
    """What a tick's phase needs of the table."""

    forward: Now
    backward: Now
    entering: jax.Array  # micro-batches, -1 for none
    leaving: jax.Array
    returning: jax.Array


@dataclass
class _Step:
    """The parts of one step's program, with the values that they read."""

    pipeline: Pipeline
    sources: Arrays  # arranged
    variables: Arrays
    micro: Any  # [micro-batches, ...]
    step: Any
    train: bool
    passes: dict[str, Passes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        objective = self.objective
        first = jax.eval_shape(
            lambda micro: jax.tree.map(lambda x: objective.cast(x[0]), micro), self.micro
        )
        self.samples = objective.samples(first)
        self.arrangement = self.pipeline.arrangement
        self.program, self.parts = self._traced()
        self.index = {v: i for i, v in enumerate(self.parts.inputs)}
        paths = [row.path for row in self.table]
        variables = dict(zip(paths, self.program.parameters, strict=True))
        assert self.table.stack is not None
        self.outer = {p: v for p, v in variables.items() if p not in self.table.stack.paths}
        self.names = self.parts.names
        self.weights = {name: self._held(name) for name in self.names}

    def _held(self, name: str) -> jax.Array:
        """A parameter of the stages as it is while the ticks run."""
        stored, source = self.arrangement.stored(name, self.table.mesh, None), self.sources[name]
        if self.pipeline.gather == "tick" or stored.gathered == stored.cut:
            return source
        # Once a step: in the layers' dtype, and gathered over data.
        spec = PartitionSpec(PIPE, None, *stored.gathered.spec)
        whole = constrain(source.astype(stored.dtype), _context(spec), "pipeline.gather")
        return whole[(..., *map(slice, stored.shape))]

    def _traced(self) -> tuple[Traced, Parts]:
        """The loss as the context traces it: inside a lane, kernels find `pipe` taken."""

        def shape(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

        first = jax.eval_shape(
            lambda micro: jax.tree.map(lambda x: self.objective.cast(x[0]), micro),
            jax.tree.map(shape, self.micro),
        )
        index = jax.ShapeDtypeStruct((), jnp.int32)
        rest = (jax.tree.map(shape, self.variables), first, index, index)
        program = self.objective.trace(rest, self.train)
        assert self.table.stack is not None
        rows = zip(self.table, program.parameters, strict=True)
        variables = {row.path: v for row, v in rows}
        leaves = self.table.stack.leaves
        stack = {name: [variables[p] for p in paths] for name, paths in leaves.items()}
        return program, parts_of(program.closed, stack)

    @property
    def objective(self) -> Objective:
        return self.pipeline.objective

    @property
    def table(self) -> Any:
        return self.objective.table

    @property
    def stages(self) -> int:
        return self.pipeline.stages

    # -- inputs ---------------------------------------------------------------------------------

    def inputs(self, micro: Any, outer: Mapping[str, Any]) -> Values:
        """The inputs of the parts for one micro-batch; those of the stack are left out (None)."""
        batch = jax.tree.map(lambda x: self.objective.cast(_at(x, micro)), self.micro)
        rest = jax.tree.leaves((self.variables, batch, jnp.asarray(self.step), micro))
        given = [outer.get(row.path) for row in self.table]
        return [*self.parts.constants, *given, *rest]

    @cached_property
    def outer_sources(self) -> Arrays:
        """The parameters outside of the stack, as units are given them."""
        return {p: unpad(self.sources[p], self.table[p].source_shape) for p in self.outer}

    # -- embedding, head and loss ---------------------------------------------------------------

    def before(self, micro: Any, outer: Mapping[str, Any]) -> Values:
        """What the first block reads."""
        outs = self._run_outer(self.parts.before, self.inputs(micro, outer), [])
        return [self._by_samples(x, "pipeline.before") for x in outs]

    def after(self, micro: Any, outer: Mapping[str, Any], carry: Values) -> Loss:
        """The loss of what the last block gave."""
        carry = [self._by_samples(x, "pipeline.after") for x in carry]
        outs = self._run_outer(self.parts.after, self.inputs(micro, outer), carry)
        return jax.tree.unflatten(self.program.out_tree, outs)[0]

    def _run_outer(self, jaxpr: Any, inputs: Values, carry: Values) -> Values:
        shared = self._shares_vocabulary(jaxpr)
        read = read_by(jaxpr)
        pairs = list(zip(jaxpr.invars, [*inputs, *carry], strict=True))
        if not shared:
            batch = set(self.program.batch)
            n = len(inputs)
            pairs = [
                (v, self._over_stages(x) if v in batch or i >= n else x)
                for i, (v, x) in enumerate(pairs)
            ]
        kept = [(v, x) for v, x in pairs if v in read]
        jaxpr = jaxpr.replace(invars=[v for v, _ in kept])
        outer = {path: v for path, v in self.outer.items() if v in read}
        storage = {
            v: self.objective.stored(self.table[path])
            for path, v in outer.items()
            if self.table[path].gathered
        }
        batch = [v for v in self.program.batch if v in read]
        moving = [v for v in jaxpr.invars if v not in self.index]
        specs = {path: self.table[path].read.spec for path in outer}
        crossed = self._crossed(
            jaxpr, outer, [*batch, *moving], specs, self.program.units.of if storage else None
        )
        way = Way(self.program.units, self.samples)
        return run_sliced(crossed, (), [x for _, x in kept], storage, way)

    def _crossed(
        self, jaxpr: Any, paths: Any, samples: Sequence[Any], specs: Any, units_of: Any
    ) -> Any:
        units = units_of or (lambda eqn: None)
        mesh, style = self.table.mesh, self.objective.style
        return with_crossings(jaxpr, paths, samples, specs, mesh, style, units)

    def _shares_vocabulary(self, jaxpr: Any) -> bool:
        """Whether a parameter that it reads is cut over the stages."""
        read = read_by(jaxpr)
        return any(
            PIPE in _axes(entry)
            for path, v in self.outer.items()
            if v in read
            for entry in self.table[path].read.spec
        )

    def _over_stages(self, x: Any) -> Any:
        """Samples shared by the stages too, for a part that has no vocabulary to share."""
        free = free_axes()
        axes = tuple(a for a in (*DATA_AXES, PIPE) if free.get(a, 1) > 1)
        ways = int(np.prod([free[a] for a in axes]))
        if not getattr(x, "ndim", 0) or x.shape[0] % ways:
            return x
        return constrain(x, _first_dim(axes, x.ndim), "pipeline.samples")

    def _by_samples(self, x: Any, site: str) -> Any:
        """An activation between the parts, cut over the data axes."""
        free = free_axes()
        axes = tuple(a for a in DATA_AXES if free.get(a, 1) > 1)
        ways = int(np.prod([free[a] for a in axes]))
        if not x.ndim or x.shape[0] != self.samples or x.shape[0] % ways:
            return x
        return constrain(x, _first_dim(axes, x.ndim), "pipeline.carry")

    # -- one stage ------------------------------------------------------------------------------

    @cached_property
    def context(self) -> dict[int, Any]:
        """What stages read beside the stack and the batch, by place."""
        batch = {self.index[v] for v in self.program.batch}
        values = self.inputs(jnp.zeros((), jnp.int32), self.outer_sources)
        micro = len(values) - 1
        return {i: values[i] for i in self.parts.context_reads if i not in batch and i != micro}

    @cached_property
    def context_batch(self) -> dict[int, Any]:
        """What stages read of the batch, by place, [micro-batches, ...]."""
        leaves = jax.tree.leaves(self.micro)
        places = {self.index[v]: x for v, x in zip(self.program.batch, leaves, strict=True)}
        return {i: x for i, x in places.items() if i in self.parts.context_reads}

    @cached_property
    def shared_paths(self) -> dict[int, str]:
        """Trained parameters outside of the stack that stages read, by place."""
        places = {self.index[v]: path for path, v in self.outer.items()}
        return {
            i: places[i]
            for i in self.context
            if i in places and self.table[places[i]].leaf.trainable
        }

    def stage_arguments(
        self, weights: Mapping[str, Any], every: Any, stage: Any, now: Now, carry: Values
    ) -> Values:
        """The arguments of the stage's program: weights, context, first layer, carry."""
        context, of_batch = every
        micro = jnp.maximum(now.micro, 0)
        given = {**context, **{i: self.objective.cast(_at(x, micro)) for i, x in of_batch.items()}}
        last = len(self.parts.inputs) - 1
        values = [given[i] if i != last else micro for i in self.parts.context_reads]
        chunk = [jax.lax.dynamic_index_in_dim(w, now.chunk, 0, False) for w in weights.values()]
        return [*chunk, *values, self.first_layer(stage, now), *carry]

    def first_layer(self, stage: Any, now: Now) -> Any:
        return (now.chunk * self.stages + stage) * self.arrangement.rows

    @cached_property
    def every(self) -> Any:
        return self.context, self.context_batch

    @cached_property
    def stage(self) -> Callable[..., Values]:
        """The stage's program, made where it runs: its constraints are those of that context."""
        mesh = jax.sharding.get_abstract_mesh()
        program, parts = self._traced()
        rows = self.arrangement.rows
        reads = parts.context_reads
        recompute = self.pipeline.recompute == "layers"

        def run(weights: Values, context: Values, first: Any, carry: Values) -> Values:
            named = dict(zip(self.names, weights, strict=True))
            padded = self.arrangement.padded
            return parts.stage(
                rows, named, context, first, carry, padded=padded, recompute=recompute
            )

        own = {
            name: self.arrangement.stored(name, mesh, self.objective.wire) for name in self.names
        }
        shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in own.values()]
        context = [_like(parts.inputs[i]) for i in reads]
        number = jax.ShapeDtypeStruct((), jnp.int32)
        closed = jax.make_jaxpr(run)(shapes, context, number, parts.carry)
        invars = closed.jaxpr.invars
        n = len(own)
        stack = dict(zip(self.names, invars, strict=False))
        places = {self.index[v]: path for path, v in self.outer.items()}
        of_context = dict(zip(reads, invars[n : n + len(reads)], strict=True))
        shared = {places[i]: v for i, v in of_context.items() if i in places}
        storage = {}
        for name, v in stack.items():
            held = self.weights[name]
            if held.dtype != own[name].dtype or (
                self.pipeline.gather == "tick" and own[name].gathered != own[name].cut
            ):
                storage[v] = own[name]
        for path, v in shared.items():
            if self.table[path].gathered:
                storage[v] = _without_pipe(self.objective.stored(self.table[path]), mesh)
        specs = {name: own[name].gathered.spec for name in self.names}
        specs |= {path: _no_pipe(self.table[path].read.spec) for path in shared}
        batch = [of_context[i] for i in self.context_batch]
        carry = invars[n + len(reads) + 1 :]
        jaxpr = self._crossed(
            closed.jaxpr,
            {**stack, **shared},
            [*batch, *carry],
            specs,
            program.units.of if storage else None,
        )
        way = Way(program.units, None)
        return lambda *args: run_sliced(jaxpr, closed.consts, args, storage, way)

    def entered(self, stage: Any, now: Now, entry: Values, ahead: Values) -> Values:
        """A chunk's input: what `before` gave, or the message of the stage before."""
        first = (stage == 0) & (now.chunk == 0)
        return [jnp.where(first, a, b) for a, b in zip(entry, ahead, strict=True)]

    def at_the_end(self, stage: Any, now: Now) -> Any:
        return (stage == self.stages - 1) & (now.chunk == self.pipeline.chunks - 1)

    def carry_leaf(self, x: jax.ShapeDtypeStruct, *lead: int) -> Any:
        return blank((self.stages, *lead, *x.shape), x.dtype)


def _evaluated(way: _Step, table: Schedule) -> Loss:
    """Forward alone: each micro-batch's loss as it leaves."""
    outer, stages = way.outer_sources, way.stages

    def tick(phase: Phase, state: tuple[Values, Any], row: Tick) -> tuple[Values, Any]:
        ahead, seen = state
        entry = way.before(jnp.maximum(row.entering, 0), outer)

        def lane(stage: Any, own: Any, every: Any) -> Any:
            now, weights, ahead = own
            entry, context = every
            x = way.entered(stage, now, entry, ahead)
            y = way.stage(*way.stage_arguments(weights, context, stage, now, x))
            end = from_one(y, stage == stages - 1) if phase.head else []
            return hand_on(y, stages, 1), end

        ahead, end = on_stages(lane, stages, (row.forward, way.weights, ahead), (entry, way.every))
        if phase.head:
            loss = way.after(row.leaving, outer, end)
            seen = _add_up(seen, loss)
        return ahead, seen

    shape = jax.eval_shape(
        lambda: way.after(0, outer, [jnp.zeros(c.shape, c.dtype) for c in way.parts.carry])
    )
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
    ahead = [way.carry_leaf(c) for c in way.parts.carry]
    return _follow(table, tick, (ahead, zero))[1]


def _add_up(seen: Loss, loss: Loss) -> Loss:
    """Two losses as one; metrics are means by weight."""
    weight = seen.weight + loss.weight
    share = jnp.where(weight > 0, loss.weight / weight, 0)
    metrics = {n: seen.metrics[n] + (m - seen.metrics[n]) * share for n, m in loss.metrics.items()}
    return Loss(seen.total + loss.total, weight, metrics)


class Flow(NamedTuple):
    """What goes on from tick to tick."""

    saved: Values  # [stages, slots, ...]
    ahead: Values  # messages to the next stage, [stages, ...]
    back: Values  # gradients to the stage before, [stages, ...]
    stack: Values  # gradients of the stages' weights, [stages, chunks, layers, ...]
    shared: Values  # of what all stages read, a part each, [stages, ...]
    outer: Arrays  # of what is outside
    loss: Loss
    weights: jax.Array  # of each micro-batch that has left, [micro-batches]
    unit: jax.Array  # in which gradients are counted, so that they keep their size


@dataclass
class _Training:
    """Forward and backward."""

    way: _Step
    scale: Any
    placed: bool  # gradients are kept as the table says, not as partial sums
    passes: Any = None  # of the stage's program

    def run(self, table: Schedule) -> Sums:
        way = self.way
        flow = _follow(table, self._tick, self._start(table))
        # From what the first micro-batch weighed, to what all did.
        weight = flow.loss.weight
        factor = jnp.where(weight > 0, flow.unit / weight, 0)
        grads = {**flow.outer, **dict(zip(self._trained, flow.stack, strict=True))}
        for path, grad in zip(way.shared_paths.values(), flow.shared, strict=True):
            grads[path] = grads[path] + self._place(path, grad.sum(0))
        grads = {path: g * factor.astype(g.dtype) for path, g in grads.items()}
        return Sums(grads, flow.loss.total, weight, flow.loss.metrics)

    @property
    def _trained(self) -> list[str]:
        """The stack's parameters that have gradients."""
        own = self.way.arrangement
        return [name for name in self.way.names if own.row(name).leaf.trainable]

    def _start(self, table: Schedule) -> Flow:
        way, own = self.way, self.way.arrangement
        carry, outer = way.parts.carry, way.outer_sources
        moving = [c for c in carry if _inexact(c)]

        def zeros() -> Loss:
            return way.after(0, outer, [jnp.zeros(c.shape, c.dtype) for c in carry])

        loss = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(zeros))

        def stack(name: str) -> jax.Array:
            row = own.row(name)
            shape = (own.stages, own.chunks, own.rows, *own.gradient_shape(name))
            zero = jnp.zeros(shape, row.grad.dtype)
            if not self.placed:
                return zero
            spec = PartitionSpec(PIPE, None, None, *own.spec(name, row.grad))
            return constrain(zero, _context(spec), "pipeline.gradients")

        trained = [p for p in way.outer if way.table[p].leaf.trainable]
        return Flow(
            self._slots(table),
            [way.carry_leaf(c) for c in carry],
            [way.carry_leaf(c) for c in moving],
            [stack(name) for name in self._trained],
            [
                jnp.zeros((way.stages, *outer[path].shape), way.table[path].grad.dtype)
                for path in way.shared_paths.values()
            ],
            {p: self._place(p, jnp.zeros(outer[p].shape, outer[p].dtype)) for p in trained},
            loss,
            jnp.zeros((table.micro_batches,), loss.weight.dtype),
            jnp.zeros((), loss.weight.dtype),
        )

    def _slots(self, table: Schedule) -> Values:
        """Room for what a stage keeps of each micro-batch under way."""
        way = self.way
        if not self._saves:
            return [way.carry_leaf(c, table.slots) for c in way.parts.carry]

        def kept() -> Any:
            none = Now(*jnp.zeros((3, way.stages), jnp.int32))
            x = [way.carry_leaf(c) for c in way.parts.carry]

            def lane(stage: Any, own: Any, every: Any) -> Any:
                now, weights, x = own
                return self._run(way.stage_arguments(weights, every, stage, now, x)), ()

            return on_stages(lane, way.stages, (none, way.weights, x), way.every)[0]

        shapes = [x for values in jax.eval_shape(kept) for x in values]
        return [blank((s.shape[0], table.slots, *s.shape[1:]), s.dtype) for s in shapes]

    @property
    def _saves(self) -> bool:
        return self.way.pipeline.recompute == "save"

    def _run(self, args: Values) -> tuple[Values, Values]:
        """What a chunk gives, and what its derivative needs that is no weight."""
        self.passes = Passes(self.way.stage, self._active, args, len(self.way.names))
        return self.passes.forward(args)

    def _place(self, path: str, grad: jax.Array) -> jax.Array:
        row = self.way.table[path]
        grad = grad.astype(row.grad.dtype)
        if not self.placed:
            return grad
        grad = pad(grad, row.shape(row.grad))
        return constrain(grad, self.way.table.sharding(row.grad), "pipeline.outer")

    # -- one tick -------------------------------------------------------------------------------

    def _tick(self, phase: Phase, flow: Flow, row: Tick) -> Flow:
        if phase.forward:
            flow = self._forward(flow, row)
        if phase.backward:
            flow = self._backward(phase, flow, row)
        return flow

    def _forward(self, flow: Flow, row: Tick) -> Flow:
        """Each stage runs a chunk on what it was handed, keeps that, and hands the result on."""
        way, stages = self.way, self.way.stages
        entry = way.before(jnp.maximum(row.entering, 0), way.outer_sources)

        def lane(stage: Any, own: Any, every: Any) -> Any:
            now, weights, saved, ahead = own
            entry, context = every
            x = way.entered(stage, now, entry, ahead)
            args = way.stage_arguments(weights, context, stage, now, x)
            if self._saves:
                y, kept = self._run(args)
                x = [*y, *kept]
            else:
                y = way.stage(*args)
            saved = write_slot(saved, now.slot, x, now.micro >= 0)
            return (saved, hand_on(y, stages, 1)), ()

        own = (row.forward, way.weights, flow.saved, flow.ahead)
        (saved, ahead), _ = on_stages(lane, stages, own, (entry, way.every))
        return flow._replace(saved=saved, ahead=ahead)

    def _backward(self, phase: Phase, flow: Flow, row: Tick) -> Flow:
        """Each stage takes a chunk back: from its input again, with the gradient it was handed."""
        way, stages = self.way, self.way.stages

        def again(stage: Any, own: Any, every: Any) -> Any:
            now, weights, saved = own
            x = read_slot(saved, now.slot)
            if self._saves:
                y, kept = x[: len(way.parts.carry)], x[len(way.parts.carry) :]
            else:
                y, kept = self._run(way.stage_arguments(weights, every, stage, now, x))
            end = from_one(y, stage == stages - 1) if phase.head else []
            return kept, end

        own = (row.backward, way.weights, flow.saved)
        kept, end = on_stages(again, stages, own, way.every)
        from_head: Values = [blank(c.shape, c.dtype) for c in way.parts.carry if _inexact(c)]
        if phase.head:
            flow, from_head = self._head(flow, row.leaving, end)

        def lane(stage: Any, own: Any, every: Any) -> Any:
            now, weights, kept, back, stack, shared = own
            from_head, share = every
            last = way.at_the_end(stage, now)
            ct = [jnp.where(last, a, b) for a, b in zip(from_head, back, strict=True)]
            grads = iter(self.passes.backward(self._chunks(weights, now), kept, ct))
            busy = now.micro >= 0
            factor = share[jnp.maximum(now.micro, 0)]
            first = way.first_layer(stage, now)
            stack = [
                self._added(name, total, now.chunk, next(grads), factor, busy, first)
                for name, total in zip(self._trained, stack, strict=True)
            ]
            shared = [
                total + jnp.where(busy, _wide(next(grads), total) * factor, 0).astype(total.dtype)
                for total in shared
            ]
            dx = list(grads)
            out = from_one(dx, (stage == 0) & busy & (now.chunk == 0))
            return (hand_on(dx, stages, -1), stack, shared), out

        unit = jnp.where(flow.unit > 0, flow.unit, 1)
        own = (row.backward, way.weights, kept, flow.back, flow.stack, flow.shared)
        share = flow.weights / unit
        (back, stack, shared), out = on_stages(lane, stages, own, (from_head, share))
        flow = flow._replace(back=back, stack=stack, shared=shared)
        return self._embedding(flow, row.returning, out, share)

    @property
    def _active(self) -> list[bool]:
        """Which arguments of the stage have gradients."""
        way = self.way
        weights = [name in self._trained for name in way.names]
        context = [i in way.shared_paths for i in way.parts.context_reads]
        return [*weights, *context, False, *map(_inexact, way.parts.carry)]

    def _chunks(self, weights: Mapping[str, Any], now: Now) -> Values:
        return [jax.lax.dynamic_index_in_dim(w, now.chunk, 0, False) for w in weights.values()]

    def _added(
        self, name: str, total: Any, chunk: Any, grad: Any, factor: Any, busy: Any, first: Any
    ) -> jax.Array:
        """A chunk's gradient added to its sum [chunks, layers, ...], in its own placement."""
        own = self.way.arrangement
        row = own.row(name)
        grad = pad(grad.astype(total.dtype), total.shape[1:])
        if self.placed:
            spec = PartitionSpec(None, *own.spec(name, row.grad))
            grad = constrain(grad, _context(spec), "pipeline.accumulate")
        if own.padded:
            real = first + jnp.arange(own.rows) < own.layers
            busy = busy & real.reshape(-1, *[1] * (grad.ndim - 1))
        more = jnp.where(busy, grad * factor.astype(total.dtype), 0)
        old = jax.lax.dynamic_index_in_dim(total, chunk, 0, False)
        return jax.lax.dynamic_update_index_in_dim(total, old + more, chunk, 0)

    def _head(self, flow: Flow, micro: Any, end: Values) -> tuple[Flow, Values]:
        """Head and loss of the micro-batch that leaves: its gradients, and those to go back."""
        way = self.way
        outer = way.outer_sources
        paths = self._trained_in(way.parts.after)
        moving = [i for i, x in enumerate(end) if _inexact(x)]

        def loss(active: Arrays, carry: Values) -> tuple[jax.Array, Loss]:
            full = list(end)
            for i, x in zip(moving, carry, strict=True):
                full[i] = x
            loss = way.after(micro, {**outer, **active}, full)
            share = jnp.where(loss.weight > 0, self.scale / loss.weight, 0)
            return loss.total * share.astype(loss.total.dtype), loss

        pull = jax.grad(loss, argnums=(0, 1), has_aux=True)
        (grads, back), new = pull({p: outer[p] for p in paths}, [end[i] for i in moving])
        weights = flow.weights.at[micro].set(new.weight)
        first = jnp.where(new.weight > 0, new.weight, 1) * len(flow.weights)
        unit = jnp.where(flow.unit > 0, flow.unit, first)
        share = new.weight / unit
        added = {p: flow.outer[p] + self._scaled(p, g, share) for p, g in grads.items()}
        flow = flow._replace(
            outer={**flow.outer, **added},
            loss=_add_up(flow.loss, new),
            weights=weights,
            unit=unit,
        )
        return flow, back

    def _scaled(self, path: str, grad: Any, share: Any) -> jax.Array:
        grad = self._place(path, grad)
        return self._place(path, _wide(grad, share) * share)

    def _embedding(self, flow: Flow, micro: Any, out: Values, share: Any) -> Flow:
        """The gradients of what comes before the blocks, for the micro-batch that came back."""
        way = self.way
        outer, paths = way.outer_sources, self._trained_in(way.parts.before)
        if not paths:
            return flow
        index = jnp.maximum(micro, 0)

        def entry(active: Arrays) -> Values:
            return [x for x in way.before(index, {**outer, **active}) if _inexact(x)]

        _, pull = jax.vjp(entry, {p: outer[p] for p in paths})
        (grads,) = pull(out)
        factor = jnp.where(micro >= 0, share[index], 0)
        added = {
            p: flow.outer[p] + jnp.where(micro >= 0, self._scaled(p, g, factor), 0)
            for p, g in grads.items()
        }
        return flow._replace(outer={**flow.outer, **added})

    def _trained_in(self, jaxpr: Any) -> list[str]:
        read = read_by(jaxpr)
        return [
            path
            for path, v in self.way.outer.items()
            if v in read and self.way.table[path].leaf.trainable
        ]


def _follow(table: Schedule, tick: Callable[..., Any], state: Any) -> Any:
    """The state after all ticks of a table: a loop for each of its phases."""
    rows = Tick(
        Now(*table.forward), Now(*table.backward), table.entering, table.leaving, table.returning
    )
    rows = jax.tree.map(jnp.asarray, rows)
    at = 0
    for times, run in phases(table):
        length = sum(phase.length for phase in run)
        part = jax.tree.map(lambda x: x[at : at + times * length], rows)
        part = jax.tree.map(lambda x: x.reshape(times, length, *x.shape[1:]), part)
        at += times * length

        def once(state: Any, rows: Tick, run: Any = run) -> tuple[Any, None]:
            at = 0
            for phase in run:
                own = jax.tree.map(lambda x: x[at : at + phase.length], rows)
                at += phase.length

                def step(state: Any, row: Tick, phase: Phase = phase) -> tuple[Any, None]:
                    return tick(phase, state, row), None

                state, _ = jax.lax.scan(step, state, own)
            return state, None

        if times == 1:
            state, _ = once(state, jax.tree.map(lambda x: x[0], part))
        else:
            state, _ = jax.lax.scan(once, state, part)
    return state


def _at(x: jax.Array, index: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _like(v: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _wide(x: jax.Array, like: Any) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, like.dtype))


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _no_pipe(spec: PartitionSpec) -> PartitionSpec:
    def kept(entry: Any) -> Any:
        axes = tuple(a for a in _axes(entry) if a != PIPE)
        return axes[0] if len(axes) == 1 else axes or None

    return PartitionSpec(*map(kept, spec))


def _without_pipe(stored: Stored, mesh: Any) -> Stored:
    from dataclasses import replace

    return replace(
        stored,
        gathered=NamedSharding(mesh, _no_pipe(stored.gathered.spec)),
        cut=NamedSharding(mesh, _no_pipe(stored.cut.spec)),
    )


def _context(spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(jax.sharding.get_abstract_mesh(), spec)


def _first_dim(axes: tuple[str, ...], ndim: int) -> NamedSharding:
    free = PartitionSpec.UNCONSTRAINED
    return _context(PartitionSpec(axes or None, *[free] * (ndim - 1)))
