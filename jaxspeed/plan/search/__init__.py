"""Which config is fastest on a target: a search over choices, and advice where one does not fit.

The folder knows neither configs' files nor how an estimate is made: it is given both, so that its
walk can be held against an exhaustive one.
"""

from jaxspeed.plan.search.choice import Choice, applied, choice_of, words_of
from jaxspeed.plan.search.estimate import Estimate
from jaxspeed.plan.search.sizes import sizes_of
from jaxspeed.plan.search.sketch import Sketch, lacking
from jaxspeed.plan.search.space import FAST, Space
from jaxspeed.plan.search.walk import Limits, Walk

__all__ = [
    "FAST",
    "Choice",
    "Estimate",
    "Limits",
    "Sketch",
    "Space",
    "Walk",
    "applied",
    "choice_of",
    "lacking",
    "sizes_of",
    "words_of",
]
