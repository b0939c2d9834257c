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
from tests.support.cpu_seconds import DEFAULT
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
    """Check that each text occurs once and `make test` has each test, without running tests."""
    found = list(problems(ROOT, ALL)) or list(not_by_default(_collected(ROOT, ALL), ALL))
    print("\n".join(found) if found else f"{len(ALL)} mutations, each text and test found")
    return bool(found)


def run(only: Sequence[str], workers: int) -> int:
    """Apply those whose name contains one of `only` (all by default); 1 if a test still passes."""
    chosen = [m for m in ALL if not only or any(part in m.name for part in only)]
    if found := list(problems(ROOT, chosen)):
        print("\n".join(found))
        return 1
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies = [_copy(Path(folder) / str(number)) for number in range(workers)]
        if not _all_pass(copies[0], {mutation.test for mutation in chosen}):
            return 1
        free, lock = list(copies), threading.Lock()

        def caught(mutation: Mutation) -> bool:
            with lock:
                copy = free.pop()
            is_caught = _fails(copy, mutation)
            with lock:
                free.append(copy)
                print("caught" if is_caught else "NOT CAUGHT", "|", mutation.name, flush=True)
            return is_caught

        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            results = list(pool.map(caught, chosen))
    print(f"{sum(results)} of {len(results)} caught")
    return not all(results)


def problems(root: Path, mutations: Iterable[Mutation]) -> Iterable[str]:
    """Texts that do not occur once, and tests that are not there, or not once."""
    sources = [file.read_text() for file in _python(root, PACKAGE)]
    tests = "\n".join(file.read_text() for file in _python(root, ["tests"]))
    for mutation in mutations:
        count = sum(source.count(mutation.old) for source in sources)
        if count != 1:
            yield f"{mutation.name}: found {count} times; it has to be in one place"
        defined = len(_definition(mutation.test).findall(tests))
        if defined != 1:
            yield f"{mutation.test}: {defined} tests have this name"


def not_by_default(names: Iterable[str], mutations: Iterable[Mutation]) -> Iterable[str]:
    """The mutations' tests that are not among these, which `make test` runs.

    Args:
        names: of tests, with their files ("tests/optim/test_muon.py::test_update[1]").
    """
    found = {name.rpartition("::")[2] for name in names}
    found |= {name.partition("[")[0] for name in found}
    yield from (f"{m.test}: `make test` does not run it" for m in mutations if m.test not in found)


def _collected(root: Path, mutations: Iterable[Mutation]) -> list[str]:
    files = sorted({str(file) for m in mutations for file in _defining(root, m.test)})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", DEFAULT, *files]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _python(root: Path, folders: Iterable[str]) -> list[Path]:
    found = (file for folder in folders for file in sorted((root / folder).rglob("*.py")))
    return [file for file in found if not file.parent.is_symlink()]


def _defining(root: Path, test: str) -> list[Path]:
    definition = _definition(test)
    return [file for file in _python(root, ["tests"]) if definition.search(file.read_text())]


def _definition(test: str) -> re.Pattern[str]:
    return re.compile(rf"^def {re.escape(test.partition('[')[0])}\(", re.MULTILINE)


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
        [*command, "-m", DEFAULT, *nodes],
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
