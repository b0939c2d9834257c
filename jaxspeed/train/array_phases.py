"""Phases before a step: passes without gradient that add arrays to its batch (`ComputedArrays`)."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.config.run_sections import FrozenModelSection
from jaxspeed.errors import ConfigError
from jaxspeed.objectives import objective_of
from jaxspeed.objectives.computed_arrays import ComputedArrays
from jaxspeed.objectives.model_logprobs import ROUTING
from jaxspeed.placement.paths import listed
from jaxspeed.traced_loss.accumulate import micro_batches
from jaxspeed.train.array_program import ArraysOf, array_function, extra_function, placed
from jaxspeed.train.disk_phases import step_phases
from jaxspeed.train.frozen_model import frozen_program
from jaxspeed.train.phases import BATCH, FIRST_ADAPTER, STATE, StepPhase
from jaxspeed.train.program import Program
from jaxspeed.user_models.batches import WithExtra


def with_array_phases(program: Program) -> Program:
    """The program, with a phase before its step for each of the arrays of its objective.

    Raises:
      ConfigError: the reference of one of them is not known, or is of other tokens.
    """
    if not program.computed_arrays:
        return program
    phased = [entry for entry in program.computed_arrays if not entry.once]
    frozen = dict[str, Program]()
    for entry in phased:
        if isinstance(entry.model, FrozenModelSection):
            frozen[_state_of(entry)] = frozen_program(program, entry.model, entry.name)
        elif entry.model == "reference":
            refuse_unknown_reference(program, entry)
    phases_of = _phases if phased else program.phases_of
    return replace(program, completed=with_array_shapes, phases_of=phases_of, frozen=frozen)


def _phases(program: Program) -> tuple[StepPhase, ...]:
    phased = [entry for entry in program.computed_arrays if not entry.once]
    return (*(_phase(program, entry) for entry in phased), *step_phases(program))


def _state_of(entry: ComputedArrays) -> str:
    """The name of the state that a phase reads, of a frozen model."""
    return f"model of {entry.name}"


def refuse_unknown_reference(program: Program, entry: ComputedArrays) -> None:
    """Raise ConfigError unless the model's own reference is known in each step."""
    objective = objective_of(program.traced_loss.loss_fn)
    options, otherwise = getattr(objective, "options", None), ""
    if hasattr(options, "reference"):
        otherwise = ', compute it once before the run (reference: "precompute")'
    elif hasattr(options, "beta"):
        otherwise = ", train without it (beta: 0)"
    if not isinstance(program.model, AdaptedModel):
        raise ConfigError(
            f"objective: {entry.name} is computed in each step, and full training changes the "
            f"model of which it is: name a folder (reference_model){otherwise}, or train adapters "
            "(lora)"
        )
    leaves = program.model.leaves
    if changed := [leaf.path for leaf in leaves if leaf.trainable and not leaf.adapts]:
        raise ConfigError(
            f"objective: {entry.name} is computed in each step, and {listed(changed)} are trained "
            "beside the adapters (lora.modules_to_save, lora.bias), of which the reference's own "
            f"values are not kept: name a folder (reference_model){otherwise}"
        )


def _phase(program: Program, entry: ComputedArrays) -> StepPhase:
    name = _state_of(entry)
    reads: tuple[str, ...] = (name if name in program.frozen else STATE,)
    if entry.model == "reference" and _has_first_adapter(program):
        reads = STATE, FIRST_ADAPTER

    def with_arrays(state: Any, *rest: Any) -> Any:
        *first_adapter, batch = rest
        for params, master in first_adapter:
            state = replace(state, params=state.params | params, master=state.master | master)
        return _with_arrays(program, entry, state, batch)

    function = program.jit(with_arrays)
    return StepPhase(entry.name, function, (*reads, BATCH), (BATCH,), mesh=program.mesh)


def with_array_shapes(program: Program, batch: Any, stored_alone: bool) -> Any:
    """The shapes of `Program.complete`."""
    for entry in program.computed_arrays:
        if entry.once or not stored_alone:
            frozen = program.frozen.get(_state_of(entry))
            state = program.state if frozen is None else frozen.state
            add = program.in_mesh(partial(_with_arrays, program, entry))
            batch = jax.eval_shape(add, state, batch)
    return batch


def _with_arrays(program: Program, entry: ComputedArrays, state: Any, batch: Any) -> Any:
    """The batch with the arrays of an entry, unless it has them."""
    samples = batch.samples if isinstance(batch, WithExtra) else batch
    extra: Any = batch.extra if isinstance(batch, WithExtra) else None
    if set(entry.writes) <= set(samples) and (entry.extra is None or extra is not None):
        return batch
    frozen = program.frozen.get(_state_of(entry))
    adapters = entry.model != "reference" or entry.once or _has_first_adapter(program)
    compute = array_function(frozen or program, entry.arrays, adapters=adapters)
    if entry.by_sample:
        compute = partial(_by_micro_batches, program, compute)
    read = samples
    if entry.model != "trained":  # its routers choose for themselves
        read = {name: x for name, x in samples.items() if name != ROUTING}
    arrays = compute(state, read)
    if entry.extra is not None:
        further = extra_function(frozen or program, entry.extra)(state, read)
        extra = {**(extra or {}), **further}
    with_arrays = {**samples, **arrays}
    return with_arrays if extra is None else WithExtra(with_arrays, extra)


def _by_micro_batches(
    program: Program, compute: ArraysOf, state: Any, samples: Any
) -> dict[str, jax.Array]:
    """The arrays of a step's samples, a micro-batch at a time; those of fewer samples at once."""
    count, ranks = program.batch.accumulation, program.ranks
    sizes = {x.shape[0] for x in jax.tree.leaves(samples) if x.shape}
    if count == 1 or sizes != {program.batch.train}:
        return compute(state, samples)
    micro = micro_batches(samples, count, ranks)
    arrays = jax.lax.map(partial(compute, state), micro)

    def in_order(x: jax.Array) -> jax.Array:
        parts = x.reshape(count, ranks, -1, *x.shape[2:])
        return jnp.moveaxis(parts, 0, 1).reshape(-1, *x.shape[2:])

    return placed(program, samples, jax.tree.map(in_order, arrays))


def _has_first_adapter(program: Program) -> bool:
    """Whether the reference is the adapter with which the run began."""
    return isinstance(program.model, AdaptedModel) and program.model.saved is not None
