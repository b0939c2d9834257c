"""What one worker computes: gradients of a part of a batch, from parameters that it pulled."""

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

Pieces = dict[str, list[jax.Array]]  # of each parameter, by path


# -- what a worker sends each server, and gets from it --------------------------------------------

DATA = "data"  # the axis of the servers' mesh along which they lie


@dataclass(frozen=True)
class ServerShard:
    """How a parameter is shared among the servers: along one dim, padded so that it can be.

    The servers' table says where. A worker shards what it pushes and joins what it pulled in the
    same places, so that no server is ever sent what it does not own.
    """

    shape: tuple[int, ...]  # as layers read it
    stored: tuple[int, ...]  # padded
    dim: int | None  # along which it is cut; None: every server has all of it
    at: NamedSharding

    def pieces(self, x: jax.Array) -> list[jax.Array]:
        """What each server gets; of what is not cut there is one piece for all."""
        if self.dim is None:
            return [x]
        return jnp.split(pad(x, self.stored), self.at.mesh.size, self.dim)

    def joined(self, pieces: Sequence[jax.Array]) -> jax.Array:
        if self.dim is None:
            return pieces[0]
        return unpad(jnp.concatenate(pieces, self.dim), self.shape)


def cuts_of(table: PlacementTable) -> dict[str, ServerShard]:
    """By path, as a server stores what layers read from."""
    return {
        row.path: ServerShard(
            row.leaf.shape,
            row.shape(row.source),
            sharded_dim(row.source.spec, DATA),
            NamedSharding(table.mesh, PartitionSpec(*row.source.spec)),
        )
        for row in table
    }


def host_parts(batch: Any, ranks: int) -> list[Any]:
    """The workers' parts of a batch in host memory, in their order."""

    def parts(x: Any) -> list[np.ndarray]:
        x = np.asarray(x)
        return np.split(x, ranks) if x.shape else [x] * ranks

    leaves, tree = jax.tree.flatten(batch)
    return [jax.tree.unflatten(tree, part) for part in zip(*map(parts, leaves), strict=True)]


# -- the worker ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    """What every worker runs: one program, compiled for each worker's device. It holds no array."""

    program: Program  # of one device: the first worker's
    cuts: dict[str, ServerShard]  # of the servers

    @property
    def first(self) -> jax.Device:
        """The first worker."""
        device: jax.Device = self.program.mesh.devices.flat[0]
        return device

    @cached_property
    def gradients(self) -> Any:
        """`(pulled, variables, part, step, scale, first micro-batch) -> Sums`, in pieces."""
        wire = wire_of(self.program.config)

        def gradients(
            pulled: Pieces, variables: Arrays, part: Any, step: Any, scale: Any, first: Any
        ) -> Sums:
            refuse_statistics(self.program, variables, part)
            sources = self.joined(pulled)
            sums = self.program.gradients.of_part(sources, variables, part, step, scale, first)
            grads = {
                path: self.cuts[path].pieces(grad.astype(reduction_dtype(grad.dtype, wire)))
                for path, grad in sums.grads.items()
            }
            return sums._replace(grads=grads)

        return jax.jit(self.program.in_mesh(gradients))

    @cached_property
    def loss(self) -> Any:
        """`(pulled, variables, part, step) -> Sums` without gradients, in evaluation mode."""

        def loss(pulled: Pieces, variables: Arrays, part: Any, step: Any) -> Sums:
            sources = self.joined(pulled)
            loss, _ = self.program.objective(sources, variables, part, step, 0, False)
            return Sums({}, loss.total, loss.weight, loss.metrics)

        return jax.jit(self.program.in_mesh(loss))

    def abstract(self, batch: Any, ranks: int) -> tuple[Any, ...]:
        """The shapes that `gradients` is given, of a global batch."""
        here = SingleDeviceSharding(self.first)

        def shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

        def part(x: Any) -> jax.ShapeDtypeStruct:
            return shape((x.shape[0] // ranks, *x.shape[1:]) if x.shape else (), x.dtype)

        pulled = {}
        for row in self.program.table:
            cut = self.cuts[row.path]
            count = 1 if cut.dim is None else cut.at.mesh.size
            piece = shape(cut.at.shard_shape(cut.stored), row.read.dtype)
            pulled[row.path] = [piece] * count
        variables = {
            path: shape(x.shape, x.dtype) for path, x in self.program.model.variables.items()
        }
        step, scale = shape((), jnp.int32), shape((), jnp.float32)
        return pulled, variables, jax.tree.map(part, batch), step, scale, step

    def joined(self, pulled: Pieces) -> Arrays:
        """What layers read."""
        return {path: self.cuts[path].joined(pieces) for path, pieces in pulled.items()}

    def state(self, pulled: Pieces, rest: TrainState) -> TrainState:
        """What the program reads of a state, on the first worker: no moments, no masters."""
        here = {
            name: one_copy(getattr(rest, name), self.first)
            for name in ("step", "skipped", "variables", "loss_scale")
        }
        params = jax.jit(self.joined)(pulled)
        return replace(rest, **here, params=params, master={}, opt=(), ema={})


def refuse_statistics(program: Program, variables: Arrays, part: Any) -> None:
    """ModelError where a training pass changes what would then stay on the worker."""
    count = program.batch.accumulation
    few = jax.tree.map(lambda x: x[: x.shape[0] // count] if x.shape else x, part)
    rest = (variables, few, jnp.asarray(0), jnp.asarray(0))
    if program.objective.trace(rest, train=True).written:
        raise ModelError(
            'parallel.data_reduction "parameter_server": the training pass changes statistics '
            "that the model keeps (of a batch norm, say), and workers push gradients alone. "
            'Write "xla", or a norm that keeps nothing'
        )


def wire_of(config: Config) -> Any:
    """The dtype in which gradients are pushed; None: as they are made."""
    wanted = config.communication_data_type
    return DTYPES[wanted] if wanted else None
