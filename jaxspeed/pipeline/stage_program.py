"""The stage program: weights, inputs and evaluation of one chunk of blocks on each stage."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.axes import PIPE
from jaxspeed.config.remat import NO_RECOMPUTE, Recompute
from jaxspeed.jaxpr.traverse import like
from jaxspeed.pipeline import stage_shard_map
from jaxspeed.pipeline.split_loss import LossParts
from jaxspeed.pipeline.stage_layout import StageLayout
from jaxspeed.pipeline.step_values import SplitStep, Values, at, inexact
from jaxspeed.pipeline.tick_loops import StageWork
from jaxspeed.placement.codec import Stored
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.memory_kinds import on_device, on_host
from jaxspeed.placement.specs import without_axes
from jaxspeed.traced_loss.passes import PartContext, after_split
from jaxspeed.zero3 import ShardedParam, run_segmented
from jaxspeed.zero3.segment_vjp import Passes


@dataclass(frozen=True)
class Stage:
    """The stages' weights, and the program that each stage runs."""

    split: SplitStep
    chunks: int
    recompute: Recompute  # rematerialization policy of a layer, when a stage is recomputed
    gather_once: bool  # ZeRO 3: gather a stage's weights once a step, not per layer and tick

    @property
    def names(self) -> list[str]:
        """The pieces of the blocks' parameters, in the order of `weights`."""
        read = set(self._like_parts.names)
        return [name for name, piece in self._layout.pieces.items() if piece.parameter in read]

    @property
    def _like_parts(self) -> LossParts:
        assert isinstance(self.split.parts, LossParts)
        return self.split.parts

    @property
    def _layout(self) -> StageLayout:
        assert isinstance(self.split.layout, StageLayout)
        return self.split.layout

    @cached_property
    def weights(self) -> Values:
        """The weights during the ticks, [stages, chunks, layers, ...] each."""
        return [self._gathered_once(name) for name in self.names]

    def _gathered_once(self, name: str) -> Stored:
        split = self.split
        stored = self._layout.sharded_param(name, split.table.mesh, None)
        source = split.sources[name]
        if not self.gather_once or stored.gathered == stored.sharding:
            return source

        def full(how: ShardedParam, source: jax.Array) -> jax.Array:
            spec = PartitionSpec(PIPE, None, *how.gathered.spec)
            source = on_device(source)
            gathered = constrain(source.astype(how.dtype), in_context(spec), "pipeline.gather")
            return gathered[(..., *map(slice, how.shape))]

        if stored.parts:
            return {part: full(how, source[part]) for part, how in stored.parts}
        return full(stored, source)

    # -- inputs -----------------------------------------------------------------------------------

    @cached_property
    def context(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """The loss's inputs that the blocks read, by index: (of the step, of the batch).

        Those of the batch are [micro-batches, ...].
        """
        split = self.split
        leaves = jax.tree.leaves(split.micro)
        batch = {split.index[v]: x for v, x in zip(split.program.batch, leaves, strict=True)}
        values = split.inputs(jnp.zeros((), jnp.int32), split.outer)
        reads = split.parts.context_reads
        of_step = {i: values[i] for i in reads if i not in batch and i != self._micro}
        return of_step, {i: x for i, x in batch.items() if i in reads}

    @property
    def _micro(self) -> int:
        """The index of the micro-batch number among the inputs: the last."""
        return len(self.split.parts.inputs) - 1

    @cached_property
    def shared(self) -> dict[int, str]:
        """The trained parameters outside of the blocks that each block reads, by input index."""
        split = self.split
        places = {split.index[v]: path for path, v in split.outside.items()}
        paths = {i: places[i] for i in split.parts.context_reads if i in places}
        return {i: path for i, path in paths.items() if split.table[path].leaf.trainable}

    def arguments(
        self, number: Any, work: StageWork, weights: Values, context: Any, carry: Values
    ) -> Values:
        """The arguments of `run`: weights, context, first layer, carry."""
        of_step, batch = context
        micro = jnp.maximum(work.micro, 0)
        inputs = of_step | {i: self._read(i, at(x, micro)) for i, x in batch.items()}
        inputs[self._micro] = micro
        reads = [inputs[i] for i in self.split.parts.context_reads]
        return [*self.chunk(weights, work), *reads, self.first_layer(number, work), *carry]

    def _read(self, i: int, x: jax.Array) -> jax.Array:
        """An array of a micro-batch in the dtype of the parts' input."""
        dtype = self.split.parts.inputs[i].aval.dtype
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def chunk(self, weights: Values, work: StageWork) -> Values:
        """A stage's weights of one chunk, [layers, ...] each."""
        # With one chunk nothing is indexed, so that offloaded weights stay in host memory.
        return jax.tree.map(
            lambda w: lax.squeeze(w, (0,)) if self.chunks == 1 else at(w, work.chunk), weights
        )

    def first_layer(self, number: Any, work: StageWork) -> Any:
        return (work.chunk * self.split.stages + number) * self.split.layout.rows

    def active(self, trained: list[str]) -> list[bool]:
        """Mask of the arguments that have gradients."""
        parts = self.split.parts
        context = [i in self.shared for i in parts.context_reads]
        weights = [name in trained for name in self.names]
        carry = [inexact(x) and self.returns_gradients for x in parts.carry]
        return [*weights, *context, False, *carry]

    @property
    def returns_gradients(self) -> bool:
        """Whether some chunk returns a gradient to the one before.

        If not, the layers below the lowest trained one, which is of the last chunk, or none, have
        no backward pass.
        """
        split, layout = self.split, self._layout
        last = (layout.stages * layout.chunks - 1) * layout.rows  # of padding, if it is past all
        below = range(min(last, layout.layers))
        return bool(
            self.shared
            or split.trained_inputs(split.parts.before)
            or any(layout.trains(layer) for layer in below)
        )

    def entered(self, number: Any, work: StageWork, entry: Values, ahead: Values) -> Values:
        """A chunk's input: the embedding's output, or the message of the stage before.

        An idle stage takes the embedding's output too. Of a blank message a mixture would route all
        tokens alike, and the further rounds of its exchange are those of all stages.
        """
        embedded = (number == 0) & (work.chunk == 0) | (work.micro < 0)
        return [jnp.where(embedded, a, b) for a, b in zip(entry, ahead, strict=True)]

    def ends(self, number: Any, work: StageWork) -> Any:
        """Whether this is the last chunk, where the backward pass starts."""
        return (number == self.split.stages - 1) & (work.chunk == self.chunks - 1)

    def messages(self) -> Values:
        """Blank messages before the first tick, one per stage."""
        stages = self.split.stages
        return [stage_shard_map.blank((stages, *c.shape), c.dtype) for c in self.split.parts.carry]

    # -- computation ------------------------------------------------------------------------------

    def run(self, args: Values) -> Values:
        """The carry after a chunk."""
        return self._program(*args)

    def passes(self, active: list[bool], args: Values) -> Any:
        """Forward and backward pass of a chunk, of the arrays of its arguments."""
        leaves, tree = jax.tree.flatten(args)
        count = len(jax.tree.leaves(args[: len(self.names)]))
        active = [on for x, on in zip(args, active, strict=True) for _ in jax.tree.leaves(x)]
        return Passes(
            lambda *leaves: self.run(jax.tree.unflatten(tree, leaves)), active, leaves, count
        )

    @cached_property
    def _program(self) -> Any:
        """The chunk's program, traced in the first stage context that runs it: all are equal."""
        split, mesh = self.split, jax.sharding.get_abstract_mesh()
        program, parts = split.traced()
        assert isinstance(parts, LossParts)
        layout, table, reads = self._layout, split.table, parts.context_reads
        sharded = {n: layout.sharded_param(n, mesh, split.traced_loss.wire) for n in self.names}

        def chunk(weights: Values, context: Values, first: Any, carry: Values) -> Values:
            pieces = dict(zip(sharded, weights, strict=True))
            for start, stop in layout.segments:
                of_segment = {
                    piece.parameter: pieces[name]
                    for name, piece in layout.pieces.items()
                    if name in pieces and piece.start == start
                }
                at, padded = first + start, layout.padded
                carry = parts.stage(stop - start, of_segment, context, at, carry, padded=padded)
            return carry

        number = jax.ShapeDtypeStruct((), jnp.int32)
        weights = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in sharded.values()]
        context = like(parts.inputs[i] for i in reads)
        closed = jax.make_jaxpr(chunk)(weights, context, number, parts.carry)
        invars = iter(closed.jaxpr.invars)
        of_weights = {name: next(invars) for name in sharded}
        of_context = {i: next(invars) for i in reads}
        next(invars)  # the first layer's number
        paths = {split.index[v]: path for path, v in split.outside.items()}
        shared = {paths[i]: v for i, v in of_context.items() if i in paths}

        arrays = dict(zip(sharded, self.weights, strict=True))
        sharded = {
            name: stored
            if any(map(on_host, jax.tree.leaves(arrays[name])))
            else _on_device_memory(stored.with_parts(_on_device_memory))
            for name, stored in sharded.items()
        }
        storage = {
            v: sharded[name]
            for name, v in of_weights.items()
            if sharded[name].parts
            or arrays[name].dtype != sharded[name].dtype
            or (sharded[name].sharding != sharded[name].gathered and not self.gather_once)
        }
        for path, v in shared.items():
            if table[path].gathered:
                storage[v] = _without_pipe_axis(split.traced_loss.stored(table[path]), mesh)
        specs: Mapping[str, Any] = {name: s.gathered.spec for name, s in sharded.items()} | {
            path: without_axes(table[path].read.spec, (PIPE,)) for path in shared
        }
        samples = [*(of_context[i] for i in self.context[1]), *invars]
        recompute = self.recompute if split.train else NO_RECOMPUTE
        units = program.units if storage or recompute else None
        part = after_split(
            program.part(closed, {**of_weights, **shared}, samples),
            PartContext(
                table.mesh,
                specs,
                split.traced_loss.style,
                units,
                sequence=split.traced_loss.sequence,
            ),
        )
        way = split.traced_loss.way(part, recompute, storage)
        evaluated = part.closed.jaxpr, part.closed.consts
        return lambda *args: run_segmented(*evaluated, args, storage, way)


def _on_device_memory(stored: ShardedParam) -> ShardedParam:
    """The same storage, in device memory."""
    at = stored.sharding
    return replace(stored, sharding=NamedSharding(at.mesh, at.spec))


def in_context(spec: PartitionSpec) -> NamedSharding:
    """A sharding on the mesh of the current trace."""
    return NamedSharding(jax.sharding.get_abstract_mesh(), spec)


def _without_pipe_axis(stored: ShardedParam, mesh: Any) -> ShardedParam:
    """The stored form of a parameter that is replicated over the stages, inside a stage."""
    stored = stored.with_parts(lambda part: _without_pipe_axis(part, mesh))
    specs = (without_axes(s.spec, (PIPE,)) for s in (stored.gathered, stored.sharding))
    gathered, sharding = (NamedSharding(mesh, spec) for spec in specs)
    return replace(stored, gathered=gathered, sharding=sharding)
