"""Ahead-of-time compiled step: run it from a file if the file holds exactly this program."""

import logging
from pathlib import Path
from typing import Any

import jax

from jaxspeed.train.aot_step import identity_of, load, read_identity
from jaxspeed.train.program import Metrics, Program
from jaxspeed.train_state.state import TrainState

log = logging.getLogger("jaxspeed")
Shapes = tuple[Any, ...]


class StepFromFile:
    """`state, metrics = step(state, batch)`, as `program.step`.

    For batches of the shapes that the file was compiled for, the file's executable runs. The step
    is still traced and lowered, to verify that it is the same program; otherwise a warning lists
    the differences and the step is compiled as usual.
    """

    def __init__(self, program: Program, path: str | Path) -> None:
        """ConfigError if there is no such file, it holds no executable, or it is not trusted."""
        self.program, self.path = program, path
        self._trusted = program.config.run.trust_executable
        self._identity = read_identity(path, trusted=self._trusted)
        self._found: dict[Shapes, Any] = {}

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        shapes = _shapes(batch)
        if shapes not in self._found:
            self._found[shapes] = self._from_file(batch)
        step = self._found[shapes] or self.program.step
        after_step: tuple[TrainState, Metrics] = step(state, batch)
        return after_step

    def trace(self, *args: Any) -> Any:
        return self.program.step.trace(*args)

    def compiled(self, batch: Any) -> Any:
        """The file's executable for such a batch; None if it is of another program."""
        shapes = _shapes(batch)
        if shapes not in self._found:
            self._found[shapes] = self._from_file(batch)
        return self._found[shapes]

    def _from_file(self, batch: Any) -> Any:
        program = self.program
        lowered = program.step.trace(program.state, program.abstract_batch(batch)).lower()
        apart = self._identity.differences(identity_of(lowered, program.devices, program.mesh))
        if jax.process_count() > 1:
            apart = ["several processes, which is untested"]
        try:
            executable = (
                None if apart else load(self.path, lowered, program.devices, trusted=self._trusted)
            )
        except jax.errors.JaxRuntimeError as error:
            apart = [str(error).splitlines()[0]]
        if apart:
            log.warning(
                "run.executable: %s does not match this step, which is compiled now: %s",
                self.path,
                "; ".join(apart),
            )
            return None
        log.info("the step starts from %s, without compilation", self.path)
        return executable


def _shapes(batch: Any) -> Shapes:
    leaves, tree = jax.tree.flatten(batch)
    return tree, *((x.shape, x.dtype) for x in leaves)
