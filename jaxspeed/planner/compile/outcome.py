"""What the process that compiles is asked, and what it answers."""

import re
from dataclasses import dataclass
from typing import Any

from jaxspeed.errors import JaxspeedError
from jaxspeed.hardware.targets import Target
from jaxspeed.hlo import CompiledReport
from jaxspeed.placement.show import bytes_text

PRINTED = "printed"  # the folder of programs, beside the answer
KEPT = "kept"  # the executable, there too
_AMOUNT = r"([\d.]+)([KMGT]?)i?B?"
# As libtpu says it, now and before.
_NEEDED = (
    re.compile(rf"memory required for [\w ]+ \({_AMOUNT}\)"),
    re.compile(rf"Used {_AMOUNT} of"),
    re.compile(rf"allocate {_AMOUNT}"),
)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Request:
    """What to compile (pickled, because it is read after the process has its devices), for what."""

    job: bytes
    target: Target
    answer: str
    keep: bool = False  # the executable, in a file beside the answer


@dataclass(frozen=True)
class Refusal:
    """A compiler found no room for the program."""

    needed: int | None  # bytes that it says it needs of the device
    said: str

    def __str__(self) -> str:
        needs = f" needs {bytes_text(self.needed)} of a device" if self.needed else ""
        return f"the compiler says that the step{needs or ' does not fit'}: {self.said}"


@dataclass(frozen=True)
class Outcome:
    """Of one compile: its report, or that it does not fit."""

    report: CompiledReport | None
    refused: Refusal | None
    seconds: float  # from the start of the process's own work to its end
    kept: str | None = None  # the file that has its executable

    @property
    def device_bytes(self) -> int | None:
        """What a step holds of a device at its peak."""
        found = self.report
        if found is None:
            return self.refused.needed if self.refused else None
        return found.argument_bytes + found.temp_bytes + found.output_bytes - found.alias_bytes

    @property
    def host_bytes(self) -> int:
        """What a step holds of its host's memory for a device."""
        return self.report.host_bytes if self.report else 0

    def fits(self, target: Target) -> bool:
        """Whether a device of the target, and its part of a host, hold the step."""
        return self.fits_device(target) and self.host_bytes <= target.chip.host_memory

    def fits_device(self, target: Target) -> bool:
        needed = self.device_bytes
        return self.refused is None and needed is not None and needed <= target.chip.memory

    def figures(self, target: Target) -> dict[str, Any]:
        """As plain numbers and words, bytes in bytes."""
        return {
            "fits": self.fits(target),
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "refused": self.refused.said if self.refused else None,
            "seconds": self.seconds,
            "kept": self.kept,
        }


@dataclass(frozen=True)
class Failure:
    """A mistake that the process found; it is raised where it was asked."""

    error: JaxspeedError


def out_of_memory(said: str) -> Refusal | None:
    """What a compiler's error says, if it is that memory is exhausted."""
    if "RESOURCE_EXHAUSTED" not in said and "out of memory" not in said.lower():
        return None
    for form in _NEEDED:
        if found := form.search(said):
            needed = int(float(found[1]) * 1024 ** _POWERS[found[2]])
            return Refusal(needed, said.strip().splitlines()[0])
    return Refusal(None, said.strip().splitlines()[0])
