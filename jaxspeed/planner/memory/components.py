"""Memory per component of a device (parameters, optimizer, saved activations, ...): a report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rich.console import Group
from rich.text import Text

from jaxspeed.placement.show import as_text, bytes_text, titled

# What the compiler may need beyond the estimate: tests/planner bounds the error by a fifth of its
# figure over a grid of compiled steps, which is a quarter of the estimate.
MAY_BE_BELOW = 0.25
# With parameters in host memory, XLA:TPU unrolls loops to prefetch them, and its memory depends on
# the loop's length (at worst a fifth above the estimate of what was compiled).
MAY_BE_BELOW_WITH_TRANSFERS = 0.5
ROLLOUT = "rollout"
Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Component:
    """One use of memory, per device.

    Attributes:
      formula: number and shapes of its arrays, per device.
      host: in host memory, not in the device's.
      lasting: state that persists between steps; otherwise alive at the peak.
    """

    name: str
    bytes: int
    formula: str
    host: bool = False
    lasting: bool = False


@dataclass(frozen=True)
class Memory:
    """M, the estimated bytes per device, by component.

    All stages of a pipeline run one program over arrays of the same shapes, so they need the same.

    Attributes:
      components: host memory last; state first, the largest first.
      recomputed: bytes that are recomputed in the computation that holds their forward pass: XLA
        may save them instead, or compute them earlier.
      early: bytes of a pipeline's last round that XLA may allocate when the step begins.
      on_chip: bytes that are assumed in on-chip memory, and are in the device's if XLA decides so.
      assumes: what it takes for granted of the run's data.
      phases: that of each program, of a step of several; this is then the largest. If a rollout
        comes before a step: that of the rollout and that of the step.
    """

    components: tuple[Component, ...]
    recomputed: int = 0
    early: int = 0
    on_chip: int = 0
    assumes: str = ""
    phases: Mapping[str, "Memory"] = field(default_factory=dict)

    def _sum(self, host: bool, lasting: bool | None = None) -> int:
        return sum(
            c.bytes for c in self.components if c.host == host and lasting in (None, c.lasting)
        )

    @property
    def device(self) -> int:
        """Peak device memory: state and temporaries."""
        return self._sum(host=False)

    @property
    def state(self) -> int:
        """Device memory of the state and the batch."""
        return self._sum(host=False, lasting=True)

    @property
    def temporary(self) -> int:
        """Device memory of temporaries at the peak."""
        return self._sum(host=False, lasting=False)

    @property
    def host(self) -> int:
        """Host memory per device."""
        return self._sum(host=True)

    def on(self, device_bytes: int) -> Verdict:
        """Compare with the device's memory; "fits" only with a margin for the estimate's error."""
        if self.phases:
            verdicts = {phase.on(device_bytes) for phase in self.phases.values()}
            return max(verdicts, key=get_args(Verdict).index)
        streamed = any(c.host and c.lasting and c.name == "parameters" for c in self.components)
        below = MAY_BE_BELOW_WITH_TRANSFERS if streamed else MAY_BE_BELOW
        most = self.device + self.recomputed + self.early + self.on_chip
        if most * (1 + below) <= device_bytes:
            return "fits"
        return "tight" if self.device <= device_bytes else "does not fit"

    def figures(self) -> dict[str, Any]:
        """JSON-serializable figures."""
        sums = {n: getattr(self, n) for n in ("device", "state", "temporary", "host")}
        components = [vars(c) for c in self.components]
        figures = {**sums, "components": components, "assumes": self.assumes}
        if self.phases:
            figures["phases"] = {name: phase.device for name, phase in self.phases.items()}
        if ROLLOUT in self.phases:
            figures["parts"] = {name: phase.figures() for name, phase in self.phases.items()}
        return figures

    def __rich__(self) -> Group:
        parts: list[Any] = []
        for name, part in self.phases.items() if ROLLOUT in self.phases else [("", self)]:
            table = titled(
                f"memory per device{name and f', {name}'} (estimate)",
                "component",
                ">bytes",
                "arrays",
            )
            for c in part.components:
                where = f"{c.name} (host memory)" if c.host else c.name
                table.add_row(where, bytes_text(c.bytes), c.formula)
            table.add_row("sum", bytes_text(part.device), "on the device", style="bold")
            if part.host:
                table.add_row("sum", bytes_text(part.host), "in host memory", style="bold")
            parts.append(table)
            if part.phases:
                sizes = (f"{n} {bytes_text(m.device)}" for n, m in part.phases.items())
                of = name or "step"
                parts.append(Text(f"the largest of the {of}'s phases: {', '.join(sizes)}"))
            parts.append(Text())
        lines = ["estimated from the traced step; not compiled", self.assumes]
        return Group(*parts[:-1], Text("\n".join(filter(None, lines))))

    def __str__(self) -> str:
        return as_text(self, 120)
