"""Engine of a parameter server: the Engine API on two meshes, with several programs per step.

With synchronous workers (or `max_staleness: 0`) all compute on one version, and the servers make
the next from the mean of their pushes. Otherwise workers run asynchronously with bounded staleness.

Nothing blocks on a device: a worker's program depends on the arrays that it pulls, a server's on
the arrays that are pushed. The order of arrival is that of the seeded virtual clock.
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
from jaxspeed.parameter_server.asynchronous import AsynchronousSchedule
from jaxspeed.parameter_server.programs import ServedProgram
from jaxspeed.parameter_server.server import ParameterServer
from jaxspeed.parameter_server.synchronous import SynchronousSchedule
from jaxspeed.parameter_server.traffic import Traffic
from jaxspeed.parameter_server.worker_step import host_parts
from jaxspeed.train.program import Metrics, Program


class ServedEngine(Engine):
    """`train_batch` assigns each worker a part of the global batch."""

    program: ServedProgram

    def __init__(self, program: ServedProgram, state: TrainState) -> None:
        self._server = ParameterServer(program, state)
        super().__init__(program, state)
        del self._state  # the server has it, and the next one
        self._schedule = self._new_schedule()

    def _new_schedule(self) -> SynchronousSchedule | AsynchronousSchedule:
        synchronous = self.program.rule.synchronous
        return (
            SynchronousSchedule(self._server) if synchronous else AsynchronousSchedule(self._server)
        )

    # -- the state --------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """The servers' state, after every push in flight has arrived.

        Assign to replace it; its step counts on.
        """
        self._schedule.drain()
        return self._server.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._reporter.begin_at(int(state.step))
        self._server.begin_at(state)
        self._schedule = self._new_schedule()

    @property
    def traffic(self) -> Traffic:
        """Bytes between workers and servers so far."""
        return self._server.workers.traffic

    @property
    def staleness(self) -> Counter[int]:
        """The number of pushes by staleness, including dropped ones."""
        return Counter(self._schedule.staleness)

    # -- training ---------------------------------------------------------------------------------

    def train_batch(self, batch: Batch, extra: Any = None) -> Metrics:
        """A part of the batch for each worker.

        Synchronous workers make one update. Otherwise the call returns once all parts are assigned
        and a push was accepted; others are still in flight, and their losses are in a later call's
        metrics.
        """
        placed = self._place(batch, "train_batch", self.program.batch.train, extra)
        start = time.perf_counter()
        self.traffic.begin_step()
        metrics: Metrics = self._explained(self._schedule.train, self.program.parts(placed))
        self._reporter.stepped(metrics, start)
        return metrics

    def eval_batch(self, batch: Batch, extra: Any = None) -> Metrics:
        """The loss of a batch in evaluation mode, once every push in flight has arrived."""
        parts = self.program.parts(self._place(batch, "eval_batch", None, extra))
        self._schedule.drain()
        metrics: Metrics = self._explained(self._server.evaluate, parts)
        self._server.pace.sent(metrics["loss"])
        return metrics

    # -- inspection -------------------------------------------------------------------------------

    @property
    def runnable(self) -> tuple[Program, TrainState]:
        """The first worker's program, and the state that it reads."""
        state = self.state
        self._server.pull(0)
        return self.program.worker_program, self._server.workers.state_of_first(state)

    @property
    def module(self) -> Any:
        """The live model on the first worker, with a copy of the current parameters."""
        own, state = self.runnable
        host = {path: np.asarray(x) for path, x in self.parameters.items()}
        here = jax.device_put(host, own.mesh.devices.flat[0])
        return self._bound(own, here, state.variables)

    def reduced_by(self, program: Program) -> checking.Reduced:
        """The gradients of one synchronous step of such a program."""
        assert isinstance(program, ServedProgram)

        def reduced(state: TrainState, batch: Any) -> tuple[Sums, Any]:
            rounds = SynchronousSchedule(ParameterServer(program, state))
            return rounds.summed(program.parts(batch)), state.variables

        return reduced

    def diagnose(self, batch: Batch, extra: Any = None) -> diagnosing.Diagnosis:
        """The first non-finite value, part by part, on the first worker."""
        batch = self.program.read_batch(batch, self.program.batch.train, extra)
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
