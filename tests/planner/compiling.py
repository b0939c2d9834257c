"""What compilers say of points of the grid; they run in a child process.

`python -m tests.planner.compiling tpu` (or `gpu`) compiles what tests/planner/compiled_tpu.json
(compiled_gpu.json) lacks, and adds it; `python -m tests.planner.compiling tpu second` what the
second grid's file lacks of TPUs.

Figures of TPUs are read from the buffer assignment that libtpu writes before it generates code,
which takes four fifths of a compile: the process ends there. A full compile's figures differ by
less than 16 KiB.
"""

import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from jaxspeed.hardware.targets import Target, target_of
from jaxspeed.planner.compile import PATIENCE, PRINTED
from jaxspeed.planner.compile.in_child import StepCompiler, compile_for
from jaxspeed.planner.compile.outcome import Outcome
from tests.planner import drawn
from tests.planner.grid import Point, points

Platform = Literal["tpu", "gpu"]
VERSIONS = {
    "tpu": ("jax", "jaxlib", "libtpu"),
    "gpu": ("jax", "jaxlib", "jax-cuda13-plugin"),
}
WORKERS = 2  # compiles at a time
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
    """The point's own target, or as many H100s where it names a TPU."""
    own = target_of(point.target)
    return (
        own
        if (own.chip.platform == "tpu") == (platform == "tpu")
        else target_of(f"h100:{own.count}")
    )


def compiled(point: Point, platform: Platform = "tpu") -> dict[str, int]:
    """The figures, or what a program needs that does not fit."""
    target = target_for(point, platform)
    if platform == "gpu":
        found = compile_for(target, point.program)
    elif isinstance(found := _assigned(target, point), dict):
        return found
    if found.report is None:
        return {"needed": found.device_bytes or 0}
    return {figure: getattr(found.report, field) for figure, field in FIGURES.items()}


def _assigned(target: Target, point: Point) -> dict[str, int] | Outcome:
    """The figures of libtpu's buffer assignment; the outcome if there is one before it."""
    with StepCompiler(target) as compiler:
        compiler.submit(point.program)
        printed, deadline = Path(compiler._folder.name) / PRINTED, time.monotonic() + PATIENCE
        # The file that libtpu writes after the assignment's own.
        while not (after := [*printed.glob("*jit_step*_after_buffer_assignment.txt")]):
            assert compiler._future is not None
            if compiler._future.done() or time.monotonic() > deadline:
                return compiler.outcome(0)
            time.sleep(0.2)
        name = after[0].name.replace("_after_buffer_assignment", "-buffer-assignment")
        return figures_of((printed / name).read_text())


def figures_of(assignment: str) -> dict[str, int]:
    """The bytes of arguments and temporaries in device and host memory."""
    found = dict.fromkeys(FIGURES, 0)
    for size, color, kind in _ALLOCATION.findall(assignment):
        if (memory := _MEMORIES.get(color)) is not None:
            found[memory + ("temp" if kind == "preallocated-temp" else "argument")] += int(size)
    return found


# `allocation 3: size 512, color 5, page 0, parameter 8, ...`: of these colors, none is 0.
_ALLOCATION = re.compile(
    r"^allocation \d+: size (\d+),(?: color (\d+),)? page \d+, (parameter|preallocated-temp)", re.M
)
_MEMORIES = {"": "", "5": "host_"}


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


def _add_drawn(grid: str, platform: Platform) -> None:
    """Compile and store them one by one."""
    turn, file = threading.Lock(), drawn.file_of(grid)

    def add(point: Point) -> None:
        figures = compiled(point, platform)
        with turn:
            tree = json.loads(file.read_text())
            tree.setdefault("versions", {}).update({n: _version(n) for n in VERSIONS[platform]})
            tree["points"][point.name] |= figures
            file.write_text(json.dumps(tree, indent=1) + "\n")

    missing = [
        point
        for point in drawn.points(grid)
        if not {"temp", "needed"} & set(drawn.stored(grid)[point.name])
        and (target_of(point.target).chip.platform == "tpu") == (platform == "tpu")
    ]
    with ThreadPoolExecutor(WORKERS) as pool:
        for point, done in [(point, pool.submit(add, point)) for point in missing]:
            if error := done.exception():
                print(f"{point.name}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    grids = [arg for arg in sys.argv[1:] if arg in drawn.SEEDS]
    which: Platform = "gpu" if "gpu" in sys.argv else "tpu"
    sys.exit(_add_drawn(grids[0], which) if grids else _add_missing(which))
