"""ZeRO 3: parameters stored sharded, gathered one unit at a time.

The program is traced with module scopes as names. The calls that are units are found
(`find_units`), the program is split at them (`segments`) and evaluated again (`segmented_eval`).
Each segment all-gathers its parameters in forward and backward and reduce-scatters their gradients
(`segment_vjp`, `sharded_param`, `param_views`) by an `exchange`, and saves what the
`residual_policy` selects.
"""

from jaxspeed.zero3.exchange import BY_CONSTRAINT, Exchange, InOrder
from jaxspeed.zero3.find_units import Units, choose_units, outermost_calls
from jaxspeed.zero3.segmented_eval import run_segmented
from jaxspeed.zero3.segments import EvalContext
from jaxspeed.zero3.sharded_param import ShardedParam, encoded

__all__ = [
    "BY_CONSTRAINT",
    "EvalContext",
    "Exchange",
    "InOrder",
    "ShardedParam",
    "Units",
    "choose_units",
    "encoded",
    "outermost_calls",
    "run_segmented",
]
