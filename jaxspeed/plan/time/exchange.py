"""What a device sends in a step."""

from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute")
TO_HOST, FROM_HOST = "to host", "from host"


@dataclass(frozen=True)
class Exchange:
    """One kind of exchange, over the same axes and for the same purpose, of a whole step.

    Attributes:
      kind: one of `KINDS`, "to host" or "from host".
      axes: of the mesh; () of host transfers.
      what: "parameters", "gradients", "activations", "stages", "optimizer" or "other state".
      link: "links" (ICI, NVLink), "network" (between nodes or slices) or "host".
      bytes: that a device sends in a step, over all runs.
      runs: how often in a step.
      seconds: of all runs, alone on its link.
      exposed: of these, what is not hidden behind compute.
      formula: its numbers in words, the largest first.
    """

    kind: str
    axes: tuple[str, ...]
    what: str
    link: str
    bytes: int
    runs: int
    seconds: float
    exposed: float
    formula: str
