"""Objectives of completions that the model itself has sampled, with their rewards: GRPO and RLOO.

Their keys, defaults, formulas and metrics are those of TRL's configs of 1.16.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from jaxspeed.config.rollout_options import GrpoOptions, RlooOptions
from jaxspeed.objectives.base_objective import Objective, Records

OLD, ADVANTAGES, WEIGHTS = "old_logprobs", "advantages", "row_weights"


class OfRollouts(Objective):
    """What objectives of sampled completions share."""

    arrays: ClassVar = {
        "tokens": "[batch, seq]: prompts and completions, without the last token",
        "targets": "[batch, seq]: the next tokens; -100 where they are not of the model, or of a "
        "completion that is left out",
        "thresholds": "[batch, seq] fp32, optional: of the distributions that were drawn from",
        "sampled_logprobs": "[batch, seq] fp32: those of the sampler",
        ADVANTAGES: "[batch] fp32",
        WEIGHTS: "[batch] fp32: of a completion, in what the loss is divided by",
        OLD: "[batch, seq] fp32, optional: of the model that sampled; by default that which trains",
    }
    in_fp32: ClassVar[tuple[str, ...]] = (
        "thresholds",
        "sampled_logprobs",
        ADVANTAGES,
        WEIGHTS,
        OLD,
    )
    records: ClassVar[Records] = "prompts"


class Grpo(OfRollouts):
    """Group relative policy optimization."""

    Options: Any = GrpoOptions

    def loss(self, model: Any, batch: Mapping[str, jax.Array], train: bool | None = None) -> Any:
        raise NotImplementedError


class Rloo(OfRollouts):
    """REINFORCE with a leave-one-out baseline."""

    Options: Any = RlooOptions

    def loss(self, model: Any, batch: Mapping[str, jax.Array], train: bool | None = None) -> Any:
        raise NotImplementedError
