"""`Estimate` of a candidate: memory, time and verdict; why one candidate loses to another."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxspeed.placement.show import bytes_text, seconds_text
from jaxspeed.planner.memory.components import Verdict

# Names of an estimate's parts.
COMPUTE, MEMORY, PIPELINE = "compute", "memory", "pipeline"


@dataclass(frozen=True)
class Estimate:
    """The estimate of one choice.

    Attributes:
      device, host: bytes needed per device.
      device_limit, host_limit: bytes available per device.
      fits: the verdict for both, with headroom.
      seconds: per step.
      tokens_per_second, mfu: of all devices.
      parts: seconds that add up to the step: compute, memory, pipeline, and exposed communication
        by what is communicated.
      refused: why there is no such program; then all else is zero.
      unit: what is counted per second: "samples" if samples have no sequence.
    """

    device: int = 0
    host: int = 0
    device_limit: int = 0
    host_limit: int = 0
    fits: Verdict = "does not fit"
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    refused: str | None = None
    unit: str = "tokens"

    @property
    def over(self) -> float:
        """Needed over available memory; below 1 if it fits."""
        return max(self.device / self.device_limit, self.host / self.host_limit)

    def figures(self) -> dict[str, Any]:
        """The estimate as JSON values of a plan."""
        same = ("seconds", "tokens_per_second", "mfu", "fits")
        fields = {name: getattr(self, name) for name in same}
        return {"device_bytes": self.device, "host_bytes": self.host, **fields}


def why_lost(lost: Estimate, best: Estimate) -> str:
    """Why `lost` is not the best, as text."""
    if lost.refused:
        return lost.refused
    if lost.fits == "does not fit":
        if lost.host > lost.host_limit:
            return f"needs {_of(lost.host, lost.host_limit)} of host memory"
        return f"needs {_of(lost.device, lost.device_limit)}"
    if lost.fits == "tight" and best.fits == "fits":
        return f"too little headroom: {_of(lost.device, lost.device_limit)}"
    more = {
        name: seconds - best.parts.get(name, 0.0)
        for name, seconds in lost.parts.items()
        if seconds > best.parts.get(name, 0.0)
    }
    apart = lost.seconds - best.seconds
    if not more or apart <= 0.005 * best.seconds:
        return "as fast within half a percent" if apart > 0 else "as fast"
    name = max(more, key=lambda name: more[name])
    if name == PIPELINE:
        return f"{lost.parts[name] / lost.seconds:.0%} pipeline bubble"
    what = {COMPUTE: "compute takes", MEMORY: "device memory access takes"}
    return f"{what.get(name, f'{name} take')} {seconds_text(more[name])} more"


def _of(needs: int, has: int) -> str:
    """`93 GB of 80`, with more digits where the two would look equal."""
    unit = bytes_text(has).split()[-1]
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}[unit]
    digits = 0 if abs(needs - has) >= scale and has / scale >= 10 else 1
    return f"{needs / scale:.{digits}f} {unit} of {has / scale:.{digits}f}"
