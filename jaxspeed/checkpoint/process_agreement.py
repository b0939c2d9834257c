"""How the processes of a run agree on a save or a restore, without touching a device.

What runs in a background thread must not start a collective: it would cross with those of the
training step. So words go through the key-value store of JAX's own coordination service.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax

# JAX has no public name for its coordination client (0.10.2 to 0.12).
from jax._src import distributed

from jaxspeed.errors import CheckpointError

TIMEOUT_SECONDS = 1200

# Which conversation it is: all processes begin the same ones in the same order.
_conversations = itertools.count()


def is_first() -> bool:
    """Whether this process does what one process does for all."""
    return jax.process_index() == 0


class Processes:
    """The processes of this run; each `together` is a barrier for all of them."""

    def __init__(self) -> None:
        self._topic = f"jaxspeed/{next(_conversations)}"
        self._turn = itertools.count()

    def together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """`work()` on every process, and what it gave on each; JSON values.

        Raises:
          CheckpointError: on all processes, where it failed on one.
        """
        if jax.process_count() == 1:
            return [work()]
        failure, result = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        said = {"result": result, "error": None if failure is None else str(failure)}
        heard = [json.loads(text) for text in self._exchange(what, json.dumps(said))]
        if failure is not None:
            raise failure
        for process, other in enumerate(heard):
            if other["error"] is not None:
                raise CheckpointError(f"process {process}, {what}: {other['error']}")
        return [other["result"] for other in heard]

    def first(self, what: str, work: Callable[[], Any]) -> Any:
        """`work()` on the first process; what it gave, on all."""
        return self.together(what, lambda: work() if is_first() else None)[0]

    def _exchange(self, what: str, text: str) -> list[str]:
        client = distributed.global_state.client
        assert client is not None
        turn = next(self._turn)
        key = f"{self._topic}/{turn}"
        client.key_value_set(f"{key}/{jax.process_index()}", text)
        heard = []
        for process in range(jax.process_count()):
            try:
                wait = TIMEOUT_SECONDS * 1000
                heard.append(client.blocking_key_value_get(f"{key}/{process}", wait))
            except jax.errors.JaxRuntimeError as error:
                raise CheckpointError(
                    f"{what}: process {process} said nothing for {TIMEOUT_SECONDS} seconds"
                ) from error
        if turn:  # all have spoken in this turn, so all have heard the one before
            client.key_value_delete(f"{self._topic}/{turn - 1}/{jax.process_index()}")
        return heard
