"""The stack's weights as the stages hold them, [stages, chunks, layers, ...], and gradients back.

A model that stacks its blocks itself is stored so already: the first dim is cut over `pipe`, and
each stage has neighbouring layers. What is not (chunks that alternate between stages, or blocks
that are a list) is stored cut over `pipe` on another dim, and one all-to-all over `pipe` at the
begin of a step brings each stage its layers; another one at the end takes the gradients back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.placement.rows import Placement, Row
from jaxspeed.placement.table import PlacementTable
from jaxspeed.placement.units import Stored


@dataclass(frozen=True)
class Arrangement:
    """How the stack of a table lies on its stages."""

    table: PlacementTable
    chunks: int

    @property
    def stages(self) -> int:
        return self.table.mesh.shape["pipe"]

    @property
    def layers(self) -> int:
        """Of a model: without padding."""
        assert self.table.stack is not None
        return self.table.stack.layers

    @property
    def rows(self) -> int:
        """Layers of a chunk, those that are padding included."""
        return -(-self.layers // (self.stages * self.chunks))

    @property
    def padded(self) -> bool:
        return self.rows * self.stages * self.chunks != self.layers

    def row(self, name: str) -> Row:
        """The row of a parameter of the blocks; of a list's, the first block's."""
        assert self.table.stack is not None
        return self.table[self.table.stack.leaves[name][0]]

    def weights(self, name: str, sources: dict[str, Any]) -> jax.Array:
        """A parameter of all blocks, [stages, chunks, layers, ...], from its stored arrays."""
        row = self.row(name)
        (path,) = self.table.stack.leaves[name]
        x = sources[path]
        rest = self.source_shape(name)
        x = x[(slice(None), *map(slice, rest))]
        return x.reshape(self.stages, self.chunks, self.rows, *rest)

    def gradients(self, name: str, gradient: jax.Array) -> dict[str, jax.Array]:
        """The gradient of a parameter of all blocks, as its rows store gradients."""
        (path,) = self.table.stack.leaves[name]
        return {path: gradient.reshape(-1, *gradient.shape[3:])}

    # -- a layer's part of a parameter, [layers, ...] ------------------------------------------------

    def source_shape(self, name: str) -> tuple[int, ...]:
        """What one layer stores, padding of what is gathered included."""
        return self.row(name).source_shape[1:]

    def gradient_shape(self, name: str) -> tuple[int, ...]:
        row = self.row(name)
        assert row.grad is not None
        return row.shape(row.grad)[1:]

    def spec(self, name: str, placement: Placement) -> PartitionSpec:
        """How one layer's part is cut."""
        row = self.row(name)
        entries = [*placement.spec, *([None] * (len(row.leaf.shape) - len(placement.spec)))]
        return PartitionSpec(*entries[1:])

    def stored(self, name: str, mesh: Any, wire: Any) -> Stored:
        """How a chunk of a parameter is stored inside a stage."""
        row = self.row(name)
        shape = (self.rows, *row.leaf.shape[1:])
        gathered = NamedSharding(mesh, PartitionSpec(None, *self.spec(name, row.read)))
        cut = NamedSharding(mesh, PartitionSpec(None, *self.spec(name, row.source)))
        return Stored(shape, row.read.dtype, gathered, cut, wire, row.leaf.trainable)

    def names(self) -> Sequence[str]:
        assert self.table.stack is not None
        return list(self.table.stack.leaves)
