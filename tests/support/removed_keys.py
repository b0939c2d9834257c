"""A config key's effect is removed, and the test that is paired with the key has to fail.

As a pytest plugin (`-p tests.support.removed_keys`) it runs each collected test once as it is, and
once for each of its keys with every config loaded as if the file did not have the key. Such a run
passes if the test fails. With `--find` a test's keys are all that its configs set.

    python -m tests.support.removed_keys [KEY...]                        # the pairs of the list
    python -m tests.support.removed_keys [KEY...] --find TEST... --write # pairs for missing keys

The list `tests/config/honoured_keys.txt` is written by it: of each honoured key the test that
failed without it.
"""

import argparse
import contextlib
import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "config" / "honoured_keys.txt"

# Keys that have no default, or none with which anything runs: what they are instead.
INSTEAD: dict[str, Any] = {
    "optimizer.type": "Adagrad",
    "optimizer.groups.pattern": "**",
    "scheduler.type": "LRRangeTest",
    "objective.type": "next_token",
    "scheduler.params.total_num_steps": 10**6,
    "scheduler.params.cycle_min_lr": 0.0,
    "scheduler.params.cycle_max_lr": 0.0,
}

# Keys whose effect is that something is no error.
ALLOWING = {"elasticity.ignore_non_elastic_batch_info"}


def pairs() -> dict[str, str]:
    """The list: {key: the test that fails without its effect}."""
    lines = LIST.read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines)  # type: ignore[misc]


# -- a config without one of its keys --------------------------------------------------------------


def removed(node: Any, parts: list[str], instead: Any) -> bool:
    """Remove a key, in place, also from each item of a list; whether it was there."""
    if isinstance(node, list):
        return sum(removed(item, parts, instead) for item in node) > 0
    if not isinstance(node, dict) or parts[0] not in node:
        return False
    if len(parts) > 1:
        return removed(node[parts[0]], parts[1:], instead)
    if instead is None:
        del node[parts[0]]
    else:
        node[parts[0]] = instead
    return True


@contextlib.contextmanager
def loaded_without(key: str | None, found: set[str]) -> Iterator[None]:
    """Load configs without this key; `found` gets the keys that they set.

    What only the key's absence makes an error is none: a test has to see that the effect is gone.
    """
    from jaxspeed.config import load
    from jaxspeed.config.tree import declared, given_leaves

    examine, validated, as_written = load.examine, load._validated, load._without_comments

    def without(tree: Any) -> Any:
        tree = copy.deepcopy(tree)
        for path, _ in given_leaves(tree):
            if each := declared(path):
                found.add(each[0])
        if key is not None:
            removed(tree, key.split("."), INSTEAD.get(key))
        return tree

    def examined(*args: Any, **options: Any) -> Any:
        load._validated, load._without_comments = validated, as_written
        given = examine(*args, **options)
        load._validated = lambda tree: validated(without(tree))
        load._without_comments = lambda given: without(as_written(given))
        try:
            changed = examine(*args, **options)
        finally:
            load._validated, load._without_comments = validated, as_written
        keeps = given.problems or key in ALLOWING
        return changed if keeps else replace(changed, problems=())

    users = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(("jaxspeed", "tests")) and getattr(module, "examine", None) is examine
    ]
    for module in users:
        module.examine = examined
    try:
        yield
    finally:
        for module in users:
            module.examine = examine


# -- the plugin ------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keys", default="", help="the keys to remove; by default those of the list")
    parser.addoption("--find", action="store_true", help="remove what the test's configs set")
    parser.addoption("--removals", help="a file for the outcomes, a line of JSON each")


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import Phase, settings

    # A failing example need not be the smallest, nor be remembered.
    settings.register_profile(
        "removed", settings(), database=None, phases=(Phase.explicit, Phase.generate)
    )
    settings.load_profile("removed")


def _keys_of(item: pytest.Item, found: set[str]) -> list[str]:
    wanted = set(filter(None, item.config.option.keys.split(",")))
    if item.config.option.find:
        from jaxspeed.config.tree import VOCABULARY

        keys = [key for key in VOCABULARY if key in found and VOCABULARY[key].verdict == "honoured"]
    else:
        keys = [key for key, test in pairs().items() if test == item.nodeid]
    return [key for key in keys if not wanted or key in wanted]


def _forget() -> None:
    """What tests remember between each other is of configs with the key."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def _run(item: pytest.Item, key: str | None) -> tuple[list[Any], set[str], float]:
    item._initrequest()  # type: ignore[attr-defined]
    _forget()
    found: set[str] = set()
    start = time.monotonic()
    with loaded_without(key, found):
        # No next test: shared fixtures are made anew, without the key.
        reports = runtestprotocol(item, log=False, nextitem=None)
    _forget()
    return reports, found, time.monotonic() - start


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports, found, _ = _run(item, None)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    if all(report.outcome == "passed" for report in reports):
        for key in _keys_of(item, found):
            _report_removal(item, key)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _report_removal(item: pytest.Item, key: str) -> None:
    reports, found, seconds = _run(item, key)
    failed = [report for report in reports if report.outcome == "failed"]
    why = failed[0].longreprtext.strip().splitlines() if failed else []
    errors = [line[1:].strip() for line in why if line.startswith("E ")] or why[-1:]
    seen = bool(failed) and key in found and "marked `fast`" not in " ".join(why)
    if path := item.config.option.removals:
        row = {"key": key, "test": item.nodeid, "seen": seen, "seconds": round(seconds, 1)}
        with open(path, "a") as file:
            file.write(json.dumps(row | {"error": " ".join(errors)[:300]}) + "\n")
    report = next(r for r in reports if r.when == "call" or r.outcome != "passed")
    report.nodeid = f"{item.nodeid} without {key}"
    report.when = "call"
    report.outcome = "passed" if seen else "failed"
    report.longrepr = None if seen else f"{item.nodeid} does not fail without {key}"
    item.ihook.pytest_runtest_logreport(report=report)


# -- the command -----------------------------------------------------------------------------------


def run_pytest(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.removed_keys"]
    command += ["-p", "no:cacheprovider", "-m", "full or not full", *arguments]
    return subprocess.run(command, cwd=ROOT, env=dict(os.environ), text=True, **options)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("keys", nargs="*", metavar="KEY", help="by default all")
    parser.add_argument("--find", nargs="+", metavar="TEST", help="tests that are not in the list")
    parser.add_argument("--write", action="store_true", help="write the list of what was seen")
    given = parser.parse_args()
    known = pairs()
    if given.find:
        arguments = ["--find", *given.find]
    else:
        arguments = sorted({known[key] for key in given.keys or known})
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.jsonl"
        keys = f"--keys={','.join(given.keys)}"
        code = run_pytest([keys, f"--removals={outcomes}", *arguments]).returncode
        rows = [json.loads(line) for line in outcomes.read_text().splitlines()]
    print(f"{sum(row['seen'] for row in rows)} of {len(rows)} removals made their test fail")
    return write_list(known, rows) if given.write else code


def write_list(known: dict[str, str], rows: list[dict[str, Any]]) -> int:
    """Write the list: pairs that held, and tests that were found for other keys; 1 if some lack."""
    from jaxspeed.config.tree import VOCABULARY

    blind = {(row["key"], row["test"]) for row in rows if not row["seen"]}
    found = {row["key"]: row["test"] for row in rows if row["seen"]}
    found |= {key: test for key, test in known.items() if (key, test) not in blind}
    honoured = [path for path, key in VOCABULARY.items() if key.verdict == "honoured"]
    lines = [f"{key} {found[key]}\n" for key in honoured if key in found]
    LIST.write_text("".join(lines))
    missing = [key for key in honoured if key not in found]
    print(
        f"{len(lines)} of {len(honoured)} honoured keys have a test; missing: {missing or 'none'}"
    )
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
