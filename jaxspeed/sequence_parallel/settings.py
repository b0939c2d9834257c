"""`parallel.sequence` of the config, as the passes read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SequenceSettings:
    """`parallel.sequence` of the config.

    Attributes:
      kind: how attention runs over the axis; `auto` is chosen for each attention.
      layout: the order of tokens over the devices.
      dims: {name of an array of the batch: its sequence dim}, for arrays that are not of tokens.
    """

    kind: Literal["auto", "gather", "ulysses", "ring", "both"] = "auto"
    layout: Literal["auto", "contiguous", "zigzag"] = "auto"
    dims: Mapping[str, int] = field(default_factory=dict)
