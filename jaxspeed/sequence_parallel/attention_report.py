"""How each attention of a loss runs over the axis `seq`, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.text import Text

from jaxspeed.errors import ConfigError
from jaxspeed.sequence_parallel.find_attention import LeftAlone

LEFT = "left to the compiler"


@dataclass(frozen=True)
class AttentionRun:
    """How the attention of some layers runs.

    Attributes:
      layers: how often a forward pass runs it; None if unknown.
      kind: with the size of its groups; `LEFT` if the compiler shards it.
      order: of the tokens over the devices: contiguous or zigzag.
      shapes: of queries and keys, as text.
    """

    layers: int | None
    kind: str
    order: str
    why: str
    shapes: str = ""

    def __str__(self) -> str:
        layers = "" if self.layers is None else f" ({self.layers} layer{'s'[: self.layers != 1]})"
        how = ", ".join(filter(None, (self.kind, self.order)))
        return f"attention{layers}: {how}: {self.why}"


@dataclass(frozen=True)
class AttentionReport:
    """The attentions of a loss over an axis `seq` of so many devices."""

    devices: int
    runs: tuple[AttentionRun, ...]

    def __rich__(self) -> Text:
        return Text("\n".join([f"over seq {self.devices}:", *(f"  {run}" for run in self.runs)]))

    def figures(self) -> dict[str, Any]:
        """The report as plain numbers and strings."""
        return {"devices": self.devices, "runs": [asdict(run) for run in self.runs]}


@dataclass
class AttentionNotes:
    """What is noted while a loss is rewritten, by call and equation: loops are written twice."""

    runs: dict[Any, AttentionRun] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def report(self, devices: int, left: Iterable[LeftAlone]) -> AttentionReport:
        """The report; ConfigError with all attentions that the config's kind cannot have."""
        if problems := list(dict.fromkeys(self.refused)):
            lines = "".join(f"\n  - {problem}" for problem in problems)
            count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
            raise ConfigError(f"{count} in the config:{lines}")
        equal: dict[Any, int] = {}
        for run in self.runs.values():
            key = run.kind, run.order, run.why, run.shapes
            equal[key] = equal.get(key, 0) + (run.layers or 0)
        attentions = [AttentionRun(layers, *key) for key, layers in equal.items()]
        attentions += [
            AttentionRun(None, LEFT, "", f"{attention.reason}{attention.where}")
            for attention in left
        ]
        return AttentionReport(devices, tuple(attentions))
