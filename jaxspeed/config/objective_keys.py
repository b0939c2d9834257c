"""Objectives that the section `objective` can name, and the validation of their own keys."""

import importlib
import inspect
import operator
import os
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from jaxspeed.config.objective_options import OPTIONS as OF_DATA
from jaxspeed.config.objective_options import ObjectiveOptions
from jaxspeed.config.problems import Problem, from_pydantic, unknown_name
from jaxspeed.config.rollout_options import DistillOptions, GrpoOptions, RlooOptions
from jaxspeed.config.schema import Settings
from jaxspeed.config.tree import section_at
from jaxspeed.config.types import Section
from jaxspeed.config.verdicts import shown

# Imported where a config names one. Of families, each of which has one:
OF_FAMILIES = {
    "next_token": "jaxspeed.objectives.named:NextToken",
    "masked": "jaxspeed.objectives.named:MaskedTokens",
    "classification": "jaxspeed.objectives.named:Classification",
    "span_corruption": "jaxspeed.objectives.named:SpanCorruption",
}
# Of any language model: of the families of next_token, or of one's own.
OF_LANGUAGE_MODELS = {
    "dpo": "jaxspeed.objectives.preference:Dpo",
    "cpo": "jaxspeed.objectives.preference:Cpo",
    "orpo": "jaxspeed.objectives.preference:Orpo",
    "kto": "jaxspeed.objectives.unpaired:Kto",
    "reward": "jaxspeed.objectives.reward:Reward",
    "distill": "jaxspeed.objectives.distill:Distill",
    "grpo": "jaxspeed.objectives.policy_gradient:Grpo",
    "rloo": "jaxspeed.objectives.policy_gradient:Rloo",
}
OBJECTIVES = OF_FAMILIES | OF_LANGUAGE_MODELS
OPTIONS: dict[str, type[ObjectiveOptions]] = {
    **OF_DATA,
    "distill": DistillOptions,
    "grpo": GrpoOptions,
    "rloo": RlooOptions,
}
_IS_ONE = "a class that subclasses jaxspeed.Objective and defines loss(self, model, batch)"
_TYPE = "objective.type"


def imported(path: str) -> Any:
    """What a path package.module:name names; the current folder is searched last.

    Raises:
      ImportError, AttributeError: it is not there.
    """
    module, _, name = path.partition(":")
    is_known = module.startswith("jaxspeed.") or not {"", os.getcwd()}.isdisjoint(sys.path)
    if not is_known:  # a script in bin/ does not have it, unlike `python -m`
        sys.path.append(os.getcwd())
    return operator.attrgetter(name)(importlib.import_module(module))


def objective_class(name: str) -> Any:
    """The class of an objective, by its name or import path."""
    return imported(OBJECTIVES.get(name, name))


def objective_problems(settings: Settings) -> Iterator[Problem]:
    """Yield the problems of the section `objective` and of `model.loss`."""
    section, model = settings.objective, settings.model
    if model is not None and model.loss is not None and model.factory is None and model.named:
        works = f"It is a factory's loss; that of a {model.named[0]} model is its objective."
        yield Problem("model.loss", shown(model.loss), works)
    if section is None:
        return
    name = section.type
    if model is not None and model.loss is not None:
        works = "Both set the loss: remove one."
        yield Problem(
            "objective", f"{shown(name)}, while model.loss is set", works, ("model.loss",)
        )
    if name not in OBJECTIVES and ":" not in name:
        yield unknown_name(_TYPE, name, OBJECTIVES, ", or package.module:Name")
        return
    if name in OF_FAMILIES and model is not None and model.factory is not None:
        works = (
            "It is an objective of families: needs one of your own, package.module:Name, or "
            "model.loss."
        )
        yield Problem(_TYPE, f"{shown(name)} with model.factory", works, ("model.factory",))
        return
    options: Any = OPTIONS.get(name, ObjectiveOptions)
    if name not in OBJECTIVES:
        try:
            objective = objective_class(name)
        except Exception as error:  # the user's module may raise any
            kind = f"{type(error).__name__}: " * (not isinstance(error, ImportError))
            yield Problem(_TYPE, shown(name), f"It cannot be imported: {kind}{error}.")
            return
        options = getattr(objective, "Options", None)
        is_section = inspect.isclass(options) and issubclass(options, Section)
        if not inspect.isclass(objective) or inspect.isabstract(objective) or not is_section:
            yield Problem(_TYPE, shown(name), f"Needs {_IS_ONE}.")
            return
    try:
        read = options.model_validate(section.own_keys)
    except ValidationError as error:
        tree = {"objective": section.model_dump()}
        for item in error.errors():
            *above, _ = item["loc"]
            beside = section_at(".".join(map(str, above)), options)
            siblings = [*([] if above else ["type"]), *(beside.model_fields if beside else ())]
            yield from_pydantic(item, "objective.", siblings, tree)
        return
    if name in OPTIONS:
        yield from read.problems(settings)


def own_key_sentence(settings: Settings, path: str) -> str:
    """The description of a key of the objective's own, below `objective` at this path."""
    assert settings.objective is not None
    name = settings.objective.type
    options = OPTIONS.get(name) or objective_class(name).Options
    field = options.model_fields.get(path.split(".")[1])
    return (field and field.description) or f"A key of {name}."
