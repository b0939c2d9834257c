"""The bytes that a step needs of a device, by what they are for."""

from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.placement.show import as_text, bytes_text

# How far below a compiler's figure the estimate may be: tests/plan holds it within a fifth of the
# compiler's, over a grid of compiled steps.
MAY_BE_BELOW = 0.2
# Where layers' parameters come from host memory, XLA:TPU opens loops to bring them ahead, and what
# it then holds hangs on their length (a fifth above the estimate in the worst that was compiled).
MAY_BE_BELOW_WITH_TRANSFERS = 0.5
Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Component:
    """One use of memory, on each device.

    Attributes:
      formula: its numbers: shapes on a device.
      host: in host memory, not in the device's.
      lasting: state that stays from step to step; else there when most memory is in use.
    """

    name: str
    bytes: int
    formula: str
    host: bool = False
    lasting: bool = False


@dataclass(frozen=True)
class Memory:
    """M: an estimate of the bytes that each device needs. All stages of a pipeline run one program
    over arrays of one shape, so all need the same."""

    components: tuple[Component, ...]

    def _sum(self, host: bool, lasting: bool | None = None) -> int:
        return sum(
            c.bytes for c in self.components if c.host == host and lasting in (None, c.lasting)
        )

    @property
    def device(self) -> int:
        """State and what is alive beside it, at the most."""
        return self._sum(host=False)

    @property
    def state(self) -> int:
        """Of the device: what stays from step to step, and the batch."""
        return self._sum(host=False, lasting=True)

    @property
    def temporary(self) -> int:
        """Of the device: what is alive beside the state, at the most."""
        return self._sum(host=False, lasting=False)

    @property
    def host(self) -> int:
        """Of host memory, for each device."""
        return self._sum(host=True)

    def on(self, device_bytes: int) -> Verdict:
        """M against N. "fits" is said only where it holds although the estimate may be low."""
        streamed = any(c.host and c.lasting and c.name == "parameters" for c in self.components)
        below = MAY_BE_BELOW_WITH_TRANSFERS if streamed else MAY_BE_BELOW
        if self.device * (1 + below) <= device_bytes:
            return "fits"
        return "tight" if self.device <= device_bytes else "does not fit"

    def figures(self) -> dict[str, Any]:
        """All of it as plain numbers and words."""
        sums = {n: getattr(self, n) for n in ("device", "state", "temporary", "host")}
        return {**sums, "components": [vars(c) for c in self.components]}

    def __rich__(self) -> Group:
        table = Table(title="memory of a device (estimate)", title_justify="left", box=None)
        table.add_column("component")
        table.add_column("bytes", justify="right")
        table.add_column("of", overflow="fold")
        for c in sorted(self.components, key=lambda c: (c.host, not c.lasting, -c.bytes)):
            where = f"{c.name} (host memory)" if c.host else c.name
            table.add_row(where, bytes_text(c.bytes), c.formula)
        table.add_row("sum", bytes_text(self.device), "on the device", style="bold")
        if self.host:
            table.add_row("sum", bytes_text(self.host), "in host memory", style="bold")
        return Group(table, Text("estimated from the traced step; not compiled"))

    def __str__(self) -> str:
        return as_text(self, 120)
