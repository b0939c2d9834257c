"""Stage layout of the blocks' weights and gradients, [stages, chunks, layers, ...]; all-to-alls.

The weights of a model with stacked blocks are stored so already: the first dim is sharded over
`pipe`, and each stage has consecutive layers. Others (chunks that alternate between stages, or
blocks in a list) are stored sharded over `pipe` on another dim. One all-to-all per parameter at the
start of a step sends each stage its layers; another one at its end returns the gradients.

Layer l of the stack is the j-th of chunk c of stage s: l = (c * stages + s) * rows + j.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.axes import PIPE
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.placement.mesh import simulated
from jaxspeed.placement.rows import HOST, Placement, Row
from jaxspeed.placement.specs import by_dim, sharded_dim, without_axes
from jaxspeed.placement.stacks import Stack
from jaxspeed.placement.table import PlacementTable
from jaxspeed.zero3 import ShardedParam

Arrays = dict[str, Any]


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
        return list(self.stack.leaves)

    def row(self, name: str) -> Row:
        """The table's row of a parameter of the blocks; in a list, of the first block."""
        return self.table[self.stack.leaves[name][0]]

    def trained(self, name: str) -> bool:
        """Whether a parameter of the blocks has a gradient."""
        return self.row(name).leaf.trainable

    def accumulator(self, name: str) -> tuple[tuple[int, ...], Any, PartitionSpec]:
        """(shape, dtype, spec) of a chunk's gradients of a parameter of the blocks."""
        grad = self.row(name).grad
        assert grad is not None
        spec = PartitionSpec(None, *self.spec(name, grad))
        return (self.rows, *self.gradient_shape(name)), grad.dtype, spec

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
        for name in self.names():
            if name in gradients:
                outer |= self.gradients(name, gradients[name], exchanges)
        return outer

    # -- one parameter of all blocks --------------------------------------------------------------

    def weights(
        self, name: str, sources: Mapping[str, Any], exchanges: "OrderedExchanges"
    ) -> jax.Array:
        """A parameter of all blocks, [stages, chunks, layers, ...], from its stored arrays.

        Before an all-to-all it is cast to the dtype that layers read.
        """
        arrays = [sources[path] for path in self.stack.leaves[name]]
        if self.stack.in_place:
            lead = (self.stages, self.chunks, self.rows)
            x = arrays[0].reshape(*lead, *arrays[0].shape[1:])
        else:
            x = self._to_stages(name, arrays, exchanges)
        shape = self.source_shape(name)
        return x if x.shape[3:] == shape else on_device(x)[(..., *map(slice, shape))]

    def gradients(self, name: str, gradient: jax.Array, exchanges: "OrderedExchanges") -> Arrays:
        """The gradient of a parameter of all blocks, by path, as its rows store gradients.

        An all-to-all leaves it sharded as the optimizer's state, which under stage 1 sends less.
        """
        paths = self.stack.leaves[name]
        if self.stack.in_place:
            return {paths[0]: gradient.reshape(-1, *gradient.shape[3:])}
        return dict(zip(paths, self._from_stages(name, gradient, exchanges), strict=True))

    def _to_stages(
        self, name: str, arrays: Sequence[jax.Array], exchanges: "OrderedExchanges"
    ) -> jax.Array:
        """Stored arrays [layers, ...], or one per layer, as [stages, chunks, layers, ...].

        Offloaded arrays are fetched for that, a stage's share at once.
        """
        arrays = on_device(arrays)
        row = self.row(name)
        dim, layers = self._pipe_dim(name, row.source), self._layers_dim(name)

        def ordered(*arrays: jax.Array) -> jax.Array:
            x = jnp.moveaxis(arrays[0], layers, 0) if layers is not None else jnp.stack(arrays)
            return self._split_by_stage(x.astype(row.read.dtype))

        def exchange(*arrays: jax.Array) -> list[jax.Array]:
            return [lax.all_to_all(ordered(*arrays), PIPE, 0, dim, tiled=True)]

        if dim is None:  # replicated over the stages
            return ordered(*arrays)
        stage_spec = self._stage_spec(name, row.source)
        return exchanges.per_device(exchange, row.source.spec, stage_spec, arrays)[0]

    def _from_stages(
        self, name: str, gradient: jax.Array, exchanges: "OrderedExchanges"
    ) -> Sequence[jax.Array]:
        """Inverse of `_to_stages`, for a gradient."""
        row = self.row(name)
        assert row.opt is not None
        dim = self._pipe_dim(name, row.opt)
        layers = self._layers_dim(name)
        more = zip(gradient.shape[3:], self._of_layer(name, row.shape(row.opt)), strict=True)
        gradient = jnp.pad(gradient, [(0, 0)] * 3 + [(0, b - a) for a, b in more])

        def apart(x: jax.Array) -> list[jax.Array]:
            x = self._merge_stages(x)
            return list(x) if layers is None else [jnp.moveaxis(x, 0, layers)]

        def exchange(x: jax.Array) -> list[jax.Array]:
            return apart(lax.all_to_all(x, PIPE, dim, 0, tiled=True))

        if dim is None:
            return apart(gradient)
        stage_spec = self._stage_spec(name, row.opt)
        return exchanges.per_device(exchange, stage_spec, row.opt.spec, [gradient])

    def _split_by_stage(self, x: jax.Array) -> jax.Array:
        """[layers, ...] as [stages, chunks, layers, ...], padding layers zero."""
        missing = self.stages * self.chunks * self.rows - self.layers
        x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
        x = x.reshape(self.chunks, self.stages, self.rows, *x.shape[1:])
        return jnp.swapaxes(x, 0, 1)

    def _merge_stages(self, x: jax.Array) -> jax.Array:
        """[stages, chunks, layers, ...] as [layers, ...]."""
        return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:])[: self.layers]

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
        return self.stack.layers_dim(self.stack.leaves[name][0])

    def _of_layer(self, name: str, dims: Sequence[Any]) -> list[Any]:
        """What belongs to the dims of one layer's slice, of a stored array's."""
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
        shape = (self.rows, *self._of_layer(name, row.leaf.shape))
        gathered = NamedSharding(mesh, PartitionSpec(None, *self.spec(name, row.read)))
        memory_kind = HOST if row.source.memory_kind == HOST and self.stack.in_place else None
        spec = PartitionSpec(None, *self.spec(name, row.source))
        shards = NamedSharding(mesh, spec, memory_kind=memory_kind)
        return ShardedParam(shape, row.read.dtype, gathered, shards, wire, row.leaf.trainable)


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
