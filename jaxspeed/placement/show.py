"""The placement table as people read it."""

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxspeed.placement.rows import ROLES, Placement, Row

MOST_ROWS = 40  # a larger table shows its largest leaves


def scaled_text(value: float, unit: str) -> str:
    """1536 bytes as '1.54 kB', in powers of 1000 as memory is sold and quoted."""
    prefixes = iter(("", "k", "M", "G", "T", "P"))
    prefix = next(prefixes)
    while abs(value) >= 999.5 and prefix != "P":
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.3g} {prefix}{unit}"


def bytes_text(count: float) -> str:
    return scaled_text(count, "B")


def as_text(shown: Any, width: int) -> str:
    """What Rich prints, without colours."""
    out = io.StringIO()
    Console(file=out, width=width).print(shown)
    return out.getvalue()


def together(*parts: Any) -> Group:
    """Several things that Rich prints, one under the other."""
    return Group(*parts)


def totals(
    stage: int,
    mesh_axes: Mapping[str, int],
    roles: Mapping[str, tuple[int, int]],
    in_host: Mapping[str, int] = MappingProxyType({}),
) -> Table:
    """Bytes by role: in all, in a device's own memory, and what it has in host memory if any."""
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh_axes.items()) or "one device"
    shown = Table(title=f"ZeRO stage {stage} on {axes}", title_justify="left", box=None)
    rows = {role: (*both, in_host.get(role, 0)) for role, both in roles.items()}
    rows["sum"] = tuple(map(sum, zip(*rows.values(), strict=True)))  # type: ignore[assignment]
    names = ("in all", "a device", *(["in host memory"] if in_host else []))
    shown.add_column("role", justify="left")
    for name in names:
        shown.add_column(name, justify="right")
    for role, counts in rows.items():
        cells = map(bytes_text, counts[: len(names)])
        shown.add_row(role, *cells, style="bold" if role == "sum" else None)
    return shown


def leaves(rows: Sequence[Row]) -> Group:
    """A line a parameter, of the largest if there are many.

    Roles that live alike everywhere share a column, one that is nowhere has none, and a note that
    several parameters have is told once, below.
    """
    columns: dict[tuple[str, ...], str] = {}
    for role in ROLES:
        cells = tuple(_cell(getattr(row, role)) for row in rows)
        if set(cells) != {"-"}:
            columns[cells] = f"{columns[cells]}, {role}" if cells in columns else role
    often = [note for note, n in Counter(row.note for row in rows).items() if note and n > 1]
    marks = {note: f"({i})" for i, note in enumerate(often, 1)}
    shown = Table(box=None)
    shown.add_column("parameter", overflow="fold")
    for name in ("shape", *columns.values(), ""):
        shown.add_column(name, overflow="fold")
    largest = sorted(rows, key=lambda row: -math.prod(row.leaf.shape))[:MOST_ROWS]
    kept = {row.path for row in largest}
    for i, row in enumerate(rows):
        if row.path in kept:
            shape = "x".join(map(str, row.leaf.shape))
            note = marks.get(row.note, row.note)
            shown.add_row(row.path, shape, *(cells[i] for cells in columns), note)
    below = [f"{mark} {note}" for note, mark in marks.items()]
    left = len(rows) - len(largest)
    if left:
        below.append(f"and {left} smaller parameters")
    return Group(shown, *(Text(f" {line}") for line in below))


def _cell(placement: Placement | None) -> str:
    if placement is None:
        return "-"
    cuts = [
        f"{'+'.join((entry,) if isinstance(entry, str) else entry)}@{dim}"
        for dim, entry in enumerate(placement.spec)
        if entry
    ]
    memory = "" if placement.memory_kind == "device" else f" {placement.memory_kind}"
    return f"{_short(placement.dtype.name)} {','.join(cuts) or 'whole'}{memory}"


def _short(dtype: str) -> str:
    """bfloat16 as bf16, float32 as f32, as compilers write them."""
    return dtype.replace("bfloat", "bf").replace("float", "f")
