"""Objectives of the families, by the names in `config.objective_section.OBJECTIVES`.

How a loss is computed from a model differs between families, so that each has a function for it;
what is known of its batches does not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxspeed.objectives.base_objective import Objective
from jaxspeed.objectives.padding import without_weight

_MASK = "[batch, seq], optional: 0 is padding"


@dataclass(frozen=True)
class FamilyLoss:
    """A family's loss function, with its parameters, as a method of an objective."""

    __self__: Objective
    __wrapped__: Callable[..., Any]

    def __call__(self, model: Any, batch: Any, **asked: Any) -> Any:
        return self.__wrapped__(model, batch, **asked)


class FamilyObjective(Objective):
    """An objective whose loss is that of the model's family."""

    def __init__(self, options: Any, family_loss: Callable[..., Any]) -> None:
        super().__init__(options)
        self._family_loss = family_loss

    @property
    def loss(self) -> Any:
        return FamilyLoss(self, self._family_loss)

    without_weight = staticmethod(without_weight)


class NextToken(FamilyObjective):
    """Cross-entropy of each token's successor; of mixtures, with the routers' losses."""

    arrays: ClassVar = {
        "tokens": "[batch, seq + 1]; with targets [batch, seq]",
        "targets": "[batch, seq], optional: what is predicted; -100 does not count",
        "segment_ids": "as tokens, optional: documents, between which nothing is predicted",
        "positions": "as tokens, optional: by default 0, 1, 2, ...",
        "mask": "as targets or tokens, optional: a prediction where it is 0 does not count",
    }


class MaskedTokens(FamilyObjective):
    """Cross-entropy of masked tokens, which the loss draws unless a batch has labels."""

    arrays: ClassVar = {
        "tokens": "[batch, seq]",
        "labels": "[batch, seq], optional: the tokens to predict; -100 elsewhere",
        "mask": _MASK,
        "segment_ids": "[batch, seq], optional: documents, with attention within each",
        "positions": "[batch, seq], optional",
        "token_types": "[batch, seq], optional",
    }


class Classification(FamilyObjective):
    """Cross-entropy of labels, with the accuracy in evaluation; of real ones the squared error."""

    arrays: ClassVar = {
        "tokens": "[batch, seq] of models of tokens",
        "images": "[batch, height, width, channels] of models of images",
        "x": "[batch, ...] of an mlp",
        "labels": "[batch] integers, of which -100 does not count, or [batch, classes] reals",
        "y": "the labels of an mlp",
        "mask": "[batch, seq] of tokens, optional: 0 is padding; of x [batch]: 0 does not count",
    }


class SpanCorruption(FamilyObjective):
    """Cross-entropy of dropped spans, which the loss draws unless a batch has pairs."""

    arrays: ClassVar = {
        "tokens": "[batch, seq], from which inputs and targets are drawn",
        "inputs": "[batch, seq], with targets, instead of tokens",
        "targets": "[batch, seq]; -100 does not count",
        "mask": _MASK,
    }
