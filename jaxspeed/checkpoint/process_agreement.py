"""Agreement of a run's processes on a save or restore, through JAX's coordination service.

A background thread must not start a collective: it would interleave with those of the training
step. So messages go through the key-value store of the coordination service.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax

# JAX has no public name for its coordination client (0.10.2 to 0.12).
from jax._src import distributed

from jaxspeed.errors import CheckpointError, PeerError

TIMEOUT_SECONDS = 1200
HOURS = 12  # of waiting for a compilation; the watchdog of a run ends earlier

# Channel numbers: all processes open the same channels in the same order.
_channels = itertools.count()


def is_first() -> bool:
    """Whether this is the process that acts for all."""
    return jax.process_index() == 0


class Processes:
    """The processes of this run; each call of `all` is a barrier."""

    def __init__(self) -> None:
        self._channel = f"jaxspeed/{next(_channels)}"
        self._round = itertools.count()

    def all(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Run `work()` on every process; the JSON results of all.

        Raises:
          PeerError: it failed on another process; on that one its own exception is raised.
        """
        if jax.process_count() == 1:
            return [work()]
        failure, result = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        message = {"result": result, "error": None if failure is None else str(failure)}
        received = [json.loads(text) for text in self._exchange(what, json.dumps(message))]
        if failure is not None:
            raise failure
        for process, other in enumerate(received):
            if other["error"] is not None:
                raise PeerError(f"process {process}, {what}: {other['error']}")
        return [other["result"] for other in received]

    def first(self, what: str, work: Callable[[], Any]) -> Any:
        """Run `work()` on the first process; its result, on all."""
        return self.all(what, lambda: work() if is_first() else None)[0]

    def wait(self, what: str) -> None:
        """Wait until all processes are here: unlike a collective, for hours if need be."""
        if jax.process_count() > 1:
            key = f"{self._channel}/{next(self._round)}"
            try:
                _client().wait_at_barrier(key, HOURS * 3_600_000)
            except jax.errors.JaxRuntimeError as error:
                raise CheckpointError(f"{what}: {str(error).splitlines()[0]}") from error

    def _exchange(self, what: str, text: str) -> list[str]:
        """The texts of all: process 0 collects them, and the others read them together.

        So a round has as many messages as processes, a few times, and not their square.
        """
        client, number = _client(), next(self._round)
        key, own = f"{self._channel}/{number}", jax.process_index()
        client.key_value_set(f"{key}/{own}", text)
        if own == 0:
            received: dict[str, Any] = {"texts": []}
            for process in range(jax.process_count()):
                try:
                    wait = TIMEOUT_SECONDS * 1000
                    found = client.blocking_key_value_get(f"{key}/{process}", wait)
                    received["texts"].append(found)
                except jax.errors.JaxRuntimeError:
                    received = {"silent": process}
                    break
            client.key_value_set(f"{key}/all", json.dumps(received))
        else:
            try:
                wait = (TIMEOUT_SECONDS + 60) * 1000
                received = json.loads(client.blocking_key_value_get(f"{key}/all", wait))
            except jax.errors.JaxRuntimeError:
                received = {"silent": 0}
        if "silent" in received:
            raise CheckpointError(
                f"{what}: no answer from process {received['silent']} for {TIMEOUT_SECONDS} seconds"
            )
        if number:  # all have sent in this round, so all have received the last round's messages
            client.key_value_delete(f"{self._channel}/{number - 1}/{own}")
            if own == 0:
                client.key_value_delete(f"{self._channel}/{number - 1}/all")
        texts: list[str] = received["texts"]
        return texts


def _client() -> Any:
    client = distributed.global_state.client
    assert client is not None
    return client
