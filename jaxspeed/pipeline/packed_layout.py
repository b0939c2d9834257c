"""Stage layout of unlike stages: each stage's parameters packed into one row per dtype.

Stored parameters are sharded over `pipe`, whichever stage reads them, as those of blocks in a list
are (`stage_layout.py`). One all-to-all per dtype at the start of a step sends each stage the shards
of its parameters, [stages, 1, shards, elements]; another one at its end returns the gradients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxspeed.axes import PIPE
from jaxspeed.pipeline.stage_layout import Arrays, OrderedExchanges
from jaxspeed.placement.rows import Row
from jaxspeed.placement.specs import sharded_dim
from jaxspeed.placement.stacks import UnlikeStages
from jaxspeed.placement.table import PlacementTable


class _Shard(NamedTuple):
    """A parameter's place in its stage's row."""

    path: str
    stage: int
    start: int
    shape: tuple[int, ...]  # of a shard
    dim: int  # that is sharded over pipe

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class PackedLayout:
    """The packed parameters of a table's unlike stages."""

    table: PlacementTable
    chunks: int = 1
    rows: int = 1
    padded: bool = False

    @property
    def stages(self) -> int:
        return self.table.mesh.shape[PIPE]

    @property
    def layers(self) -> int:
        return self.stages

    @property
    def stack(self) -> UnlikeStages:
        assert isinstance(self.table.stack, UnlikeStages)
        return self.table.stack

    @cached_property
    def packs(self) -> dict[str, list[_Shard]]:
        """The parameters of each packed array, by its name."""
        packs: dict[str, list[_Shard]] = {}
        ends: dict[tuple[str, int], int] = {}
        for path, stage in self.stack.stage_of.items():
            row = self.table[path]
            name = f"stages/{row.read.dtype}/{row.grad.dtype if row.grad else 'frozen'}"
            dim = sharded_dim(row.source.spec, PIPE)
            assert dim is not None, f"{path} is not sharded over pipe"
            shape = list(row.shape(row.source))
            shape[dim] //= self.stages
            start = ends.get((name, stage), 0)
            packs.setdefault(name, []).append(_Shard(path, stage, start, tuple(shape), dim))
            ends[name, stage] = start + math.prod(shape)
        return packs

    def names(self) -> Sequence[str]:
        return list(self.packs)

    def _row(self, name: str) -> Row:
        return self.table[self.packs[name][0].path]

    def _room(self, name: str) -> int:
        return max(shard.start + shard.size for shard in self.packs[name])

    def trained(self, name: str) -> bool:
        return self._row(name).leaf.trainable

    def accumulator(self, name: str) -> tuple[tuple[int, ...], Any, PartitionSpec]:
        """(shape, dtype, spec) of the gradients of a chunk."""
        grad = self._row(name).grad
        assert grad is not None
        return (self.stages, self._room(name)), grad.dtype, PartitionSpec(None, None)

    @property
    def gradient_pieces(self) -> Mapping[str, Sequence[str]]:
        """The packed arrays, each one piece, as in `StageLayout.gradient_pieces`."""
        return {name: [name] for name in self.names() if self.trained(name)}

    def accumulated(
        self, name: str, gradients: Sequence[jax.Array], stage: Any, chunk: Any
    ) -> tuple[jax.Array, Any]:
        """All of the gradient, where `StageLayout.accumulated` selects rows."""
        (gradient,) = gradients
        return gradient, True

    @property
    def packed_bytes(self) -> tuple[int, int]:
        """A device's bytes of weights, as its stage reads them, and of gradients."""
        sizes = [(self._row(name), self.stages * self._room(name)) for name in self.packs]
        gradients = sum(n * row.grad.dtype.itemsize for row, n in sizes if row.grad)
        return sum(n * row.read.dtype.itemsize for row, n in sizes), gradients

    # -- exchanges --------------------------------------------------------------------------------

    def by_stage(self, sources: Mapping[str, Any], step: Any) -> Arrays:
        """The sources, with the stages' parameters packed, by name."""
        outer = {path: x for path, x in sources.items() if path not in self.stack.paths}
        exchanges = OrderedExchanges(self.table.mesh, step)
        return outer | {name: self._packed(name, sources, exchanges) for name in self.packs}

    def by_path(self, gradients: Mapping[str, Any], step: Any) -> Arrays:
        """Packed gradients as gradients of the sources, by path."""
        outer = {path: x for path, x in gradients.items() if path not in self.packs}
        exchanges = OrderedExchanges(self.table.mesh, step)
        for name in self.packs:
            if name in gradients:
                outer |= self._unpacked(name, gradients[name], exchanges)
        return outer

    def _packed(
        self, name: str, sources: Mapping[str, Any], exchanges: OrderedExchanges
    ) -> jax.Array:
        shards, room, dtype = self.packs[name], self._room(name), self._row(name).read.dtype

        def exchange(*arrays: jax.Array) -> list[jax.Array]:
            flat = [x.astype(dtype).reshape(-1) for x in arrays]
            rows = []
            for stage in range(self.stages):
                stage_shards = [x for x, s in zip(flat, shards, strict=True) if s.stage == stage]
                row = jnp.concatenate(stage_shards) if stage_shards else jnp.zeros((0,), dtype)
                rows.append(jnp.pad(row, (0, room - row.size)))
            sent = lax.all_to_all(jnp.stack(rows), PIPE, 0, 0, tiled=True)
            return [sent.reshape(1, 1, self.stages, room)]

        specs = [self.table[s.path].source.spec for s in shards]
        arrays = [sources[s.path] for s in shards]
        return exchanges.per_device(exchange, specs, [PartitionSpec(PIPE)], arrays)[0]

    def _unpacked(self, name: str, gradient: jax.Array, exchanges: OrderedExchanges) -> Arrays:
        shards, room = self.packs[name], self._room(name)

        def exchange(packed: jax.Array) -> list[jax.Array]:
            rows = lax.all_to_all(packed.reshape(self.stages, room), PIPE, 0, 0, tiled=True)
            return [rows[s.stage, s.start : s.start + s.size].reshape(s.shape) for s in shards]

        specs = [self.table[s.path].source.spec for s in shards]
        parameters = exchanges.per_device(exchange, [PartitionSpec(PIPE)], specs, [gradient])
        return dict(zip([s.path for s in shards], parameters, strict=True))

    def of_stage(self, stage: int, weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """A stage's parameters by path, from its packed arrays, [shards, elements]."""
        arrays = {}
        for name, shards in self.packs.items():
            for s in shards:
                if s.stage == stage:
                    x = weights[name][:, s.start : s.start + s.size]
                    x = jnp.moveaxis(x.reshape(self.stages, *s.shape), 0, s.dim)
                    shape = (*s.shape[: s.dim], -1, *s.shape[s.dim + 1 :])
                    x = x.reshape(shape)
                    arrays[s.path] = x[tuple(map(slice, self.table[s.path].leaf.shape))]
        return arrays
