"""`Outcome` of a compile: its report, or a refusal because of memory."""

import re
from dataclasses import dataclass
from typing import Any

from jaxspeed.hardware.targets import Target
from jaxspeed.hlo import CompiledReport

_AMOUNT = r"([\d.]+)([KMGT]?)i?B?"
# Messages of current and earlier libtpu versions.
_NEEDED = (
    re.compile(rf"memory required for [\w ]+ \({_AMOUNT}\)"),
    re.compile(rf"Used {_AMOUNT} of"),
    re.compile(rf"allocate {_AMOUNT}"),
)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Refusal:
    """A compiler's out-of-memory error."""

    needed: int | None  # bytes needed per device, if reported
    message: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of one compile: its report, or that it does not fit."""

    report: CompiledReport | None
    refused: Refusal | None
    seconds: float  # of building, lowering and compiling
    kept: str | None = None  # the file of its executable

    @property
    def device_bytes(self) -> int | None:
        """Peak bytes of a step per device."""
        report = self.report
        if report is None:
            return self.refused.needed if self.refused else None
        return report.step_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of a step in host memory, per device."""
        return self.report.step_host_bytes if self.report else 0

    def fits(self, target: Target) -> bool:
        """Whether the step fits a device of the target and its share of host memory."""
        return self.fits_device(target) and self.host_bytes <= target.chip.host_memory

    def fits_device(self, target: Target) -> bool:
        needed = self.device_bytes
        return self.refused is None and needed is not None and needed <= target.chip.memory

    def figures(self, target: Target) -> dict[str, Any]:
        """The outcome as JSON values."""
        return {
            "fits": self.fits(target),
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "refused": self.refused.message if self.refused else None,
            "seconds": self.seconds,
            "kept": self.kept,
        }


def out_of_memory(message: str) -> Refusal | None:
    """The Refusal of a compiler's error text, if it reports exhausted memory.

    That an operation's blocks exceed on-chip memory is another error: it depends on no device's
    memory.
    """
    if "memory space vmem" in message:
        return None
    if "RESOURCE_EXHAUSTED" not in message and "out of memory" not in message.lower():
        return None
    for form in _NEEDED:
        if match := form.search(message):
            needed = int(float(match[1]) * 1024 ** _POWERS[match[2]])
            return Refusal(needed, message.strip().splitlines()[0])
    return Refusal(None, message.strip().splitlines()[0])
