"""Build model and loss from the config's `model` section."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from jaxspeed.config import Config
from jaxspeed.errors import ConfigError, ModelError, PretrainedError
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

    `overrides` replace sizes of the config.
    """
    section = config.model
    if model is not None:
        if section is not None:
            raise ConfigError(
                "model: given twice, to initialize(model=...) and in the config; remove one"
            )
        if isinstance(model, PipelineModule) and model.loss_fn is not None:
            if loss_fn is not None:
                raise ModelError(
                    "loss_fn: given twice, to PipelineModule(..., loss_fn=...) and to "
                    "initialize(loss_fn=...); remove one"
                )
            return model, model.batch_loss
        if isinstance(model, Pretrained):
            loss_fn = loss_fn or model.loss
        if loss_fn is None:
            raise ModelError("loss_fn is missing: initialize(model=..., loss_fn=...)")
        return model, loss_fn
    if section is None:
        raise ModelError(
            "no model: pass initialize(model=..., loss_fn=...), or name one in the config, as "
            '{"model": {"family": "gpt2", "preset": "tiny"}}'
        )
    if section.factory is not None:
        sizes = {**section.config, **(overrides or {})}
        return _from_import_path(section.factory, sizes, loss_fn)
    built = _built(config, overrides or {})
    if isinstance(built, Pretrained):
        assert built.loss is not None
        # Of other sizes it has no weights, and is initialized.
        return (built.model if overrides else built), loss_fn or built.loss
    return built.factory, loss_fn or built.loss


def family_sizes(config: Config) -> Any:
    """Config of the model family that the config names; None for other models."""
    if config.model is None or config.model.factory is not None:
        return None
    return _built(config, {}).config


def _built(config: Config, overrides: Mapping[str, Any]) -> Any:
    # By name, so that the package imports no model of its own.
    families = importlib.import_module("jaxspeed.models")
    section = config.model
    assert section is not None
    try:
        if section.pretrained is not None:
            return families.from_pretrained(section.pretrained, {**section.config, **overrides})
        return families.build(section.family, section.preset, {**section.config, **overrides})
    except PretrainedError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model: {error}") from None


def _from_import_path(path: str, sizes: Mapping[str, Any], loss_fn: Loss | None) -> Any:
    module_name, _, name = path.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model.factory: {path!r} cannot be imported: {error}") from None
    if loss_fn is None:
        raise ModelError(f"loss_fn is missing: model.factory {path!r} has no loss")
    return (lambda rngs: made(rngs=rngs, **sizes)), loss_fn


def hidden_size_of(model: Any = None) -> Callable[[Mapping[str, Any]], int | None]:
    """Find the hidden size of this model, or of the family that a config's tree names.

    As in transformers: `hidden_size` (`d_model` and `n_embd` are its names in some models), or the
    largest of `hidden_sizes`, of the model's `config` or of its `text_config`.
    """

    def find(tree: Mapping[str, Any]) -> int | None:
        sizes = sizes_of(model) if model is not None else _named_sizes(tree.get("model"))
        for each in (sizes, getattr(sizes, "text_config", None)):
            for name in ("hidden_size", "d_model", "n_embd", "hidden_sizes"):
                size = getattr(each, name, None)
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
        made = families.build(section["family"], section.get("preset"), section.get("config") or {})
    except (ValueError, TypeError):  # reported where the model is built
        return None
    return made.config


def sizes_of(model: Any) -> Any:
    """The `config` of a module, or of the one that a factory builds, without its arrays."""
    if hasattr(model, "config") or not callable(model):
        return getattr(model, "config", None)
    try:
        return getattr(nnx.eval_shape(lambda: model(nnx.Rngs(0))), "config", None)
    except Exception:  # the model's own, reported where it is built
        return None
