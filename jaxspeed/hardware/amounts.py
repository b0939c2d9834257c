"""Amounts as people write them: `80 GB`, `95.7 GiB`, `989.5 TFLOP/s`."""

import re
from typing import Any

_PREFIXES = {
    "": 1,
    **{prefix: 1000**power for power, prefix in enumerate("kMGTP", 1)},
    **{f"{prefix}i": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kMGTPK]i?)?([A-Za-z/]*)\s*")


def amount(written: Any, unit: str) -> float | None:
    """The number of an amount in this unit, which may be left out; None if it is none."""
    if isinstance(written, bool):
        return None
    if isinstance(written, int | float):
        return float(written)
    found = _FORM.fullmatch(written) if isinstance(written, str) else None
    if found is None or found[3] not in ("", unit) or (found[2] or "") not in _PREFIXES:
        return None
    return float(found[1]) * _PREFIXES[found[2] or ""]
