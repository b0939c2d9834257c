"""Rings: sums over data ranks whose steps, messages and order of summation are written down here.

`steps` are the two phases of one ring, `levels` rings inside of nodes and across them, `wire` what
travels, and `buckets` how many leaves become few arrays of N chunks. All is per-device code, of
arrays that differ from device to device; where they come from is `train/ringed`.
"""

from jaxspeed.parallel.ring.buckets import Bucket, Part, buckets_of
from jaxspeed.parallel.ring.levels import Levels, Ranks, gathered, sum_of_all, sum_of_chunk
from jaxspeed.parallel.ring.steps import Directions, Ring, handed_round, reduce_scatter
from jaxspeed.parallel.ring.wire import WIRES, Wire

__all__ = [
    "WIRES",
    "Bucket",
    "Directions",
    "Levels",
    "Part",
    "Ranks",
    "Ring",
    "Wire",
    "buckets_of",
    "gathered",
    "handed_round",
    "reduce_scatter",
    "sum_of_all",
    "sum_of_chunk",
]
