"""Report of the estimated step time: compute, memory, exposed communication, bubble; MFU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.communication import FROM_HOST, TO_HOST, Communication, ring_bytes
from jaxspeed.placement.show import as_text, bytes_text, seconds_text, titled

WIDTH = 80
HOUR = 3600
SHOWN = {"collective-permute": "permute", TO_HOST: "to host", FROM_HOST: "from host"}


@dataclass(frozen=True)
class CommunicationGroup:
    """The communications of a step of the same kind, axes and purpose.

    Attributes:
      link: "links" (ICI, NVLink), "network" (between nodes or slices) or "host".
      seconds: of all runs, alone on the link.
      exposed: seconds of these that do not overlap with compute.
      formula: runs and shapes, the largest first.
      phase: the name of the program, if a step is several.
    """

    communications: tuple[Communication, ...]
    link: str
    seconds: float
    exposed: float
    formula: str
    phase: str = ""

    @property
    def kind(self) -> str:
        """Kind of collective or transfer, for display."""
        kind = self.communications[0].kind
        return SHOWN.get(kind, kind)

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes; () for host transfers."""
        return self.communications[0].axes

    @property
    def purpose(self) -> str:
        return self.communications[0].purpose

    @property
    def bytes(self) -> int:
        """Bytes that a device sends per step, over all runs."""
        return int(sum(map(ring_bytes, self.communications)))

    @property
    def runs(self) -> int:
        """Runs per step."""
        return sum(communication.runs for communication in self.communications)

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
            **({"phase": self.phase} if self.phase else {}),
        }


@dataclass(frozen=True)
class RolloutTime:
    """Estimated seconds of a rollout, if all of its completions have the most tokens.

    Attributes:
      token: seconds in which each row of a group draws a token.
      prefill: seconds of a batch of starts.
      group: rows of a group, on all devices.
      rows: completions of a rollout.
      starts: batches of starts.
      tokens: of a completion, at most.
      steps: that train on a rollout.
    """

    token: float
    prefill: float
    group: int
    rows: int
    starts: int
    tokens: int
    steps: int

    @property
    def seconds(self) -> float:
        drawn = -(-self.rows // self.group) * self.tokens
        return drawn * self.token + self.starts * self.prefill

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all devices draw, while all completions have an end before them."""
        return min(self.rows, self.group) / self.token

    def share(self, step: float) -> float:
        """The share of sampling in a run's time, from the seconds of a step."""
        return self.seconds / (self.seconds + self.steps * step)

    def figures(self, step: float) -> dict[str, Any]:
        more = ("seconds", "tokens_per_second")
        plain = {**vars(self), **{name: getattr(self, name) for name in more}}
        return {**plain, "share": self.share(step)}

    def line(self, step: float) -> str:
        return (
            f"sampling: {self.tokens_per_second:,.0f} tokens/s while all rows draw; "
            f"a rollout takes at most {seconds_text(self.seconds)}, where all {self.rows:,} "
            f"completions have {self.tokens:,} tokens, and is then {self.share(step):.0%} of the "
            "time"
        )


@dataclass(frozen=True)
class Time:
    """Estimated seconds of a step, by cause.

    Attributes:
      compute: seconds of matmuls and kernels, at the chip's achieved rate.
      memory: seconds beyond compute in which memory bandwidth is the bottleneck.
      exchanges: communication by kind, axes and purpose, with its exposed time.
      bubble: idle seconds of a pipeline's stages.
      step: total seconds.
      tokens: tokens per step, or samples where the batch has no sequence (see `unit`).
      model_flops: model FLOPs per step on all devices.
      formula: the formula of model_flops.
      peak: peak FLOP/s per device, for `mfu`.
      assumes: what it takes for granted of the run's data.
      phases: seconds of each program, if a step is several.
      on_host: {host work of the step: bytes that it reads, bytes that it writes}.
      rollout: of what is sampled before steps, if the objective samples.
    """

    compute: float
    memory: float
    exchanges: tuple[CommunicationGroup, ...]
    bubble: float
    step: float
    devices: int
    tokens: int
    unit: str
    model_flops: float
    formula: str
    peak: float
    assumes: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    on_host: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rollout: RolloutTime | None = None

    @property
    def exchanged(self) -> float:
        """Exposed seconds of communication."""
        return sum(e.exposed for e in self.exchanges)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices."""
        return self.tokens / self.step

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: model FLOP/s over the peak of all devices."""
        return self.model_flops / (self.step * self.peak * self.devices)

    def device_hours(self, tokens: float) -> float:
        """Device-hours to train on `tokens`."""
        return tokens / self.tokens_per_second * self.devices / HOUR

    def figures(self) -> dict[str, Any]:
        """JSON-serializable figures, in seconds and bytes."""
        plain = ("compute", "memory", "bubble", "step", "devices", "tokens", "unit", "assumes")
        more = ("model_flops", "formula", "peak", "exchanged", "tokens_per_second", "mfu")
        return {
            **{name: getattr(self, name) for name in (*plain, *more)},
            "exchanges": [e.figures() for e in self.exchanges],
            **({"phases": dict(self.phases)} if self.phases else {}),
            **({"on_host": dict(self.on_host)} if self.on_host else {}),
            **({"rollout": self.rollout.figures(self.step)} if self.rollout else {}),
        }

    def __rich__(self) -> Group:
        parts = titled("step time (estimate)", "", ">", "")
        for name, seconds, of in (
            ("compute", self.compute, "matmuls and kernels, at the achieved rate"),
            ("memory", self.memory, "memory-bound operations"),
            ("communication", self.exchanged, "not overlapped with compute"),
            ("bubble", self.bubble, "idle pipeline stages"),
        ):
            if seconds:
                parts.add_row(name, seconds_text(seconds), f"{seconds / self.step:4.0%}  {of}")
        parts.add_row("step", seconds_text(self.step), "", style="bold")
        for name, seconds in self.phases.items():
            parts.add_row(name, seconds_text(seconds), f"{seconds / self.step:4.0%}  of its phases")
        rate = (
            f"{self.tokens_per_second:,.0f} {self.unit}/s, "
            f"{self.tokens_per_second / self.devices:,.0f} per device; MFU {self.mfu:.1%}"
        )
        lines: list[Any] = [parts, Text(rate), Text(f"  MFU by {self.formula}")]
        if self.rollout:
            lines.append(Text(self.rollout.line(self.step)))
        if self.assumes:
            lines.append(Text(f"  {self.assumes}"))
        lines += [
            Text(
                f"  on the host, {name}: reads {bytes_text(read)} of memory, writes "
                f"{bytes_text(written)}; "
                "its time is not in the estimate"
            )
            for name, (read, written) in self.on_host.items()
        ]
        if self.exchanges:
            lines += [Text(), self._links()]
        return Group(*lines)

    def _links(self) -> Table:
        heads = ("", "purpose", "over", ">runs", ">bytes", ">time", ">exposed")
        table = titled("communication, per device and step", *heads)
        for e in sorted(self.exchanges, key=lambda e: -e.seconds)[:12]:
            over = ", ".join(e.axes) or "host"
            over += " (network)" if e.link == "network" else ""
            table.add_row(
                e.kind,
                f"{e.purpose}, {e.phase}" if e.phase else e.purpose,
                over,
                str(e.runs),
                bytes_text(e.bytes),
                seconds_text(e.seconds),
                seconds_text(e.exposed),
            )
        return table

    def __str__(self) -> str:
        return as_text(self, WIDTH)
