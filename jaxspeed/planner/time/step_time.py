"""The time of a step, as it is told."""

from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.communication import FROM_HOST, TO_HOST, Communication, ring_bytes
from jaxspeed.placement.show import as_text, bytes_text

WIDTH = 80
HOUR = 3600
SHOWN = {"collective-permute": "permute", TO_HOST: "to host", FROM_HOST: "from host"}


@dataclass(frozen=True)
class Exchange:
    """The communications of a step that are of one kind, over the same axes, for one purpose.

    Attributes:
      link: "links" (ICI, NVLink), "network" (between nodes or slices) or "host".
      seconds: of all runs, alone on its link.
      exposed: of these, what is not hidden behind compute.
      formula: its numbers in words, the largest first.
    """

    communications: tuple[Communication, ...]
    link: str
    seconds: float
    exposed: float
    formula: str

    @property
    def kind(self) -> str:
        """As it is shown."""
        kind = self.communications[0].kind
        return SHOWN.get(kind, kind)

    @property
    def axes(self) -> tuple[str, ...]:
        """Of the mesh; () of host transfers."""
        return self.communications[0].axes

    @property
    def purpose(self) -> str:
        return self.communications[0].purpose

    @property
    def bytes(self) -> int:
        """That a device sends in a step, over all runs."""
        return int(sum(map(ring_bytes, self.communications)))

    @property
    def runs(self) -> int:
        """How often in a step."""
        return sum(one.runs for one in self.communications)

    def figures(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "axes": list(self.axes),
            "what": self.purpose,
            "link": self.link,
            "bytes": self.bytes,
            "runs": self.runs,
            "seconds": self.seconds,
            "exposed": self.exposed,
            "formula": self.formula,
        }


@dataclass(frozen=True)
class Time:
    """An estimate of the seconds of a step, and of what they go to.

    Attributes:
      compute: of a step in products, at what the chip reaches.
      memory: in which device memory, not the matrix units, is the limit (beyond compute).
      exchanges: what a device sends, with how long that takes and how much of it is waited for.
      bubble: that a pipeline's stages wait.
      step: the whole.
      tokens: of a step; samples where the batch has no sequence (`unit` says which).
      model_flops: of a step, all devices.
      formula: of model_flops.
      peak: FLOP/s of a device that mfu is against.
    """

    compute: float
    memory: float
    exchanges: tuple[Exchange, ...]
    bubble: float
    step: float
    devices: int
    tokens: int
    unit: str
    model_flops: float
    formula: str
    peak: float

    @property
    def exchanged(self) -> float:
        """Seconds of a step that wait for exchanges."""
        return sum(e.exposed for e in self.exchanges)

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.tokens / self.step

    @property
    def mfu(self) -> float:
        """The model's flops a second over the peak of all devices."""
        return self.model_flops / (self.step * self.peak * self.devices)

    def device_hours(self, tokens: float) -> float:
        """That so many tokens take."""
        return tokens / self.tokens_per_second * self.devices / HOUR

    def figures(self) -> dict[str, Any]:
        """All of it as plain numbers and words, in seconds and bytes."""
        plain = ("compute", "memory", "bubble", "step", "devices", "tokens", "unit")
        more = ("model_flops", "formula", "peak", "exchanged", "tokens_per_second", "mfu")
        return {
            **{name: getattr(self, name) for name in (*plain, *more)},
            "exchanges": [e.figures() for e in self.exchanges],
        }

    def __rich__(self) -> Group:
        parts = Table(title="time of a step (estimate)", title_justify="left", box=None)
        parts.add_column("")
        parts.add_column("", justify="right")
        parts.add_column("")
        for name, seconds, of in (
            ("compute", self.compute, "products and kernels, at what the chip reaches"),
            ("memory", self.memory, "where device memory is the limit"),
            ("exchanges", self.exchanged, "what is waited for"),
            ("bubble", self.bubble, "stages of the pipeline that wait"),
        ):
            if seconds:
                parts.add_row(name, seconds_text(seconds), f"{seconds / self.step:4.0%}  {of}")
        parts.add_row("step", seconds_text(self.step), "", style="bold")
        rate = (
            f"{self.tokens_per_second:,.0f} {self.unit}/s, "
            f"{self.tokens_per_second / self.devices:,.0f} a device; MFU {self.mfu:.1%}"
        )
        said: list[Any] = [parts, Text(rate), Text(f"  MFU by {self.formula}")]
        if self.exchanges:
            said += [Text(), self._links()]
        return Group(*said)

    def _links(self) -> Table:
        table = Table(title="what a device sends in a step", title_justify="left", box=None)
        for column in ("", "of", "along"):
            table.add_column(column, overflow="fold")
        for column in ("runs", "bytes", "alone", "waited"):
            table.add_column(column, justify="right", no_wrap=True)
        for e in sorted(self.exchanges, key=lambda e: -e.seconds)[:12]:
            along = ", ".join(e.axes) or "host"
            along += " (network)" if e.link == "network" else ""
            table.add_row(
                e.kind,
                e.purpose,
                along,
                str(e.runs),
                bytes_text(e.bytes),
                seconds_text(e.seconds),
                seconds_text(e.exposed),
            )
        return table

    def __str__(self) -> str:
        return as_text(self, WIDTH)


def seconds_text(seconds: float) -> str:
    """`12.3 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
