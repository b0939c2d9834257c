"""The Ray actor of a server, which holds the state of its shards: thin over `ServerFunctions`."""

import os

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.engine.jax_setup import start_devices
from jaxspeed.objective.train_state import Arrays, TrainState
from jaxspeed.parameter_server.ray.build_worker_program import Build
from jaxspeed.parameter_server.ray.server_functions import Published, ServerFunctions, Told
from jaxspeed.parameter_server.ray.server_program import program_of_share


class Server:
    """Owns one share. Its calls run one after the other, in the order in which they were made."""

    def __init__(self) -> None:
        self._serving: ServerFunctions
        self._state: TrainState
        self._grads: Arrays | None = None  # of the update that is under way

    def build(self, build: Build, number: int) -> int:
        """The program of this server's share; the process's id."""
        start_devices("cpu")  # the optimizer's state lives in host memory
        program, shares = build.program(jax.local_devices()[0])
        self._serving = ServerFunctions(program_of_share(program, shares[number], build.factor))
        return os.getpid()

    def alive(self) -> bool:
        return True

    def fresh(self, seed: int) -> tuple[Published, Arrays]:
        """A fresh state; what is published of it, and what is frozen."""
        return self._begin(self._serving.program.init(seed))

    def take(self, kept: Arrays) -> tuple[Published, Arrays]:
        """This state; what is published of it, and what is frozen."""
        return self._begin(self._serving.taken(kept))

    def give(self) -> Arrays:
        """The state, by the names of a checkpoint."""
        return self._serving.given(self._state)

    def reduce(self, shares: np.ndarray, *pushes: Arrays) -> np.ndarray:
        """Adds up the pushes of one update; the sum of squares of the gradients."""
        self._grads, squares = self._serving.reduce(
            pushes, jnp.asarray(shares), self._state.loss_scale.scale
        )
        return np.asarray(squares)

    def apply(self, told: Told, *squares: np.ndarray) -> tuple[Published, dict[str, np.ndarray]]:
        """The update of what was reduced last; what is published, and metrics."""
        grads, self._grads = self._grads, None
        given = (grads, jnp.asarray(squares), told)
        self._state, metrics = self._serving.apply(self._state, *given)
        found = {name: np.asarray(x) for name, x in metrics.items()}
        return self._serving.published(self._state), found

    def _begin(self, state: TrainState) -> tuple[Published, Arrays]:
        self._state = jax.block_until_ready(state)
        self._grads = None
        return self._serving.published(state), self._serving.frozen(state)
