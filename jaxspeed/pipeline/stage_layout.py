"""Stage layout of the blocks' weights and gradients, [stages, chunks, layers, ...]; all-to-alls.

The weights of a model with stacked blocks are stored so already: the first dim is sharded over
`pipe`, and each stage has consecutive layers. Others (chunks that alternate between stages, or
blocks in a list) are stored sharded over `pipe` on another dim. One all-to-all per parameter at the
start of a step sends each stage its layers; another one at its end returns the gradients.

Layer l of the stack is the j-th of chunk c of stage s: l = (c * stages + s) * rows + j.

If some layers are frozen, the rows of a chunk are divided into segments: those that are trained on
some stage, and those that are frozen on all of them, which have no gradient. Each segment of a
parameter is an array of its own, a piece.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.axes import PIPE
from jaxspeed.placement.codec import PLAIN, EncodedArray, Stored
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.placement.mesh import simulated
from jaxspeed.placement.rows import HOST, Placement, Row
from jaxspeed.placement.specs import by_dim, sharded_dim, without_axes
from jaxspeed.placement.stacks import Stack
from jaxspeed.placement.table import PlacementTable
from jaxspeed.zero3 import ShardedParam

Arrays = dict[str, Any]


class BlockPiece(NamedTuple):
    """Rows of a chunk of one of the blocks' parameters."""

    parameter: str
    start: int
    stop: int


@dataclass(frozen=True)
class StageLayout:
    """The assignment of a table's stack of layers to stages and chunks."""

    table: PlacementTable
    chunks: int

    @property
    def stages(self) -> int:
        return self.table.mesh.shape[PIPE]

    @property
    def stack(self) -> Stack:
        assert self.table.stack is not None
        return self.table.stack

    @property
    def layers(self) -> int:
        """Layers of the model, without padding."""
        return self.stack.layers

    @property
    def rows(self) -> int:
        """Layers of a chunk, padding included."""
        return -(-self.layers // (self.stages * self.chunks))

    @property
    def padded(self) -> bool:
        return self.rows * self.stages * self.chunks != self.layers

    def names(self) -> Sequence[str]:
        """The names of all pieces."""
        return list(self.pieces)

    @cached_property
    def pieces(self) -> Mapping[str, BlockPiece]:
        """The pieces by name, segment by segment."""
        return {
            name if len(self.segments) == 1 else f"{name}/{start}": BlockPiece(name, start, stop)
            for start, stop in self.segments
            for name in self.stack.leaves
        }

    @cached_property
    def segments(self) -> Sequence[tuple[int, int]]:
        """Consecutive rows of a chunk of which the same parameters are trained on some stage."""

        def trained(row: int) -> list[bool]:
            layers = self._layers_at(row)
            return [
                any(self._row_of(name, layer).leaf.trainable for layer in layers)
                for name in self.stack.leaves
            ]

        groups = [list(rows) for _, rows in groupby(range(self.rows), trained)]
        return [(rows[0], rows[-1] + 1) for rows in groups]

    def _layers_at(self, row: int) -> range:
        """The layers that are this row of a chunk, of all stages."""
        return range(row, self.layers, self.rows)

    def _row_of(self, parameter: str, layer: int) -> Row:
        """The table's row that holds a layer of one of the blocks' parameters."""
        paths = self.stack.leaves[parameter]
        if not self.stack.stacked:
            return self.table[paths[layer]]
        ends = ((self.table[path].leaf.range, path) for path in paths)
        return self.table[next(path for layers, path in ends if not layers or layer < layers.stop)]

    def trains(self, layer: int) -> bool:
        """Whether some parameter of a layer is trained."""
        return any(self._row_of(name, layer).leaf.trainable for name in self.stack.leaves)

    def row(self, name: str) -> Row:
        """A row of the table that holds layers of a piece; one that is trained, if any is."""
        piece = self.pieces[name]
        layers = (n for row in range(piece.start, piece.stop) for n in self._layers_at(row))
        rows = [self._row_of(piece.parameter, layer) for layer in layers]
        return next((row for row in rows if row.leaf.trainable), rows[0])

    def length(self, name: str) -> int:
        """The layers of a chunk of a piece."""
        return self.pieces[name].stop - self.pieces[name].start

    def trained(self, name: str) -> bool:
        """Whether a piece has a gradient."""
        return self.row(name).leaf.trainable

    @cached_property
    def gradient_pieces(self) -> Mapping[str, Sequence[str]]:
        """The trained pieces by parameter, of which one array accumulates the gradients."""
        by_parameter: dict[str, list[str]] = {}
        for name, piece in self.pieces.items():
            if self.trained(name):
                by_parameter.setdefault(piece.parameter, []).append(name)
        return by_parameter

    def accumulator(self, parameter: str) -> tuple[tuple[int, ...], Any, PartitionSpec]:
        """(shape, dtype, spec) of a chunk's gradients of a parameter of the blocks."""
        first = self.gradient_pieces[parameter][0]
        grad = self.row(first).grad
        assert grad is not None
        spec = PartitionSpec(None, *self.spec(first, grad))
        return (self.slots(parameter).shape[2], *self.gradient_shape(first)), grad.dtype, spec

    def slots(self, parameter: str) -> np.ndarray:
        """Which rows of the trained pieces are accumulated: [stages, chunks, slots].

        There are as many slots as the chunk with most trained layers needs; -1 is an empty one.
        """
        chunk_rows: dict[tuple[int, int], list[int]] = {}
        rows = self._trained_rows(parameter)
        for stage, chunk in np.ndindex(self.stages, self.chunks):
            first = (chunk * self.stages + stage) * self.rows
            chunk_rows[stage, chunk] = [
                i
                for i, row in enumerate(rows)
                if first + row < self.layers and self._row_of(parameter, first + row).leaf.trainable
            ]
        slots = np.full((self.stages, self.chunks, max(map(len, chunk_rows.values()))), -1)
        for (stage, chunk), filled in chunk_rows.items():
            slots[stage, chunk, : len(filled)] = filled
        return slots

    def _trained_rows(self, parameter: str) -> list[int]:
        """The rows of a chunk in trained pieces."""
        pieces = (self.pieces[name] for name in self.gradient_pieces[parameter])
        return [row for _, start, stop in pieces for row in range(start, stop)]

    def accumulated(
        self, parameter: str, gradients: Sequence[jax.Array], stage: Any, chunk: Any
    ) -> tuple[jax.Array, Any]:
        """The gradients of a chunk's trained pieces by slot, and which slots are not empty."""
        gradient = gradients[0] if len(gradients) == 1 else jnp.concatenate(gradients)
        slots = self.slots(parameter)
        numbers = np.arange(slots.shape[2])
        if len(gradient) == len(numbers) and (slots == numbers).all():
            return gradient, True
        rows = jnp.asarray(slots)[stage, chunk]
        if (np.where(slots < 0, numbers, slots) == numbers).all():  # the empty ones are the last
            gradient = gradient[: len(numbers)]
        else:
            gradient = gradient[jnp.maximum(rows, 0)]
        return gradient, (rows >= 0).reshape(-1, *[1] * (gradient.ndim - 1))

    # -- all parameters ---------------------------------------------------------------------------

    def by_stage(self, sources: Mapping[str, Any], step: Any) -> Arrays:
        """The sources, with the blocks' parameters in the stage layout, by name.

        `step` is the number of the step.
        """
        outer = {path: x for path, x in sources.items() if path not in self.stack.paths}
        exchanges = OrderedExchanges(self.table.mesh, step)
        return outer | {name: self.weights(name, sources, exchanges) for name in self.names()}

    def by_path(self, gradients: Mapping[str, Any], step: Any) -> Arrays:
        """Gradients in the stage layout as gradients of the sources, by path."""
        outer = {path: x for path, x in gradients.items() if path not in self.stack.leaves}
        exchanges = OrderedExchanges(self.table.mesh, step)
        for parameter in self.stack.leaves:
            if parameter in gradients:
                outer |= self.gradients(parameter, gradients[parameter], exchanges)
        return outer

    # -- one parameter of all blocks --------------------------------------------------------------

    def weights(
        self, name: str, sources: Mapping[str, Any], exchanges: "OrderedExchanges"
    ) -> Stored:
        """A piece of a parameter, [stages, chunks, layers, ...], from its stored arrays.

        Before an all-to-all it is cast to the dtype that layers read. Of an encoded one it is each
        of the codec's arrays.
        """
        row = self.row(name)
        values = [sources[path] for path in self.stack.leaves[self.pieces[name].parameter]]

        def by_stage(spec: PartitionSpec, dtype: Any, *arrays: jax.Array) -> jax.Array:
            if self.stack.in_place:
                lead = (self.stages, self.chunks, self.rows)
                return arrays[0].reshape(*lead, *arrays[0].shape[1:])
            return self._to_stages(name, arrays, spec, dtype, exchanges)

        if row.source.codec != PLAIN:
            return {
                part: by_stage(array.sharding.spec, array.dtype, *(x[part] for x in values))
                for part, array in self.table.stored(row, row.source).arrays.items()
            }
        x = by_stage(row.source.spec, row.read.dtype, *values)
        shape = self.source_shape(name)
        return x if x.shape[3:] == shape else on_device(x)[(..., *map(slice, shape))]

    def gradients(
        self, parameter: str, gradient: jax.Array, exchanges: "OrderedExchanges"
    ) -> Arrays:
        """The gradients of a parameter's trained layers, by path, as its rows store gradients.

        An all-to-all leaves it sharded as the optimizer's state, which under stage 1 sends less.
        """
        if self.stack.in_place:
            return {self.stack.leaves[parameter][0]: gradient.reshape(-1, *gradient.shape[3:])}
        return self._from_stages(parameter, gradient, exchanges)

    def _to_stages(
        self,
        name: str,
        arrays: Sequence[jax.Array],
        spec: PartitionSpec,
        dtype: Any,
        exchanges: "OrderedExchanges",
    ) -> jax.Array:
        """Stored arrays [layers, ...], or one per layer, as [stages, chunks, layers, ...].

        Offloaded arrays are fetched for that, a stage's share at once.
        """
        arrays = on_device(arrays)
        piece, layers = self.pieces[name], self._layers_dim(name)
        entries = self._of_layer(name, by_dim(spec, arrays[0].ndim))
        dim = sharded_dim(entries, PIPE)

        def ordered(*arrays: jax.Array) -> jax.Array:
            read = [x.astype(dtype) for x in arrays]
            if layers is None:
                x = jnp.stack(read)
            else:
                x = jnp.concatenate([jnp.moveaxis(x, layers, 0) for x in read])
            return self._split_by_stage(x)[:, :, piece.start : piece.stop]

        if dim is None:  # replicated over the stages
            return ordered(*arrays)
        at = 3 + dim

        def exchange(*arrays: jax.Array) -> list[jax.Array]:
            return [lax.all_to_all(ordered(*arrays), PIPE, 0, at, tiled=True)]

        stage_spec = PartitionSpec(PIPE, None, None, *without_axes(entries, (PIPE,)))
        return exchanges.per_device(exchange, spec, stage_spec, arrays)[0]

    def _from_stages(
        self, parameter: str, gradient: jax.Array, exchanges: "OrderedExchanges"
    ) -> Arrays:
        """Inverse of `_to_stages`, for the gradients of a parameter's trained layers."""
        name = self.gradient_pieces[parameter][0]
        row, layers = self.row(name), self._layers_dim(name)
        assert row.opt is not None
        dim = self._pipe_dim(name, row.opt)
        more = zip(gradient.shape[3:], self._of_layer(name, row.shape(row.opt)), strict=True)
        gradient = jnp.pad(gradient, [(0, 0)] * 3 + [(0, b - a) for a, b in more])
        paths = self.stack.leaves[parameter]
        trained = [path for path in paths if self.table[path].leaf.trainable]
        # By layer, the index of its gradient in [chunks * stages * slots, ...].
        slots, rows = self.slots(parameter), self._trained_rows(parameter)
        place: dict[int, int] = {}
        for (stage, chunk, slot), number in np.ndenumerate(slots):
            if number >= 0:
                block = chunk * self.stages + stage
                place[block * self.rows + rows[number]] = block * slots.shape[2] + slot

        def of_path(path: str, x: jax.Array) -> jax.Array:
            """What belongs to a row of the table, of [chunks * stages * slots, ...]."""
            layer_range = self.table[path].leaf.range
            number = [paths.index(path)] if layers is None else range(self.layers)
            index = [
                place[layer] for layer in (number[layer_range.rows] if layer_range else number)
            ]
            if index == list(range(index[0], index[-1] + 1)):
                x = x[index[0] : index[-1] + 1]
            else:
                x = jnp.stack([x[i] for i in index])
            return x[0] if layers is None else jnp.moveaxis(x, 0, layers)

        def apart(x: jax.Array) -> list[jax.Array]:
            x = jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:])
            return [of_path(path, x) for path in trained]

        def exchange(x: jax.Array) -> list[jax.Array]:
            return apart(lax.all_to_all(x, PIPE, dim, 0, tiled=True))

        if dim is None:
            gradients = apart(gradient)
        else:
            stage_spec = self._stage_spec(name, row.opt)
            gradients = exchanges.per_device(exchange, stage_spec, row.opt.spec, [gradient])
        return dict(zip(trained, gradients, strict=True))

    def _split_by_stage(self, x: jax.Array) -> jax.Array:
        """[layers, ...] as [stages, chunks, layers, ...], padding layers zero."""
        missing = self.stages * self.chunks * self.rows - self.layers
        x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
        x = x.reshape(self.chunks, self.stages, self.rows, *x.shape[1:])
        return jnp.swapaxes(x, 0, 1)

    def _pipe_dim(self, name: str, placement: Placement) -> int | None:
        """The dim of [stages, chunks, layers, ...] that is stored sharded over `pipe`."""
        entries = self._layer_spec_entries(name, placement)
        dim = sharded_dim(entries, PIPE)
        return None if dim is None else 3 + dim

    def _stage_spec(self, name: str, placement: Placement) -> PartitionSpec:
        return PartitionSpec(PIPE, None, None, *self.spec(name, placement))

    # -- one layer's slice of a parameter, [layers, ...] ------------------------------------------

    def _layers_dim(self, name: str) -> int | None:
        """The dim of a stored array that stacks the layers."""
        return self.stack.layers_dim(self.stack.leaves[self.pieces[name].parameter][0])

    def _of_layer(self, name: str, dims: Sequence[Any]) -> list[Any]:
        """The entries of a stored array's dims that are dims of one layer's slice."""
        layers = self._layers_dim(name)
        return [x for dim, x in enumerate(dims) if dim != layers]

    def _layer_spec_entries(self, name: str, placement: Placement) -> list[Any]:
        """PartitionSpec entries of one layer's slice as stored, one per dim."""
        ndim = len(self.row(name).leaf.shape)
        return self._of_layer(name, by_dim(placement.spec, ndim))

    def spec(self, name: str, placement: Placement) -> PartitionSpec:
        """PartitionSpec of one layer's slice on its stage."""
        return without_axes(self._layer_spec_entries(name, placement), (PIPE,))

    def source_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one layer's slice, including the padding of gathered dims."""
        row = self.row(name)
        sizes = zip(
            self._of_layer(name, row.leaf.shape),
            self._of_layer(name, row.shape(row.source)),
            self.spec(name, row.read),
            self.spec(name, row.source),
            strict=True,
        )
        return tuple(size if r == s else padded for size, padded, r, s in sizes)

    def gradient_shape(self, name: str) -> tuple[int, ...]:
        row = self.row(name)
        assert row.grad is not None
        return tuple(self._of_layer(name, row.shape(row.grad)))

    def sharded_param(self, name: str, mesh: Any, wire: Any) -> ShardedParam:
        """A chunk of a parameter as it is stored inside a stage."""
        row = self.row(name)
        shape = (self.length(name), *self._of_layer(name, row.leaf.shape))
        gathered = NamedSharding(mesh, PartitionSpec(None, *self.spec(name, row.read)))
        memory_kind = HOST if row.source.memory_kind == HOST and self.stack.in_place else None
        spec = PartitionSpec(None, *self.spec(name, row.source))
        shards = NamedSharding(mesh, spec, memory_kind=memory_kind)
        sharded = ShardedParam(shape, row.read.dtype, gathered, shards, wire, row.leaf.trainable)
        value, read = self.table.stored(row, row.source), self.table.sharding(row.read)

        def of_stage(
            sharding: NamedSharding, array: EncodedArray, kind: str | None
        ) -> NamedSharding:
            spec = array.spec(value.padded, sharding)
            entries = self._of_layer(name, by_dim(spec, len(array.shape)))
            of_layers = PartitionSpec(None, *without_axes(entries, (PIPE,)))
            return NamedSharding(mesh, of_layers, memory_kind=kind)

        def part(array: EncodedArray) -> ShardedParam:
            dims = (self.length(name), *self._of_layer(name, array.shape))
            how = ShardedParam(
                dims,
                array.dtype,
                of_stage(read, array, None),
                of_stage(value.sharding, array, memory_kind),
                trainable=False,
            )
            return replace(how, blocks=(1, *self._of_layer(name, array.blocks)))

        if row.source.codec == PLAIN:
            return sharded
        parts = tuple((part_name, part(array)) for part_name, array in value.parts.items())
        return replace(sharded, codec=row.source.codec, parts=parts)


class OrderedExchanges:
    """All-to-alls in a fixed order.

    Simulated devices would run them in any order, each device in another (see
    `pipeline/cpu_ordering.py`): there each depends on the last one's result, by a condition that
    is never true.
    """

    def __init__(self, mesh: Mesh, step: Any) -> None:
        self.mesh, self.never = mesh, jnp.asarray(step) < 0
        self.last: tuple[jax.Array, PartitionSpec] | None = None

    def per_device(
        self,
        exchange: Callable[..., list[jax.Array]],
        in_spec: Any,
        out_spec: Any,
        arrays: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Run `exchange` on each device's shards, manual over all axes.

        With only `pipe` manual, XLA gathers operands that other axes shard (an all-gather:
        jax 0.11.2 and 0.12.0.1).
        """

        def ordered(never: jax.Array, last: Sequence[jax.Array], arrays: Any) -> list[jax.Array]:
            for x in last:
                arrays = [jnp.where(never, x.reshape(-1)[0].astype(a.dtype), a) for a in arrays]
            return exchange(*arrays)

        last = [self.last] if self.last and simulated(self.mesh) else []
        outs = jax.shard_map(
            ordered,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), [spec for _, spec in last], in_spec),
            out_specs=out_spec,
            check_vma=False,
        )(self.never, [x for x, _ in last], list(arrays))
        self.last = outs[0], out_spec[0] if isinstance(out_spec, list) else out_spec
        return outs
