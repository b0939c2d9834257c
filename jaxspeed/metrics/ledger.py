"""Where the wall time of a run went."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.table import Table
from rich.text import Text

from jaxspeed.metrics.format import duration_text

PHASES = ("compile", "data", "compute", "checkpoint", "evaluate", "restart", "other")
_BAR = 24  # columns of the longest bar


class Ledger:
    """Books every second to one phase; what is in none is `other`, so that they sum to wall time.

        with ledger.phase("data"):
            batch = next(feeder)

    A phase inside another stops the outer one's clock. It is the thread of the run loop that is
    booked: what others do meanwhile, reading ahead or writing a checkpoint, costs the run nothing.

    Args:
      carried: what `as_record` said when the run was stopped before; its seconds go on.
      clock: seconds, for tests.
    """

    def __init__(
        self,
        carried: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        carried = carried or {}
        self._clock = clock
        self._seconds = {name: float(carried.get(f"wall/{name}", 0.0)) for name in PHASES}
        self._open = ["other"]
        self._settled = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is booked to this phase, until it returns or raises."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}: known are {', '.join(PHASES)}")
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def seconds(self) -> dict[str, float]:
        """By phase, up to now."""
        self._settle()
        return dict(self._seconds)

    def as_record(self) -> dict[str, float]:
        """`wall/total` and each phase as `wall/...`, in seconds."""
        seconds = self.seconds()
        return {
            "wall/total": sum(seconds.values()),
            **{f"wall/{name}": value for name, value in seconds.items()},
        }

    def table(self) -> Table:
        """For people: the phases that took any time, the longest first."""
        seconds = self.seconds()
        total = sum(seconds.values()) or 1.0
        shown = Table(title="where the time went", title_justify="left", box=None)
        for name, justify in (("phase", "left"), ("time", "right"), ("share", "right")):
            shown.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        shown.add_column("", no_wrap=True)
        longest = max(seconds.values()) or 1.0
        for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
            if value / total >= 0.0005:
                bar = Text("━" * round(_BAR * value / longest) or "╸", style="cyan")
                shown.add_row(name, duration_text(value), f"{100 * value / total:.1f} %", bar)
        shown.add_row("wall time", duration_text(sum(seconds.values())), "", "", style="bold")
        return shown

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self._open[-1]] += now - self._settled
        self._settled = now
