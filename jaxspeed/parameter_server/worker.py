"""A worker's programs: gradients or loss of a part of a batch, from pulled parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxspeed.axes import TENSOR
from jaxspeed.errors import ModelError
from jaxspeed.parameter_server.param_split import Splits
from jaxspeed.placement.codec import pad, unpad
from jaxspeed.placement.precision import dtype_named
from jaxspeed.placement.rows import reduction_dtype
from jaxspeed.placement.specs import sharded_dim
from jaxspeed.traced_loss.accumulate import Sums
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import Arrays, TrainState

REPLICATED = PartitionSpec()
# Pieces of each parameter, by path; one array where they are joined already.
Pulled = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class WorkerStep:
    """The compiled functions of a worker: one device, or a mesh of `replica` x `tensor`.

    Holds no array. Workers of one device share it; the programs run where their arguments are.
    """

    program: Program
    splits: Splits  # over the servers
    workers: int

    @cached_property
    def gradients(self) -> Any:
        """`(pulled, variables, part, step, scale, first micro-batch) -> Sums`, in pieces.

        Random numbers derive from the micro-batch's number, whichever worker computes it.
        """
        wire = dtype_named(self.program.config.communication_data_type)

        def gradients(
            pulled: Pulled, variables: Arrays, part: Any, step: Any, scale: Any, first: Any
        ) -> Sums:
            refuse_mixed_samples(self.program, self.workers, variables, part)
            sources = self.join(pulled)
            sums = self.program.gradients.of_part(sources, variables, part, step, scale, first)
            return sums._replace(grads={path: pieces(path, x) for path, x in sums.grads.items()})

        def pieces(path: str, grad: jax.Array) -> list[jax.Array]:
            split = self.splits[path]
            grad = unpad(grad, split.shape)
            parts: list[jax.Array] = split.split(grad.astype(reduction_dtype(grad.dtype, wire)))
            return [self._placed(x, path) for x in parts]

        return jax.jit(self.program.in_mesh(gradients))

    @cached_property
    def loss(self) -> Any:
        """`(pulled, variables, part, step, number) -> Sums` without gradients, in evaluation mode.

        Each part draws its own random numbers, by its number.
        """

        def loss(pulled: Pulled, variables: Arrays, part: Any, step: Any, number: Any) -> Sums:
            sources = self.join(pulled)
            loss, _ = self.program.traced_loss(sources, variables, part, step, number, False)
            return Sums({}, loss.total, loss.weight, loss.metrics)

        return jax.jit(self.program.in_mesh(loss))

    def join(self, pulled: Pulled) -> Arrays:
        """The parameters as the program stores them, from their pieces."""
        table = self.program.table
        joined = {path: self.splits[path].join(pieces) for path, pieces in pulled.items()}
        if table.mesh.size == 1:
            return joined
        return {
            path: jax.lax.with_sharding_constraint(
                pad(x, table[path].shape(table[path].source)), table.sharding(table[path].source)
            )
            for path, x in joined.items()
        }

    # -- placement on a worker's devices ----------------------------------------------------------

    def at(self, spec: PartitionSpec = REPLICATED) -> Any:
        """A device, or a sharding over the worker's mesh."""
        return place(self.program.mesh, spec)

    @cached_property
    def piece_specs(self) -> dict[str, PartitionSpec]:
        """Specs of parameters' pieces: over `tensor` as the parameter, if it divides them all."""
        tensor = self.program.mesh.shape[TENSOR]
        specs = {}
        if tensor == 1:
            return dict.fromkeys(self.splits, REPLICATED)
        for path, split in self.splits.items():
            dim = sharded_dim(self.program.table[path].read.spec, TENSOR)
            sizes = {1} if dim is None else {split.shape_of(piece)[dim] for piece in split.pieces}
            divides = all(size % tensor == 0 for size in sizes)
            specs[path] = PartitionSpec(*[None] * (dim or 0), TENSOR) if divides else REPLICATED
        return specs

    def _placed(self, piece: jax.Array, path: str) -> jax.Array:
        if self.program.mesh.size == 1:
            return piece
        return jax.lax.with_sharding_constraint(piece, self.at(self.piece_specs[path]))

    # -- inspection -------------------------------------------------------------------------------

    def abstract(self, batch: Any, workers: int) -> tuple[Any, ...]:
        """The argument shapes of `gradients` for a global batch."""
        mesh = self.program.mesh

        def shape(shape: Any, dtype: Any, spec: PartitionSpec = REPLICATED) -> Any:
            at = self.at(spec)
            at = SingleDeviceSharding(at) if mesh.size == 1 else at
            return jax.ShapeDtypeStruct(shape, dtype, sharding=at)

        def part(x: Any, at: NamedSharding) -> Any:
            return shape((x.shape[0] // workers, *x.shape[1:]) if x.shape else (), x.dtype, at.spec)

        pulled = {}
        for row in self.program.table:
            split, spec = self.splits[row.path], self.piece_specs[row.path]
            shapes = map(split.shape_of, split.pieces)
            pulled[row.path] = [shape(piece_shape, row.read.dtype, spec) for piece_shape in shapes]
        variables = {
            path: shape(x.shape, x.dtype) for path, x in self.program.model.variables.items()
        }
        step, scale = shape((), jnp.int32), shape((), jnp.float32)
        parts = jax.tree.map(part, batch, self.program.batch_shardings(batch))
        return pulled, variables, parts, step, scale, step

    def state(self, pulled: Pulled, rest: TrainState) -> TrainState:
        """The state that the program reads: without moments and masters."""
        names = ("step", "skipped", "variables", "loss_scale")
        here = {name: one_copy(getattr(rest, name), self.at()) for name in names}
        params = jax.jit(self.join)(pulled)
        return replace(rest, **here, params=params, master={}, opt=(), ema={})


def place(mesh: Mesh, spec: PartitionSpec = REPLICATED) -> Any:
    """A sharding over a worker's mesh; its device, where it has one: its programs have no mesh."""
    return mesh.devices.flat[0] if mesh.size == 1 else NamedSharding(mesh, spec)


def one_copy(tree: Any, at: Any) -> Any:
    """Copy replicated arrays to a worker's devices.

    From one shard: `device_put` of an array on a mesh leaves that mesh in its type (jax
    0.11.2 and 0.12.0.1).
    """
    return jax.tree.map(lambda x: jax.device_put(x.addressable_shards[0].data, at), tree)


def host_parts(batch: Any, workers: int) -> list[Any]:
    """The workers' parts of a batch in host memory, by worker."""

    def parts(x: Any) -> list[np.ndarray]:
        if not x.shape:  # a random key, perhaps
            return [x] * workers
        return np.split(np.asarray(x), workers)

    leaves, tree = jax.tree.flatten(batch)
    return [jax.tree.unflatten(tree, part) for part in zip(*map(parts, leaves), strict=True)]


def refuse_mixed_samples(program: Program, workers: int, variables: Arrays, part: Any) -> None:
    """ModelError where a worker's part of the batch is not enough for what the loss computes."""

    def of_all_workers(x: Any) -> Any:
        """The shape of a micro-batch."""
        samples = [x.shape[0] // program.batch.accumulation * workers] if x.shape else []
        return jax.ShapeDtypeStruct((*samples, *x.shape[1:]), x.dtype)

    rest = (variables, jax.tree.map(of_all_workers, part), jnp.asarray(0), jnp.asarray(0))
    model, where = program.model, 'parallel.data_reduction "parameter_server"'
    if jax.eval_shape(model.after_step, dict(model.variables), jnp.asarray(0)):
        raise ModelError(
            f"{where}: the model's after_step() changes variables, and workers have those of the "
            'first step; use "xla"'
        )
    if program.traced_loss.trace(rest, train=True).written:
        raise ModelError(
            f"{where}: the training pass changes statistics that the model keeps (of a batch "
            "norm, say), and workers push gradients alone. "
            'Write "xla", or use a norm without running statistics'
        )
    separable = program.traced_loss.by_parts(rest, train=True, parts=workers)
    separable.refuse_mixed(where, "each worker", 'use "xla"')
    if program.traced_loss.trace(rest, train=True).loss_outputs.terms:
        raise ModelError(
            f"{where}: the loss has several terms, which are averaged by their weights of the "
            'entire step, and a worker knows those of its own part; use "xla" or "ring"'
        )
