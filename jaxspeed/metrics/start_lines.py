"""The phases of a start that last: a line with seconds in a terminal, lines of text elsewhere."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from rich.console import Console
from rich.text import Text

from jaxspeed.launch.variables import RANK
from jaxspeed.metrics.progress import LiveLine, is_watched

Showing = Callable[[str], AbstractContextManager[None]]
LATE = 0.5  # seconds after which a phase is named in a pipe
LASTS = 1.0  # seconds from which a phase has a line with its seconds
_RANKS = (RANK, "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")  # as far as is known before JAX


def not_shown(_: str) -> AbstractContextManager[None]:
    """A phase of a start that nobody watches."""
    return nullcontext()


def start_lines(console: Console | None, clock: Callable[[], float] = time.monotonic) -> Showing:
    """How the first process of a run shows its phases: `with showing("compiling"): ...`."""
    if console is None or console.quiet or any(os.environ.get(name, "0") != "0" for name in _RANKS):
        return not_shown

    @contextmanager
    def showing(what: str) -> Iterator[None]:
        begun = clock()

        def line() -> Text:
            return Text(f"{what}  {clock() - begun:.0f} s", "dim")

        with LiveLine(console, line) if is_watched(console) else _named_late(console, what):
            yield
        if (seconds := clock() - begun) >= LASTS:
            console.print(f"{what}: {seconds:.1f} s", style="dim", highlight=False, markup=False)

    return showing


@contextmanager
def _named_late(console: Console, what: str) -> Iterator[None]:
    """Name a phase that is not over soon."""

    def name() -> None:
        with suppress(OSError):  # of a pipe whose reader has ended: the main thread finds it
            console.print(f"{what} ...", highlight=False, markup=False)

    timer = threading.Timer(LATE, name)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
