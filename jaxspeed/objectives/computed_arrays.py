"""Arrays of a batch that a forward pass without gradient computes before the loss sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jaxspeed.config.run_sections import FrozenModelSection


@dataclass(frozen=True)
class ComputedArrays:
    """What a program without gradient adds to a batch: in a phase before the step, or once.

    Attributes:
      name: of the phase.
      writes: the names of the arrays.
      function: of (model, batch) in evaluation mode; it returns the arrays by name, [batch, ...].
      model: the model that trains, with its current parameters; or a frozen model beside it; or
        the reference: the frozen model of the objective's option `reference_model`, else the model
        without its adapters, or with those that `lora.adapter` names as they were read.
      once: whether it is computed for each sample of the data before the run, and stored; not in
        each step. Not of the model that trains.
      by_sample: whether a sample's arrays depend on no other sample; then a step's are computed
        by micro-batches, in less memory.
    """

    name: str
    writes: tuple[str, ...]
    function: Callable[[Any, Any], Mapping[str, jax.Array]]
    model: Literal["trained", "reference"] | FrozenModelSection = "trained"
    once: bool = False
    by_sample: bool = False
