"""The Ray actors: a server with the state of its pieces, and a worker, which stores no state."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxspeed.checkpoint.leaves import donatable_copy, saved_arrays, saved_leaves
from jaxspeed.engine.jax_setup import start_devices
from jaxspeed.errors import RunError
from jaxspeed.parameter_server.param_split import join_all
from jaxspeed.parameter_server.ray.build import BuildArguments, RayResources
from jaxspeed.parameter_server.ray.server_state import ServerLayout, program_of_server, restored
from jaxspeed.parameter_server.server import ServerStep
from jaxspeed.parameter_server.worker import WorkerStep
from jaxspeed.placement.rows import Row
from jaxspeed.traced_loss.accumulate import Sums
from jaxspeed.train.bucketed_update import BucketedUpdate
from jaxspeed.train_state.state import Arrays, TrainState


@dataclass(frozen=True)
class Build:
    """What every process is built from."""

    inputs: BuildArguments
    resources: RayResources
    layout: ServerLayout
    factor: float  # that multiplies gradients


class Published(NamedTuple):
    """What workers pull from one server: its trained pieces, as layers read them."""

    params: Arrays
    version: Any
    scale: Any  # the loss scale


class Reduced(NamedTuple):
    """What the other servers need of a server's reduced gradients."""

    squares: Any
    grads: Arrays  # for an update that mixes parameters


class ServerActor:
    """A server; Ray runs its calls one after the other, in order."""

    def __init__(self) -> None:
        self._layout: ServerLayout
        self._step: ServerStep
        self._number: int
        self._state: TrainState
        self._sums: Sums  # of the update in progress
        self._update: BucketedUpdate | None = None

    def build(self, build: Build, number: int) -> int:
        """Build the program of this server's parameters; return the process id."""
        start_devices("cpu")  # the optimizer's state is in host memory
        self._layout, self._number = build.layout, number
        device = jax.local_devices()[0]
        program = build.inputs.program(build.resources.state_config, [device])
        server_program = program_of_server(program, build.layout, number, build.factor)
        mine = build.layout.owned(number)
        buckets = [[path for path in paths if path in mine] for paths in build.layout.buckets]
        self._step = ServerStep(server_program, buckets)
        return os.getpid()

    def alive(self) -> bool:
        return True

    def fresh(self, seed: int) -> tuple[Published, Arrays]:
        """Create a fresh state; return what is published of it, and what is frozen."""
        return self._begin(self._step.program.init(seed))

    def set_state(self, saved: Arrays) -> tuple[Published, Arrays]:
        """Replace the state; return what is published of it, and what is frozen."""
        return self._begin(restored(self._step.program, saved))

    def get_state(self) -> Arrays:
        """The state, by the names of a checkpoint."""
        arrays = saved_arrays(self._step.program, self._state)
        return {name: np.asarray(x) for name, x in arrays.items()}

    def reduce(self, factor: float, scale: Any, losses: Sequence[Sums], *pushes: Arrays) -> Reduced:
        """Reduce the pushes of one update, or of a bucket, computed under this loss scale."""
        every = [sums._replace(grads=push) for sums, push in zip(losses, pushes, strict=True)]
        # Another version may have changed the loss scale since.
        factor = np.float32(factor) * np.asarray(self._state.loss_scale.scale) / scale
        self._sums, squares = self._step.reduce(every, factor)
        grads = jax.device_get(self._sums.grads) if self._layout.mixed else {}
        return Reduced(np.asarray(squares), grads)

    def apply(self, *reduced: Reduced) -> tuple[Published, Arrays]:
        """Update by what all servers reduced last; return what is published, and metrics."""
        sums, norm = self._sums, np.sqrt(sum(part.squares for part in reduced))
        if self._layout.mixed:  # the update computes the norm of all gradients
            grads = join_all(self._layout.splits, [part.grads for part in reduced])
            sums, norm = sums._replace(grads=grads), None
        self._state, metrics = self._step.apply(self._state, sums, np.float32(1), norm)
        return self._published(self._step.publish(self._state)), _on_host(metrics)

    def apply_bucket(self, last: bool, *reduced: Reduced) -> tuple[Published, Arrays]:
        """Update by the bucket that was reduced last; `reduced` are those of all servers so far."""
        assert self._step.buckets is not None
        if self._update is None:
            self._update = BucketedUpdate(self._step.buckets, self._state)
        published = self._update.bucket(self._sums.grads)
        metrics: Arrays = {}
        if last:
            factor = self._step.program.update.gradient_factor
            squares = [part.squares * factor**2 for part in reduced]
            rest = self._sums._replace(grads={})
            self._state, metrics = self._update.finish(rest, squares)
            self._update = None
        return self._published(published), _on_host(metrics)

    def _begin(self, state: TrainState) -> tuple[Published, Arrays]:
        self._state, self._update = jax.block_until_ready(state), None
        params = self._step.publish(state)
        frozen = {row.path for row in self._step.program.table if not row.leaf.trainable}
        return self._published(params), self._pieces({p: params[p] for p in params if p in frozen})

    def _published(self, params: Arrays) -> Published:
        table = self._step.program.table
        trained = {path: x for path, x in params.items() if table[path].leaf.trainable}
        step, scale = self._state.step, self._state.loss_scale.scale
        return Published(self._pieces(trained), np.asarray(step), np.asarray(scale))

    def _pieces(self, params: Arrays) -> Arrays:
        """This server's pieces, on the host."""
        owned, splits = self._layout.owned(self._number), self._layout.splits
        if self._layout.mixed:
            params = {p: splits[p].take(x, owned[p]) for p, x in params.items() if p in owned}
        return _on_host(params)


def _on_host(arrays: Arrays) -> Arrays:
    return {name: np.asarray(x) for name, x in arrays.items()}


class WorkerActor:
    """Computes gradients and losses of the parameters that it is passed.

    Calls also take the result of `begin` (`ready`), so that an error there is raised by the call.
    """

    def __init__(self) -> None:
        self._layout: ServerLayout
        self._step: WorkerStep
        self._frozen: Arrays = {}
        self._variables: Arrays = {}

    def build(self, build: Build) -> int:
        """Build a worker's programs; return the process id."""
        count, platform = build.resources.devices, build.resources.platform
        if platform in (None, "cpu"):
            with contextlib.suppress(RuntimeError):  # JAX has started: counted below
                jax.config.update("jax_num_cpu_devices", count)
        start_devices(platform)
        devices = jax.local_devices()[:count]
        if len(devices) < count:
            raise RunError(
                f"mesh.replica x mesh.tensor is {count}, the devices of each worker, and its "
                f"process has {len(devices)}"
            )
        program = build.inputs.program(build.resources.worker_config, devices)
        self._layout = build.layout
        self._step = WorkerStep(program, build.layout.splits, build.resources.workers)
        return os.getpid()

    def begin(self, built: int, variables: Arrays, *frozen: Arrays) -> int:
        """Store what is the same in all steps: the model's variables and frozen parameters.

        `built` is the result of `build`.
        """
        self._frozen = join_all(self._layout.splits, frozen)
        leaves = saved_leaves(self._step.program)
        copies = {
            path: donatable_copy(jnp.asarray(x), leaves[f"variables/{path}"])
            for path, x in variables.items()
        }
        self._variables = jax.device_put(copies, self._step.at())
        return built

    def pull(self, *published: Published) -> None:
        """Ray brings the arguments to this machine, ahead of the task that reads them."""

    def gradients(
        self, ready: int, part: int, batch: Any, *published: Published
    ) -> tuple[Any, ...]:
        """(pushes by bucket and server, ..., (loss and weight, the loss scale))."""
        version, scale = published[-1].version, published[-1].scale
        first = np.int32(part * self._step.program.batch.accumulation)
        args = (self._pulled(published), self._variables, self._part(batch), version, scale, first)
        sums = jax.device_get(self._step.gradients(*args))
        by_server: list[Arrays] = [{} for _ in range(self._layout.servers)]
        for path, pieces in sums.grads.items():
            for piece, x in zip(self._layout.splits[path].pieces, pieces, strict=True):
                by_server[piece.server][path] = x
        pushes = [
            {path: x for path, x in of_server.items() if path in paths}
            for paths in self._layout.buckets or [sums.grads]
            for of_server in by_server
        ]
        return *pushes, (sums._replace(grads={}), scale)

    def evaluate(self, ready: int, part: int, batch: Any, *published: Published) -> Any:
        """The loss of a part of a batch, in evaluation mode, and the loss scale."""
        version, number = published[-1].version, np.int32(part)
        args = (self._pulled(published), self._variables, self._part(batch), version, number)
        return jax.device_get(self._step.loss(*args)), published[-1].scale

    def _pulled(self, published: Sequence[Published]) -> dict[str, list[Any]]:
        """The parameters, joined on the host and placed on this worker's devices."""
        by_server: list[Arrays] = [{} for _ in range(self._layout.servers)]
        for number, message in enumerate(published):  # by bucket, then by server
            by_server[number % self._layout.servers] |= message.params
        joined = join_all(self._layout.splits, by_server) | self._frozen
        table = self._step.program.table
        return {row.path: [self._sharded(joined[row.path], row)] for row in table}

    def _sharded(self, x: Any, row: Row) -> Any:
        divides = row.shape(row.source) == row.leaf.shape
        return jax.device_put(x, self._step.at(row.source.spec if divides else PartitionSpec()))

    def _part(self, batch: Any) -> Any:
        specs = self._step.program.batch_shardings(batch)
        return jax.tree.map(lambda x, at: jax.device_put(x, self._step.at(at.spec)), batch, specs)
