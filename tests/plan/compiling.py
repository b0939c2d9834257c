"""What the TPU's compiler says of points of the grid; runs in a child process.

`python -m tests.plan.compiling` compiles what tests/plan/compiled_tpu.json lacks, and adds it.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.plan.grid import Point, points
from tests.support.topology import run_on_topology

STORED = Path(__file__).with_name("compiled_tpu.json")
FIGURES = {
    "argument": "argument_size_in_bytes",
    "temp": "temp_size_in_bytes",
    "host_argument": "host_argument_size_in_bytes",
    "host_temp": "host_temp_size_in_bytes",
}


def stored() -> dict[str, dict[str, int]]:
    """Bytes of a device by point, as they were compiled."""
    return json.loads(STORED.read_text())["points"]


def compile_point(devices: Any, name: str) -> dict[str, int]:
    """In the child process."""
    point = next(p for p in points() if p.name == name)
    program, batch = point.program(devices)
    compiled = program.step.lower(program.state, batch).compile().memory_analysis()
    return {figure: getattr(compiled, field) for figure, field in FIGURES.items()}


def compiled(point: Point) -> dict[str, int]:
    return run_on_topology("tests.plan.compiling:compile_point", point.target, name=point.name)


def _add_missing() -> None:
    found = stored() if STORED.exists() else {}
    for point in points():
        if point.name not in found:
            found[point.name] = compiled(point)
            write(found)


def write(found: dict[str, dict[str, int]]) -> None:
    versions = {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
    STORED.write_text(json.dumps({"versions": versions, "points": found}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(_add_missing())
