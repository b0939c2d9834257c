"""Calls of a program's functions: batches placed, compiled by all processes together, explained."""

from contextlib import nullcontext
from typing import Any

import jax

from jaxspeed.checkpoint.process_agreement import Processes
from jaxspeed.engine.oom_help import explain_out_of_memory, is_out_of_memory
from jaxspeed.engine.reporter import ShapeLog
from jaxspeed.jaxpr.paused_collector import paused_collector
from jaxspeed.train.phases import PhasedStep
from jaxspeed.train.program import Program

# Of what compiles for a batch's shapes.
NAMES = "train_batch", "eval_batch", "evaluating", "logprobs"


class Calls:
    """The calls of one program, which know whether the last batch had new shapes."""

    def __init__(self, program: Program) -> None:
        self.program, self.processes = program, Processes()
        self.new_shapes = False
        self._shapes = {name: ShapeLog(name) for name in NAMES}
        self._log_of_name = self._shapes[NAMES[0]]

    def place(self, batch: Any, name: str, size: int | None, extra: Any = None) -> Any:
        """A user's batch, checked and on the devices, for the call of this name."""
        batch = self.program.read_batch(batch, size, extra)
        placed = jax.device_put(batch, self.program.batch_shardings(batch))
        self._log_of_name = self._shapes[name]
        self.new_shapes = self._log_of_name.is_new(placed)
        return placed

    def log_shapes(self, batch: Any) -> None:
        """Log the shapes of the last batch, if they are new."""
        if self.new_shapes:
            self._log_of_name.see(batch)

    def compile_together(self, function: Any, state: Any, batch: Any) -> None:
        """Log new shapes, compile for them, and wait until all processes have.

        Otherwise those that are ready early wait in a collective: Gloo gives up after 30 s. A batch
        that the loss refuses, as a trace shows, has no new shapes.
        """
        if self.new_shapes and hasattr(function, "trace"):
            self(function.trace, state, batch)
        self.log_shapes(batch)
        if self.new_shapes and jax.process_count() > 1:
            if isinstance(function, PhasedStep):
                self(function.compile, state, batch)
            elif hasattr(function, "lower"):  # a step from a file is compiled
                self(lambda: function.lower(state, batch).compile())
            self.processes.wait("compiling")

    def __call__(self, function: Any, *args: Any) -> Any:
        """Call the function; on OOM raise a report built from the placement table."""
        pause = paused_collector() if self.new_shapes else nullcontext()
        try:
            with self.program.set_mesh(), pause:
                return function(*args)
        except Exception as error:
            if is_out_of_memory(error):
                raise explain_out_of_memory(self.program, error) from error
            raise
