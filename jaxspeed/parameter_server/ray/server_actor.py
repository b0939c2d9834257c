"""The Ray actor of a server, which holds the state of its shards: thin over `ServerFunctions`."""

import os

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.engine.jax_setup import start_devices
from jaxspeed.objective.train_state import Arrays, TrainState
from jaxspeed.parameter_server.ray.build_worker_program import Build
from jaxspeed.parameter_server.ray.server_functions import LossScalars, Published, ServerFunctions
from jaxspeed.parameter_server.ray.server_program import program_of_server


class ServerActor:
    """A server; Ray runs its calls one after the other, in order."""

    def __init__(self) -> None:
        self._functions: ServerFunctions
        self._state: TrainState
        self._grads: Arrays | None = None  # of the update in progress

    def build(self, build: Build, number: int) -> int:
        """Build the program of this server's parameters; return the process id."""
        start_devices("cpu")  # the optimizer's state is in host memory
        program, shares = build.program(jax.local_devices()[0])
        self._functions = ServerFunctions(program_of_server(program, shares[number], build.factor))
        return os.getpid()

    def alive(self) -> bool:
        return True

    def fresh(self, seed: int) -> tuple[Published, Arrays]:
        """Create a fresh state; return what is published of it, and what is frozen."""
        return self._begin(self._functions.program.init(seed))

    def set_state(self, saved: Arrays) -> tuple[Published, Arrays]:
        """Replace the state; return what is published of it, and what is frozen."""
        return self._begin(self._functions.restored(saved))

    def get_state(self) -> Arrays:
        """The state, by the names of a checkpoint."""
        return self._functions.saved(self._state)

    def reduce(self, shares: np.ndarray, *pushes: Arrays) -> np.ndarray:
        """Sum the pushes of one update; return the sum of squares of the gradients."""
        self._grads, squares = self._functions.reduce(
            pushes, jnp.asarray(shares), self._state.loss_scale.scale
        )
        return np.asarray(squares)

    def apply(
        self, scalars: LossScalars, *squares: np.ndarray
    ) -> tuple[Published, dict[str, np.ndarray]]:
        """Update with the gradients of the last `reduce`; return what is published, and metrics."""
        grads, self._grads = self._grads, None
        given = (grads, jnp.asarray(squares), scalars)
        self._state, metrics = self._functions.apply(self._state, *given)
        found = {name: np.asarray(x) for name, x in metrics.items()}
        return self._functions.published(self._state), found

    def _begin(self, state: TrainState) -> tuple[Published, Arrays]:
        self._state = jax.block_until_ready(state)
        self._grads = None
        return self._functions.published(state), self._functions.frozen(state)
