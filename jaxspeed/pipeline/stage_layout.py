"""Stage layout of the stack's weights, [stages, chunks, layers, ...], and of their gradients.

A model that stacks its blocks itself is stored so already: the first dim is cut over `pipe`, and
each stage has neighbouring layers. What is not (chunks that alternate between stages, or blocks
that are a list) is stored cut over `pipe` on another dim. One all-to-all a parameter at the begin
of a step brings each stage its layers; another one at its end takes the gradients back.

Layer l of the stack is the j-th of chunk c of stage s: l = (c * stages + s) * rows + j.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.placement.mesh import simulated
from jaxspeed.placement.rows import HOST, Placement, Row
from jaxspeed.placement.specs import by_dim, sharded_dim, without_axes
from jaxspeed.placement.stacks import Stack
from jaxspeed.placement.table import PIPE, PlacementTable
from jaxspeed.zero3 import ShardedParam

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Arrangement:
    """How the stack of a table lies on its stages."""

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
        """Of a model: without padding."""
        return self.stack.layers

    @property
    def rows(self) -> int:
        """Layers of a chunk, those that are padding included."""
        return -(-self.layers // (self.stages * self.chunks))

    @property
    def padded(self) -> bool:
        return self.rows * self.stages * self.chunks != self.layers

    def names(self) -> Sequence[str]:
        return list(self.stack.leaves)

    def row(self, name: str) -> Row:
        """The row of a parameter of the blocks; of a list's, the first block's."""
        return self.table[self.stack.leaves[name][0]]

    # -- all parameters ---------------------------------------------------------------------------

    def arranged(self, sources: Mapping[str, Any], step: Any) -> Arrays:
        """The sources, with the stack as the stages hold it, by the names of its parameters.

        `step` is the number of the step.
        """
        outer = {path: x for path, x in sources.items() if path not in self.stack.paths}
        turns = Turns(self.table.mesh, step)
        return outer | {name: self.weights(name, sources, turns) for name in self.names()}

    def by_path(self, gradients: Mapping[str, Any], step: Any) -> Arrays:
        """Gradients of what was arranged, as those of the sources."""
        outer = {path: x for path, x in gradients.items() if path not in self.stack.leaves}
        turns = Turns(self.table.mesh, step)
        for name in self.names():
            if name in gradients:
                outer |= self.gradients(name, gradients[name], turns)
        return outer

    # -- one parameter of all blocks --------------------------------------------------------------

    def weights(self, name: str, sources: Mapping[str, Any], turns: "Turns") -> jax.Array:
        """A parameter of all blocks, [stages, chunks, layers, ...], from its stored arrays.

        Where stages exchange it, it is cast first to what layers read.
        """
        arrays = [sources[path] for path in self.stack.leaves[name]]
        if self.stack.in_place:
            lead = (self.stages, self.chunks, self.rows)
            x = arrays[0].reshape(*lead, *arrays[0].shape[1:])
        else:
            x = self._to_stages(name, arrays, turns)
        shape = self.source_shape(name)
        return x if x.shape[3:] == shape else on_device(x)[(..., *map(slice, shape))]

    def gradients(self, name: str, gradient: jax.Array, turns: "Turns") -> Arrays:
        """The gradient of a parameter of all blocks, by path, as its rows store gradients.

        What stages exchange goes at once to where the update wants it: cut as the optimizer's
        state is, which under stage 1 is less to send.
        """
        paths = self.stack.leaves[name]
        if self.stack.in_place:
            return {paths[0]: gradient.reshape(-1, *gradient.shape[3:])}
        return dict(zip(paths, self._from_stages(name, gradient, turns), strict=True))

    def _to_stages(self, name: str, arrays: Sequence[jax.Array], turns: "Turns") -> jax.Array:
        """Stored arrays [layers, ...], or one a layer, as [stages, chunks, layers, ...].

        What waits in host memory comes to the devices for that, a stage's share whole.
        """
        arrays = on_device(arrays)
        row = self.row(name)
        dim = self._exchanged(name, row.source)

        def ordered(*arrays: jax.Array) -> jax.Array:
            x = arrays[0] if self.stack.stacked else jnp.stack(arrays)
            return self._by_stage(x.astype(row.read.dtype))

        def exchange(*arrays: jax.Array) -> list[jax.Array]:
            return [lax.all_to_all(ordered(*arrays), PIPE, 0, dim, tiled=True)]

        if dim is None:  # every stage has all of it
            return ordered(*arrays)
        of_stages = self._of_stages(name, row.source)
        return turns.on_each_device(exchange, row.source.spec, of_stages, arrays)[0]

    def _from_stages(self, name: str, gradient: jax.Array, turns: "Turns") -> Sequence[jax.Array]:
        """What `_to_stages` does, backwards."""
        row = self.row(name)
        assert row.opt is not None
        dim = self._exchanged(name, row.opt)
        more = zip(gradient.shape[3:], row.shape(row.opt)[self._lead :], strict=True)
        gradient = jnp.pad(gradient, [(0, 0)] * 3 + [(0, b - a) for a, b in more])

        def apart(x: jax.Array) -> list[jax.Array]:
            x = self._by_layer(x)
            return [x] if self.stack.stacked else list(x)

        def exchange(x: jax.Array) -> list[jax.Array]:
            return apart(lax.all_to_all(x, PIPE, dim, 0, tiled=True))

        if dim is None:
            return apart(gradient)
        of_stages = self._of_stages(name, row.opt)
        return turns.on_each_device(exchange, of_stages, row.opt.spec, [gradient])

    def _by_stage(self, x: jax.Array) -> jax.Array:
        """[layers, ...] as [stages, chunks, layers, ...], with zeros for layers that are none."""
        missing = self.stages * self.chunks * self.rows - self.layers
        x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
        x = x.reshape(self.chunks, self.stages, self.rows, *x.shape[1:])
        return jnp.swapaxes(x, 0, 1)

    def _by_layer(self, x: jax.Array) -> jax.Array:
        """[stages, chunks, layers, ...] as [layers, ...]."""
        return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:])[: self.layers]

    def _exchanged(self, name: str, placement: Placement) -> int | None:
        """The dim of [stages, chunks, layers, ...] of which each stage stores a part."""
        entries = self._entries(name, placement)
        dim = sharded_dim(entries, PIPE)
        return None if dim is None else 3 + dim

    def _of_stages(self, name: str, placement: Placement) -> PartitionSpec:
        return PartitionSpec(PIPE, None, None, *self.spec(name, placement))

    # -- a layer's part of a parameter, [layers, ...] ---------------------------------------------

    @property
    def _lead(self) -> int:
        """How many dims of what is stored are of the stack."""
        return 1 if self.stack.stacked else 0

    def _entries(self, name: str, placement: Placement) -> list[Any]:
        """Over what one layer's part is stored cut, a dim each."""
        ndim = len(self.row(name).leaf.shape)
        return by_dim(placement.spec, ndim)[self._lead :]

    def spec(self, name: str, placement: Placement) -> PartitionSpec:
        """How one layer's part is cut on its stage."""
        return without_axes(self._entries(name, placement), (PIPE,))

    def source_shape(self, name: str) -> tuple[int, ...]:
        """One layer's part, padding of what is gathered included."""
        row = self.row(name)
        sizes = zip(
            row.leaf.shape[self._lead :],
            row.shape(row.source)[self._lead :],
            self.spec(name, row.read),
            self.spec(name, row.source),
            strict=True,
        )
        return tuple(size if r == s else padded for size, padded, r, s in sizes)

    def gradient_shape(self, name: str) -> tuple[int, ...]:
        row = self.row(name)
        assert row.grad is not None
        return row.shape(row.grad)[self._lead :]

    def stored(self, name: str, mesh: Any, wire: Any) -> ShardedParam:
        """How a chunk of a parameter is stored inside a stage."""
        row = self.row(name)
        shape = (self.rows, *row.leaf.shape[self._lead :])
        gathered = NamedSharding(mesh, PartitionSpec(None, *self.spec(name, row.read)))
        waits = HOST if row.source.memory_kind == HOST and self.stack.in_place else None
        spec = PartitionSpec(None, *self.spec(name, row.source))
        cut = NamedSharding(mesh, spec, memory_kind=waits)
        return ShardedParam(shape, row.read.dtype, gathered, cut, wire, row.leaf.trainable)


class Turns:
    """Exchanges one after the other.

    Simulated devices would run them in any order, each device in another (see
    `pipeline/cpu_ordering.py`): there each takes something of the last one's result, by a
    condition that never holds.
    """

    def __init__(self, mesh: Mesh, step: Any) -> None:
        self.mesh, self.never = mesh, jnp.asarray(step) < 0
        self.last: tuple[jax.Array, PartitionSpec] | None = None

    def on_each_device(
        self,
        exchange: Callable[..., list[jax.Array]],
        given: PartitionSpec,
        made: PartitionSpec,
        arrays: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """`exchange` on each device's parts: XLA gathers operands that other axes cut as well,
        where only `pipe` is manual (jax 0.10.2)."""

        def waiting(never: jax.Array, last: Sequence[jax.Array], arrays: Any) -> list[jax.Array]:
            for x in last:
                arrays = [jnp.where(never, x.reshape(-1)[0].astype(a.dtype), a) for a in arrays]
            return exchange(*arrays)

        last = [self.last] if self.last and simulated(self.mesh) else []
        outs = jax.shard_map(
            waiting,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), [spec for _, spec in last], given),
            out_specs=made,
            check_vma=False,
        )(self.never, [x for x, _ in last], list(arrays))
        self.last = outs[0], made
        return outs
