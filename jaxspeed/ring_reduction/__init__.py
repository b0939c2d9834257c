"""Ring all-reduce over data ranks, with a documented order of summation.

`steps` are the two phases of one ring, `levels` rings inside of nodes and across them, `wire` what
is sent, `buckets` how many leaves become few arrays. `rings` says which rings a mesh has, and
`reduction` takes partial gradients to sums that are sharded as the optimizer's state is;
`unit_exchange` gathers and scatters the units of ZeRO 3.
"""

from jaxspeed.ring_reduction.buckets import Bucket, BucketLeaf, buckets_of
from jaxspeed.ring_reduction.levels import Levels, Ranks, gathered, sum_of_all, sum_of_chunk
from jaxspeed.ring_reduction.reduction import OF_DEVICES, Reduction
from jaxspeed.ring_reduction.rings import Rings, rings_of
from jaxspeed.ring_reduction.steps import Directions, Ring, handed_round, reduce_scatter
from jaxspeed.ring_reduction.wire import WIRES, Wire

__all__ = [
    "OF_DEVICES",
    "WIRES",
    "Bucket",
    "BucketLeaf",
    "Directions",
    "Levels",
    "Ranks",
    "Reduction",
    "Ring",
    "Rings",
    "Wire",
    "buckets_of",
    "gathered",
    "handed_round",
    "reduce_scatter",
    "rings_of",
    "sum_of_all",
    "sum_of_chunk",
]
