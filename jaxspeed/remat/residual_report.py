"""Residual report: what each unit saves for its backward pass, name by name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.config.remat import Recompute
from jaxspeed.placement.show import bytes_text, scaled_text
from jaxspeed.remat.budget import Choice, Costs
from jaxspeed.remat.resolve import ATTENTION, chosen, costs_of, every_of
from jaxspeed.remat.unit_jaxprs import Member

Place = Literal["device", "host", "made again"]
_WHERE = {"device": "on the device", "host": "in host memory", "made again": "made again"}


@dataclass(frozen=True)
class ResidualReport:
    """Of one device and micro-batch, from the traced loss.

    Attributes:
      inputs: bytes of what units are handed.
      inputs_at: where these wait.
      names: {activation's name: (its bytes in all units, where it is kept)}.
      again: flops that the backward pass does a second time.
      budget: of bytes, where the config gives one.
    """

    inputs: int
    inputs_at: Place
    names: dict[str, tuple[int, Place]]
    again: int
    budget: int | None

    @property
    def on_device(self) -> int:
        return sum(size for size, place in self._rows() if place == "device")

    def _rows(self) -> Iterator[tuple[int, Place]]:
        yield self.inputs, self.inputs_at
        yield from self.names.values()

    def __rich__(self) -> Group:
        table = Table(
            title="kept between a unit's two passes, per device and micro-batch",
            title_justify="left",
            box=None,
            min_width=60,
        )
        table.add_column("named")
        table.add_column("bytes", justify="right")
        table.add_column("kept")
        table.add_row("(inputs)", bytes_text(self.inputs), _WHERE[self.inputs_at])
        for name, (size, place) in self.names.items():
            table.add_row(name, bytes_text(size), _WHERE[place])
        budget = f", of a budget of {bytes_text(self.budget)}" if self.budget is not None else ""
        held = f"{bytes_text(self.on_device)} kept on the device{budget}"
        again = f"{scaled_text(self.again, 'flop')} are done again"
        return Group(table, Text(f"{held}; {again} (traced loss)"))

    def figures(self) -> dict[str, Any]:
        """All of it as plain numbers and words."""
        return {
            "inputs": {"bytes": self.inputs, "kept": self.inputs_at},
            "names": {n: {"bytes": size, "kept": at} for n, (size, at) in self.names.items()},
            "bytes_on_device": self.on_device,
            "flops_again": self.again,
            "budget": self.budget,
        }


def kept_of(
    words: Recompute, members: Sequence[Member], ways: int, kind: str
) -> ResidualReport | None:
    """What units keep by these words; None where that has no names to tell it by (`dots`)."""
    if not words or words.policy == "dots" or not members:
        return None
    costs = costs_of(members, ways, kind)
    saved, moved = _choice(words, costs)
    resting: Place = "host" if words.on_host else "device"

    def place(name: str) -> Place:
        return "host" if name in moved else resting if name in saved else "made again"

    return ResidualReport(
        costs.input_bytes // every_of(words, members),
        resting,
        {name: (size, place(name)) for name, size in costs.bytes.items()},
        costs.again(saved | moved),
        words.budget,
    )


def _choice(words: Recompute, costs: Costs) -> Choice:
    none: frozenset[str] = frozenset()
    if words.budget is not None:
        return chosen(words.budget, costs)
    if words.policy == "attention":
        return frozenset([ATTENTION]), none
    return frozenset(words.save), frozenset(words.offload)
