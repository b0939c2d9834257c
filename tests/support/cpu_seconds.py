"""CPU seconds of each test, and each folder's budget of them.

A test counts with the processes that it starts, and with the shared fixtures that it is the first
to need. `tests/cpu_seconds.json` has, for each folder, the budget of its tests in `make test`, and
for each file the seconds of its `sampled` tests, by which `tests.support.sample` makes parts.
"""

import collections
import functools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
RECORD = TESTS / "cpu_seconds.json"
# Equal runs differ, and a folder of few seconds by more than one of many.
TOLERANCE, TOLERATED_S = 1.25, 5.0
DEFAULT = "not full and not sampled"  # what `make test` selects


@functools.cache
def record(file: Path = RECORD) -> dict[str, dict[str, float]]:
    """`budgets` by folder, `sampled` by file."""
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def of_tree() -> float:
    """What this process, its descendants, and those that they waited for have used."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # A program's name, in parentheses, may hold anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        processes[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    if not processes:  # no Linux: only those that ended
        return sum(os.times()[:4])
    ticks = 0
    for pid, (_, own) in processes.items():
        while pid in processes and pid != os.getpid():
            pid = processes[pid][0]
        ticks += own if pid == os.getpid() else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def folder_of(nodeid: str) -> str:
    """The folder below `tests` that has a test, "." for the files beside the folders."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "."


def over_budget(seconds: Mapping[str, float], budgets: Mapping[str, float]) -> Iterator[str]:
    """A line for each folder that used too much, with its dearest tests.

    A slower machine, or a busy one, is no reason: what all folders need more than their budgets,
    by the median, is granted to each.
    """
    used: dict[str, float] = collections.Counter()
    for nodeid, value in seconds.items():
        used[folder_of(nodeid)] += value
    ratios = [used[folder] / budgets[folder] for folder in used if folder in budgets]
    slower = max(1.0, statistics.median(ratios)) if ratios else 1.0
    for folder, value in sorted(used.items()):
        if folder not in budgets:
            yield f"tests/{folder} used {value:.0f} CPU seconds and has no budget in {RECORD.name}"
        elif value > TOLERANCE * slower * budgets[folder] + TOLERATED_S:
            more = value / slower - budgets[folder]
            machine = f" on a machine that needs {slower:.2f} of all budgets" if slower > 1 else ""
            dearest = sorted(
                (n for n in seconds if folder_of(n) == folder), key=seconds.__getitem__
            )
            yield (
                f"tests/{folder} used {value:.0f} CPU seconds{machine}: {more:.0f} more than its "
                f"budget of {budgets[folder]:g}. Its dearest: "
                + ", ".join(f"{n.partition('/')[2]} {seconds[n]:.0f}" for n in dearest[:-4:-1])
            )


class CpuSeconds:
    """The plugin; in a worker of xdist it measures, in the session that starts them it sums up."""

    def __init__(self, config: pytest.Config, budgets: Path = RECORD) -> None:
        self.file: str | None = config.getoption("cpu_seconds", None)
        # A part of the suite, or of a folder, has no budget.
        whole = [Path(a).resolve() for a in config.args] == [budgets.resolve().parent]
        self.has_budget = whole and config.option.markexpr == DEFAULT
        self.budgets = budgets
        self.seconds: dict[str, float] = {}
        self.problems: list[str] = []
        self._before = 0.0

    def pytest_collection_finish(self) -> None:
        self._before = of_tree()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        if call.when == "teardown":
            now = of_tree()
            # A process that ended unwaited takes its seconds along.
            report.cpu_seconds, self._before = max(now - self._before, 0.0), now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.seconds[report.nodeid] = report.cpu_seconds  # type: ignore[attr-defined]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        if self.file:
            Path(self.file).write_text(json.dumps(self.seconds, indent=0))
        if self.has_budget and session.exitstatus == pytest.ExitCode.OK:
            self.problems = list(over_budget(self.seconds, record(self.budgets)["budgets"]))
            if self.problems:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        total = sum(self.seconds.values())
        terminalreporter.line(f"{total / 60:.1f} CPU minutes")
        for problem in self.problems:
            terminalreporter.line(f"OVER BUDGET: {problem}", red=True)


def update(measured: Path) -> None:
    """Take over what `--cpu-seconds` wrote in a run of tests marked `sampled`, of entire files."""
    found: dict[str, float] = collections.Counter()
    for nodeid, value in json.loads(measured.read_text()).items():
        found[nodeid.partition("::")[0]] += value
    kept = {file: s for file, s in record()["sampled"].items() if (TESTS.parent / file).exists()}
    merged = kept | {file: max(round(value, 1), 0.1) for file, value in found.items()}
    new = record() | {"sampled": dict(sorted(merged.items()))}
    RECORD.write_text(json.dumps(new, indent=1) + "\n")


if __name__ == "__main__":
    update(Path(sys.argv[1]))
