"""Mutation tests: apply each of `mutation_list.py` to a copy of the sources; a test must fail.

A mutation is named by a text that occurs once in the package, and its test by name, so that files
may move. The copies share the compilation cache of the test suite.
"""

import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support import compilation_cache
from tools.structure.mutation_list import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ["jaxspeed"]
COPIED = (*PACKAGE, "models", "tests", "configs", "docs", "benchmarks")
TESTS_FAILED = 1  # pytest's exit code; an error of import or collection has another


class Mutation(NamedTuple):
    """One change of the sources: `old` becomes `new`, and `test` must fail."""

    old: str
    new: str
    test: str  # its function's name, with its parameters in brackets where it has some

    @property
    def name(self) -> str:
        """The mutation's text, shortened."""
        return " ".join(self.old.split())[:60]


ALL = tuple(Mutation(*each) for each in MUTATIONS)


def check() -> int:
    """Check that each text occurs once and each test exists, without running tests."""
    problems = list(_problems(ROOT, ALL))
    print("\n".join(problems) if problems else f"{len(ALL)} mutations, each text and test found")
    return bool(problems)


def run(only: Sequence[str], workers: int) -> int:
    """Apply those whose name contains one of `only` (all by default); 1 if a test still passes."""
    chosen = [m for m in ALL if not only or any(part in m.name for part in only)]
    problems = list(_problems(ROOT, chosen))
    if problems:
        print("\n".join(problems))
        return 1
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies = [_copy(Path(folder) / str(number)) for number in range(workers)]
        if not _all_pass(copies[0], {mutation.test for mutation in chosen}):
            return 1
        free, lock = list(copies), threading.Lock()

        def caught(mutation: Mutation) -> bool:
            with lock:
                copy = free.pop()
            found = _fails(copy, mutation)
            with lock:
                free.append(copy)
                print("caught" if found else "NOT CAUGHT", "|", mutation.name, flush=True)
            return found

        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            results = list(pool.map(caught, chosen))
    print(f"{sum(results)} of {len(results)} caught")
    return not all(results)


def _problems(root: Path, mutations: Iterable[Mutation]) -> Iterable[str]:
    for mutation in mutations:
        places = [file for file in _python(root, PACKAGE) if mutation.old in file.read_text()]
        if len(places) != 1 or places[0].read_text().count(mutation.old) != 1:
            yield f"{mutation.name}: found in {len(places)} files; it has to be in one place"
        tests = _defining(root, mutation.test)
        if len(tests) != 1:
            yield f"{mutation.test}: {len(tests)} tests have this name"


def _python(root: Path, folders: Iterable[str]) -> list[Path]:
    found = (file for folder in folders for file in sorted((root / folder).rglob("*.py")))
    return [file for file in found if not file.parent.is_symlink()]


def _defining(root: Path, test: str) -> list[Path]:
    definition = re.compile(rf"^def {re.escape(test.split('[')[0])}\(", re.MULTILINE)
    return [file for file in _python(root, ["tests"]) if definition.search(file.read_text())]


def _copy(to: Path) -> Path:
    for name in COPIED:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, to)
    # Else `jaxspeed.models` would be that of the installed package.
    (to / "jaxspeed" / "models").symlink_to("../models")
    return to


def _pytest(copy: Path, tests: Iterable[str]) -> subprocess.CompletedProcess[str]:
    nodes = []
    for test in sorted(tests):
        (file,) = _defining(copy, test)
        nodes.append(f"{file.relative_to(copy)}::{test}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": os.environ.get(
            "JAX_COMPILATION_CACHE_DIR", str(compilation_cache.folder())
        ),
    }
    return subprocess.run(
        [*command, "-m", "full or not full", *nodes],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
    )


def _all_pass(copy: Path, tests: Iterable[str]) -> bool:
    """Whether the tests pass on unchanged sources: otherwise a failure proves nothing."""
    done = _pytest(copy, tests)
    if done.returncode:
        print(f"without any mutation:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def _fails(copy: Path, mutation: Mutation) -> bool:
    (file,) = [f for f in _python(copy, PACKAGE) if mutation.old in f.read_text()]
    original = file.read_text()
    file.write_text(original.replace(mutation.old, mutation.new))
    try:
        done = _pytest(copy, [mutation.test])
    finally:
        file.write_text(original)
    if done.returncode not in (0, TESTS_FAILED):
        print(f"{mutation.name}: the test did not run\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == TESTS_FAILED
