"""Ring all-reduce over data ranks, with a documented order of summation.

`steps` has the two phases of one ring, `levels` rings within and across nodes, `wire` the message
formats, `buckets` the fusion of many leaves into few arrays. `rings` derives a mesh's rings from
the config, `reduction` sums the ranks' partial gradients into the optimizer state's sharding, and
`unit_exchange` gathers and scatters the units of ZeRO 3.
"""

from jaxspeed.ring_reduction.buckets import Bucket, BucketLeaf, buckets_of
from jaxspeed.ring_reduction.levels import (
    Levels,
    Ranks,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from jaxspeed.ring_reduction.reduction import PER_DEVICE, Reduction
from jaxspeed.ring_reduction.rings import rings_of
from jaxspeed.ring_reduction.steps import Ring
from jaxspeed.ring_reduction.wire import WIRES

__all__ = [
    "PER_DEVICE",
    "WIRES",
    "Bucket",
    "BucketLeaf",
    "Levels",
    "Ranks",
    "Reduction",
    "Ring",
    "buckets_of",
    "hierarchical_all_reduce",
    "hierarchical_reduce_scatter",
    "rings_of",
]
