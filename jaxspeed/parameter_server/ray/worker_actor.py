"""The process of a worker: it computes and keeps nothing. An actor, thin over `Working`."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.checkpoint.leaves import donatable_copy, saved_leaves
from jaxspeed.engine.jax_setup import start_devices
from jaxspeed.objective.train_state import Arrays
from jaxspeed.parameter_server.ray.build_worker_program import Build
from jaxspeed.parameter_server.ray.server_functions import Published, Told
from jaxspeed.parameter_server.ray.worker_functions import Working


class Worker:
    """Computes on what it is given.

    A call is given the result of `begin` as well (`ready`), so that what went wrong there is what
    the call raises.
    """

    def __init__(self) -> None:
        self._working: Working
        self._device: jax.Device
        self._frozen: Arrays = {}
        self._variables: Arrays = {}

    def build(self, build: Build) -> int:
        """The programs of a worker; the process's id."""
        start_devices(build.platform)
        self._device = jax.local_devices()[0]
        program, shares = build.program(self._device)
        self._working = Working(program, shares)
        return os.getpid()

    def begin(self, built: int, variables: Arrays, *frozen: Arrays) -> int:
        """What stays the same in all steps: the model's variables, and parameters that are frozen.

        `built` is what `build` gave.
        """
        self._frozen = self._working.joined(frozen)
        leaves = saved_leaves(self._working.program)
        self._variables = {
            path: donatable_copy(jnp.asarray(x), leaves[f"variables/{path}"])
            for path, x in variables.items()
        }
        return built

    def gradients(
        self, ready: int, part: int, batch: Any, *published: Published
    ) -> tuple[Any, ...]:
        """(the push for each server, ..., what is told)."""
        step, scale = published[0].step, published[0].scale
        given = (self._sources(published), self._variables, batch, step, part, scale)
        pushes, told = jax.device_get(self._working.gradients(*given))
        return *pushes, told

    def evaluate(self, ready: int, part: int, batch: Any, *published: Published) -> Told:
        """The loss of a part of a batch, in evaluation mode."""
        given = (self._sources(published), self._variables, batch, published[0].step)
        told: Told = jax.device_get(self._working.evaluate(*given))
        return told

    def _sources(self, published: Sequence[Published]) -> Arrays:
        return self._working.sources(published, self._frozen)
