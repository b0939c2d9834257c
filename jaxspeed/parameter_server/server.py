"""A running parameter server: the servers' state and version, and the workers' pulls and pushes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.objective.accumulate import Sums
from jaxspeed.objective.train_state import Arrays, TrainState
from jaxspeed.optim.loss_scale import StaticRule
from jaxspeed.parameter_server.local_workers import LocalWorkers
from jaxspeed.parameter_server.programs import ServedProgram
from jaxspeed.train.dispatch_limit import DispatchLimit
from jaxspeed.train.program import Metrics

# Updates in flight on simulated servers: each is several programs.
MAX_PENDING_UPDATES = 1


class ParameterServer:
    """The state of the servers, with the workers that compute for them."""

    def __init__(self, program: ServedProgram, state: TrainState) -> None:
        self.program = program
        self.workers = LocalWorkers(program)
        self.pace = DispatchLimit(program.mesh.devices.flat[0], MAX_PENDING_UPDATES)
        self.state = state
        self.version = int(state.step)  # of the parameters; each update makes one
        self._published: Arrays | None = None
        self._pulled: dict[int, int] = {}  # the version that each worker has
        self._scales: dict[int, jax.Array] = {}  # ... and its loss scale, if dynamic

    def begin_at(self, state: TrainState) -> None:
        """Replace the state, and discard what workers pulled of the old one."""
        self.workers.discard()
        self._pulled.clear()
        self.state, self.version, self._published = state, int(state.step), None

    def pull(self, worker: int) -> None:
        """Send a worker the current parameters, unless it has them."""
        if self._pulled.get(worker) == self.version:
            return
        if self._published is None:
            self._published = self.program.publish(self.state)
        self.workers.pull(worker, self._published, self.state)
        self._pulled[worker] = self.version
        if self.program.optimizer.rule != StaticRule():
            self._scales[worker] = jnp.copy(self.state.loss_scale.scale)

    def scale_since(self, worker: int) -> jax.Array | float:
        """The factor by which the loss scale has grown since a worker pulled."""
        pulled = self._scales.get(worker)
        return 1.0 if pulled is None else self.state.loss_scale.scale / pulled

    def compute(self, worker: int, part: Any) -> None:
        """Dispatch the gradients of a part, of the version that the worker has."""
        self.workers.compute(worker, part, self._pulled[worker])

    def apply(self, sums: Sums, factor: jax.Array | float = 1.0) -> Metrics:
        """One update by what was pushed; gradients count times `factor`."""
        given = np.float32(factor) if isinstance(factor, float) else factor
        state, metrics = self.program.apply(self.state, sums, given)
        self.advance(state)
        self.pace.sent(metrics["loss"])
        return metrics

    def advance(self, state: TrainState) -> None:
        """Take the state after an update as the next version."""
        self._published = None
        self.state = state
        self.version += 1

    def mark_pulled(self, worker: int) -> None:
        """Record that a worker pulled the current version, bucket by bucket."""
        self.workers.pull_scale(worker, self.state)
        self._pulled[worker] = self.version

    def evaluate(self, parts: list[Any]) -> Metrics:
        """The loss of the parts in evaluation mode, with the current parameters."""
        sums: Sums | None = None
        for worker, part in enumerate(parts):
            self.pull(worker)
            own = self.workers.loss(worker, part, self.version)
            sums = own if sums is None else self.program.fold(sums, own)
        assert sums is not None
        return self.program.mean_loss(sums)

    def number(self, value: float) -> jax.Array:
        """A metric known to the controller, as an array like the others."""
        return jax.device_put(np.float32(value), self.program.mesh.devices.flat[0])
