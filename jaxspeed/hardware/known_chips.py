"""Chips by name: the built-in hardware table and a user's `--hardware` file; the table as text."""

import re
from collections.abc import Mapping
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.errors import ConfigError
from jaxspeed.hardware.chip import Chip, read_chips
from jaxspeed.near_words import did_you_mean

__all__ = ["Chip", "chip_named", "chips_of", "speeds_table"]


def chips_of(hardware: str | Path | None = None) -> dict[str, Chip]:
    """All chips by name; a hardware file adds to the built-in ones or overrides them."""
    added = read_chips(hardware) if hardware is not None else {}
    return {**read_chips(), **added}


def chip_named(name: str, chips: Mapping[str, Chip]) -> Chip:
    """The chip of this name, or a ConfigError with the nearest names."""
    if name.lower() in chips:
        return chips[name.lower()]
    if name in chips:
        return chips[name]
    # `a100` lacks only the memory size.
    sizes = [chip_name for chip_name in chips if name and chip_name.startswith(f"{name.lower()}-")]
    counted = re.fullmatch(r"(.+)x(\d+)", name)
    if counted and counted[1].lower() in chips:
        sizes = [f"{counted[1].lower()}:{counted[2]}"]
    hint = f"It is one of {', '.join(sizes)}." if sizes else did_you_mean(name, chips)
    raise ConfigError(
        f'target: no chip is called "{name}". {hint}{" " if hint else ""}Known: '
        f"{', '.join(chips)}; --hardware FILE adds others"
    )


def speeds_table(chips: Mapping[str, Chip]) -> Group:
    """A table with a row per chip, within 80 columns."""
    title = "figures of one device; links in one direction, GB and GB/s"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("chip", no_wrap=True)
    for column in ("TFLOP/s\nbf16", "\nfp32", "memory\nGB", "\nGB/s", "links"):
        table.add_column(column, justify="right")
    for column in ("out-\nside", "host\nlink", "host\nGB", "a\nnode"):
        table.add_column(column, justify="right")
    for chip in chips.values():
        link = f"{chip.links} x " if chip.links > 1 else ""
        table.add_row(
            chip.name + ("" if chip.compiles else "*"),
            _number(chip.flops["bf16"], 1e12),
            _number(chip.flops["fp32"], 1e12),
            _number(chip.memory),
            _number(chip.bandwidth),
            link + _number(chip.link),
            _number(chip.outside),
            _number(chip.host_link),
            _number(chip.host_memory),
            str(chip.node) if chip.platform != "cpu" else "",
        )
    notes = [
        "* is estimated only: no compiler here supports it. --json has the source of each",
        "figure. Simulated cpu devices share the memory of the machine.",
        "",
        "A target is CHIP:COUNT, of TPUs CHIP:TORUS: cpu:8, h100:64, h100:64/4 (4 devices",
        "per node), v5e:4x4, v5p:4x4x8, 2x v5p:4x4x4 (2 slices). --hardware FILE adds chips.",
    ]
    return Group(table, Text(), Text("\n".join(notes)))


def _number(figure: float, unit: float = 1e9) -> str:
    return f"{figure / unit:.3g}" if figure < 1000 * unit else f"{figure / unit:.0f}"
