"""`engine.check`: compare the sharded step with the same step on one device and with plain Flax."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.config import match
from jaxspeed.engine.oom_help import device_limit
from jaxspeed.engine.plain_flax import PlainGradients, plain_gradients
from jaxspeed.errors import ConfigError, ModelError, OutOfMemoryError
from jaxspeed.jaxpr.traverse import bodies
from jaxspeed.objective.accumulate import Sums, micro_batch_shapes, micro_batches
from jaxspeed.objective.batches import EXTRA, WithExtra, with_extra
from jaxspeed.objective.config_model import resolve_model
from jaxspeed.objective.rng import is_key
from jaxspeed.objective.train_state import (
    Arrays,
    TrainState,
    pad,
    unpad,
    updated_values,
    wide_dtype,
)
from jaxspeed.objective.trainable import read_trainable
from jaxspeed.optim.loss_scale import DynamicRule
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.placement.paths import listed
from jaxspeed.placement.show import as_text, bytes_text
from jaxspeed.train.program import Program

# Tolerance for the order of summation, relative to the leaf's norm. fp32: sums of up to a million
# terms at eps 6e-8. 16 bits: eps 4e-3 (bf16) or 5e-4 (fp16) on each activation and gradient, whose
# errors mostly average out over a leaf.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 2e-2}
# Tolerance for ring messages, rounded N - 1 times: bf16 as above; int8 by up to 1/254 of a block's
# largest number, so a small leaf in the same block has few significant digits.
OF_WIRE = {"none": 0.0, "bf16": 5e-2, "int8": 0.5}
NAMES = {"bfloat16": "bf16", "float16": "fp16"}
# A value is rounding noise up to this many times what it moves by when each parameter moves by one
# unit in its last place: the bias before a batch normalization, whose gradient is 0 but for that.
NOISE = 4.0
SHOWN = 12


@dataclass(frozen=True)
class LeafDifference:
    """Relative differences of one parameter, ||sharded - plain|| / ||plain||.

    A leaf with less than 1/1000 of the global gradient norm is measured against that 1/1000, and
    one that is rounding noise (`NOISE`) against that: pure noise has no meaningful relative
    difference.
    """

    path: str
    gradient: float  # the larger of those against the plain step and against plain Flax
    update: float  # of the parameter's change, not of the parameter


@dataclass(frozen=True)
class CheckReport:
    """Differences between the sharded and the plain step."""

    loss: float
    leaves: tuple[LeafDifference, ...]
    tolerance: float
    devices: int
    # Parameters and state that are not trained or carried as by plain JAX and Flax.
    faults: tuple[str, ...] = ()
    lower: str = ""  # the 16-bit dtype in which the model computes by itself

    @property
    def gradient(self) -> float:
        """The largest relative difference of a gradient."""
        return max((leaf.gradient for leaf in self.leaves), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether loss and gradients agree, and the trained parameters and carried state.

        Updates do not count: Adam turns the rounding noise of a zero gradient into full steps.
        """
        differences = [self.loss, *(leaf.gradient for leaf in self.leaves)]
        # Not "any(d > ...)": a NaN must fail.
        return not self.faults and all(d <= self.tolerance for d in differences)

    def __rich__(self) -> Group:
        verdict = "agrees with" if self.ok else "DIFFERS from"
        title = (
            f"the step on {self.devices} devices {verdict} the step on one device "
            f"(tolerance {self.tolerance:g}"
            + (f": the model computes in {self.lower})" if self.lower else ")")
        )
        table = Table(box=None)
        for name in ("relative difference of", "gradient", "update"):
            table.add_column(name, justify="left" if name[0] == "r" else "right")
        table.add_row("loss", f"{self.loss:.2e}", "")
        worst = sorted(self.leaves, key=lambda leaf: -leaf.gradient)
        for leaf in worst[:SHOWN]:
            table.add_row(leaf.path, f"{leaf.gradient:.2e}", f"{leaf.update:.2e}")
        if len(worst) > SHOWN:
            table.add_row(f"{len(worst) - SHOWN} others, all smaller", "", "")
        notes = self.faults
        apart = [leaf.path for leaf in worst if leaf.update > self.tolerance]
        if self.ok and apart:
            notes = (
                f"updates of {listed(apart)} differ although the gradients agree: an optimizer "
                "that divides by a gradient's size (Adam) makes full steps of rounding noise",
            )
        return Group(Text(title), table, *map(Text, notes))

    def __str__(self) -> str:
        return as_text(self, width=100)


# (state, batch) -> (reduced gradients, variables after the batch).
Reduced = Callable[[TrainState, Any], tuple[Sums, Any]]


def check(
    program: Program,
    state: TrainState,
    batch: Any,
    reduced_by: Callable[[Program], Reduced],
    *,
    layers: int | None = None,
    model: Any = None,
) -> CheckReport:
    """Run one step on all devices, on one, and by plain Flax, from the same state (not donated)."""
    if layers is not None or model is not None:
        program = _smaller(program, layers, model)
        state = program.init(program.config.run.seed)
    probe = _probe(program, reduced_by(program))
    plain = _plain(program)
    _fits(plain)
    placed = jax.device_put(batch, program.batch_shardings(batch))
    state, ours = _at_a_scale_without_overflow(program, probe, state, placed)
    single = _moved(state, program, plain)
    order = _as_one_rank(program, batch)
    order = jax.device_put(order, plain.batch_shardings(order))
    theirs = _probe(plain, reduced_by_one(plain))(single, order)
    flax_step = _by_flax(plain)
    lower = _lowest_dtype(plain, order)
    nudged = flax_step(_nudged(plain, lower)(single), order)
    found = jax.device_get((ours, theirs, flax_step(single, order), nudged))
    return _compare(program, lower, *found)


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


def _plain(program: Program) -> Program:
    """The same program on one device: one data rank, stage 0, the same micro-batches."""
    given = program.given_for_one_mesh()
    for key in ("data_parallel_size", "tensor_parallel", "elasticity"):
        given.pop(key, None)
    zero = {"stage": 0}
    accumulation = program.numbered_micro_batches
    given |= {
        "mesh": {},
        "zero_optimization": zero,
        "train_batch_size": program.batch.train,
        "train_micro_batch_size_per_gpu": program.batch.train // accumulation,
        "gradient_accumulation_steps": accumulation,
    }
    if given.get("gradient_allreduce_op") == "sum":
        raise ConfigError(
            "check: gradient_allreduce_op is sum, so the step depends on the number of data ranks; "
            "check with mean"
        )
    config = type(program.config).load(given)
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


class StepValues(NamedTuple):
    """The values of a step that are compared."""

    loss: Any
    grads: Arrays
    old: Arrays  # parameters, trained or not, before the step
    new: Arrays  # ... and after it
    variables: Arrays  # after it, without random keys


def _by_flax(program: Program) -> Any:
    """(state, batch) -> PlainGradients of the same micro-batches on the same device."""

    def gradients(state: TrainState, batch: Any) -> PlainGradients:
        params = {
            r.path: unpad(updated_values(state, r), r.leaf.shape).astype(r.read.dtype)
            for r in program.table
        }
        variables, batch = with_extra(state.variables, batch)
        batch = jax.tree.map(program.objective.cast, batch)
        micro = micro_batches(batch, program.batch.accumulation, 1)
        found = plain_gradients(
            program.model,
            program.objective.loss_fn,
            params,
            variables,
            micro,
            state.step,
            program.config.parallel.state_collections,
            read_trainable(program.source.trainable).adds,
            program.objective.autocast,
        )
        values = {p: x for p, x in found.values.items() if p != EXTRA and not is_key(x)}
        return found._replace(values=values)

    return jax.jit(program.in_mesh(gradients))


def _nudged(program: Program, lower: str) -> Callable[[TrainState], TrainState]:
    """The state with each parameter moved by one unit in its last place, up or down."""

    def nudge(state: TrainState) -> TrainState:
        # Drawn once for all parameters: each draw takes the compiler as long as a layer does.
        most = max((x.size for x in [*state.params.values(), *state.master.values()]), default=0)
        signs = jax.random.rademacher(jax.random.key(0), (most,), "int8")

        def moved(path: str, x: Any) -> Any:
            step = float(jnp.finfo(lower or program.table[path].read.dtype).eps)
            sign = signs[: x.size].reshape(x.shape).astype(x.real.dtype)
            return (x * (1 + step * sign)).astype(x.dtype)

        params = {path: moved(path, x) for path, x in state.params.items()}
        master = {path: moved(path, x) for path, x in state.master.items()}
        return replace(state, params=params, master=master)

    return jax.jit(nudge)


def _lowest_dtype(program: Program, batch: Any) -> str:
    """The 16-bit dtype of a step's values, if the config does not set it; "" for none."""
    if program.config.compute_dtype != "fp32":
        return ""
    variables, batch = with_extra(program.model.variables, batch)
    one = micro_batch_shapes(batch, program.batch.accumulation)
    index = jnp.zeros((), jnp.int32)
    trace = program.in_mesh(lambda *rest: program.objective.trace(rest, train=True))
    found = _dtypes(trace(variables, one, index, index).closed.jaxpr)
    return next((name for name in NAMES if name in found), "")


def _dtypes(jaxpr: Any) -> set[str]:
    """The dtypes of the values in a traced program."""
    own = {str(v.aval.dtype) for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "dtype")}
    return own.union(*(_dtypes(body.jaxpr) for eqn in jaxpr.eqns for body in bodies(eqn)))


def reduced_by_one(program: Program) -> Reduced:
    """The program's gradients, compiled separately from its update."""

    def reduced(state: TrainState, batch: Any) -> tuple[Sums, Any]:
        scale = state.loss_scale.scale
        sources = state.sources(program.table)
        given, batch = with_extra(state.variables, batch)
        found: tuple[Sums, Any] = program.gradients(
            sources, given, batch, state.step, scale, state.ring_errors
        )
        return found

    compiled: Reduced = jax.jit(program.in_mesh(reduced))
    return compiled


def _probe(program: Program, reduced: Reduced) -> Callable[[TrainState, Any], StepValues]:
    """(state, batch) -> StepValues; the state is not donated."""
    seen = jax.jit(program.in_mesh(_step_values(program)))

    def probe(state: TrainState, batch: Any) -> StepValues:
        found: StepValues = seen(state, *reduced(state, batch))
        return found

    return probe


def _step_values(program: Program) -> Callable[[TrainState, Sums, Any], StepValues]:
    """(state, gradients, variables) -> StepValues: the update, and the values to compare."""

    def seen(state: TrainState, sums: Sums, variables: Any) -> StepValues:
        scale = state.loss_scale.scale
        after, metrics = program.update(state, sums, variables)
        trained = [row for row in program.table if row.leaf.trainable]

        def logical(state: TrainState) -> Arrays:
            return {r.path: unpad(updated_values(state, r), r.leaf.shape) for r in program.table}

        grads = on_device(sums.grads)
        grads = {
            r.path: unpad(grads[r.path], r.leaf.shape).astype(wide_dtype(r)) / scale
            for r in trained
        }
        carried = {path: x for path, x in after.variables.items() if not is_key(x)}
        return StepValues(
            metrics["loss"], grads, logical(on_device(state)), logical(on_device(after)), carried
        )

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
        found = probe(state, batch)
        scale = state.loss_scale.scale
        if not dynamic or scale <= 1 or math.isfinite(sum(map(_norm, found.grads.values()))):
            return state, found
        state = replace(state, loss_scale=state.loss_scale._replace(scale=scale / 2))


def _moved(state: TrainState, program: Program, plain: Program) -> TrainState:
    """The state on one device, in the plain program's layout."""

    def move(state: TrainState) -> TrainState:
        state = on_device(state)
        values = {r.path: unpad(updated_values(state, r), r.leaf.shape) for r in program.table}
        params, master = {}, {}
        for row in plain.table:
            if row.param:
                params[row.path] = values[row.path].astype(row.param.dtype)
            if row.master:
                master[row.path] = values[row.path]
        average = {path: unpad(x, program.table[path].leaf.shape) for path, x in state.ema.items()}
        opt = plain.layout.stored(program.layout.logical(state.opt))
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


def _compare(
    program: Program,
    lower: str,
    ours: StepValues,
    theirs: StepValues,
    by_flax: PlainGradients,
    nudged: PlainGradients,
) -> CheckReport:
    tolerance = TOLERANCE[NAMES.get(lower, program.config.compute_dtype)]
    if program.update.ring:
        tolerance = max(tolerance, OF_WIRE[program.config.parallel.ring_wire])

    def noise(of: Any, nudged: Any) -> float:
        """The size up to which a value is noise, over the tolerance."""
        return NOISE * _norm(_wide(of) - _wide(nudged)) / tolerance

    floor = 1e-3 * math.sqrt(sum(_norm(g) ** 2 for g in theirs.grads.values()))

    def gradient(path: str) -> float:
        sides = [theirs.grads[path], by_flax.grads.get(path, theirs.grads[path])]
        least = floor
        if path in by_flax.grads:
            least = max(floor, noise(by_flax.grads[path], nudged.grads[path]))
        return max(_difference(ours.grads[path], side, least) for side in sides)

    leaves = tuple(
        LeafDifference(
            path,
            gradient(path),
            _difference(ours.new[path] - ours.old[path], theirs.new[path] - theirs.old[path]),
        )
        for path in ours.grads
    )
    least = noise(by_flax.loss, nudged.loss)
    loss = max(_difference(ours.loss, side, least) for side in (theirs.loss, by_flax.loss))
    kept = {
        path: max(tolerance, noise(x, nudged.values[path])) for path, x in by_flax.values.items()
    }
    faults = _faults(program, ours, by_flax, tolerance, kept)
    return CheckReport(loss, leaves, tolerance, len(program.devices), tuple(faults), lower)


def _faults(
    program: Program,
    ours: StepValues,
    by_flax: PlainGradients,
    tolerance: float,
    floors: Mapping[str, float],
) -> Iterator[str]:
    """Parameters and state that are not trained or carried as by plain JAX and Flax.

    `floors` are the sizes against which carried values are measured at least.
    """
    for path, grad in by_flax.grads.items():
        if path not in ours.grads and _norm(grad) > 0 and not _frozen_by_user(program, path):
            yield f"{path} is not trained: its jax.grad has norm {_norm(grad):.3g}"
    for path in ours.grads.keys() - by_flax.grads.keys():
        yield f"{path} is trained, but is not a parameter for Flax"
    # Untrained parameters and all variables have the values that the loss assigned.
    carried = {path: x for path, x in ours.new.items() if path not in ours.grads} | ours.variables
    for path, value in carried.items():
        wanted = by_flax.values.get(path)
        off = 0.0 if wanted is None else _difference(value, wanted, floors[path])
        if not off <= tolerance:  # a NaN must fail
            yield f"{path} is carried to the next step with a relative difference of {off:.2e}"


def _frozen_by_user(program: Program, path: str) -> bool:
    """Whether `trainable` or an optimizer group freezes a parameter."""
    optimizer, trainable = program.config.optimizer, read_trainable(program.source.trainable)
    if optimizer and any(g.frozen and match(g.pattern, path) for g in optimizer.groups):
        return True
    if trainable.by_leaf:  # only the table has the variables' types
        return path in program.table.rows
    return not trainable(path, None)


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _norm(x: Any) -> float:
    return float(np.linalg.norm(_wide(x).reshape(-1)))


def _difference(a: Any, b: Any, floor: float = 0.0) -> float:
    apart = _norm(_wide(a) - _wide(b))
    return 0.0 if apart == 0 else apart / (max(_norm(b), floor) or math.nan)
