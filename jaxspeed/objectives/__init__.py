"""Objectives: what a sample is, its loss, and how samples and tokens are counted.

A config names one in its section `objective`; without it, it is that of the model's family. A class
of one's own subclasses `Objective`.
"""

from jaxspeed.config.run_sections import FrozenModelSection
from jaxspeed.objectives.base_objective import Objective, objective_of
from jaxspeed.objectives.computed_arrays import ComputedArrays
from jaxspeed.objectives.model_logprobs import model_logprobs
from jaxspeed.objectives.named import FamilyObjective
from jaxspeed.objectives.padding import Batch, WithoutWeight, without_weight
from jaxspeed.objectives.terms_and_metrics import Max, Mean, Min, Sum, Terms

__all__ = [
    "Batch",
    "ComputedArrays",
    "FamilyObjective",
    "FrozenModelSection",
    "Max",
    "Mean",
    "Min",
    "Objective",
    "Sum",
    "Terms",
    "WithoutWeight",
    "model_logprobs",
    "objective_of",
    "without_weight",
]
