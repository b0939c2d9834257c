"""Stop requests: SIGTERM (from a scheduler) or SIGINT (Ctrl-C), agreed between processes."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

import jax
import numpy as np

AGREE_EVERY = 10  # steps between agreements of several processes


class StopRequest:
    """Inside of the `with` block the first signal is recorded, a second one ends the process."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:  # the second: the default action
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = signal.Signals(number)

    def agreed(self, step: int) -> bool:
        """Whether to stop now; all processes return the same at the same step."""
        if jax.process_count() == 1:
            return self.signal is not None
        if step % AGREE_EVERY:
            return False
        from jax.experimental import multihost_utils

        asked = multihost_utils.process_allgather(np.array(self.signal is not None))
        return bool(np.any(asked))
