"""A worker's programs: gradients or loss of a part of a batch, from pulled parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxspeed.config import Config
from jaxspeed.errors import ModelError
from jaxspeed.objective.accumulate import Sums
from jaxspeed.objective.precision import DTYPES
from jaxspeed.objective.train_state import Arrays, TrainState, pad, unpad
from jaxspeed.parameter_server.traffic import one_copy
from jaxspeed.placement.rows import reduction_dtype
from jaxspeed.placement.specs import sharded_dim
from jaxspeed.placement.table import PlacementTable
from jaxspeed.train.program import Program

PulledShards = dict[str, list[jax.Array]]  # of each parameter, by path


# -- sharding over the servers --------------------------------------------------------------------

DATA = "data"  # the axis of the servers' mesh


@dataclass(frozen=True)
class ServerSharding:
    """The sharding of a parameter over the servers: along one dim, padded to divide.

    It comes from the servers' table. A worker splits its gradients and concatenates pulled
    parameters by it, so that a server only receives what it owns.
    """

    shape: tuple[int, ...]  # as layers read it
    stored: tuple[int, ...]  # padded
    dim: int | None  # the sharded dim; None: replicated on every server
    at: NamedSharding

    def split(self, x: jax.Array) -> list[jax.Array]:
        """Split into one shard per server; a replicated array is one shard for all."""
        if self.dim is None:
            return [x]
        return jnp.split(pad(x, self.stored), self.at.mesh.size, self.dim)

    def join(self, shards: Sequence[jax.Array]) -> jax.Array:
        if self.dim is None:
            return shards[0]
        return unpad(jnp.concatenate(shards, self.dim), self.shape)


def server_shards(table: PlacementTable) -> dict[str, ServerSharding]:
    """The shardings of what layers read from, by path."""
    return {
        row.path: ServerSharding(
            row.leaf.shape,
            row.shape(row.source),
            sharded_dim(row.source.spec, DATA),
            NamedSharding(table.mesh, PartitionSpec(*row.source.spec)),
        )
        for row in table
    }


def host_parts(batch: Any, ranks: int) -> list[Any]:
    """The workers' parts of a batch in host memory, by worker."""

    def parts(x: Any) -> list[np.ndarray]:
        if not x.shape:  # a random key, perhaps
            return [x] * ranks
        return np.split(np.asarray(x), ranks)

    leaves, tree = jax.tree.flatten(batch)
    return [jax.tree.unflatten(tree, part) for part in zip(*map(parts, leaves), strict=True)]


# -- the worker ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerStep:
    """The programs of every worker, compiled for each worker's device. Holds no array."""

    program: Program  # of one device: the first worker's
    shards: dict[str, ServerSharding]  # of the servers

    @property
    def first(self) -> jax.Device:
        """The first worker's device."""
        device: jax.Device = self.program.mesh.devices.flat[0]
        return device

    @cached_property
    def gradients(self) -> Any:
        """`(pulled, variables, part, step, scale, first micro-batch) -> Sums`, split by server."""
        wire = wire_of(self.program.config)

        def gradients(
            pulled: PulledShards, variables: Arrays, part: Any, step: Any, scale: Any, first: Any
        ) -> Sums:
            refuse_statistics(self.program, variables, part)
            sources = self.join(pulled)
            sums = self.program.gradients.of_part(sources, variables, part, step, scale, first)
            grads = {
                path: self.shards[path].split(grad.astype(reduction_dtype(grad.dtype, wire)))
                for path, grad in sums.grads.items()
            }
            return sums._replace(grads=grads)

        return jax.jit(self.program.in_mesh(gradients))

    @cached_property
    def loss(self) -> Any:
        """`(pulled, variables, part, step) -> Sums` without gradients, in evaluation mode."""

        def loss(pulled: PulledShards, variables: Arrays, part: Any, step: Any) -> Sums:
            sources = self.join(pulled)
            loss, _ = self.program.objective(sources, variables, part, step, 0, False)
            return Sums({}, loss.total, loss.weight, loss.metrics)

        return jax.jit(self.program.in_mesh(loss))

    def abstract(self, batch: Any, ranks: int) -> tuple[Any, ...]:
        """The argument shapes of `gradients` for a global batch."""
        here = SingleDeviceSharding(self.first)

        def shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

        def part(x: Any) -> jax.ShapeDtypeStruct:
            return shape((x.shape[0] // ranks, *x.shape[1:]) if x.shape else (), x.dtype)

        pulled = {}
        for row in self.program.table:
            layout = self.shards[row.path]
            count = 1 if layout.dim is None else layout.at.mesh.size
            shard = shape(layout.at.shard_shape(layout.stored), row.read.dtype)
            pulled[row.path] = [shard] * count
        variables = {
            path: shape(x.shape, x.dtype) for path, x in self.program.model.variables.items()
        }
        step, scale = shape((), jnp.int32), shape((), jnp.float32)
        return pulled, variables, jax.tree.map(part, batch), step, scale, step

    def join(self, pulled: PulledShards) -> Arrays:
        """Concatenate the shards of pulled parameters."""
        return {path: self.shards[path].join(shards) for path, shards in pulled.items()}

    def state(self, pulled: PulledShards, rest: TrainState) -> TrainState:
        """The state that the program reads, on the first worker: without moments and masters."""
        here = {
            name: one_copy(getattr(rest, name), self.first)
            for name in ("step", "skipped", "variables", "loss_scale")
        }
        params = jax.jit(self.join)(pulled)
        return replace(rest, **here, params=params, master={}, opt=(), ema={})


def refuse_statistics(program: Program, variables: Arrays, part: Any) -> None:
    """ModelError where the training pass changes statistics, which would stay on the worker."""
    count = program.batch.accumulation
    few = jax.tree.map(lambda x: x[: x.shape[0] // count] if x.shape else x, part)
    rest = (variables, few, jnp.asarray(0), jnp.asarray(0))
    if program.objective.trace(rest, train=True).written:
        raise ModelError(
            'parallel.data_reduction "parameter_server": the training pass changes statistics '
            "that the model keeps (of a batch norm, say), and workers push gradients alone. "
            'Write "xla", or use a norm without running statistics'
        )


def wire_of(config: Config) -> Any:
    """The dtype in which gradients are pushed; None: their own."""
    wanted = config.communication_data_type
    return DTYPES[wanted] if wanted else None
