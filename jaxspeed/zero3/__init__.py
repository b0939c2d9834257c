"""ZeRO 3: parameters stored sharded, gathered one unit at a time.

A program is traced with names on its module calls, the calls that are units are found
(`find_units`), the program is split at those names (`segments`) and evaluated again
(`segmented_eval`), each segment gathering its own parameters forward and backward (`segment_vjp`,
`sharded_param`, `param_views`) and saving what the `residual_policy` says.
"""

from jaxspeed.zero3.find_units import Units, choose_units
from jaxspeed.zero3.segmented_eval import run_sliced
from jaxspeed.zero3.segments import Way
from jaxspeed.zero3.sharded_param import GatherScatter, ShardedParam

__all__ = [
    "GatherScatter",
    "ShardedParam",
    "Units",
    "Way",
    "choose_units",
    "run_sliced",
]
