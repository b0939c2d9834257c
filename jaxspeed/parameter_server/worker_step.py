"""What one worker computes: gradients of a part of a batch, from parameters that it pulled."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxspeed.config import Config
from jaxspeed.errors import ModelError
from jaxspeed.objective.accumulate import Sums
from jaxspeed.objective.precision import DTYPES
from jaxspeed.objective.train_state import Arrays, TrainState
from jaxspeed.parameter_server.server_shards import ServerShard
from jaxspeed.parameter_server.traffic import one_copy
from jaxspeed.placement.rows import reduction_dtype
from jaxspeed.train.program import Program

Pieces = dict[str, list[jax.Array]]  # of each parameter, by path


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
