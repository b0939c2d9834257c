"""What the tests of inference share: a foreign model traced as the library traces it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh

import jaxspeed
from jaxspeed.placement.rows import Leaf
from jaxspeed.tensor_parallel.dim_propagation import PropagatedDims, propagate_dims
from jaxspeed.train.build import build_program
from tests.support.foreign_models import BATCH, Foreign

CONFIG = {"train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@dataclass(frozen=True)
class Traced:
    """A model's loss as a program of its parameters."""

    leaves: tuple[Leaf, ...]
    propagated: PropagatedDims
    init: Callable[[int], tuple[dict[str, Any], dict[str, Any]]]
    inputs: tuple[Any, ...]  # what follows the variables: batch, step, micro
    run: Callable[[dict[str, Any], list[Any]], Any]  # the loss, of parameters and the rest

    @cached_property
    def _fresh(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.init(0)

    @property
    def params(self) -> dict[str, Any]:
        return self._fresh[0]

    @property
    def rest(self) -> list[Any]:
        return jax.tree.leaves((self._fresh[1], *self.inputs))

    @property
    def batch(self) -> slice:
        """Where the batch is in `rest`."""
        start = len(self._fresh[1])
        return slice(start, start + len(self.inputs[0]))


def traced(foreign: Foreign) -> Traced:
    config = jaxspeed.Config.model_validate(CONFIG)
    devices = jax.devices()[:1]
    program = build_program(
        config, foreign.model, foreign.loss, devices=devices, example_batch=foreign.batch
    )
    objective = program.traced_loss
    inputs = (foreign.batch, jnp.int32(0), jnp.int32(0))
    found = objective.trace((dict(objective.model.variables), *inputs), train=True)
    propagated = propagate_dims(found.closed.jaxpr, found.parameters, found.batch)
    evaluate = jaxpr_as_fun(found.closed)

    def run(params: dict[str, Any], rest: list[Any]) -> Any:
        total, weight, *_ = evaluate(*(params[path] for path in found.parameters), *rest)
        return total / weight

    return Traced(objective.model.leaves, propagated, objective.model.init, inputs, run)


def mesh(data: int, tensor: int) -> Mesh:
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
