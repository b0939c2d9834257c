"""A model beside the one that trains: read from a folder, stored for reading alone, never trained.

It is a program of its own on the same mesh, whose table has no masters, gradients or moments: its
parameters are stored in the compute dtype, sharded, offloaded or encoded by a section of its own.
"""

import importlib
from dataclasses import replace
from typing import Any

import optax

from jaxspeed.config import Config
from jaxspeed.config.run_sections import FrozenModelSection
from jaxspeed.errors import ConfigError, JaxspeedError
from jaxspeed.train.program import Program
from jaxspeed.user_models.config_model import sizes_of
from jaxspeed.user_models.pretrained_model import Pretrained


def frozen_program(program: Program, section: FrozenModelSection, what: str) -> Program:
    """The program of a frozen model on the mesh of another, which computes no step.

    Its state is read from the folder by `init`, straight into its shards.

    Args:
      program: of the model that trains.
      what: it is read for, as errors name it.

    Raises:
      ConfigError: it has another vocabulary.
      JaxspeedError: it cannot be read.
    """
    # By name, so that the package imports no model of its own.
    families = importlib.import_module("jaxspeed.models")
    try:
        model: Pretrained = families.from_pretrained(section.pretrained)
    except JaxspeedError as error:
        raise type(error)(f"{what}: {error}") from None
    _refuse_other_vocabulary(program, model, f"{what}: {section.pretrained}")
    built = program.source.build(
        _config(program, section),
        model,
        model.loss,
        devices=program.devices,
        optimizer=optax.identity(),
        example_batch=None,
        trainable=lambda path: False,
        init_with=None,
        frozen_on=program.mesh,
    )
    in_fp32 = program.traced_loss.in_fp32
    return replace(built, traced_loss=replace(built.traced_loss, in_fp32=in_fp32))


def _config(program: Program, section: FrozenModelSection) -> Config:
    """The settings of a frozen model: its section's, and the compute dtype of the run."""
    config, sizes = program.config, dict(program.mesh.shape)
    threshold = "stage3_param_persistence_threshold"
    stage = section.zero_stage
    if stage is None:
        stage = 3 if program.ranks > 1 else 0
    keys: dict[str, Any] = {
        "train_batch_size": program.batch.train,
        "mesh": sizes,
        "zero_optimization": {
            "stage": stage,
            threshold: getattr(config.zero_optimization, threshold),
            "offload_param": {"device": "cpu" if section.offload else "none"},
        },
        "parallel": {"sequence": config.parallel.sequence.model_dump()},
    }
    if config.autocasts:
        keys["torch_autocast"] = config.given["torch_autocast"]
    elif config.compute_dtype != "fp32":
        keys[config.compute_dtype] = {"enabled": True}
    if section.quantize is not None:
        keys["model"] = {"quantize": section.quantize.model_dump(exclude_unset=True)}
    return Config.load(keys)


def _refuse_other_vocabulary(program: Program, model: Pretrained, what: str) -> None:
    """Raise ConfigError if a frozen model has another vocabulary than a program's."""
    source = program.source.model
    sizes = source.config if isinstance(source, Pretrained) else sizes_of(source)
    ours, theirs = (getattr(x, "vocab_size", None) for x in (sizes, model.config))
    if None not in (ours, theirs) and ours != theirs:
        raise ConfigError(
            f"{what} has a vocabulary of {theirs:,} tokens, and the model that trains has "
            f"{ours:,}: both have to have the same"
        )
