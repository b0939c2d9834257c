"""Arrays of a batch that a forward pass without gradient computes before the loss sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jaxspeed.config.run_sections import FrozenModelSection
from jaxspeed.errors import ModelError
from jaxspeed.placement.paths import listed


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
      extra: of (model); it returns further arrays by name, which are not of samples: the loss gets
        them in its parameter `extra`.
    """

    name: str
    writes: tuple[str, ...]
    function: Callable[[Any, Any], Mapping[str, jax.Array]]
    model: Literal["trained", "reference"] | FrozenModelSection = "trained"
    once: bool = False
    by_sample: bool = False
    extra: Callable[[Any], Mapping[str, jax.Array]] | None = None

    def arrays(self, model: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Call the function.

        Raises:
          ModelError: it returned others than it declares, or some that are not of samples.
        """
        arrays = dict(self.function(model, batch))
        sizes = {x.shape[0] for x in jax.tree.leaves(batch) if x.shape}
        shapes = {name: x.shape for name, x in arrays.items()}
        if set(arrays) != set(self.writes) or any({*x[:1]} != sizes for x in shapes.values()):
            raise ModelError(
                f"the function of the computed arrays {self.name!r} returned {shapes}; it returns "
                f"{listed(list(self.writes))}, each [batch, ...] of {listed([*map(str, sizes)])} "
                "samples"
            )
        return arrays
