"""The Ray actor of a worker, which stores no state: thin over `WorkerFunctions`."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.checkpoint.leaves import donatable_copy, saved_leaves
from jaxspeed.engine.jax_setup import start_devices
from jaxspeed.objective.train_state import Arrays
from jaxspeed.parameter_server.ray.build_worker_program import Build
from jaxspeed.parameter_server.ray.server_functions import LossScalars, Published
from jaxspeed.parameter_server.ray.worker_functions import WorkerFunctions


class WorkerActor:
    """Computes gradients and losses of the parameters that it is passed.

    Calls also take the result of `begin` (`ready`), so that an error there is raised by the call.
    """

    def __init__(self) -> None:
        self._functions: WorkerFunctions
        self._device: jax.Device
        self._frozen: Arrays = {}
        self._variables: Arrays = {}

    def build(self, build: Build) -> int:
        """Build a worker's programs; return the process id."""
        start_devices(build.platform)
        self._device = jax.local_devices()[0]
        program, shares = build.program(self._device)
        self._functions = WorkerFunctions(program, shares)
        return os.getpid()

    def begin(self, built: int, variables: Arrays, *frozen: Arrays) -> int:
        """Store what is the same in all steps: the model's variables and frozen parameters.

        `built` is the result of `build`.
        """
        self._frozen = self._functions.join_rows(frozen)
        leaves = saved_leaves(self._functions.program)
        self._variables = {
            path: donatable_copy(jnp.asarray(x), leaves[f"variables/{path}"])
            for path, x in variables.items()
        }
        return built

    def gradients(
        self, ready: int, part: int, batch: Any, *published: Published
    ) -> tuple[Any, ...]:
        """(the push for each server, ..., the scalars)."""
        step, scale = published[0].step, published[0].scale
        given = (self._sources(published), self._variables, batch, step, part, scale)
        pushes, scalars = jax.device_get(self._functions.gradients(*given))
        return *pushes, scalars

    def evaluate(self, ready: int, part: int, batch: Any, *published: Published) -> LossScalars:
        """The loss of a part of a batch, in evaluation mode."""
        given = (self._sources(published), self._variables, batch, published[0].step)
        scalars: LossScalars = jax.device_get(self._functions.evaluate(*given))
        return scalars

    def _sources(self, published: Sequence[Published]) -> Arrays:
        return self._functions.sources(published, self._frozen)
