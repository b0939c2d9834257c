"""`engine.check`: compare the sharded step with the same step on one device and with plain Flax."""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.config.equivalent_keys import without_axes
from jaxspeed.disk.disk_array import in_memory
from jaxspeed.engine.check_report import (
    DTYPE_NAMES,
    NUDGES,
    CheckReport,
    StepValues,
    compare_steps,
    moves_from,
    norm,
)
from jaxspeed.engine.oom_help import device_limit
from jaxspeed.engine.plain_flax import PlainGradients, plain_gradients, plain_init, plain_loss
from jaxspeed.errors import ConfigError, ModelError, OutOfMemoryError
from jaxspeed.jaxpr.traverse import equations
from jaxspeed.optim.loss_scale import DynamicRule
from jaxspeed.placement.codec import pad, unpad
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.placement.show import bytes_text
from jaxspeed.placement.table import PlacementTable
from jaxspeed.placement.xla_options import without_ynnpack
from jaxspeed.traced_loss.accumulate import Sums, micro_batch_shapes, micro_batches
from jaxspeed.traced_loss.loss_program import LossProgram
from jaxspeed.train.phases import BATCH, FIRST_ADAPTER, STATE, SUMS, VARIABLES, PhasedStep
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import Arrays, TrainState, logical_value, wide_dtype
from jaxspeed.user_models.batches import EXTRA, WithExtra, read_batch, with_extra, zeros_of
from jaxspeed.user_models.config_model import resolve_model
from jaxspeed.user_models.pretrained_model import Pretrained
from jaxspeed.user_models.rng import is_key
from jaxspeed.user_models.trainable import train_rule

# (state, batch) -> (reduced gradients, variables after the batch).
Reduced = Callable[[TrainState, Any], tuple[Sums, Any]]
Held = Mapping[str, Any]


def check(
    program: Program,
    state: TrainState,
    batch: Any,
    reduced_by: Callable[[Program, Held], Reduced],
    held: Held,
    *,
    as_given: Any = None,
    layers: int | None = None,
    model: Any = None,
) -> CheckReport:
    """Run one step on all devices, on one, and by plain Flax, from the same state (not donated).

    Args:
      batch: as the program takes it.
      held: the values that phases read beside state and batch.
      as_given: the arrays as they were passed, which plain Flax reads.
    """
    if layers is not None or model is not None:
        program = _smaller(program, layers, model)
        state = program.init(program.config.run.seed)
        held = program.held(state)
    if tier := program.update.tier:
        _refuse_large(tier.nbytes)
        state = in_memory(state)
    probe = _probe(program, reduced_by(program, held))
    plain, parts = _plain(program, program.batch.accumulation), 1
    _fits(plain)
    shapes = _as_one_rank(program, batch)
    numbered = program.numbered_micro_batches
    if numbered > program.batch.accumulation and _draws(plain, shapes):
        # Each part of a micro-batch draws its own numbers: plain Flax takes the parts one by one.
        plain, parts = _plain(program, numbered), numbered // program.batch.accumulation
    placed = jax.device_put(batch, program.batch_shardings(batch))
    state, ours = _at_a_scale_without_overflow(program, probe, state, placed)
    single = _moved(state, program, plain)
    held_by_plain = _moved_values(held, state, program, plain)
    user = batch if as_given is None else as_given
    ordered = _as_one_rank(program, user)
    order, flax_batch, evaluated = (
        jax.device_put(x, plain.batch_shardings(x))
        # An evaluation has no micro-batches, and draws by the number of a sample.
        for x in (shapes, ordered, user if program.on_one_mesh else ordered)
    )
    with plain.set_mesh():
        theirs = _probe(plain, reduced_by_one(plain, held_by_plain))(single, order)
        placed = _prepared(program, state, placed, held)
        order, flax_batch, evaluated = (
            _prepared(plain, single, x, held_by_plain) for x in (order, flax_batch, evaluated)
        )
        flax_step = _by_flax(plain)
        lower = _lowest_dtype(plain, order)
        ours, theirs, by_flax = jax.device_get((ours, theirs, flax_step(single, flax_batch)))
        nudge = _nudged(plain, lower)
        # One at a time: each is as large as the gradients.
        moves = [
            moves_from(by_flax, flax_step(*nudge(single, flax_batch, i))) for i in range(NUDGES)
        ]
        others = [
            *_evaluated(program, plain, state, single, placed, order, evaluated),
            *_initialized(plain),
        ]
    return compare_steps(program, lower, ours, theirs, by_flax, moves, others, parts)


def _as_one_rank(program: Program, batch: Any) -> Any:
    """The samples in the order in which one rank computes the same micro-batches."""
    if isinstance(batch, WithExtra):
        return WithExtra(_as_one_rank(program, batch.samples), batch.extra)
    return jax.tree.map(lambda x: program.as_one_rank(x if is_key(x) else np.asarray(x)), batch)


def _smaller(program: Program, layers: int | None, model: Any) -> Program:
    if model is None:
        if program.config.model is None:
            raise ModelError(
                "check(layers=...) needs a model named by the config; for your own model, pass "
                "check(batch, model=<a smaller factory>)"
            )
        model, _ = resolve_model(program.config, overrides={"num_hidden_layers": layers})
    elif layers is not None:
        raise ModelError("check: layers and model are both given; pass only one")
    return program.rebuilt(program.config, program.devices, model)


def _plain(program: Program, accumulation: int) -> Program:
    """The same program on one device: one data rank, stage 0, so many entire micro-batches."""
    settings = without_axes(program.given_for_one_mesh())
    if "parallel" in settings:
        settings["parallel"] = {k: v for k, v in settings["parallel"].items() if k != "batch_parts"}
    settings |= {
        "zero_optimization": {"stage": 0},
        "train_batch_size": program.batch.train,
        "train_micro_batch_size_per_gpu": program.batch.train // accumulation,
        "gradient_accumulation_steps": accumulation,
    }
    if settings.get("gradient_allreduce_op") == "sum":
        raise ConfigError(
            "check: gradient_allreduce_op is sum, so the step depends on the number of data ranks; "
            "check with mean"
        )
    config = type(program.config).load(settings)
    if config.lora and config.lora.lora_dropout:
        raise ConfigError(
            f"check: lora.lora_dropout is {config.lora.lora_dropout:g}, and plain Flax, which has "
            "merged weights, has no input of an adapter to drop; check with 0"
        )
    device = next(d for d in program.mesh.devices.flat if d.process_index == jax.process_index())
    return program.rebuilt(config, [device])


def _fits(plain: Program) -> None:
    limit = device_limit(plain)
    need = sum(per_device for _, per_device in plain.table.bytes_by_role().values())
    if limit is not None and need > limit:
        raise OutOfMemoryError(
            f"check: the full state needs {bytes_text(need)} on one device, which has "
            f"{bytes_text(limit)}. Check a smaller model: check(batch, layers=2) for a model named "
            "by the config, check(batch, model=<a smaller factory>) for your own"
        )


def _by_flax(program: Program) -> Any:
    """(state, batch) -> PlainGradients of the same micro-batches on the same device."""

    def gradients(state: TrainState, batch: Any) -> PlainGradients:
        params = _read_parameters(program.table, state)
        variables, batch = with_extra(state.variables, batch)
        batch = program.traced_loss.cast(batch)
        micro = micro_batches(batch, program.batch.accumulation, 1)
        adapted = _adapted(program)
        flax_gradients = plain_gradients(
            adapted.base if adapted else program.model,
            _user_model(program),
            program.traced_loss.loss_fn,
            params,
            variables,
            micro,
            state.step,
            program.config.parallel.state_collections,
            train_rule(program.config, program.source.trainable).adds,
            program.traced_loss.autocast,
            adapted,
        )
        values = {p: x for p, x in flax_gradients.values.items() if p != EXTRA and not is_key(x)}
        in_rows = partial(_in_rows, program.table)
        return flax_gradients._replace(grads=in_rows(flax_gradients.grads), values=in_rows(values))

    return compiled_otherwise(program, gradients)


def _adapted(program: Program) -> AdaptedModel | None:
    """The model of a program, if it has adapters."""
    return program.model if isinstance(program.model, AdaptedModel) else None


def _read_parameters(table: PlacementTable, state: TrainState) -> Arrays:
    """The model's parameters as its layers read them."""
    return table.joined({r.path: logical_value(state, r).astype(r.read.dtype) for r in table})


def _in_rows(table: PlacementTable, values: Arrays) -> Arrays:
    """Values by the paths of the table's rows; those that have none unchanged."""
    parameters = {path: x for path, x in values.items() if path in table.parameters}
    return {path: x for path, x in values.items() if path not in parameters} | table.in_rows(
        parameters
    )


def _user_model(program: Program) -> Any:
    """What `initialize` was given: a factory, a module or a pair."""
    model = program.source.model
    return model.model if isinstance(model, Pretrained) else model


def compiled_otherwise(program: Program, function: Callable[..., Any]) -> Any:
    """A function of plain Flax, compiled with other kernels than the step on CPUs."""
    return jax.jit(program.in_mesh(function), compiler_options=without_ynnpack(program.mesh))


def _evaluated(
    program: Program,
    plain: Program,
    state: TrainState,
    single: TrainState,
    placed: Any,
    order: Any,
    flax_batch: Any,
) -> Iterator[tuple[str, Any, Any]]:
    """(what, by the engine, by plain Flax) of evaluation, if it computes otherwise than a step."""

    def loss(state: TrainState, batch: Any, train: bool = False) -> jax.Array:
        params = _read_parameters(plain.table, state)
        variables, batch = with_extra(state.variables, batch)
        batch = plain.traced_loss.cast(batch)
        model: Any = plain.model
        if adapted := _adapted(plain):
            model, params = adapted.base, adapted.merged(params)
        args = (model, _user_model(plain), plain.traced_loss.loss_fn, params, variables, batch)
        return plain_loss(*args, state.step, plain.traced_loss.autocast, train=train)

    traced = [
        str(jax.make_jaxpr(plain.in_mesh(functools.partial(loss, train=train)))(single, flax_batch))
        for train in (False, True)
    ]
    if traced[0] != traced[1] or not _evaluates_as_it_trains(plain, flax_batch):
        # Servers do not evaluate, and their workers compute as one device does.
        run, *args = (program, state, placed) if program.on_one_mesh else (plain, single, order)
        ours = run.evaluate(*args)["loss"]
        theirs = compiled_otherwise(plain, loss)(single, flax_batch)
        yield "the loss in evaluation", *jax.device_get((ours, theirs))


def _evaluates_as_it_trains(program: Program, batch: Any) -> bool:
    variables, batch = with_extra(program.model.variables, batch)
    index = jnp.zeros((), jnp.int32)

    def traced(train: bool) -> str:
        trace = program.in_mesh(lambda *rest: program.traced_loss.trace(rest, train=train))
        return str(trace(variables, batch, index, index).closed.jaxpr)

    return traced(False) == traced(True)


def _initialized(program: Program) -> Iterator[tuple[str, Any, Any]]:
    """(what, by the engine, by `Module.init`) of a Linen module's initial variables."""
    module, source = _user_model(program), program.source
    if not isinstance(module, nn.Module) or program.model.weights is not None:
        return
    example, _ = read_batch(source.example_batch, name="example_batch", abstract=True)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(example)):
        example = zeros_of(example)  # the values are not read, or they would have been asked for
    seed = program.config.run.seed
    call = source.init_with or program.traced_loss.loss_fn
    plain = compiled_otherwise(program, lambda example: plain_init(module, call, seed, example))(
        example
    )
    params, variables = jax.jit(program.in_mesh(lambda: program.model.init(seed)))()
    for path, x in {**params, **variables}.items():
        if path in plain:
            yield f"{path} at the start", *jax.device_get((x, plain[path]))


def _nudged(program: Program, lower: str) -> Callable[[TrainState, Any, int], tuple[Any, Any]]:
    """The i-th move of each parameter by one unit in its last place, up or down.

    The extra arrays of a batch move too: they may be another network's parameters.
    """

    def nudge(state: TrainState, batch: Any, i: int) -> tuple[TrainState, Any]:
        extra = batch.extra if isinstance(batch, WithExtra) else ()
        # Drawn once for all arrays: each draw takes the compiler as long as a layer does.
        sizes = [x.size for x in jax.tree.leaves((state.params, state.master, extra))]
        signs = jax.random.rademacher(jax.random.key(i), (max(sizes, default=0),), "int8")

        def moved(x: Any, dtype: Any) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x
            step = float(jnp.finfo(lower or dtype).eps)
            sign = signs[: x.size].reshape(x.shape).astype(x.real.dtype)
            return (x * (1 + step * sign)).astype(x.dtype)

        def all_moved(arrays: Arrays) -> Arrays:
            dtypes = {path: program.table[path].read.dtype for path in arrays}
            return {
                path: jax.tree.map(lambda x, dtype=dtypes[path]: moved(x, dtype), stored)
                for path, stored in arrays.items()
            }

        state = replace(state, params=all_moved(state.params), master=all_moved(state.master))
        if isinstance(batch, WithExtra):
            batch = WithExtra(batch.samples, jax.tree.map(lambda x: moved(x, x.dtype), extra))
        return state, batch

    return jax.jit(nudge)


def _lowest_dtype(program: Program, batch: Any) -> str:
    """The 16-bit dtype of a step's values, if the config does not set it; "" for none."""
    if program.config.compute_dtype != "fp32":
        return ""
    dtypes = _dtypes(_traced(program, batch).closed.jaxpr)
    return next((name for name in DTYPE_NAMES if name in dtypes), "")


def _draws(program: Program, batch: Any) -> bool:
    """Whether the loss of a micro-batch draws random numbers."""
    if program.array_phases:
        batch = PhasedStep(program.phases).shapes(program.values(batch), until=BATCH)[BATCH]
    return _traced(program, batch).draws_random_numbers


def _traced(program: Program, batch: Any) -> LossProgram:
    """The traced loss of a micro-batch."""
    variables, batch = with_extra(program.model.variables, batch)
    micro_batch = micro_batch_shapes(batch, program.batch.accumulation)
    index = jnp.zeros((), jnp.int32)
    trace = program.in_mesh(lambda *rest: program.traced_loss.trace(rest, train=True))
    loss_program: LossProgram = trace(variables, micro_batch, index, index)
    return loss_program


def _dtypes(jaxpr: Any) -> set[str]:
    """The dtypes of the values in a traced program."""
    avals = (v.aval for eqn in equations(jaxpr.eqns) for v in eqn.outvars)
    return {str(aval.dtype) for aval in avals if hasattr(aval, "dtype")}


def reduced_by_one(program: Program, held: Held) -> Reduced:
    """The program's gradients, compiled separately from its update.

    Of a step of several phases, those that its phases write, if they do.
    """

    compiled: Reduced = jax.jit(program.in_mesh(program.summed))
    if not any(SUMS in phase.writes for phase in program.phases):
        return lambda state, batch: compiled(state, _prepared(program, state, batch, held))

    def by_phases(state: TrainState, batch: Any) -> tuple[Sums, Any]:
        values = {STATE: jax.tree.map(jnp.copy, state), BATCH: batch}  # phases may donate the state
        with program.set_mesh():
            values = PhasedStep(program.phases, held).run(values, until=SUMS)
        return values[SUMS], values[VARIABLES]

    return by_phases


def _prepared(program: Program, state: TrainState, batch: Any, held: Held) -> Any:
    """The batch with what phases before the gradients add to it."""
    with program.set_mesh():
        return PhasedStep(program.array_phases, held).batch(state, batch)


def _refuse_large(nbytes: int) -> None:
    """Raise ConfigError if there is no memory for so many bytes of state on a disk, twice."""
    try:
        text = Path("/proc/meminfo").read_text("utf-8")
    except OSError:
        return
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    if match and 2 * nbytes > (free := 1024 * int(match[1])):
        raise ConfigError(
            f"engine.check: it holds the state on the disk in memory, twice {bytes_text(nbytes)}, "
            f"and {bytes_text(free)} are free: check fewer layers, engine.check(batch, layers=2)"
        )


def _probe(program: Program, reduced: Reduced) -> Callable[[TrainState, Any], StepValues]:
    """(state, batch) -> StepValues; the state is not donated."""
    seen = jax.jit(program.in_mesh(_step_values(program)))

    def probe(state: TrainState, batch: Any) -> StepValues:
        step_values: StepValues = seen(state, *reduced(state, batch))
        return step_values

    return probe


def _step_values(program: Program) -> Callable[[TrainState, Sums, Any], StepValues]:
    """(state, gradients, variables) -> StepValues: the update, and the values to compare."""

    def seen(state: TrainState, sums: Sums, variables: Any) -> StepValues:
        scale = state.loss_scale.scale
        after, metrics = program.update(state, sums, variables)
        trained = [row for row in program.table if row.leaf.trainable]

        def logical(state: TrainState) -> Arrays:
            return {r.path: logical_value(state, r) for r in program.table}

        grads = on_device(sums.grads)
        grads = {
            r.path: unpad(grads[r.path], r.leaf.shape).astype(wide_dtype(r)) / scale
            for r in trained
        }
        carried = {path: x for path, x in after.variables.items() if not is_key(x)}
        old, new = logical(on_device(state)), logical(on_device(after))
        return StepValues(metrics["loss"], grads, old, new, carried, metrics["skipped"])

    return seen


def _at_a_scale_without_overflow(
    program: Program, probe: Callable[[TrainState, Any], StepValues], state: TrainState, batch: Any
) -> tuple[TrainState, Any]:
    """The probe's result, and the state that it belongs to, at a loss scale without overflow.

    A dynamic loss scale starts so high that gradients overflow, and is lowered by skipped steps;
    overflowed gradients cannot be compared.
    """
    dynamic = isinstance(program.optimizer.rule, DynamicRule)
    while True:
        step_values = probe(state, batch)
        scale = state.loss_scale.scale
        if not dynamic or scale <= 1 or math.isfinite(sum(map(norm, step_values.grads.values()))):
            return state, step_values
        state = replace(state, loss_scale=state.loss_scale._replace(scale=scale / 2))


def _moved_values(held: Held, state: TrainState, program: Program, plain: Program) -> Held:
    """The values that phases of the plain program read beside state and batch."""
    if FIRST_ADAPTER in held:
        params, master = held[FIRST_ADAPTER]
        state = replace(state, params=state.params | params, master=state.master | master)
    return plain.held(_moved(state, program, plain))


def _moved(state: TrainState, program: Program, plain: Program) -> TrainState:
    """The state on one device, in the plain program's layout."""

    def move(state: TrainState) -> TrainState:
        state = on_device(state)
        values = {r.path: logical_value(state, r) for r in program.table}
        params, master = {}, {}
        for row in plain.table:
            if row.param:
                params[row.path] = values[row.path].astype(row.param.dtype)
            if row.master:
                master[row.path] = values[row.path]
        average = {path: unpad(x, program.table[path].leaf.shape) for path, x in state.ema.items()}
        opt = plain.layout.moved(state.opt, program.layout)
        return TrainState(
            state.step,
            state.skipped,
            params,
            master,
            opt,
            {path: pad(x, plain.table[path].leaf.shape) for path, x in average.items()},
            state.variables,
            state.loss_scale,
        )

    gathered = jax.jit(move)(state)
    return jax.device_put(gathered, plain.shardings)
