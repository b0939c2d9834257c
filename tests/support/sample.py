"""`make test-sample`: the tests marked `sampled` in parts, of which a seed chooses one.

A part has whole files, whose tests share fixtures, but for those that one worker would be busy with
for too long: of these it has a run of neighbouring tests.
"""

import argparse
import hashlib
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.covering import tier_of
from tests.support.cpu_seconds import record

ROOT = Path(__file__).resolve().parents[2]
MARKED = "sampled and not full"  # an entire test may be marked so, and some of its cases `full`
MINUTES, WORKERS = 12, 2  # a part takes so long on that many cores
_PART_S = 0.9 * MINUTES * 60 * WORKERS  # they do not end at the same time
_LONGEST_S = 300.0  # of one file in a part
_MADE = ("__pycache__", "_build", "build", "dist", "runs")  # folders that are no sources


class Slice(NamedTuple):
    """The tests of a file marked `sampled`, or the index-th of `count` runs of them."""

    file: str
    index: int
    count: int
    seconds: float


def parts(seconds: Mapping[str, float]) -> list[list[Slice]]:
    """Parts of about equal CPU time, from the files' CPU seconds: the same for equal records."""
    slices = []
    for file, value in seconds.items():
        count = max(1, math.ceil(value / _LONGEST_S))
        slices += [Slice(file, index, count, value / count) for index in range(count)]
    slices.sort(key=lambda one: (-one.seconds, one.file, one.index))
    number = math.ceil(sum(seconds.values()) / _PART_S)
    while True:
        made: list[list[Slice]] = [[] for _ in range(number)]
        for one in slices:
            min(made, key=_seconds).append(one)
        if max(map(_seconds, made)) <= _PART_S:
            return made
        number += 1


def _seconds(part: list[Slice]) -> float:
    return sum(one.seconds for one in part)


def part_of(seed: int) -> list[Slice]:
    """The part that a seed chooses: as many consecutive seeds as there are parts choose all."""
    made = parts(record()["sampled"])
    return made[seed % len(made)]


def seed_of_contents(root: Path = ROOT) -> int:
    """A hash of the tracked files; of an export, which has no `.git`, of all but hidden ones."""
    if (root / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True
        )
        names = listed.stdout.decode().split("\0")
    else:
        names = [str(file.relative_to(root)) for file in root.rglob("*")]
    digest = hashlib.sha256()
    for name in sorted(names):
        made = any(
            p.startswith(".") or p in _MADE or p.endswith(".egg-info") for p in name.split("/")
        )
        if not made and (root / name).is_file():
            digest.update(f"{name}\0".encode() + (root / name).read_bytes())
    return int.from_bytes(digest.digest()[:4])


def keep(items: list[Any], seed: int) -> Iterable[Any]:
    """Of the tests marked `sampled`, those of the part."""
    by_file: dict[str, list[Any]] = {}
    for item in items:
        if tier_of(item) == "sampled":
            by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for one in part_of(seed):
        tests = by_file.get(one.file, [])
        yield from tests[
            one.index * len(tests) // one.count : (one.index + 1) * len(tests) // one.count
        ]


def main() -> int:
    """Print the arguments of pytest that run a part."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.sample", description=__doc__)
    parser.add_argument("--seed", type=int, help="default: from the contents of the tracked files")
    seed = parser.parse_args().seed
    seed = seed_of_contents() if seed is None else seed
    part, number = part_of(seed), len(parts(record()["sampled"]))
    print(
        f"part {seed % number + 1} of {number} of the tests marked `sampled` (SEED={seed}): "
        f"{len(part)} files, {_seconds(part) / 60:.0f} CPU minutes as recorded",
        file=sys.stderr,
    )
    print("\n".join(["-m", MARKED, f"--sample={seed}", *sorted({one.file for one in part})]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
