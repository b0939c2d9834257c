"""The chips that a plan may be for: the table of hardware, and a file of the user's own over it."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.config.problems import did_you_mean
from jaxspeed.errors import ConfigError
from jaxspeed.hardware import Chip, read_chips
from jaxspeed.placement.show import bytes_text, scaled_text

__all__ = ["Chip", "chip_named", "chips_of", "speeds_table"]


def chips_of(hardware: str | Path | None = None) -> dict[str, Chip]:
    """All chips by name; a hardware file adds some, or says otherwise of one that is known."""
    own = read_chips(hardware) if hardware is not None else {}
    return {**read_chips(), **own}


def chip_named(name: str, chips: Mapping[str, Chip]) -> Chip:
    """ConfigError with the nearest name unless there is one."""
    if name.lower() in chips:
        return chips[name.lower()]
    if name in chips:
        return chips[name]
    # Of `a100` there are two sizes, and that is all that is missing.
    sizes = [each for each in chips if name and each.startswith(f"{name.lower()}-")]
    hint = f"It is one of {', '.join(sizes)}." if sizes else did_you_mean(name, chips)
    raise ConfigError(
        f'target: no chip is called "{name}". {hint}{" " if hint else ""}Known: '
        f"{', '.join(chips)}; --hardware FILE adds others"
    )


def speeds_table(chips: Mapping[str, Chip]) -> Group:
    """A row a chip."""
    table = Table(title="targets: figures of one device, links in one direction", box=None)
    table.title_justify = "left"
    table.add_column("chip", no_wrap=True)
    for column in ("memory", "bf16", "fp32", "its memory", "link", "outside", "host link", "host"):
        table.add_column(column, justify="right")
    table.add_column("compiles")
    for chip in chips.values():
        link = f"{chip.links} x " if chip.links > 1 else ""
        table.add_row(
            chip.name,
            bytes_text(chip.memory),
            scaled_text(chip.flops["bf16"], ""),
            scaled_text(chip.flops["fp32"], ""),
            f"{bytes_text(chip.bandwidth)}/s",
            f"{link}{bytes_text(chip.link)}/s",
            f"{bytes_text(chip.outside)}/s",
            f"{bytes_text(chip.host_link)}/s",
            bytes_text(chip.host_memory),
            "yes" if chip.compiles else "estimate only",
        )
    forms = Text(
        "a target is CHIP:COUNT, of TPUs CHIP:TORUS: cpu:8, h100:64, h100:64/4 (devices a node), "
        "v5e:4x4, v5p:4x4x8, 2x v5p:4x4x4 (slices). --json has the source of each figure"
    )
    return Group(table, Text(), forms)
