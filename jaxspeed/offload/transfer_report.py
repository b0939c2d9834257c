"""Expected time of a step's host transfers, against the time of its compute."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.communication import FROM_HOST, TO_HOST, Communication
from jaxspeed.hardware.chip import host_link, peak_flops
from jaxspeed.placement.show import bytes_text, scaled_text, seconds_text

ACTIVATIONS, GRADIENTS, PARAMETERS, OPTIMIZER, HOST_UPDATE = (
    "activations",
    "gradients",
    "parameters",
    "optimizer",
    "update on the host",
)
ASSUMED = "A100"  # for devices of which nothing is known, as simulated ones
ESTIMATED = "estimated from the traced step"
_HELP = {
    OPTIMIZER: "it crosses once a step: more gradient_accumulation_steps, or a larger "
    "train_micro_batch_size_per_gpu, computes more for the same bytes",
    HOST_UPDATE: "gradients leave once a step, and parameters come back: more "
    "gradient_accumulation_steps, or a larger train_micro_batch_size_per_gpu, computes more for "
    "the same bytes",
    PARAMETERS: "they cross in each micro-batch, twice: a larger train_micro_batch_size_per_gpu "
    "computes more for the same bytes; more data ranks under stage 3 move less each",
    GRADIENTS: "they cross in each micro-batch: a larger train_micro_batch_size_per_gpu computes "
    "more for the same bytes; fewer gradient_accumulation_steps add up fewer",
    ACTIVATIONS: 'parallel.remat makes them again in place of moving them: "full" without '
    'cpu_checkpointing, or {"recompute": [...]} for what {"offload": [...]} names',
}


@dataclass(frozen=True)
class HostTransfers:
    """Of one step, a device.

    Attributes:
      moves: what comes to the device and what leaves it; the purpose is one of the kinds above, the
        site the path of an argument in host memory, where it is one's.
      by_host: {path of an argument: bytes of it with which the host's cores compute}.
    """

    moves: Sequence[Communication]
    by_host: Mapping[str, int]

    @property
    def to_device(self) -> dict[str, int]:
        """{purpose: bytes that come to the device}."""
        return _sums((m.purpose, m) for m in self.moves if m.kind == FROM_HOST)

    @property
    def to_host(self) -> dict[str, int]:
        """{purpose: bytes that leave it}."""
        return _sums((m.purpose, m) for m in self.moves if m.kind == TO_HOST)

    @property
    def fetched(self) -> dict[str, int]:
        """{path of an argument: bytes of it that come to the device}."""
        return _sums((m.site, m) for m in self.moves if m.kind == FROM_HOST and m.site)

    @property
    def stored(self) -> dict[str, int]:
        """... and that leave for it."""
        return _sums((m.site, m) for m in self.moves if m.kind == TO_HOST and m.site)

    @property
    def bytes(self) -> int:
        return sum(m.payload for m in self.moves)


def _sums(named: Iterable[tuple[str, Communication]]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for name, move in named:
        found[name] += move.payload
    return dict(found)


@dataclass(frozen=True)
class TransferReport:
    """Host transfers of a step, a device, and how long these and computing take at best.

    Attributes:
      transfers: from the traced step.
      device_kind: of the devices that run it.
      flops: what a device computes in a step.
      flops_from: who says so.
    """

    transfers: HostTransfers
    device_kind: str
    flops: float
    flops_from: str = ESTIMATED

    def counted(self, flops: int | None) -> "TransferReport":
        """With the compiler's count of flops, where there is one."""
        if not flops:
            return self
        return replace(self, flops=flops, flops_from="as compiled")

    @property
    def is_known(self) -> bool:
        """Whether its figures are of the devices that run it."""
        return peak_flops(self.device_kind) is not None

    @property
    def _rated(self) -> str:
        return self.device_kind if self.is_known else ASSUMED

    @property
    def link(self) -> float:
        """Bytes a second, in one direction."""
        return host_link(self._rated)

    @property
    def peak(self) -> float:
        peak = peak_flops(self._rated)
        assert peak is not None
        return peak

    @property
    def seconds(self) -> float:
        """Of moving: one way after the other, as within one layer or piece it is."""
        return self.transfers.bytes / self.link

    @property
    def compute_seconds(self) -> float:
        return self.flops / self.peak

    @property
    def by_kind(self) -> Mapping[str, tuple[int, int]]:
        """{kind: (bytes to the device, bytes to the host)}."""
        there, back = self.transfers.to_device, self.transfers.to_host
        return {kind: (there.get(kind, 0), back.get(kind, 0)) for kind in {**there, **back}}

    @property
    def warning(self) -> str | None:
        """Where moving takes longer than computing: why, and what would help."""
        if self.seconds <= self.compute_seconds:
            return None
        most = max(self.by_kind, key=lambda kind: sum(self.by_kind[kind]))
        share = sum(self.by_kind[most]) / self.transfers.bytes
        return (
            f"offload: moving takes {_times(self.seconds / self.compute_seconds)} as long as "
            f"computing; {share:.0%} of what moves is {most}: {_HELP[most]}"
        )

    def _lines(self) -> tuple[str, str, str]:
        whose = self._rated if self.is_known else f"an {ASSUMED}: of this device none is known"
        return (
            f"expected at best, as of {whose}",
            f"moving {seconds_text(self.seconds)} = {bytes_text(self.transfers.bytes)} "
            f"(traced step) / {bytes_text(self.link)}/s",
            f"computing {seconds_text(self.compute_seconds)} = {scaled_text(self.flops, 'flop')} "
            f"({self.flops_from}) / {scaled_text(self.peak, 'flop')}/s",
        )

    def __str__(self) -> str:
        whose, moving, computing = self._lines()
        return f"{moving}; {computing}; {whose}"

    def __rich__(self) -> Group:
        table = Table(
            title="over the link to host memory, per device and step",
            title_justify="left",
            box=None,
            min_width=52,
        )
        table.add_column("of")
        for name in ("to the device", "to the host", "time"):
            table.add_column(name, justify="right")
        rows = dict(sorted(self.by_kind.items(), key=lambda item: -sum(item[1])))
        there, back = zip(*rows.values(), strict=True)
        for kind, sizes in {**rows, "sum": (sum(there), sum(back))}.items():
            cells = [*map(bytes_text, sizes), seconds_text(sum(sizes) / self.link)]
            table.add_row(kind, *cells, style="bold" if kind == "sum" else None)
        whose, *times = self._lines()
        lines = [Text(f"{whose}:"), *(Text(f" {each}") for each in times)]
        if self.transfers.by_host:
            held = bytes_text(sum(self.transfers.by_host.values()))
            lines.append(Text(f"the host's cores update {held} in place, which takes its own time"))
        if self.warning:
            lines.append(Text(self.warning, style="yellow"))
        return Group(table, *lines)

    def figures(self) -> dict[str, Any]:
        """All of it as plain numbers and words."""
        return {
            "to_device": dict(self.transfers.to_device),
            "to_host": dict(self.transfers.to_host),
            "by_host_cores": sum(self.transfers.by_host.values()),
            "bytes_per_second": self.link,
            "seconds": self.seconds,
            "flops": self.flops,
            "flops_from": self.flops_from,
            "flops_per_second": self.peak,
            "compute_seconds": self.compute_seconds,
            "as_on": self._rated,
            "warning": self.warning,
        }


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio < 10 else f"{ratio:,.0f} times"
