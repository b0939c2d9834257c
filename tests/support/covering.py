"""Which cases of a grid, and how many examples, `make test` runs; `make test-full` runs all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

is_full = False  # whether tests marked `full` are asked for; conftest.py sets it


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
