"""Compiled programs that compute arrays of a batch's samples with the model, without gradient."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.errors import ConfigError
from jaxspeed.objectives.model_logprobs import THRESHOLDS
from jaxspeed.placement.batch_dims import batch_specs
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.paths import listed
from jaxspeed.traced_loss.loss import Outputs
from jaxspeed.traced_loss.micro_batch_loss import MicroBatchLoss
from jaxspeed.train.gather_once import GatherOnce, ModelState
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState
from jaxspeed.user_models.batches import with_extra

ArrayFunction = Callable[[Any, Any], Mapping[str, jax.Array]]
ArraysOf = Callable[[TrainState | ModelState, Any], dict[str, jax.Array]]


def array_program(
    program: Program,
    function: ArrayFunction,
    *,
    adapters: bool = True,
    once: GatherOnce | None = None,
) -> Any:
    """`array_function`, compiled."""
    return program.jit(array_function(program, function, adapters=adapters, once=once))


def array_function(
    program: Program,
    function: ArrayFunction,
    *,
    adapters: bool = True,
    once: GatherOnce | None = None,
) -> ArraysOf:
    """`arrays = compute(state, batch)`, to be traced in the program's mesh.

    Parameters are gathered, transferred and sharded as in a step; the model is in evaluation mode.
    A mesh's stages of a pipeline do not run as stages: each device computes all layers.

    Args:
      function: (model, batch) -> the arrays by name, [batch, ...]. They are sharded as a batch's
        are: samples over the data axes, positions over theirs.
      adapters: whether the model has its adapters; without them it is the base.
      once: how parameters were gathered, if the state is what it returns.
    """
    computed = _computed(program, function, adapters, once)

    def compute(state: TrainState | ModelState, batch: Any) -> dict[str, jax.Array]:
        model_state = state if isinstance(state, ModelState) else ModelState.of(program, state)
        return placed(program, batch, _arrays(computed, model_state, batch))

    return compute


def extra_function(
    program: Program, function: Callable[[Any], Mapping[str, jax.Array]]
) -> Callable[[TrainState, Any], dict[str, jax.Array]]:
    """`arrays = compute(state, batch)` of a function of the model alone, sharded as it reads it."""
    computed = _computed(program, lambda model, _: function(model), True, None)
    return lambda state, batch: _arrays(computed, ModelState.of(program, state), batch)


def refuse_unknown_base(program: Program) -> None:
    """Raise ConfigError unless the model without its adapters is the base as it was."""
    model = program.model
    if not isinstance(model, AdaptedModel):
        raise ConfigError(
            "the reference is the model without its adapters: there is no section lora"
        )
    trained = [leaf.path for leaf in model.leaves if leaf.trainable and not leaf.adapts]
    if trained:
        raise ConfigError(
            f"the reference is the model without its adapters, and {listed(trained)} are trained "
            "beside them (lora.modules_to_save, lora.bias): the base's own values are not kept"
        )


def _computed(
    program: Program, function: ArrayFunction, adapters: bool, once: GatherOnce | None
) -> MicroBatchLoss:
    """The function in place of the loss."""
    traced = program.traced_loss
    model = traced.model
    if not adapters:
        assert isinstance(model, AdaptedModel)
        model = model.without_adapters()

    def outputs(model: Any, batch: Any) -> Outputs:
        return Outputs(dict(function(model, batch)))

    return replace(
        traced,
        model=model,
        table=replace(program.table if once is None else once.table, stack=None),
        loss_fn=outputs,
        in_fp32=(*traced.in_fp32, THRESHOLDS),
    )


def _arrays(computed: MicroBatchLoss, state: ModelState, batch: Any) -> dict[str, jax.Array]:
    variables, samples = with_extra(state.variables, batch)
    loss, _ = computed(state.sources, variables, samples, state.step, 0, False)
    return {name: metric.value for name, metric in loss.metrics.items()}


def placed(program: Program, batch: Any, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays, sharded like those of the batch."""
    named, mesh = program.config.parallel.sequence.dims, program.mesh
    _, specs = batch_specs((batch, arrays), named, mesh.shape)
    return {
        name: constrain(x, NamedSharding(mesh, specs[name]), "computed_arrays")
        for name, x in arrays.items()
    }
