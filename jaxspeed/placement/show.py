"""The placement table as text, and the formats of bytes and seconds in all reports."""

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxspeed.communication import dtype_text
from jaxspeed.placement.codec import PLAIN
from jaxspeed.placement.owned import OwnedStack
from jaxspeed.placement.rows import ROLES, Placement, Row
from jaxspeed.placement.specs import entry_axes

MOST_ROWS = 40  # a longer table shows its largest leaves


def scaled_text(value: float, unit: str) -> str:
    """1536 bytes as '1.54 kB', in powers of 1000 as memory is sold and quoted."""
    prefixes = iter(("", "k", "M", "G", "T", "P"))
    prefix = next(prefixes)
    while abs(value) >= 999.5 and prefix != "P":
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.3g} {prefix}{unit}"


def bytes_text(count: float) -> str:
    return scaled_text(count, "B")


def seconds_text(seconds: float) -> str:
    """`216 µs`, `12.3 ms`, `1.24 s`, `3.4 min`."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}"
    if 0 < seconds < 1e-9:
        return "<1 ns"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def mesh_text(axis_sizes: Mapping[str, int]) -> str:
    """`data 4, tensor 2`: the axes that shard anything."""
    axes = [f"{axis} {size}" for axis, size in axis_sizes.items() if size > 1]
    return ", ".join(axes) or "one device"


def as_text(shown: Any, width: int) -> str:
    """Render with Rich, without colours."""
    out = io.StringIO()
    Console(file=out, width=width).print(shown)
    return out.getvalue()


def titled(title: str, *heads: str, **look: Any) -> Table:
    """A table without lines; a head with a leading `>` is of a column of numbers."""
    table = Table(title=title, title_justify="left", box=None, **look)
    for head in heads:
        if head.startswith(">"):
            table.add_column(head[1:], justify="right", no_wrap=True)
        else:
            table.add_column(head, overflow="fold")
    return table


def together(*parts: Any) -> Group:
    """Stack several Rich renderables."""
    return Group(*parts)


def totals(
    stage: int,
    mesh_axes: Mapping[str, int],
    roles: Mapping[str, tuple[int, int]],
    in_host: Mapping[str, int] = MappingProxyType({}),
    on_disk: Mapping[str, int] = MappingProxyType({}),
) -> Table:
    """Bytes per role: in total, per device, and in host memory and on a disk per device if any."""
    elsewhere = {"in host memory": in_host, "on disk": on_disk}
    shown_places = {name: places for name, places in elsewhere.items() if places}
    rows = {
        role: (*both, *(places.get(role, 0) for places in shown_places.values()))
        for role, both in roles.items()
    }
    rows["sum"] = tuple(map(sum, zip(*rows.values(), strict=True)))
    numbers = (f">{name}" for name in ("total", "per device", *shown_places))
    shown = titled(f"ZeRO stage {stage} on {mesh_text(mesh_axes)}", "role", *numbers)
    for role, counts in rows.items():
        cells = map(bytes_text, counts)
        shown.add_row(role, *cells, style="bold" if role == "sum" else None)
    return shown


def leaves(rows: Sequence[Row]) -> Group:
    """One line per parameter, only of the largest if there are many.

    Roles with equal placements everywhere share a column, a role without any has none, and a note
    that several parameters share is printed once, below.
    """
    columns: dict[tuple[str, ...], str] = {}
    for role in ROLES:
        cells = tuple(_cell(getattr(row, role)) for row in rows)
        if set(cells) != {"-"}:
            columns[cells] = f"{columns[cells]}, {role}" if cells in columns else role
    shared = [note for note, n in Counter(row.note for row in rows).items() if note and n > 1]
    marks = {note: f"({i})" for i, note in enumerate(shared, 1)}
    shown = Table(box=None)
    shown.add_column("parameter", overflow="fold")
    for name in ("shape", *columns.values(), ""):
        shown.add_column(name, overflow="fold")
    largest = sorted(rows, key=lambda row: -math.prod(row.leaf.shape))[:MOST_ROWS]
    listed = {row.path for row in largest}
    for i, row in enumerate(rows):
        if row.path in listed:
            shape = "x".join(map(str, row.leaf.shape))
            note = marks.get(row.note, row.note)
            shown.add_row(row.path, shape, *(cells[i] for cells in columns), note)
    below = [f"{mark} {note}" for note, mark in marks.items()]
    left = len(rows) - len(largest)
    if left:
        below.append(f"and {left} smaller parameters")
    return Group(shown, *(Text(f" {line}") for line in below))


def owned_matrices(stacks: Sequence[OwnedStack]) -> Table:
    """One line per stack of matrices that the optimizer computes entire."""
    heads = "matrices of the optimizer", "of", "computed", ">per device", ">sent", ">returned"
    shown = titled("", *heads)
    for stack in stacks:
        first, *others = stack.layouts
        more = f" and {len(others)} more" if others else ""
        place = f"owned over {', '.join(stack.owners)}"
        if stack.everywhere:
            place = "everywhere" if stack.owners else "where they are stored"
        shape = "x".join(map(str, stack.view.matrix))
        cells = place, str(stack.share), *map(bytes_text, stack.sent)
        shown.add_row(f"{stack.count} of {shape}", first + more, *cells)
    return shown


def other_state(leaves: Sequence[tuple[str, Sequence[int], Placement, int]]) -> Table:
    """One line per leaf of the optimizer's state that has not its parameter's shape."""
    shown = titled("", "optimizer state of its own shape", "shape", "opt", ">bytes per device")
    largest = sorted(leaves, key=lambda leaf: -leaf[-1])[:MOST_ROWS]
    for path, shape, placement, count in largest:
        shown.add_row(path, "x".join(map(str, shape)), _cell(placement), bytes_text(count))
    if left := len(leaves) - len(largest):
        rest = sum(leaf[-1] for leaf in leaves) - sum(leaf[-1] for leaf in largest)
        shown.add_row(f"and {left} smaller", "", "", bytes_text(rest))
    return shown


def _cell(placement: Placement | None) -> str:
    if placement is None:
        return "-"
    axes = [
        f"{'+'.join(entry_axes(entry))}@{dim}" for dim, entry in enumerate(placement.spec) if entry
    ]
    memory = "" if placement.memory_kind == "device" else f" {placement.memory_kind}"
    memory = " disk" if placement.disk else memory
    codec = "" if placement.codec == PLAIN else f"{placement.codec.name} of "
    dtype = f"{codec}{dtype_text(placement.dtype.name)}"
    return f"{dtype} {','.join(axes) or 'replicated'}{memory}"
