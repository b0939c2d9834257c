"""The program that every Ray process builds for its one device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxspeed.config import load_config
from jaxspeed.engine.jax_setup import enable_compilation_cache
from jaxspeed.objective.config_model import resolve_model
from jaxspeed.parameter_server.ray.ownership import OwnedParams
from jaxspeed.parameter_server.ray.server_program import assign_to_servers
from jaxspeed.train import Program, build_program


@dataclass(frozen=True)
class Build:
    """The pickled arguments from which a process builds its program."""

    process_config: Mapping[str, Any]  # the config of one process
    workers: int
    servers: int
    platform: str | None  # of the workers
    factor: float = 1  # that multiplies gradients
    model: Any = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    optimizer: optax.GradientTransformation | None = None
    example_batch: Any = None
    trainable: Any = None

    def program(self, device: jax.Device) -> tuple[Program, list[OwnedParams]]:
        """The program for this device, and the parameters of each server."""
        config = load_config(self.process_config)
        enable_compilation_cache(config)
        model, loss_fn = resolve_model(config, self.model, self.loss_fn)
        program = build_program(
            config,
            model,
            loss_fn,
            optimizer=self.optimizer,
            devices=[device],
            example_batch=self.example_batch,
            trainable=self.trainable,
        )
        return program, list(assign_to_servers(program, self.servers))
