"""Build model and loss from the config's `model` section."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from flax import nnx

from jaxspeed.config import Config
from jaxspeed.config.objective_keys import (
    OF_FAMILIES,
    OF_LANGUAGE_MODELS,
    imported,
    objective_class,
)
from jaxspeed.config.problems import Problem, config_error
from jaxspeed.errors import ConfigError, ModelError, PretrainedError
from jaxspeed.objectives import Objective
from jaxspeed.user_models.pipeline_module import PipelineModule
from jaxspeed.user_models.pretrained_model import Pretrained

Loss = Callable[[Any, Any], Any]


def resolve_model(
    config: Config,
    model: Any = None,
    loss_fn: Loss | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Any, Loss]:
    """Resolve model and loss: those that were passed, or those that the config names.

    An objective's loss is its bound method, and the model is what the objective trains.
    `overrides` replace sizes of the config.
    """
    section, family = config.model, _Default()
    if loss_fn is not None:
        _refuse_two_losses(config, "initialize(loss_fn=...)")
    if model is not None:
        if section is not None:
            raise ConfigError(
                "model: given twice, to initialize(model=...) and in the config; remove one"
            )
        if isinstance(model, PipelineModule) and model.loss_fn is not None:
            _refuse_two_losses(config, "PipelineModule(..., loss_fn=...)")
            if loss_fn is not None:
                raise ModelError(
                    "loss_fn: given twice, to PipelineModule(..., loss_fn=...) and to "
                    "initialize(loss_fn=...); remove one"
                )
            return model, model.batch_loss
        if isinstance(model, Pretrained):
            family = _Default(model.objective, model.loss, model.config)
        missing = "loss_fn is missing: initialize(model=..., loss_fn=...)"
    elif section is None:
        raise ModelError(
            "no model: pass initialize(model=..., loss_fn=...), or name one in the config, as "
            '{"model": {"family": "gpt2", "preset": "tiny"}}'
        )
    elif section.factory is not None:
        sizes = {**section.config, **(overrides or {})}
        factory = _imported(section.factory, "model.factory")
        model = lambda rngs: factory(rngs=rngs, **sizes)  # noqa: E731
        if section.loss is not None:
            family = _Default(None, _imported(section.loss, "model.loss"))
        missing = (
            f"loss_fn is missing: model.factory {section.factory!r} has no loss. Name one as "
            "model.loss, or an objective as objective.type, each package.module:name, or pass "
            "initialize(loss_fn=...)"
        )
    else:
        built = _built(config, overrides or {})
        family, missing = _Default(built.objective, built.loss, built.config), ""
        # Of other sizes a pretrained model has no weights, and is initialized.
        of_sizes = built.model if isinstance(built, Pretrained) else built.factory
        model = built if isinstance(built, Pretrained) and not overrides else of_sizes
    if loss_fn is not None:
        return model, loss_fn
    objective = _objective(config, family)
    if objective is None:
        if family.loss is None:
            raise ModelError(missing)
        return model, family.loss
    if isinstance(model, Pretrained):
        return replace(model, model=objective.trained_model(model.model)), objective.loss
    return objective.trained_model(model), objective.loss


class _Default(NamedTuple):
    """The loss of a model; of a family, the name of the objective that it is, and sizes."""

    objective: str | None = None
    loss: Loss | None = None
    sizes: Any = None


def _objective(config: Config, family: _Default) -> Objective | None:
    """The objective that the config names, or else the family's."""
    section = config.objective
    name = family.objective if section is None else section.type
    if name is None:
        return None
    cls = objective_class(name)
    options = cls.Options.model_validate({} if section is None else section.own_keys)
    if cls.num_labels is not None:
        _check_scores(name, cls.num_labels, family)
    elif name in OF_LANGUAGE_MODELS and family.objective not in (None, "next_token"):
        works = f"It trains language models; the model has {family.objective}."
        raise config_error([Problem("objective.type", f'"{name}"', works)], "the config")
    if name not in OF_FAMILIES:
        of_any_model: Objective = cls(options)
        return of_any_model
    if name != family.objective:
        has = f"has {family.objective}" if family.objective else "is of no family"
        works = f"The model {has}; or name one of your own, package.module:Name."
        raise config_error([Problem("objective.type", f'"{name}"', works)], "the config")
    of_family: Objective = cls(options, family.loss)
    return of_family


def _check_scores(name: str, labels: int, family: _Default) -> None:
    """Raise ConfigError unless a model has so many scores of sequences."""
    is_classifier = importlib.import_module("jaxspeed.models.language").is_classifier
    if not is_classifier(family.sizes) or family.sizes.num_labels != labels:
        works = (
            f"It trains a family's decoder with scores ({labels}) in place of its head: name the "
            "model in the config, or pass initialize(model=jaxspeed.models.from_pretrained(FOLDER, "
            f'{{"num_labels": {labels}}})).'
        )
        raise config_error([Problem("objective.type", f'"{name}"', works)], "the config")


def own_objective(config: Config) -> type[Objective] | None:
    """The class of the objective that the config names; None for one of the families."""
    section = config.objective
    if section is None or section.type in OF_FAMILIES:
        return None
    cls: type[Objective] = objective_class(section.type)
    return cls


def _refuse_two_losses(config: Config, where: str) -> None:
    key = "objective" if config.objective is not None else "model.loss"
    if config.objective is not None or (config.model is not None and config.model.loss):
        raise ConfigError(f"{key}: given twice, to {where} and in the config; remove one")


def family_sizes(config: Config) -> Any:
    """Config of the model family that the config names; None for other models."""
    if config.model is None or config.model.factory is not None:
        return None
    return _built(config, {}).config


def image_processor(config: Config, model: Any = None) -> Any:
    """How a model, or the one that the config names, reads images, by its folder if it has one.

    None for a model that reads none.
    """
    if not isinstance(model, Pretrained):
        if config.model is None or config.model.factory is not None:
            return None
        model = _built(config, {})
    if not hasattr(model.config, "image_token_id"):
        return None
    folder = getattr(getattr(model, "weights", None), "folder", None)
    form = importlib.import_module(f"{type(model.config).__module__}_hf")
    return form.image_processor(model.config, None if folder is None else folder.image_processor)


def family_objective(config: Config, model: Any) -> str | None:
    """The name of the objective that a resolved model's family has; None for other models."""
    if isinstance(model, Pretrained):
        return model.objective
    if config.model is None or config.model.factory is not None:
        return None
    name: str = _built(config, {}).objective
    return name


def _built(config: Config, overrides: Mapping[str, Any]) -> Any:
    # By name, so that the package imports no model of its own.
    families = importlib.import_module("jaxspeed.models")
    section, objective = config.model, own_objective(config)
    assert section is not None
    sizes = {**section.config, **overrides}
    labels = None if objective is None else objective.num_labels
    try:
        if section.pretrained is not None:
            return families.from_pretrained(
                section.pretrained, sizes, labels, text_only=section.text_only
            )
        if section.text_only:
            raise ValueError("text_only is of a pretrained model")
        return families.build(section.family, section.preset, sizes, labels)
    except PretrainedError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model: {error}") from None


def _imported(path: str, key: str) -> Any:
    try:
        return imported(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}: {path!r} cannot be imported: {error}") from None


def hidden_size_of(model: Any = None) -> Callable[[Mapping[str, Any]], int | None]:
    """Find the hidden size of this model, or of the family that a config's tree names.

    As in transformers: `hidden_size` (`d_model` and `n_embd` are its names in some models), or the
    largest of `hidden_sizes`, of the model's `config` or of its `text_config`.
    """

    def find(tree: Mapping[str, Any]) -> int | None:
        sizes = sizes_of(model) if model is not None else _named_sizes(tree.get("model"))
        for candidate in (sizes, getattr(sizes, "text_config", None)):
            for name in ("hidden_size", "d_model", "n_embd", "hidden_sizes"):
                size = getattr(candidate, name, None)
                if isinstance(size, list | tuple) and size:
                    size = max(size)
                if isinstance(size, int):
                    return size
        return None

    return find


def _named_sizes(section: Any) -> Any:
    if not isinstance(section, Mapping) or section.get("family") is None:
        return None
    families = importlib.import_module("jaxspeed.models")
    try:
        built = families.build(
            section["family"], section.get("preset"), section.get("config") or {}
        )
    except (ValueError, TypeError):  # reported where the model is built
        return None
    return built.config


def sizes_of(model: Any) -> Any:
    """The `config` of a module, or of the one that a factory builds, without its arrays."""
    if hasattr(model, "config") or not callable(model):
        return getattr(model, "config", None)
    try:
        return getattr(nnx.eval_shape(lambda: model(nnx.Rngs(0))), "config", None)
    except Exception:  # the model's own, reported where it is built
        return None
