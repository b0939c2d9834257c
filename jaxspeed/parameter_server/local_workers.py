"""Workers of a parameter server on the devices of this controller: pull, compute, push.

Calls only dispatch: a worker's computation depends on the arrays that it pulls, a server's on the
arrays that are pushed, by data alone.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspeed.communication import PULL, PUSH
from jaxspeed.objective.accumulate import Sums
from jaxspeed.objective.train_state import Arrays, TrainState
from jaxspeed.parameter_server.programs import ServedProgram
from jaxspeed.parameter_server.traffic import Traffic, one_copy
from jaxspeed.parameter_server.worker_step import PulledShards


class LocalWorkers:
    """The parameters that each worker's device pulled, and the gradients that it computes."""

    def __init__(self, program: ServedProgram) -> None:
        self.program = program
        self.traffic = Traffic()
        self._frozen = {row.path for row in program.table if not row.leaf.trainable}
        self._pulled: list[PulledShards] = [{} for _ in program.worker_devices]
        self._scale: list[Any] = [None for _ in program.worker_devices]
        self._variables: list[Any] = [None for _ in program.worker_devices]
        self._computed: dict[int, Sums] = {}

    @property
    def _servers(self) -> list[jax.Device]:
        return list(self.program.mesh.devices.flat)

    # -- parameters, down -------------------------------------------------------------------------

    def pull(self, worker: int, published: Arrays, state: TrainState) -> None:
        """Send the published parameters to a worker; frozen parameters only once."""
        if self._variables[worker] is None:
            device = self.program.worker_devices[worker]
            self._variables[worker] = one_copy(state.variables, device)
            self.pull_some(worker, {path: published[path] for path in self._frozen})
        self.pull_some(worker, {p: x for p, x in published.items() if p not in self._frozen})
        self.pull_scale(worker, state)

    def pull_some(self, worker: int, published: Arrays) -> None:
        """Send some of the parameters."""
        device = self.program.worker_devices[worker]
        shards = {path: self._server_shards(x, path) for path, x in published.items()}
        flat = [shard for each in shards.values() for shard in each]
        sent = iter(self.traffic.send(PULL, worker, "parameters", flat, [device] * len(flat)))
        self._pulled[worker] |= {path: [next(sent) for _ in each] for path, each in shards.items()}

    def pull_scale(self, worker: int, state: TrainState) -> None:
        """Send the loss scale."""
        device = self.program.worker_devices[worker]
        scale = state.loss_scale.scale.addressable_shards[0].data
        self._scale[worker] = self.traffic.send(PULL, worker, "scale", [scale], [device])[0]

    def _server_shards(self, x: jax.Array, path: str) -> list[jax.Array]:
        """The shards of a published array, by server."""
        by_device = {shard.device: shard.data for shard in x.addressable_shards}
        owners = self._servers if self.program.worker.shards[path].dim is not None else [None]
        return [by_device[owner or self._servers[0]] for owner in owners]

    def discard(self) -> None:
        """Discard pulled parameters and gradients, after the state was replaced."""
        for worker in range(self.program.ranks):
            self._pulled[worker], self._variables[worker] = {}, None
        self._computed.clear()

    # -- computing --------------------------------------------------------------------------------

    def compute(self, worker: int, part: Any, step: int) -> None:
        """Dispatch the gradients of a part; `step` is the version that was pulled."""
        device = self.program.worker_devices[worker]
        self._computed[worker] = self.program.worker.gradients(
            self._pulled[worker],
            self._variables[worker],
            jax.device_put(part, device),
            np.int32(step),
            self._scale[worker],
            np.int32(worker * self.program.batch.accumulation),
        )

    def loss(self, worker: int, part: Any, step: int) -> Sums:
        """The loss of a part in evaluation mode, as sums on the servers."""
        part = jax.device_put(part, self.program.worker_devices[worker])
        args = (self._pulled[worker], self._variables[worker], part, np.int32(step))
        return self._scalars(worker, self.program.worker.loss(*args))

    def state_of_first(self, state: TrainState) -> TrainState:
        """The state that a worker's program reads, on the first worker."""
        return self.program.worker.state(self._pulled[0], state)

    # -- gradients, up ----------------------------------------------------------------------------

    def push(self, worker: int) -> Sums:
        """Send a worker's sums, each gradient shard to the server that owns it."""
        sums = self.push_scalars(worker)._replace(grads=self.push_gradients(worker))
        self.pushed(worker)
        return sums

    def push_scalars(self, worker: int) -> Sums:
        """Send loss, weight and metrics."""
        return self._scalars(worker, self._computed[worker])

    def pushed(self, worker: int) -> None:
        """Discard the gradients that a worker computed."""
        del self._computed[worker]

    def push_gradients(self, worker: int, paths: Sequence[str] | None = None) -> Arrays:
        """Send the gradients of these parameters, by default of all."""
        sums = self._computed[worker]
        chosen = list(sums.grads) if paths is None else list(paths)
        layouts = self.program.worker.shards
        flat, to = [], []
        for path in chosen:
            shards: Any = sums.grads[path]
            flat += shards if layouts[path].dim is not None else shards * len(self._servers)
            to += self._servers
        sent = iter(self.traffic.send(PUSH, worker, "gradients", flat, to))
        grads = {}
        for path in chosen:
            parts = [next(sent) for _ in self._servers]
            layout = layouts[path]
            grads[path] = jax.make_array_from_single_device_arrays(layout.stored, layout.at, parts)
        return grads

    def _scalars(self, worker: int, sums: Sums) -> Sums:
        leaves, tree = jax.tree.flatten(sums._replace(grads={}))
        count = len(self._servers)
        copies = [x for x in leaves for _ in self._servers]
        sent = self.traffic.send(PUSH, worker, "scalars", copies, self._servers * len(leaves))
        at = self.program.shardings.step
        made = [
            jax.make_array_from_single_device_arrays((), at, sent[i * count : (i + 1) * count])
            for i in range(len(leaves))
        ]
        moved: Sums = jax.tree.unflatten(tree, made)
        return moved
