"""The engine of a parameter server: the same face, on two meshes and many programs.

By rounds (in step, or `max_staleness: 0`) all workers compute on one version, and the servers make
the next of the mean of their pushes. Otherwise each worker goes at its own pace.

Nothing waits for a device: a worker computes once what it pulls is there, a server updates once
what is pushed is there. The time by which pushes arrive is the seeded clock's.
"""

import time
from collections import Counter
from typing import Any

import jax
import numpy as np

from jaxspeed.engine import check as checking
from jaxspeed.engine import diagnose as diagnosing
from jaxspeed.engine.engine import Batch, Engine
from jaxspeed.objective.accumulate import Sums
from jaxspeed.objective.train_state import TrainState
from jaxspeed.parameter_server.asynchronous import OwnPace
from jaxspeed.parameter_server.programs import ServedProgram
from jaxspeed.parameter_server.rounds import Rounds
from jaxspeed.parameter_server.service import Service
from jaxspeed.parameter_server.traffic import Traffic
from jaxspeed.parameter_server.worker_step import host_parts
from jaxspeed.train.program import Metrics, Program


class ServedEngine(Engine):
    """`train_batch` gives each worker its part of a global batch."""

    program: ServedProgram

    def __init__(self, program: ServedProgram, state: TrainState) -> None:
        self._service = Service(program, state)
        super().__init__(program, state)
        del self._state  # the service has it, and the next one
        self._way = self._way_of_now()

    def _way_of_now(self) -> Rounds | OwnPace:
        by_rounds = self.program.rule.by_rounds
        return Rounds(self._service) if by_rounds else OwnPace(self._service)

    # -- the state --------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """What the servers hold, once every push that is under way has arrived.

        Another state may be put here; its step counts on.
        """
        self._way.drain()
        return self._service.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._reporter.begin_at(int(state.step))
        self._service.begin_at(state)
        self._way = self._way_of_now()

    @property
    def traffic(self) -> Traffic:
        """Bytes between workers and servers so far."""
        return self._service.fleet.traffic

    @property
    def staleness(self) -> Counter[int]:
        """How many pushes had which staleness, the dropped ones included."""
        return Counter(self._way.staleness)

    # -- training ---------------------------------------------------------------------------------

    def train_batch(self, batch: Batch) -> Metrics:
        """A part of the batch for each worker.

        By rounds this is one step. Otherwise it returns once all parts are handed out and a push
        was accepted; others are still under way, and their losses are in a later call's metrics.
        """
        placed = self._place(batch, "train_batch", self.program.batch.train)
        start = time.perf_counter()
        self.traffic.begin_step()
        metrics: Metrics = self._explained(self._way.train, self.program.parts(placed))
        self._reporter.stepped(metrics, start)
        return metrics

    def eval_batch(self, batch: Batch) -> Metrics:
        """The loss of a batch in evaluation mode, once every push under way has arrived."""
        parts = self.program.parts(self._place(batch, "eval_batch", None))
        self._way.drain()
        metrics: Metrics = self._explained(self._service.evaluated, parts)
        self._service.pace.sent(metrics["loss"])
        return metrics

    # -- looking ----------------------------------------------------------------------------------

    @property
    def runnable(self) -> tuple[Program, TrainState]:
        """The first worker's program, and what it reads of the state."""
        state = self.state
        self._service.pull(0)
        return self.program.of_worker, self._service.fleet.state_of_first(state)

    @property
    def module(self) -> Any:
        """The live model on the first worker, with the parameters of now; valid for good."""
        own, state = self.runnable
        host = {path: np.asarray(x) for path, x in self.parameters.items()}
        here = jax.device_put(host, own.mesh.devices.flat[0])
        return own.model.bind(here, state.variables, train=False, step=0, micro=0)

    def reduced_by(self, program: Program) -> checking.Reduced:
        """By a round of all workers of such a program."""
        assert isinstance(program, ServedProgram)

        def reduced(state: TrainState, batch: Any) -> tuple[Sums, Any]:
            rounds = Rounds(Service(program, state))
            return rounds.summed(program.parts(batch)), state.variables

        return reduced

    def diagnose(self, batch: Batch) -> diagnosing.Diagnosis:
        """The first that is not finite, part by part, on the first worker."""
        self.program.check_batch(batch, self.program.batch.train)
        own, state = self.runnable
        found = None
        for part in host_parts(batch, self.program.ranks):
            found = diagnosing.diagnose(own, state, jax.device_put(part, own.batch_shardings(part)))
            if not found.finite:
                break
        assert found is not None
        return found


def open_engine(program: Program, state: TrainState) -> Engine:
    """The engine of any program."""
    if isinstance(program, ServedProgram):
        return ServedEngine(program, state)
    return Engine(program, state)
