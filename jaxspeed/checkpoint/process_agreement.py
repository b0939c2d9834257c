"""Agreement of a run's processes on a save or restore, through JAX's coordination service.

A background thread must not start a collective: it would interleave with those of the training
step. So messages go through the key-value store of the coordination service.
"""

import itertools
import json
import random
import time
from collections.abc import Callable, Collection
from typing import Any

import jax

# JAX has no public name for its coordination client (0.11.2 and 0.12.0.1).
from jax._src import distributed

from jaxspeed.errors import CheckpointError, PeerError

TIMEOUT_SECONDS = 1200
GROUP = 16  # processes whose shares are one message
HOURS = 12  # of waiting for a compilation; the watchdog of a run ends earlier

# Channel numbers: all processes open the same channels in the same order.
_channels = itertools.count()
_random = random.Random(0)  # a user's own stream is not disturbed


def is_first() -> bool:
    """Whether this is the process that acts for all."""
    return jax.process_index() == 0


class OnFirst:
    """Work of the first process between collectives of all, such as writing what they gather.

    An error there would leave the others waiting in the next collective. So it ends the work, but
    `agree` raises it, on all.
    """

    def __init__(self, what: str) -> None:
        self._what, self._processes = what, Processes()
        self._failure: Exception | None = None

    def __call__(self, work: Callable[[], Any]) -> None:
        """Run `work()` on the first process, unless its work failed before."""
        if not is_first() or self._failure is not None:
            return
        try:
            work()
        except Exception as error:
            if jax.process_count() == 1:
                raise
            self._failure = error

    def agree(self) -> None:
        """Wait for all processes.

        Raises:
          PeerError: the first one's work failed; there its own exception is raised.
        """

        def check() -> None:
            if self._failure is not None:
                raise self._failure

        self._processes.first(self._what, check)


class Processes:
    """The processes of this run; each call of `all` is a barrier."""

    def __init__(self) -> None:
        self._channel = f"jaxspeed/{next(_channels)}"
        self._round = 0

    def all(
        self,
        what: str,
        work: Callable[[], Any],
        combine: Callable[[list[Any]], Any] = lambda results: None,
    ) -> Any:
        """Run `work()` on every process; what `combine` makes of all results on the first one.

        All receive the combined value alone: all results sent to all would be bytes of the square
        of the processes. Results are JSON.

        Raises:
          PeerError: it failed on another process; on that one its own exception is raised.
        """
        if jax.process_count() == 1:
            return combine([work()])
        failure, outcome = None, {}
        try:
            outcome["result"] = work()
        except Exception as error:
            failure, outcome["error"] = error, str(error)

        def answer(received: list[Any]) -> dict[str, Any]:
            nonlocal failure
            for process, other in enumerate(received):
                if "error" in other:
                    return {"error": f"process {process}, {what}: {other['error']}"}
            try:
                return {"value": combine([other["result"] for other in received])}
            except Exception as error:
                failure = error
                return {"error": f"process 0, {what}: {error}"}

        received = self._exchange(what, outcome, answer)
        if failure is not None:
            raise failure
        if "error" in received:
            raise PeerError(received["error"])
        return received["value"]

    def first(self, what: str, work: Callable[[], Any]) -> Any:
        """Run `work()` on the first process; its result, on all."""
        return self.all(what, lambda: work() if is_first() else None, lambda results: results[0])

    def share(self, what: str, work: Callable[[], Any], divide: Callable[[], list[Any]]) -> Any:
        """Run `work()` on every process, then `divide()` on the first: each receives its own item.

        A message has the items of a few: one for each would take the first process long.
        """
        if jax.process_count() == 1:
            work()
            return divide()[0]
        key = f"{self._channel}/{self._round}/items"

        def publish(_: list[Any]) -> None:
            items = divide()
            for first in range(0, len(items), GROUP):
                text = json.dumps(items[first : first + GROUP])
                _client().key_value_set(f"{key}/{first // GROUP}", text)

        self.all(what, work, publish)
        group, number = divmod(jax.process_index(), GROUP)
        text = _client().blocking_key_value_get(f"{key}/{group}", TIMEOUT_SECONDS * 1000)
        return json.loads(text)[number]

    def wait(self, what: str) -> None:
        """Wait until all processes are here: unlike a collective, for hours if need be."""
        if jax.process_count() > 1:
            key, self._round = f"{self._channel}/{self._round}", self._round + 1
            try:
                _client().wait_at_barrier(key, HOURS * 3_600_000)
            except jax.errors.JaxRuntimeError as error:
                raise CheckpointError(f"{what}: {str(error).splitlines()[0]}") from error

    def _exchange(
        self, what: str, message: Any, answer: Callable[[list[Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Process 0's answer to what all have sent: two messages per process."""
        number, self._round = self._round, self._round + 1
        client, key = _client(), f"{self._channel}/{number}"
        rank, count = jax.process_index(), jax.process_count()
        client.key_value_set(f"{key}/of/{rank}", json.dumps(message))
        received: dict[str, Any]
        if rank == 0:
            texts = answers_of(client, f"{key}/of", count, TIMEOUT_SECONDS)
            if len(texts) < count:
                received = {"silent": min(set(range(count)) - set(texts))}
            else:
                received = answer([json.loads(texts[process]) for process in range(count)])
            client.key_value_set(f"{key}/answer", json.dumps(received))
            if number:  # all have sent in this round, so all have read what the last one left
                client.key_value_delete(f"{self._channel}/{number - 1}/")
        else:
            try:
                wait = 2 * TIMEOUT_SECONDS * 1000  # process 0 waits for all, and then works
                received = json.loads(client.blocking_key_value_get(f"{key}/answer", wait))
            except jax.errors.JaxRuntimeError:
                received = {"silent": 0}
        if "silent" in received:
            raise CheckpointError(
                f"{what}: no answer from process {received['silent']} for {TIMEOUT_SECONDS} seconds"
            )
        return received


def answers_of(
    client: Any, key: str, count: int, seconds: float, absent: Collection[int] = ()
) -> dict[int, str]:
    """The texts under `key/RANK`, once all have written, or those that have within this time.

    After waiting for a random one of the missing, half of those are likely to be there, in whatever
    order they come: about log2(count) rounds of two messages.
    """
    deadline = time.monotonic() + seconds
    while True:
        texts = client.key_value_dir_get(f"{key}/")
        answers = {int(name.rpartition("/")[2]): text for name, text in texts}
        missing = [rank for rank in range(count) if rank not in answers and rank not in absent]
        rest = deadline - time.monotonic()
        if not missing or rest <= 0:
            return answers
        try:
            awaited = f"{key}/{_random.choice(missing)}"
            client.blocking_key_value_get(awaited, max(int(rest * 1000), 1))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _client() -> Any:
    client = distributed.global_state.client
    assert client is not None
    return client
