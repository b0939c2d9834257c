"""A parameter server at work: the servers' state and version, and what workers get and give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.objective.accumulate import Sums
from jaxspeed.objective.train_state import Arrays, TrainState
from jaxspeed.optim.loss_scale import StaticRule
from jaxspeed.parameter_server.local_workers import Fleet
from jaxspeed.parameter_server.programs import ServedProgram
from jaxspeed.train.dispatch_limit import DispatchLimit
from jaxspeed.train.program import Metrics

# Updates that simulated servers may be behind: each is several programs.
UNDER_WAY = 1


class Service:
    """The state of the servers, and the fleet that works for them."""

    def __init__(self, program: ServedProgram, state: TrainState) -> None:
        self.program = program
        self.fleet = Fleet(program)
        self.pace = DispatchLimit(program.mesh.devices.flat[0], UNDER_WAY)
        self.state = state
        self.version = int(state.step)  # of the parameters; each update makes one
        self._published: Arrays | None = None
        self._pulled: dict[int, int] = {}  # the version that each worker has
        self._scales: dict[int, jax.Array] = {}  # ... and its loss scale, where that changes

    def begin_at(self, state: TrainState) -> None:
        """From another state; what workers have of the old one is forgotten."""
        self.fleet.forget()
        self._pulled.clear()
        self.state, self.version, self._published = state, int(state.step), None

    def pull(self, worker: int) -> None:
        """A worker gets the parameters of now, unless it has them."""
        if self._pulled.get(worker) == self.version:
            return
        if self._published is None:
            self._published = self.program.publish(self.state)
        self.fleet.pull(worker, self._published, self.state)
        self._pulled[worker] = self.version
        if self.program.optimizer.rule != StaticRule():
            self._scales[worker] = jnp.copy(self.state.loss_scale.scale)

    def scale_since(self, worker: int) -> jax.Array | float:
        """By how much the loss scale has grown since a worker pulled."""
        pulled = self._scales.get(worker)
        return 1.0 if pulled is None else self.state.loss_scale.scale / pulled

    def compute(self, worker: int, part: Any) -> None:
        """A worker begins the gradients of a part, of the version that it has."""
        self.fleet.compute(worker, part, self._pulled[worker])

    def apply(self, sums: Sums, factor: jax.Array | float = 1.0) -> Metrics:
        """One update, by what was pushed; gradients count times `factor`."""
        given = np.float32(factor) if isinstance(factor, float) else factor
        state, metrics = self.program.apply(self.state, sums, given)
        self.advance(state)
        self.pace.sent(metrics["loss"])
        return metrics

    def advance(self, state: TrainState) -> None:
        """The state after an update: the next version."""
        self._published = None
        self.state = state
        self.version += 1

    def has_pulled(self, worker: int) -> None:
        """A worker got the version of now piece by piece."""
        self.fleet.pull_scale(worker, self.state)
        self._pulled[worker] = self.version

    def evaluated(self, parts: list[Any]) -> Metrics:
        """The loss of the parts in evaluation mode, by the parameters of now."""
        sums: Sums | None = None
        for worker, part in enumerate(parts):
            self.pull(worker)
            own = self.fleet.loss(worker, part, self.version)
            sums = own if sums is None else self.program.fold(sums, own)
        assert sums is not None
        return self.program.mean_loss(sums)

    def number(self, value: float) -> jax.Array:
        """A metric that the controller knows, as an array like the others."""
        return jax.device_put(np.float32(value), self.program.mesh.devices.flat[0])
