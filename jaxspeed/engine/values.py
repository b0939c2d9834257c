"""The parameters of a train state as values: read, replaced, and averaged."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.disk.disk_array import in_memory
from jaxspeed.errors import ConfigError
from jaxspeed.placement.codec import Stored, unpad
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.placement.rows import Row
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState, updated_values


def parameters_of(program: Program, state: TrainState) -> dict[str, jax.Array]:
    """The parameters by path on the devices, decoded and unpadded."""
    return program.table.joined({row.path: current_value(state, row) for row in program.table})


def averages_of(program: Program, state: TrainState) -> dict[str, jax.Array]:
    """The moving averages, and those that are not trained as they are."""
    _check_averaged(program)
    return program.table.joined({row.path: _average(state, row) for row in program.table})


def averaged_state(program: Program, state: TrainState) -> TrainState:
    """The state with the averages as parameters, of which one at a time is on devices."""
    _check_averaged(program)
    params: dict[str, Any] = {}
    master: dict[str, Any] = {}
    table = program.table
    for rows in table.parameters.values():
        if any(row.path in state.ema for row in rows):
            average = table.joined({row.path: _average(state, row) for row in rows})
            for placed, new in zip(
                (params, master), program.storage.placed(average, onto_disk=False)
            ):
                placed |= new
            for row in rows:
                if row.master and row.master.disk and row.path in state.ema:
                    master[row.path] = state.ema[row.path]
    return _with_parameters(state, params, master)


def with_values(program: Program, state: TrainState, values: Mapping[str, Any]) -> TrainState:
    """The state with other parameters at these paths.

    Magnitudes of DoRA that are not among them are measured again where their weights are.
    """
    state, model = _with_parameters(state, *program.storage.placed(values)), program.model
    if not isinstance(model, AdaptedModel):
        return state
    kept = (a.leaf("magnitude") for a in model.adapters.values() if a.path not in values)
    return with_magnitudes(program, state, {*values, *kept})


def with_magnitudes(program: Program, state: TrainState, known: Collection[str]) -> TrainState:
    """The state with magnitudes of DoRA measured by its weights, but for those at `known` paths."""
    measured = program.storage.with_magnitudes(dict(state.params), dict(state.master), set(known))
    return _with_parameters(state, *measured)


def current_value(state: TrainState, row: Row) -> jax.Array:
    """A parameter on the devices, unpadded."""
    value: jax.Array = row.decoded(row.updated, _on_devices(row, updated_values(state, row)))
    return value


def _average(state: TrainState, row: Row) -> jax.Array:
    """Its moving average, or the parameter itself if it is not trained."""
    if row.path not in state.ema:
        return current_value(state, row)
    return unpad(_on_devices(row, state.ema[row.path]), row.leaf.shape)


def _check_averaged(program: Program) -> None:
    if program.optimizer.ema_decay is None:
        raise ConfigError(
            "optimizer.ema_decay: not set, so there is no moving average of the weights; the "
            "config of the run that kept one would do"
        )


def _on_devices(row: Row, stored: Stored) -> Stored:
    """The arrays of a value, copied to the devices if they are offloaded."""

    def here(x: jax.Array) -> jax.Array:
        at: Any = x.sharding
        return jax.device_put(x, at.with_memory_kind(row.read.memory_kind))

    stored = in_memory(stored)
    offloaded = any(in_host(x.sharding) for x in jax.tree.leaves(stored))
    return jax.tree.map(here, stored) if offloaded else stored


def _with_parameters(
    state: TrainState, params: Mapping[str, Any], master: Mapping[str, Any]
) -> TrainState:
    return replace(state, params={**state.params, **params}, master={**state.master, **master})
