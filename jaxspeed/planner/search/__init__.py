"""Which config is fastest on a target: a search over choices, and advice where one does not fit.

The folder knows neither configs' files nor how an estimate is made: it is given both, so that its
walk can be held against an exhaustive one.
"""

from jaxspeed.planner.search.analytic_cost import Sketch, lacking
from jaxspeed.planner.search.candidate import Choice, applied, choice_of, words_of
from jaxspeed.planner.search.candidate_estimate import Estimate
from jaxspeed.planner.search.model_sizes import sizes_of
from jaxspeed.planner.search.space import FAST, Space
from jaxspeed.planner.search.walk import Limits, SearchLoop

__all__ = [
    "FAST",
    "Choice",
    "Estimate",
    "Limits",
    "SearchLoop",
    "Sketch",
    "Space",
    "applied",
    "choice_of",
    "lacking",
    "sizes_of",
    "words_of",
]
