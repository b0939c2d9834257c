"""Report of a step's host transfers: bytes by purpose, and their time compared with compute."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group
from rich.text import Text

from jaxspeed.communication import FROM_HOST, TO_HOST, Communication
from jaxspeed.hardware.chip import host_link, peak_flops
from jaxspeed.placement.show import bytes_text, scaled_text, seconds_text, titled

ACTIVATIONS, GRADIENTS, PARAMETERS, OPTIMIZER, HOST_UPDATE = (
    "activations",
    "gradients",
    "parameters",
    "optimizer",
    "update on the host",
)
ASSUMED = "A100"  # for devices without published figures, such as simulated ones
ESTIMATED = "estimated from the traced step"
_HELP = {
    OPTIMIZER: "it is transferred once per step: more gradient_accumulation_steps, or a larger "
    "train_micro_batch_size_per_gpu, computes more for the same bytes",
    HOST_UPDATE: "gradients and parameters are transferred once per step: more "
    "gradient_accumulation_steps, or a larger train_micro_batch_size_per_gpu, computes more for "
    "the same bytes",
    PARAMETERS: "they are transferred twice per micro-batch: a larger "
    "train_micro_batch_size_per_gpu computes more for the same bytes; with stage 3, more data "
    "ranks transfer less each",
    GRADIENTS: "they are transferred per micro-batch: a larger train_micro_batch_size_per_gpu "
    "computes more for the same bytes; fewer gradient_accumulation_steps transfer fewer",
    ACTIVATIONS: 'parallel.remat recomputes them instead: "full" without '
    'cpu_checkpointing, or {"recompute": [...]} for what {"offload": [...]} names',
}


@dataclass(frozen=True)
class HostTransfers:
    """Host transfers of one step, per device.

    Attributes:
      moves: the transfers; the purpose is one of the kinds above, the site the path of the argument
        in host memory, if it is an argument.
      by_host: {path of an argument: bytes that the host's cores read in place}.
      written: paths of the arguments whose new values the host's cores compute in place.
    """

    moves: Sequence[Communication]
    by_host: Mapping[str, int]
    written: frozenset[str] = frozenset()

    @property
    def to_device(self) -> dict[str, int]:
        """Host-to-device bytes by purpose."""
        return _sums((m.purpose, m) for m in self.moves if m.kind == FROM_HOST)

    @property
    def to_host(self) -> dict[str, int]:
        """Device-to-host bytes by purpose."""
        return _sums((m.purpose, m) for m in self.moves if m.kind == TO_HOST)

    @property
    def fetched(self) -> dict[str, int]:
        """Host-to-device bytes by path of the argument."""
        return _sums((m.site, m) for m in self.moves if m.kind == FROM_HOST and m.site)

    @property
    def stored(self) -> dict[str, int]:
        """Device-to-host bytes by path of the argument."""
        return _sums((m.site, m) for m in self.moves if m.kind == TO_HOST and m.site)

    @property
    def bytes(self) -> int:
        return sum(m.payload for m in self.moves)


def _sums(named: Iterable[tuple[str, Communication]]) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for name, move in named:
        sums[name] += move.payload
    return dict(sums)


@dataclass(frozen=True)
class TransferReport:
    """Host transfers of a step per device, with lower bounds of transfer and compute time.

    Attributes:
      transfers: from the traced step.
      device_kind: kind of the devices that run it.
      flops: FLOPs per device and step.
      flops_from: source of `flops`.
    """

    transfers: HostTransfers
    device_kind: str
    flops: float
    flops_from: str = ESTIMATED

    def counted(self, flops: int | None) -> "TransferReport":
        """Replace the estimate with the compiler's FLOP count, if there is one."""
        if not flops:
            return self
        return replace(self, flops=flops, flops_from="as compiled")

    @property
    def is_known(self) -> bool:
        """Whether link and peak are those of the devices that run it."""
        return peak_flops(self.device_kind) is not None

    @property
    def _rated(self) -> str:
        return self.device_kind if self.is_known else ASSUMED

    @property
    def link(self) -> float:
        """Bytes per second in one direction."""
        return host_link(self._rated)

    @property
    def peak(self) -> float:
        peak = peak_flops(self._rated)
        assert peak is not None
        return peak

    @property
    def seconds(self) -> float:
        """Time of the transfers; the directions take turns, as within one layer or slice."""
        return self.transfers.bytes / self.link

    @property
    def compute_seconds(self) -> float:
        return self.flops / self.peak

    @property
    def by_kind(self) -> Mapping[str, tuple[int, int]]:
        """(bytes to the device, bytes to the host) by kind."""
        there, back = self.transfers.to_device, self.transfers.to_host
        return {kind: (there.get(kind, 0), back.get(kind, 0)) for kind in {**there, **back}}

    @property
    def warning(self) -> str | None:
        """Cause and remedy where transfers take longer than compute."""
        if self.seconds <= self.compute_seconds:
            return None
        most = max(self.by_kind, key=lambda kind: sum(self.by_kind[kind]))
        share = sum(self.by_kind[most]) / self.transfers.bytes
        return (
            f"offload: host transfers take {_times(self.seconds / self.compute_seconds)} as long "
            f"as compute; {share:.0%} of the bytes are {most}: {_HELP[most]}"
        )

    def _lines(self) -> tuple[str, str, str]:
        rated = self._rated if self.is_known else f"{ASSUMED} (this device's link is unknown)"
        return (
            f"lower bounds, with the link and peak of {rated}",
            f"transfers {seconds_text(self.seconds)} = {bytes_text(self.transfers.bytes)} "
            f"(traced step) / {bytes_text(self.link)}/s",
            f"compute {seconds_text(self.compute_seconds)} = {scaled_text(self.flops, 'flop')} "
            f"({self.flops_from}) / {scaled_text(self.peak, 'flop')}/s",
        )

    def __str__(self) -> str:
        basis, transfers, compute = self._lines()
        return f"{transfers}; {compute}; {basis}"

    def __rich__(self) -> Group:
        heads = ("purpose", ">to the device", ">to the host", ">time")
        table = titled("host transfers, per device and step", *heads, min_width=52)
        rows = dict(sorted(self.by_kind.items(), key=lambda item: -sum(item[1])))
        there, back = zip(*rows.values(), strict=True)
        for kind, sizes in {**rows, "sum": (sum(there), sum(back))}.items():
            cells = [*map(bytes_text, sizes), seconds_text(sum(sizes) / self.link)]
            table.add_row(kind, *cells, style="bold" if kind == "sum" else None)
        basis, *times = self._lines()
        lines = [Text(f"{basis}:"), *(Text(f" {time}") for time in times)]
        if self.transfers.by_host:
            held = bytes_text(sum(self.transfers.by_host.values()))
            lines.append(Text(f"the host's cores update {held} in place; not in these times"))
        if self.warning:
            lines.append(Text(self.warning, style="yellow"))
        return Group(table, *lines)

    def figures(self) -> dict[str, Any]:
        """JSON-serializable figures."""
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
