"""`parallel.sequence` of the config, as the passes read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SequenceTiles:
    """The number of tiles on each device.

    Activations of the names `kept`, which a residual policy saves or offloads, are in no tile.
    """

    number: int | Literal["auto"] = 1
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class SequenceSettings:
    """`parallel.sequence` and `parallel.sequence_tiles` of the config.

    Attributes:
      kind: how attention runs over the axis; `auto` is chosen for each attention.
      layout: the order of tokens over the devices.
      dims: {name of an array of the batch: its sequence dim}, for arrays that are not of tokens.
      tiles: in which what is per token is evaluated.
      shards: whether sequences are sharded at all: those of generation are replicated.
    """

    kind: Literal["auto", "gather", "ulysses", "ring", "both"] = "auto"
    layout: Literal["auto", "contiguous", "zigzag"] = "auto"
    dims: Mapping[str, int] = field(default_factory=dict)
    tiles: SequenceTiles = SequenceTiles()
    shards: bool = True
