"""What `make test` runs, within which budgets, and which part of the rest is sampled."""

import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import sample
from tests.support.covering import COLLECTED, UNKNOWN
from tests.support.cpu_seconds import over_budget, record
from tools.structure import mutations

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.fast


def test_a_folder_that_is_slower_than_the_others_exceeds_its_budget():
    budgets = {"data": 40, "moe": 100, "optim": 60, ".": 20}
    seconds = {
        "tests/data/test_a.py::test_a": 30.0,
        "tests/moe/test_b.py::test_b[x]": 90.0,
        "tests/moe/test_b.py::test_b[y]": 10.0,
        "tests/optim/test_c.py::test_c": 55.0,
        "tests/test_d.py::test_d": 20.0,
    }
    assert list(over_budget(seconds, budgets)) == []
    twice_as_slow = {name: 2 * value for name, value in seconds.items()}
    assert list(over_budget(twice_as_slow, budgets)) == []
    seconds["tests/data/test_a.py::test_slow"] = 45.0
    (line,) = over_budget(seconds, budgets)
    assert line == (
        "tests/data used 75 CPU seconds: 35 more than its budget of 40. "
        "Its dearest: data/test_a.py::test_slow 45, data/test_a.py::test_a 30"
    )
    seconds["tests/new/test_e.py::test_e"] = 1.0
    assert "tests/new used 1 CPU seconds and has no budget" in "\n".join(
        over_budget(seconds, budgets)
    )


SLOW = """
import subprocess, sys, pytest

def test_quick():
    pass

def test_{name}():
    loop = "import time\\nwhile time.process_time() < {seconds}: pass"
    subprocess.run([sys.executable, "-c", loop], check=True)
"""
CONFTEST = """
from pathlib import Path
from tests.support import cpu_seconds

cpu_seconds.TOLERATED_S = 0.3

def pytest_configure(config):
    for name in ("full", "sampled"):
        config.addinivalue_line("markers", f"{name}: as ours")
    file = Path(__file__).with_name("cpu_seconds.json")
    config.pluginmanager.register(cpu_seconds.CpuSeconds(config, file))
"""


@pytest.mark.parametrize(("seconds", "code"), [(0.1, 0), (2.5, 1)])
def test_a_run_over_budget_fails_and_says_by_how_much(tmp_path, seconds, code):
    """Over the workers of xdist, the processes that a test starts included."""
    tests, used = tmp_path / "tests", {"first": 0.1, "second": 0.1, "other": seconds}
    for name, value in used.items():
        (tests / name).mkdir(parents=True)
        (tests / name / f"test_{name}.py").write_text(SLOW.format(name=name, seconds=value))
    (tests / "conftest.py").write_text(CONFTEST)
    (tests / "cpu_seconds.json").write_text(json.dumps({"budgets": dict.fromkeys(used, 0.5)}))
    words = ["-p", "no:cacheprovider", "-n", "2", "-m", "not full and not sampled", "tests"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == code, run.stdout
    said = re.findall(r"OVER BUDGET: tests/(\w+) used \d CPU seconds.*: \d more than", run.stdout)
    assert said == ["other"] * code, run.stdout


@given(
    st.dictionaries(st.text("abc", min_size=1), st.floats(0.01, 5_000), min_size=1),
    st.integers(0, 2**32),
)
def test_consecutive_seeds_run_all_tests_once(seconds, seed):
    parts = sample.parts(seconds)
    chosen = [parts[(seed + i) % len(parts)] for i in range(len(parts))]
    slices = [(one.file, one.index) for part in chosen for one in part]
    assert len(slices) == len(set(slices))
    assert {file for file, _ in slices} == set(seconds)
    for file in seconds:
        counts = {one.count for part in chosen for one in part if one.file == file}
        assert [n for _, n in sorted(s for s in slices if s[0] == file)] == list(range(*counts))
    most = max(sum(one.seconds for one in part) for part in parts)
    assert most <= sample.MINUTES * 60 * sample.WORKERS


class Item:
    """A collected test, as much of it as a part looks at."""

    def __init__(self, nodeid, tiers):
        self.nodeid, self.tiers = nodeid, tiers

    def get_closest_marker(self, name):
        return self if name in self.tiers else None


def test_all_parts_have_each_sampled_test_once(monkeypatch):
    seconds = {"tests/a.py": 1_000.0, "tests/b.py": 10.0, "tests/c.py": 2_000.0}
    monkeypatch.setattr(sample, "record", lambda: {"sampled": seconds})
    tiers = [(), ("sampled",), ("full",), ("sampled", "full")]
    items = [Item(f"{file}::test[{i}]", tiers[i % 4]) for file in seconds for i in range(9)]
    parts = len(sample.parts(seconds))
    kept = [item.nodeid for seed in range(7, 7 + parts) for item in sample.keep(items, seed)]
    assert sorted(kept) == sorted(item.nodeid for item in items if item.tiers == ("sampled",))


def test_a_part_fits_its_minutes():
    seconds = record()["sampled"]
    parts = sample.parts(seconds)
    assert sum(one.seconds for part in parts for one in part) == pytest.approx(
        sum(seconds.values())
    )
    for part in parts:
        assert sum(one.seconds for one in part) <= sample.MINUTES * 60 * sample.WORKERS


def test_the_seed_is_that_of_the_contents(tmp_path):
    export = tmp_path / "export"
    (export / "tests").mkdir(parents=True)
    (export / "tests" / "test_a.py").write_text("a")
    (export / "README.md").write_text("b")
    seed = sample.seed_of_contents(export)
    (export / "tests" / "__pycache__").mkdir()
    (export / "tests" / "__pycache__" / "test_a.pyc").write_text("c")
    (export / ".cache").mkdir()
    (export / ".cache" / "file").write_text("d")
    assert sample.seed_of_contents(export) == seed
    subprocess.run(["git", "init", "--quiet"], cwd=export, check=True)
    subprocess.run(["git", "add", "README.md", "tests/test_a.py"], cwd=export, check=True)
    (export / "untracked").write_text("e")
    assert sample.seed_of_contents(export) == seed
    (export / "README.md").write_text("f")
    assert sample.seed_of_contents(export) != seed


# -- of the tests that this run has collected ------------------------------------------------------


def test_each_file_with_sampled_tests_has_a_record(pytestconfig):
    collected = pytestconfig.stash[COLLECTED]
    files = {name.partition("::")[0] for name, tier in collected.items() if tier == "sampled"}
    assert sorted(files - set(record()["sampled"])) == [], "run `make test-record` for these"


def claims():
    """(what a row of docs/notes/verification.md claims, its tests' files and folders, its tier)."""
    for line in (ROOT / "docs/notes/verification.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and "`tests/" in cells[1]:
            names = re.findall("`([^`]+)`", cells[1])
            for i, name in enumerate(names):  # a file after one of the same folder
                names[i] = name if "/" in name else names[i - 1].rpartition("/")[0] + "/" + name
            yield cells[0], names, cells[2]


@pytest.mark.parametrize(
    ("claim", "names", "tier"), [pytest.param(*c, id=c[0][:40]) for c in claims()]
)
def test_a_claim_has_tests_of_its_tier(claim, names, tier, pytestconfig):
    assert tier in ("default", "points", "sampled", "full", "a GPU")
    collected, tests = pytestconfig.stash[COLLECTED], []
    for name in names:
        pattern = f"{name}*" if "*" in name else f"{name}[:/]*"
        own = [own for test, own in collected.items() if fnmatch.fnmatch(test, pattern)]
        if not own:
            assert list(ROOT.glob(name)), f"there is no {name}"
            pytest.skip("its tests were not collected")
        tests += own
    if tier in ("points", "a GPU"):
        assert "default" in tests, "`make test` has no test of it"
    elif tier == "default":
        assert set(tests) == {"default"}, "`make test` has some of its tests alone"
    else:
        assert tier in tests


def test_each_default_case_exists(pytestconfig):
    """A case that `default_cases` names, of the tests whose file was collected."""
    assert pytestconfig.stash[UNKNOWN] == []


def test_each_mutation_has_one_place_and_one_test():
    assert list(mutations.problems(ROOT, mutations.ALL)) == []


def test_make_test_runs_the_tests_that_catch_mutations(pytestconfig):
    """Of the mutations whose tests' files were collected; where there is one, it is found."""
    collected = pytestconfig.stash[COLLECTED]
    functions = {name.rpartition("::")[2].partition("[")[0] for name in collected}
    known = [m for m in mutations.ALL if m.test.partition("[")[0] in functions]
    default = [name for name, tier in collected.items() if tier == "default"]
    assert list(mutations.not_by_default(default, known)) == []
