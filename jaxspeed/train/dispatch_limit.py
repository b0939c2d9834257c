"""A limit on how many dispatched calls may be in flight on simulated devices.

XLA's CPU client runs the executions of all devices, and their launches, on one pool of as many
threads as there are devices. A launch that finds 32 executions of its device in flight blocks its
thread, and a collective that already holds the other threads then deadlocks, as it needs the
blocked one (seen with jaxlib 0.11.2: seven threads in an all-gather, the eighth in the launch of a
later step). Real devices have a queue each.
"""

from collections import deque
from typing import Any

import jax

MOST_IN_FLIGHT = 8


class DispatchLimit:
    """Blocks on the oldest call when more than `most` are in flight on simulated devices."""

    def __init__(self, device: jax.Device, most: int | None = None) -> None:
        self._bounded = device.platform == "cpu"
        self._most = most
        self._in_flight: deque[Any] = deque()

    def sent(self, result: Any) -> None:
        """Count a dispatched call, of which `result` is one output."""
        if not self._bounded:
            return
        self._in_flight.append(result)
        if len(self._in_flight) > (self._most or MOST_IN_FLIGHT):
            jax.block_until_ready(self._in_flight.popleft())
