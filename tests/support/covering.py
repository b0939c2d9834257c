"""Which cases of a grid `make test` runs; `make test-full` runs all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


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
