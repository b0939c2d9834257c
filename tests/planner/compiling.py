"""What compilers say of points of the grid; they run in a child process.

`python -m tests.planner.compiling tpu` (or `gpu`) compiles what tests/planner/compiled_tpu.json
(compiled_gpu.json) lacks, and adds it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from jaxspeed.hardware.known_chips import chips_of
from jaxspeed.hardware.targets import Target, target_of
from jaxspeed.planner.compile.in_child import compile_for
from tests.planner.grid import DEVICES, Point, points

Platform = Literal["tpu", "gpu"]
VERSIONS = {
    "tpu": ("jax", "jaxlib", "libtpu"),
    "gpu": ("jax", "jaxlib", "jax-cuda13-plugin"),
}
FIGURES = {
    "argument": "argument_bytes",
    "temp": "temp_bytes",
    "host_argument": "host_argument_bytes",
    "host_temp": "host_temp_bytes",
}


def stored(platform: Platform = "tpu") -> dict[str, dict[str, int]]:
    """Bytes of a device by point, as they were compiled."""
    return json.loads(_file(platform).read_text())["points"]


def target_for(point: Point, platform: Platform) -> Target:
    name = point.target if platform == "tpu" else f"h100:{DEVICES[point.target]}"
    return target_of(name, chips_of())


@dataclass(frozen=True)
class Job:
    """Builds a point's program, in the process that compiles."""

    name: str

    def __call__(self, devices: Sequence[Any] | None) -> tuple[Any, Any]:
        return next(p for p in points() if p.name == self.name).program(devices)


def compiled(point: Point, platform: Platform = "tpu") -> dict[str, int]:
    found = compile_for(target_for(point, platform), Job(point.name)).report
    assert found is not None, "the chips of the grid are large enough"
    return {figure: getattr(found, field) for figure, field in FIGURES.items()}


def _file(platform: Platform) -> Path:
    return Path(__file__).with_name(f"compiled_{platform}.json")


def _add_missing(platform: Platform) -> None:
    found = stored(platform) if _file(platform).exists() else {}
    for point in points():
        if point.name not in found:
            found[point.name] = compiled(point, platform)
            write(platform, found)


def write(platform: Platform, found: dict[str, dict[str, int]]) -> None:
    versions = {name: _version(name) for name in VERSIONS[platform]}
    _file(platform).write_text(json.dumps({"versions": versions, "points": found}, indent=1) + "\n")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(_add_missing("gpu" if "gpu" in sys.argv else "tpu"))
