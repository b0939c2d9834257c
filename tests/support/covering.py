"""Which cases of a grid, and how many examples, `make test` runs; `make test-full` runs all.

A case that is marked `sampled` is in a part of `make test-sample`, one marked `full` is not.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

is_full = False  # whether tests marked `full` are asked for; conftest.py sets it
# The tier of each collected test, before any are deselected; and the cases that
# `default_cases` names and no test has.
COLLECTED, UNKNOWN = pytest.StashKey[dict[str, str]](), pytest.StashKey[list[str]]()


def examples(few: int, many: int) -> int:
    """How many examples of a property are tried: `few`, and `many` where all tests run."""
    return many if is_full else few


def covering(cases: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test; those not in `default` are marked `full`."""
    cases = list(cases)
    unknown = [case for case in default if case not in cases]
    assert not unknown, f"not among the cases: {unknown}"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in default else pytest.mark.full,
        )
        for case in cases
    ]


def choose_default(items: Sequence[pytest.Item], stash: pytest.Stash) -> None:
    """Mark the cases that a test's `default_cases` does not choose as `sampled`.

    It has their ids, or `every=n` for the first of each n, or both.
    """
    left: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for item in items:
        chosen = item.get_closest_marker("default_cases")
        if chosen is None or item.get_closest_marker("full"):
            continue
        test, _, case = item.nodeid.partition("[")
        case, number, every = case[:-1], counts.get(test, 0), chosen.kwargs.get("every")
        counts[test] = number + 1
        left.setdefault(test, set(chosen.args)).discard(case)
        if case not in chosen.args and (every is None or number % every):
            item.add_marker(pytest.mark.sampled)
    stash[UNKNOWN] = [f"{test}[{case}]" for test, cases in left.items() for case in sorted(cases)]
    stash[COLLECTED] = {item.nodeid: tier_of(item) for item in items}


def tier_of(item: pytest.Item) -> str:
    """`default`, `sampled` or `full`."""
    return next((tier for tier in ("full", "sampled") if item.get_closest_marker(tier)), "default")
