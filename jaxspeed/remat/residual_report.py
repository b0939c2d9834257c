"""Residual report: what each unit saves for its backward pass, name by name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group
from rich.text import Text

from jaxspeed.config.remat import Recompute
from jaxspeed.placement.show import bytes_text, scaled_text, titled
from jaxspeed.remat.budget import ActivationShards, Choice, RematCosts
from jaxspeed.remat.resolve import (
    ATTENTION,
    choice_within,
    input_share,
    remat_costs,
    units_together,
)
from jaxspeed.remat.unit_jaxprs import UnitJaxpr

Place = Literal["device", "host", "split", "recomputed"]
_WHERE = {
    "device": "device memory",
    "host": "host memory",
    "split": "host memory: {ratio:.0%}",
    "recomputed": "recomputed",
}


@dataclass(frozen=True)
class ResidualReport:
    """Residuals per device and micro-batch, from the traced loss.

    Attributes:
      inputs: bytes of the units' inputs.
      inputs_at: where these are stored.
      host_ratio: the share of a split activation that is in host memory.
      names: {activation's name: (its bytes in all units, where it is saved)}.
      recomputed_flops: of the backward pass.
      budget: in bytes, if the config sets one.
    """

    inputs: int
    inputs_at: Place
    names: dict[str, tuple[int, Place]]
    recomputed_flops: int
    budget: int | None
    host_ratio: float = 1.0

    @property
    def on_device(self) -> int:
        shares = {"device": 1.0, "split": 1 - self.host_ratio}
        return int(sum(shares.get(place, 0.0) * size for size, place in self._rows()))

    def _rows(self) -> Iterator[tuple[int, Place]]:
        yield self.inputs, self.inputs_at
        yield from self.names.values()

    def __rich__(self) -> Group:
        title = "residuals of the units, per device and micro-batch"
        table = titled(title, "name", ">bytes", "saved in", min_width=60)
        where = {place: text.format(ratio=self.host_ratio) for place, text in _WHERE.items()}
        table.add_row("(inputs)", bytes_text(self.inputs), where[self.inputs_at])
        for name, (size, place) in self.names.items():
            table.add_row(name, bytes_text(size), where[place])
        budget = f" of a budget of {bytes_text(self.budget)}" if self.budget is not None else ""
        saved = f"saved in device memory: {bytes_text(self.on_device)}{budget}"
        recomputed = f"recomputed: {scaled_text(self.recomputed_flops, 'flop')}"
        return Group(table, Text(f"{saved}; {recomputed} (traced loss)"))

    def figures(self) -> dict[str, Any]:
        """The report as plain numbers and strings."""
        return {
            "inputs": {"bytes": self.inputs, "kept": self.inputs_at},
            "names": {n: {"bytes": size, "kept": at} for n, (size, at) in self.names.items()},
            "bytes_on_device": self.on_device,
            "flops_again": self.recomputed_flops,
            "budget": self.budget,
            "host_ratio": self.host_ratio,
        }


def residual_report(
    config: Recompute, units: Sequence[UnitJaxpr], shards: ActivationShards, device_kind: str
) -> ResidualReport | None:
    """The residuals under the config; None without a policy, or if it has no names (`dots`)."""
    if not config or config.policy == "dots" or not units:
        return None
    costs = remat_costs(units, shards, device_kind)
    saved, offloaded = _choice(config, costs)
    ratio = config.host_ratio
    if config.budget is not None:
        ratio = input_share(config.budget, costs)
    storage: Place = "device" if not ratio else "host" if ratio == 1 else "split"

    def place(name: str) -> Place:
        return "host" if name in offloaded else storage if name in saved else "recomputed"

    return ResidualReport(
        costs.input_bytes // units_together(config, units),
        storage,
        {name: (size, place(name)) for name, size in costs.bytes.items()},
        costs.recomputed_flops(saved | offloaded),
        config.budget,
        ratio or 1.0,
    )


def _choice(config: Recompute, costs: RematCosts) -> Choice:
    none: frozenset[str] = frozenset()
    if config.budget is not None:
        return choice_within(config.budget, costs)
    if config.policy == "attention":
        return frozenset([ATTENTION]), none
    return frozenset(config.save), frozenset(config.offload)
