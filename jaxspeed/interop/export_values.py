"""The arrays of an export, block by block: those of a checkpoint, or of a state on devices."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.adapters.adapter import PREFIX as ADAPTERS
from jaxspeed.adapters.adapter import Adapter
from jaxspeed.checkpoint.header import Header, codec_of
from jaxspeed.checkpoint.object_storage import new_context
from jaxspeed.checkpoint.tensorstore_arrays import FOLDER, array_spec
from jaxspeed.disk.disk_array import in_memory
from jaxspeed.interop.mapping import Index
from jaxspeed.placement.codec import PLAIN, Codec, Stored, StoredValue, unpad
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.placement.rows import IS_RANGE, LayerRange, Leaf, Row
from jaxspeed.quantization.codecs import MatrixCodec
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState, updated_values
from jaxspeed.train_state.state_storage import read_encoded
from jaxspeed.user_models.pretrained_model import Weights

_BLOCK_BYTES = 64 << 20


class Values(Protocol):
    """The arrays of an export."""

    @property
    def leaves(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype by path."""

    def blocks(self, path: str) -> Iterator[tuple[Index, np.ndarray]]:
        """Blocks that together are the array, of which each is read once."""


class CheckpointValues:
    """Arrays of a checkpoint as stored by Orbax: Zarr chunks in one OCDBT database.

    Args:
      names: their names in the checkpoint by path, or by the paths of ranges of their layers.
      base: opens the weights of those that the checkpoint does not have, since they were frozen.
    """

    def __init__(
        self,
        source: epath.Path,
        header: Header,
        names: Mapping[str, str],
        base: Callable[[], Weights] | None = None,
    ) -> None:
        self._source, self._header, self._base = source, header, base
        self._records = {**header.leaves, **header.excluded}
        self._parts: dict[str, list[tuple[int, str]]] = {}  # (the first layer, the name)
        for path, name in names.items():
            parameter, _, layers = path.rpartition("/")
            is_range = IS_RANGE.fullmatch(layers)
            first = int(layers[1:].partition(":")[0]) if is_range else 0
            self._parts.setdefault(parameter if is_range else path, []).append((first, name))
        self.leaves = {path: self._joined(parts) for path, parts in self._parts.items()}

    def _joined(self, parts: Sequence[tuple[int, str]]) -> tuple[tuple[int, ...], str]:
        records = [self._records[name] for _, name in parts]
        shape = records[0].shape
        if len(records) > 1:
            shape = (sum(record.shape[0] for record in records), *shape[1:])
        return shape, jnp.result_type(*(record.dtype for record in records)).name

    def blocks(self, path: str) -> Iterator[tuple[Index, np.ndarray]]:
        """Blocks of full chunks, without padding; of an encoded stack layers."""
        for first, name in self._parts[path]:
            is_saved = name in self._header.leaves
            blocks = self._saved(name) if is_saved else self._of_base(path, first, name)
            for index, block in blocks:
                yield _shifted(index, first), block

    def _of_base(self, path: str, first: int, name: str) -> Iterator[tuple[Index, np.ndarray]]:
        """Blocks of what was frozen, encoded and decoded as when the rest was trained."""
        assert self._base is not None
        weights, record = self._base(), self._header.excluded[name]
        shape, dtype, codec = record.shape, jnp.dtype(record.dtype), codec_of(name, record)
        if codec == PLAIN:
            row = math.prod(shape[1:]) * dtype.itemsize
            step = max(1, _BLOCK_BYTES // max(row, 1))
            for start in range(0, shape[0], step) if shape else [0]:
                index = tuple(slice(0, n) for n in shape)
                if shape:
                    index = slice(start, min(start + step, shape[0])), *index[1:]
                yield index, weights.read(path, _shifted(index, first), dtype)
            return
        stacked = len(codec.stack(shape)[:1]) if isinstance(codec, MatrixCodec) else 0
        mesh = Mesh(np.array(jax.local_devices()[:1]), ("data",))
        at = NamedSharding(mesh, PartitionSpec())
        form = StoredValue(shape, shape, dtype, at, codec, stacked)
        rows = LayerRange(path, first, first + shape[0], "") if stacked else None
        leaf = Leaf(path, shape, dtype, trainable=False, range=rows)
        for number in range(shape[0]) if stacked else [None]:
            layer_form = form if number is None else form.layer
            arrays = read_encoded(weights, leaf, layer_form, number)
            yield _of_layer(shape, number, _decoded(codec, arrays, layer_form.shape, dtype))

    def _saved(self, name: str) -> Iterator[tuple[Index, np.ndarray]]:
        record = self._header.leaves[name]
        shape, dtype = record.shape, jnp.dtype(record.dtype)
        if not math.prod(shape):
            return
        if (codec := codec_of(name, record)) != PLAIN:
            arrays = {part: self._open(f"{name}/{part}") for part in record.arrays}
            stacked = isinstance(codec, MatrixCodec) and codec.stack(shape)
            for number in range(shape[0]) if stacked else [None]:
                of_layer = {part: x if number is None else x[number] for part, x in arrays.items()}
                read = {part: jnp.asarray(x.read().result()) for part, x in of_layer.items()}
                layer = shape if number is None else shape[1:]
                yield _of_layer(shape, number, _decoded(codec, read, layer, dtype))
            return
        array = self._open(name)
        step = list(array.chunk_layout.read_chunk.shape or ())  # a scalar has none
        size = math.prod(step) * dtype.itemsize
        for dim in reversed(range(len(shape))):
            most = -(-shape[dim] // step[dim])
            times = max(1, min(most, _BLOCK_BYTES // size))
            step[dim] *= times
            size *= times
        starts = [range(0, n, s) for n, s in zip(shape, step, strict=True)]
        for corner in itertools.product(*starts):
            ends = (min(a + s, n) for a, s, n in zip(corner, step, shape, strict=True))
            index = tuple(map(slice, corner, ends))
            yield index, np.asarray(array[index].read().result())

    def _open(self, name: str) -> Any:
        # The fewest chunks in memory at a time that keep the disk busy.
        most = {"file_io_concurrency": {"limit": 2}, "data_copy_concurrency": {"limit": 2}}
        spec = array_spec(self._source / FOLDER, name) | {"context": {**most, "cache_pool": {}}}
        return ts.open(spec, open=True, read=True, context=new_context()).result()


class StateValues:
    """The parameters of a state, in the precision in which they are updated, and some variables."""

    def __init__(self, program: Program, state: TrainState, variables: Sequence[str] = ()) -> None:
        self._table, self._state = program.table, state
        table = program.table
        self.leaves = {
            path: (table.shape_of(path), jnp.result_type(*(r.updated.dtype for r in rows)).name)
            for path, rows in table.parameters.items()
        }
        stored = ((path, state.variables[path]) for path in variables if path in state.variables)
        self.leaves |= {path: (x.shape, x.dtype.name) for path, x in stored}

    def blocks(self, path: str) -> Iterator[tuple[Index, np.ndarray]]:
        """One shard at a time; if other processes have some, blocks that are gathered."""
        if path in self._state.variables:  # replicated
            value = np.asarray(self._state.variables[path].addressable_data(0))
            yield tuple(slice(0, n) for n in value.shape), value
            return
        for row in self._table.parameters[path]:
            for index, block in self._of_row(row):
                if row.leaf.range:
                    index = _shifted(index, row.leaf.range.start)
                yield index, block

    def _of_row(self, row: Row) -> Iterator[tuple[Index, np.ndarray]]:
        """Blocks of a parameter; of an encoded stack those of one layer after another."""
        form = self._table.stored(row, row.updated)
        x = in_memory(updated_values(self._state, row))
        if form.codec == PLAIN:
            yield from _shards(x, form.shape)
        elif not form.stacked:
            yield from _shards(_decoded(form.codec, x, form.shape, form.dtype), form.shape)
        else:
            for number in range(form.shape[0]):
                layer = _decoded_layer(form, x, number)
                for index, block in _shards(layer, form.layer.shape):
                    yield (slice(number, number + 1), *index), block[None]


class MergedValues:
    """Values in which adapters are added to the weights, a layer's factors and block at a time.

    As applied: W + s A B, and with DoRA m (W + s A B) / ||W + s A B||, in fp32.
    """

    def __init__(self, values: Values, adapters: Mapping[str, Adapter]) -> None:
        self._values, self._adapters = values, adapters
        self.leaves = {p: x for p, x in values.leaves.items() if not p.startswith(ADAPTERS)}

    def blocks(self, path: str) -> Iterator[tuple[Index, np.ndarray]]:
        """The blocks of the values; with DoRA they are read twice, first for the norms."""
        adapter = self._adapters.get(path)
        if adapter is None:
            yield from self._values.blocks(path)
            return
        dims = adapter.dims
        kept = [dim for dim in range(len(adapter.shape)) if dim not in dims.inputs]
        leaves = {leaf: full_array(self._values, leaf) for leaf in adapter.shapes}
        ratio: np.ndarray | None = None
        if adapter.dora:
            squares = np.zeros([adapter.shape[dim] for dim in kept], np.float32)
            for index, block in self._values.blocks(path):
                total = np.square(_with_delta(adapter, leaves, index, block))
                squares[tuple(index[dim] for dim in kept)] += total.sum(axis=dims.inputs)
            magnitude = leaves[adapter.leaf("magnitude")].astype(np.float32)
            adapted = (adapter.per_layer(adapter.ranks) > 0).T
            adapted = np.broadcast_to(adapted, magnitude.T.shape).T
            order = np.argsort([*dims.stack, *dims.outputs])  # as the weight has them
            norms = np.sqrt(squares)
            ratio = np.divide(
                magnitude.transpose(order),
                norms,
                out=np.ones_like(norms),
                where=adapted.transpose(order),
            )
        for index, block in self._values.blocks(path):
            total = _with_delta(adapter, leaves, index, block)
            if ratio is not None:
                factors = ratio[tuple(index[dim] for dim in kept)]
                total *= np.expand_dims(factors, dims.inputs)
            yield index, total.astype(block.dtype)


def _with_delta(
    adapter: Adapter, leaves: Mapping[str, np.ndarray], index: Index, block: np.ndarray
) -> np.ndarray:
    """A block of a weight plus that of s A B, in fp32."""
    dims = adapter.dims
    stack, inputs, outputs = (
        tuple(index[dim] for dim in role) for role in (dims.stack, dims.inputs, dims.outputs)
    )
    a = leaves[adapter.leaf("A")][(*stack, *inputs)].astype(np.float32)
    b = leaves[adapter.leaf("B")][(*stack, slice(None), *outputs)].astype(np.float32)
    total = block.astype(np.float32)
    # [*stack, *inputs, *outputs], a view of the total
    view = total.transpose([*dims.stack, *dims.inputs, *dims.outputs])
    scales, ranks = (adapter.per_layer(role)[stack] for role in (adapter.scales, adapter.ranks))
    for at in np.ndindex(*view.shape[: len(stack)]):
        if ranks[at]:
            view[at] += np.float32(scales[at]) * np.tensordot(a[at], b[at], 1)
    return total


def full_array(values: Values, path: str) -> np.ndarray:
    """A leaf at once."""
    shape, dtype = values.leaves[path]
    array = np.empty(shape, jnp.dtype(dtype))
    for index, block in values.blocks(path):
        array[index] = block
    return array


def _gathered(x: jax.Array, shape: tuple[int, ...]) -> Iterator[tuple[Index, np.ndarray]]:
    """Blocks of rows, each replicated by a collective and read from this process's copy."""
    at = NamedSharding(x.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
    replicated = jax.jit(lambda x: x, out_shardings=at)
    rows = max(1, _BLOCK_BYTES // max(1, x.nbytes // max(1, x.shape[0]))) if x.ndim else 1
    for start in range(0, shape[0] if shape else 1, rows):
        if not shape:
            yield (), np.asarray(replicated(x).addressable_data(0))
            return
        stop = min(start + rows, shape[0])
        inside = (slice(start, stop), *(slice(0, n) for n in shape[1:]))
        yield inside, np.asarray(replicated(x[inside]).addressable_data(0))


def _shards(x: jax.Array, shape: tuple[int, ...]) -> Iterator[tuple[Index, np.ndarray]]:
    """One shard of a padded array at a time; if other processes have some, gathered blocks."""
    if not x.is_fully_addressable:
        yield from _gathered(x, shape)
        return
    seen = set()
    for shard in x.addressable_shards:
        index = tuple(
            slice(*span.indices(n)[:2]) for span, n in zip(shard.index, x.shape, strict=True)
        )
        index = tuple(
            slice(min(i.start, n), min(i.stop, n)) for i, n in zip(index, shape, strict=True)
        )
        if str(index) in seen:
            continue
        seen.add(str(index))
        block = np.asarray(shard.data)[tuple(slice(i.stop - i.start) for i in index)]
        if block.size:
            yield index, block


def _shifted(index: Index, first: int) -> Index:
    """An index into a range of layers, as one into all."""
    if not first:
        return index
    rows, *others = index
    return slice(rows.start + first, rows.stop + first), *others


def _of_layer(
    shape: tuple[int, ...], number: int | None, value: jax.Array
) -> tuple[Index, np.ndarray]:
    """A layer's value (or an array's, without a number) as a block."""
    index = tuple(slice(0, n) for n in shape)
    if number is None:
        return index, np.asarray(value)
    return (slice(number, number + 1), *index[1:]), np.asarray(value)[None]


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _decoded(codec: Codec, stored: Stored, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An unpadded value; one program, since a decoder has many intermediate values."""
    return unpad(codec.decode(on_device(stored), shape, dtype), shape)


@functools.partial(jax.jit, static_argnums=0)
def _decoded_layer(form: StoredValue, stored: Stored, number: Any) -> jax.Array:
    """A layer of an encoded stack."""
    layer = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, 0, False), stored)
    return form.layer.decode(on_device(layer))
