"""What every process of a run builds for itself: the same program, of one device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxspeed.config import load_config
from jaxspeed.engine.jax_setup import enable_compilation_cache
from jaxspeed.objective.config_model import resolve_model
from jaxspeed.parameter_server.ray.ownership import Pieces
from jaxspeed.parameter_server.ray.server_program import shares
from jaxspeed.train import Program, build_program


@dataclass(frozen=True)
class Build:
    """All that a process has to be told; it travels by pickle."""

    alone: Mapping[str, Any]  # the config of one process
    workers: int
    servers: int
    platform: str | None  # of the workers
    factor: float = 1  # how often a gradient counts
    model: Any = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    optimizer: optax.GradientTransformation | None = None
    example_batch: Any = None
    trainable: Any = None

    def program(self, device: jax.Device) -> tuple[Program, list[Pieces]]:
        """The program of this device, and what each server owns."""
        config = load_config(self.alone)
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
        return program, list(shares(program, self.servers))
