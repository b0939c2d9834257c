"""Workers and servers on the devices of this process.

Nothing blocks on a device: a worker's program depends on the arrays that it pulls, a server's on
the arrays that are pushed. The order of arrival is that of the seeded virtual clock.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.axes import TENSOR
from jaxspeed.communication import PULL, PUSH, Communication
from jaxspeed.optim.loss_scale import StaticRule
from jaxspeed.parameter_server.programs import LocalProgram
from jaxspeed.parameter_server.schedules import Finished, Task
from jaxspeed.parameter_server.virtual_clock import VirtualClock
from jaxspeed.parameter_server.worker import one_copy, place
from jaxspeed.placement.batch_dims import sample_specs
from jaxspeed.placement.specs import sharded_dim
from jaxspeed.traced_loss.accumulate import Sums
from jaxspeed.train.bucketed_update import BucketedUpdate
from jaxspeed.train.dispatch_limit import DispatchLimit
from jaxspeed.train.program import Metrics
from jaxspeed.train_state.state import Arrays, TrainState

# Updates in flight on simulated servers: each is several programs.
MAX_PENDING_UPDATES = 1


@dataclass
class Traffic:
    """Bytes sent, by worker; `order` has the transfers of the current step in order of dispatch."""

    up: Counter[int] = field(default_factory=Counter)
    down: Counter[int] = field(default_factory=Counter)
    order: list[Communication] = field(default_factory=list)  # of the current step

    def send(
        self,
        kind: str,
        worker: int,
        purpose: str,
        arrays: Sequence[jax.Array],
        to: Sequence[Any],
    ) -> Iterator[jax.Array]:
        """Send each array to its device or mesh, without blocking."""
        sizes = [(x.size, x.dtype) for x in arrays]
        message = Communication.of_arrays(
            kind, (), sizes, 1, source="run", purpose=purpose, site=f"worker {worker}"
        )
        (self.up if kind == PUSH else self.down)[worker] += message.bytes
        self.order.append(message)
        return iter(jax.device_put(list(arrays), list(to)))


Pieces = dict[str, list[jax.Array]]  # of each parameter, on the servers that own them


class PulledVersion(NamedTuple):
    """What workers pull of a version."""

    version: int | None  # None: a bucket, of a version that is not complete
    params: Callable[[], Pieces]
    state: TrainState  # its loss scale and variables
    scale: Any  # a copy of the loss scale on the servers, if it is dynamic


class LocalWorkers:
    """Pulled parameters on each worker's devices, and the programs that run on them."""

    def __init__(self, program: LocalProgram, traffic: Traffic) -> None:
        self.program, self.traffic = program, traffic
        self._frozen = {row.path for row in program.table if not row.leaf.trainable}
        self.begin()

    def begin(self) -> None:
        """Discard pulled parameters, after the state was replaced."""
        self.clock = VirtualClock(self.program.paces, self.program.config.run.seed)
        self._pulled: list[Pieces] = [{} for _ in self.program.paces]
        self._scale: list[Any] = [None for _ in self.program.paces]
        self._variables: list[Any] = [None for _ in self.program.paces]
        self._versions: list[int | None] = [None for _ in self.program.paces]
        self._computed: dict[int, Finished] = {}

    @property
    def size(self) -> int:
        return self.clock.size

    @property
    def in_flight(self) -> int:
        return self.clock.in_flight

    def start(self, worker: int, task: Task) -> None:
        """Dispatch the gradients, or the loss, of a part."""
        self._pull(worker, task.published)
        step = self.program.worker(worker)
        mesh, at = self.program.worker_meshes[worker], place(self.program.worker_meshes[worker])
        if mesh.size > 1:
            at = jax.tree.map(lambda spec: place(mesh, spec), sample_specs(task.batch))
        part = jax.device_put(task.batch, at)  # it may have been placed for another worker
        args = (self._pulled[worker], self._variables[worker], part)
        version = np.int32(task.published.version)
        if task.train:
            first = np.int32(task.part * self.program.batch.accumulation)
            push = step.gradients(*args, version, self._scale[worker], first)
        else:
            push = step.loss(*args, version, np.int32(task.part))
        self._computed[worker] = Finished(worker, task, push)
        self.clock.start(worker)

    def next(self) -> Finished:
        return self._computed.pop(self.clock.next().worker)

    def pull(self, published: PulledVersion) -> None:
        for worker in range(self.size):
            self._pull(worker, published)

    def discard(self) -> None:
        self.clock.discard()
        self._computed.clear()

    def metrics(self) -> dict[str, float]:
        return {"virtual_seconds": self.clock.now}

    def state_of_first(self, published: PulledVersion) -> TrainState:
        """The state that the first worker's program reads."""
        self._pull(0, published)
        return self.program.worker(0).state(self._pulled[0], published.state)

    def _pull(self, worker: int, published: PulledVersion) -> None:
        """Send a worker what it lacks; frozen ones, variables and a static scale only once."""
        if published.version is not None and self._versions[worker] == published.version:
            return
        params = published.params()
        if published.version is None:
            self._send(worker, params)
            return
        if self._variables[worker] is None:
            here = place(self.program.worker_meshes[worker])
            self._variables[worker] = one_copy(published.state.variables, here)
            self._send(worker, {path: params[path] for path in self._frozen})
        self._send(worker, {p: x for p, x in params.items() if p not in self._frozen})
        if self._scale[worker] is None or published.scale is not None:
            scale = published.state.loss_scale.scale.addressable_shards[0].data
            here = place(self.program.worker_meshes[worker])
            (self._scale[worker],) = self.traffic.send(PULL, worker, "scale", [scale], [here])
        self._versions[worker] = published.version

    def _send(self, worker: int, params: Pieces) -> None:
        """Send some parameters, sharded over `tensor` where that divides their pieces."""
        specs, mesh = self.program.worker(worker).piece_specs, self.program.worker_meshes[worker]
        flat, to = [], []
        for path, pieces in params.items():
            flat += pieces
            to += [place(mesh, specs[path])] * len(pieces)
        sent = self.traffic.send(PULL, worker, "parameters", flat, to)
        self._pulled[worker] |= {path: [next(sent) for _ in x] for path, x in params.items()}


class ReducedSums(NamedTuple):
    """Reduced gradients on the servers, with loss and weight."""

    sums: Sums
    factor: Any
    bucket: int | None


class LocalServers:
    """The servers' state on their mesh."""

    def __init__(self, program: LocalProgram, state: TrainState, traffic: Traffic) -> None:
        self.program, self.traffic = program, traffic
        self.pace = DispatchLimit(program.mesh.devices.flat[0], MAX_PENDING_UPDATES)
        self._servers = list(program.mesh.devices.flat)
        self._at = {  # as pushes arrive: in device memory
            row.path: NamedSharding(program.mesh, PartitionSpec(*row.source.spec))
            for row in program.table
        }
        self._bucket: Arrays = {}  # the last that was updated, until it is published
        self.state = state

    @property
    def state(self) -> TrainState:
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self.version = int(state.step)  # each update makes one
        self._advance(state)

    def _advance(self, state: TrainState) -> None:
        self._state = state
        self._published: PulledVersion | None = None
        self._update: BucketedUpdate | None = None  # in progress

    @property
    def buckets(self) -> Sequence[int | None]:
        buckets = self.program.server.buckets
        return (None,) if buckets is None else range(len(buckets.paths))

    def publish(self, bucket: int | None = None) -> PulledVersion:
        """Parameters as layers read them; with the last bucket the version is complete."""
        if bucket is not None:
            params, self._bucket = self._pieces(self._bucket), {}
            version = self.version if self._update is None else None
            return PulledVersion(version, lambda: params, self._state, None)
        if self._published is None:
            state, dynamic = self._state, self.program.optimizer.rule != StaticRule()
            pieces = cache(lambda: self._pieces(self.program.server.publish(state)))
            scale = jnp.copy(state.loss_scale.scale) if dynamic else None
            self._published = PulledVersion(self.version, pieces, state, scale)
        return self._published

    def _pieces(self, params: Arrays) -> Pieces:
        splits, pieces = self.program.worker(0).splits, {}
        for path, x in params.items():
            by_device = {shard.device: shard.data for shard in x.addressable_shards}
            pieces[path] = [by_device[self._servers[p.server]] for p in splits[path].pieces]
        return pieces

    def losses(self, done: Finished) -> Sums:
        """Send loss, weight and metrics to every server."""
        leaves, tree = jax.tree.flatten(done.push._replace(grads={}))
        count = len(self._servers)
        copies = [_shards(x)[0] for x in leaves for _ in self._servers]
        to = self._servers * len(leaves)
        sent = self.traffic.send(PUSH, done.worker, "scalars", copies, to)
        at = self.program.shardings.step
        scalars = [
            jax.make_array_from_single_device_arrays((), at, [next(sent) for _ in range(count)])
            for _ in leaves
        ]
        moved: Sums = jax.tree.unflatten(tree, scalars)
        return moved

    def reduce(
        self,
        pushes: Sequence[tuple[Finished, Sums]],
        factor: float = 1.0,
        bucket: int | None = None,
    ) -> ReducedSums:
        server = self.program.server
        paths = None if bucket is None or not server.buckets else server.buckets.paths[bucket]
        sums = server.mean(
            losses._replace(grads=self._sent(done, paths)) for done, losses in pushes
        )
        pulled = pushes[0][0].task.published.scale
        if pulled is None:
            return ReducedSums(sums, np.float32(factor), bucket)
        # A push is in units of the loss scale of the version that was pulled.
        return ReducedSums(sums, factor * (self._state.loss_scale.scale / pulled), bucket)

    def _sent(self, done: Finished, paths: Iterable[str] | None) -> Arrays:
        """Send gradients, each piece to the server that owns it."""
        step, servers = self.program.worker(done.worker), self._servers
        pushed = done.push.grads
        shards: dict[str, list[list[jax.Array]]] = {}  # by server
        flat, to = [], []
        for path in pushed if paths is None else paths:
            shards[path] = list(map(_shards, pushed[path]))
            if step.splits[path].dim is None:
                shards[path] *= len(servers)
            for of_server, server in zip(shards[path], servers, strict=True):
                flat += of_server
                to += [server] * len(of_server)
        sent = self.traffic.send(PUSH, done.worker, "gradients", flat, to)
        grads = {}
        for path, by_server in shards.items():
            arrived = [[next(sent) for _ in of_server] for of_server in by_server]
            dim = sharded_dim(step.piece_specs[path], TENSOR) or 0
            pieces = [x[0] if len(x) == 1 else jnp.concatenate(x, dim) for x in arrived]
            shape, at = step.splits[path].stored, self._at[path]
            grads[path] = jax.make_array_from_single_device_arrays(shape, at, pieces)
        return grads

    def apply(self, reduced: ReducedSums) -> Metrics:
        sums, factor, bucket = reduced
        server = self.program.server
        if bucket is None:
            state, metrics = server.apply(self._state, sums, factor, None)
        else:
            assert server.buckets is not None
            if self._update is None:
                self._update = BucketedUpdate(server.buckets, self._state)
            self._bucket = self._update.bucket(sums.grads)
            self.pace.sent(next(iter(self._bucket.values())))
            if bucket + 1 < len(server.buckets.paths):
                return {}
            state, metrics = self._update.finish(sums._replace(grads={}))
        self.version += 1
        self._advance(state)
        self.pace.sent(metrics["loss"])
        return metrics

    # -- for the engine ---------------------------------------------------------------------------

    def wait(self) -> None:
        jax.block_until_ready(self._state)

    held = state

    def reset(self, seed: int) -> None:
        self.state = self.program.init(seed)


def _shards(x: jax.Array) -> list[jax.Array]:
    """The shards of a worker's array over `tensor`, in order, without their replicas."""
    if x.sharding.num_devices == 1:
        return [x]
    starts = {tuple(i.start or 0 for i in s.index): s.data for s in x.addressable_shards}
    return [starts[start] for start in sorted(starts)]
