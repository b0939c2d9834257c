"""Breakdown of a run's wall time by phase: compile, data, compute, checkpoint, ..."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.table import Table
from rich.text import Text

from jaxspeed.metrics.format import duration_text

PHASES = (
    "compile",
    "data",
    "compute",
    "rollout",
    "rewards",
    "checkpoint",
    "evaluate",
    "restart",
    "other",
)
_BAR = 24  # columns of the longest bar


class TimeLedger:
    """Attributes every second to one phase; the rest is `other`, so the phases sum to wall time.

        with ledger.phase("data"):
            batch = next(feeder)

    A nested phase pauses the outer one. Only the thread of the run loop is measured: background
    threads that read ahead or write a checkpoint cost the run no time.

    Args:
      carried: the `as_record` of the run's earlier part, whose seconds are added.
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
        """Attribute the time of the `with` block to a phase."""
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
        """Seconds by phase so far."""
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
        """A table of the phases by share of the time, the longest first."""
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
