"""Search for the fastest config on a target, and advice for a config that does not fit.

The folder depends on neither config files nor the estimator: both are passed in, so that the search
can be compared with an exhaustive one.
"""

from jaxspeed.planner.search.analytic_cost import CostModel, memory_excess
from jaxspeed.planner.search.candidate import Choice, choice_of, keys_of, with_keys
from jaxspeed.planner.search.candidate_estimate import Estimate
from jaxspeed.planner.search.model_sizes import sizes_of
from jaxspeed.planner.search.space import FAST, Space
from jaxspeed.planner.search.walk import Limits, SearchLoop

__all__ = [
    "FAST",
    "Choice",
    "CostModel",
    "Estimate",
    "Limits",
    "SearchLoop",
    "Space",
    "choice_of",
    "keys_of",
    "memory_excess",
    "sizes_of",
    "with_keys",
]
