"""Parameters that are gathered once for several evaluations, or for all tokens of a request."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxspeed.checkpoint.process_agreement import Processes
from jaxspeed.engine.oom_help import device_limit
from jaxspeed.placement.mesh import simulated
from jaxspeed.train.gather_once import GatherOnce, ModelState, part_of_machine
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState


class Gathered:
    """The gathered parameters of an engine's current state, while it evaluates."""

    def __init__(self, program: Program, processes: Processes) -> None:
        self._program, self._processes = program, processes
        self._once: GatherOnce | None = None
        self._evaluating = False
        self._state: ModelState | None = None

    def once(self, program: Program) -> GatherOnce:
        """How parameters of a program are gathered. All processes call it, and decide alike."""
        if self._once is None or self._once.program is not program:
            # A device that reports no memory gets nothing gathered, unless it is simulated.
            memory = part_of_machine(program) if simulated(program.mesh) else 0
            memory = device_limit(program) or memory
            least = self._processes.all("a device's memory", lambda: memory, min)
            self._once = GatherOnce(program, least)
        return self._once

    def for_evaluation(self) -> GatherOnce | None:
        """How an evaluation gathers parameters once; None where there is nothing to gather."""
        if not self._program.on_one_mesh or self._program.pipeline:
            return None
        once = self.once(self._program)
        return once if once.gathers else None

    def now(self) -> GatherOnce | None:
        """The same, within `evaluating`; None outside."""
        return self.for_evaluation() if self._evaluating else None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which `of` keeps what it gathered."""
        before, self._evaluating = self._evaluating, True
        try:
            yield
        finally:
            self._evaluating = before
            if not before:
                self.drop()

    def of(self, state: TrainState) -> ModelState:
        """The current state with its parameters gathered."""
        if self._state is None:
            self._state = self.once(self._program)(ModelState.of(self._program, state))
        return self._state

    def drop(self) -> None:
        """Free what is gathered, before the state changes."""
        self._state = None
