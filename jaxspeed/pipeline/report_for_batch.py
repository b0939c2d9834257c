"""`pipeline_report`: the PipelineReport of a program for a batch of given shapes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.axes import DATA, PIPE, TENSOR, storing_axes
from jaxspeed.pipeline.cost_report import PipelineReport
from jaxspeed.pipeline.packed_layout import PackedLayout
from jaxspeed.pipeline.pipeline import Pipeline
from jaxspeed.pipeline.step_values import split_program
from jaxspeed.placement.rows import Placement, Row
from jaxspeed.placement.specs import by_dim, num_shards, spec_axes
from jaxspeed.placement.table import PlacementTable
from jaxspeed.traced_loss.accumulate import micro_batch_shapes
from jaxspeed.traced_loss.micro_batch_loss import MicroBatchLoss
from jaxspeed.train_state.state import Arrays


def pipeline_report(
    pipeline: Pipeline, variables: Arrays, batch: Any, micro_batches: int
) -> PipelineReport:
    """The report, from the shapes of a model's variables and of a global batch.

    Call it with the mesh in the context: the loss is traced.
    """
    table, layout = pipeline.traced_loss.table, pipeline.layout
    sizes = table.mesh.shape
    stored_over = {axis: sizes[axis] for axis in storing_axes() if sizes[axis] > 1}
    first = (
        pipeline.schedule(micro_batches),
        _carry(pipeline.traced_loss, variables, batch, micro_batches),
        layout.layers,
        layout.rows,
        pipeline.recompute,
        pipeline.gather,
        stored_over or {DATA: 1},
    )
    if isinstance(layout, PackedLayout):
        weights, gradients = layout.packed_bytes
        return PipelineReport(*first, weights, moved_bytes=weights + gradients, unlike=True)
    blocks = [(layout.length(name), layout.row(name)) for name in layout.names()]

    def of_chunk(size: Callable[[Row], int]) -> int:
        return sum(length * size(row) for length, row in blocks)

    layer_bytes = _LayerBytes(table, pipeline.traced_loss.wire)
    slots = pipeline.stages * pipeline.chunks
    return PipelineReport(
        *first,
        pipeline.chunks * of_chunk(layer_bytes.read),
        of_chunk(layer_bytes.gathered) // layout.rows,
        of_chunk(layer_bytes.reduced) // layout.rows,
        0 if layout.stack.in_place else slots * of_chunk(layer_bytes.exchanged),
    )


def _carry(
    traced_loss: MicroBatchLoss, variables: Arrays, batch: Any, micro_batches: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """A device's shard of the activations sent between stages."""
    mesh, stack = traced_loss.table.mesh, traced_loss.table.stack
    assert stack is not None

    micro = micro_batch_shapes(batch, micro_batches)
    cast_micro = jax.eval_shape(traced_loss.cast, micro)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), variables)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    traced = traced_loss.trace((shapes, cast_micro, index, index), train=True)
    carry = split_program(traced, stack, cast_micro).carry
    samples = traced_loss.samples(cast_micro)
    ranks = traced_loss.table.ranks
    tensor = mesh.shape[TENSOR] if traced_loss.style.sequence_parallel else 1

    def share(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not x.shape or x.shape[0] != samples:
            return x
        shape = [x.shape[0] // ranks, *x.shape[1:]]
        if len(shape) > 2 and shape[1] % tensor == 0:
            shape[1] //= tensor
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    return tuple(map(share, carry))


class _LayerBytes:
    """Bytes per device of one layer's slice of a parameter of the blocks."""

    def __init__(self, table: PlacementTable, wire: Any) -> None:
        assert table.stack is not None
        self.sizes, self.wire = table.mesh.shape, wire
        self.stack = table.stack

    def read(self, row: Row, dtype: Any = None) -> int:
        """Bytes as the layer reads it, or in another dtype; padded as gathered arrays are."""
        shape = row.source_shape if row.gathered else row.leaf.shape
        return self._size(row, shape, row.read, dtype or row.read.dtype)

    def gathered(self, row: Row) -> int:
        """Bytes gathered by ZeRO 3."""
        return self.read(row) if _added(row, row.source).intersection(storing_axes()) else 0

    def reduced(self, row: Row) -> int:
        """Bytes of gradients reduce-scattered by ZeRO 2 and 3."""
        if row.grad is None or not _added(row, row.grad).intersection(storing_axes()):
            return 0
        in_layers = row.read.dtype if self.gathered(row) else row.grad.dtype
        return self.read(row, self.wire or in_layers)

    def exchanged(self, row: Row) -> int:
        """Bytes of the stage layout's all-to-alls: weights as read, and gradients."""
        parts = [(row.source, row.read.dtype)]
        parts += [(row.opt, row.grad.dtype)] if row.opt and row.grad else []
        return sum(
            self._size(row, row.shape(at), at, dtype)
            for at, dtype in parts
            if PIPE in _added(row, at)
        )

    def _size(self, row: Row, shape: Sequence[int], placement: Placement, dtype: Any) -> int:
        """Bytes of a shard of such an array, without the `layers` dim and its sharding."""
        dims = [d for d in range(len(shape)) if d != self.stack.layers_dim(row.path)]
        spec = by_dim(placement.spec, len(shape))
        shards = math.prod(num_shards(spec[d], self.sizes) for d in dims)
        return math.prod(shape[d] for d in dims) * jnp.dtype(dtype).itemsize // shards


def _added(row: Row, placement: Placement) -> frozenset[str]:
    """The axes that shard an array in addition to the sharding that layers read."""
    return spec_axes(placement.spec) - spec_axes(row.read.spec)
