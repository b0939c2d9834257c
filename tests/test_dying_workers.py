"""A worker of the tests that dies: its test is run again, once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOOKS = "pytest_handlecrashitem, pytest_report_teststatus, pytest_terminal_summary"
TESTS = """
import os, pathlib, pytest

@pytest.mark.parametrize("i", range(4))
def test_{name}(i):
    deaths = pathlib.Path("deaths")
    count = int(deaths.read_text()) if deaths.exists() else 0
    if i == 2 and count < {deaths}:
        deaths.write_text(str(count + 1))
        os._exit(1)
"""


@pytest.mark.default_cases("2-1-FAILED test_first.py::test_first[2]")
@pytest.mark.parametrize(
    ("deaths", "code", "said"),
    [(1, 0, "8 passed, 1 worker died"), (2, 1, "FAILED test_first.py::test_first[2]")],
)
def test_the_first_death_is_named_and_the_second_fails(tmp_path, deaths, code, said):
    (tmp_path / "conftest.py").write_text(f"from tests.conftest import {HOOKS}\n")
    for name, count in (("first", deaths), ("other", 0)):
        (tmp_path / f"test_{name}.py").write_text(TESTS.format(name=name, deaths=count))
    words = ["-n", "2", "--max-worker-restart", "1", "--dist", "loadfile", "--no-loadscope-reorder"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == code, run.stdout
    assert "WORKER DIED in test_first.py::test_first[2], which was run again" in run.stdout
    assert said in run.stdout
