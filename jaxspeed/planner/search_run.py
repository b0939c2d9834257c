"""`plan --search`: the fastest config on a target; and advice for a config that does not fit."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxspeed.axes import AXES, SEQ, TENSOR, axis_names, sample_axes
from jaxspeed.config import Config, load_config, match
from jaxspeed.config.verdicts import shortened
from jaxspeed.errors import ConfigError, JaxspeedError, ModelError
from jaxspeed.hardware.targets import Target
from jaxspeed.known_jax_bugs import installed, refuse_known_bugs
from jaxspeed.parameter_server import build
from jaxspeed.placement.mesh import resolve_sizes
from jaxspeed.placement.rules import LOGICAL_RULES, model_sharding
from jaxspeed.placement.stacks import find_stack
from jaxspeed.planner.compile.in_child import compile_for, pickled
from jaxspeed.planner.compile.outcome import Outcome
from jaxspeed.planner.compile.workers import Inline, Workers
from jaxspeed.planner.memory import Memory, memory_in
from jaxspeed.planner.search.advice import Advice, Adviser
from jaxspeed.planner.search.analytic_cost import CostModel, memory_excess
from jaxspeed.planner.search.candidate import (
    ACCUMULATION,
    MICRO,
    NONE,
    Choice,
    choice_of,
    keys_of,
    with_keys,
)
from jaxspeed.planner.search.candidate_estimate import COMPUTE, MEMORY, PIPELINE, Estimate
from jaxspeed.planner.search.model_sizes import sizes_of
from jaxspeed.planner.search.result import SearchResult, make_result, with_outcomes
from jaxspeed.planner.search.space import FAST, Space, divisors
from jaxspeed.planner.search.walk import Limits, SearchLoop
from jaxspeed.planner.time import Time, time_in
from jaxspeed.planner.time.links import Links
from jaxspeed.planner.time.torus import can_hold, split_dims
from jaxspeed.planner.trace import read_step
from jaxspeed.planner.trace.traced_step import on_chip, with_overlap
from jaxspeed.run.start import Source
from jaxspeed.train.program import Program
from jaxspeed.user_models.config_model import resolve_model

WORKERS = 2
MAX_COMPILED = 4  # candidates
LONG, MAX_SEQ = 32768, 64  # tokens from which sequences are sharded, and devices of one
_MAX_REASON = 160  # characters of a refusal's reason

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """Builds a run's program on given devices, in the process that compiles too."""

    source: Source
    batch: Mapping[str, jax.ShapeDtypeStruct] | None = None

    def __call__(self, devices: Sequence[Any] | None) -> tuple[Program, Any]:
        source = self.source
        model, loss_fn = resolve_model(source.config, source.model, source.loss_fn)
        program = build(source.config, model, loss_fn, optimizer=source.optimizer, devices=devices)
        return program, self.batch


@dataclass(frozen=True)
class SearchProblem:
    """A run, its batch's shapes and a target; sent to worker processes, which build programs."""

    source: Source
    batch: Mapping[str, jax.ShapeDtypeStruct]
    target: Target
    base: Choice
    samples: int

    @property
    def given(self) -> dict[str, Any]:
        return self.source.config.given

    def keys(self, choice: Choice) -> dict[str, Any]:
        """The config keys to set for a choice."""
        return keys_of(self.given, self.base, choice, self.samples)

    def config(self, choice: Choice) -> Config:
        return load_config(with_keys(self.given, self.keys(choice)))

    def __call__(self) -> Callable[[Choice], Estimate]:
        """Set up a worker process with the target's number of devices, simulated."""
        jax.config.update("jax_num_cpu_devices", self.target.count)
        return self.estimate

    def estimate(self, choice: Choice) -> Estimate:
        """The estimate of a choice, from its traced step."""
        platform, devices = self.target.chip.platform, jax.devices("cpu")[: self.target.count]
        try:
            with on_chip(self.target.chip):
                config = with_overlap(self.config(choice), platform)
                program, _ = Job(replace(self.source, config=config))(devices)
                step = read_step(program, self.batch, platform)
                return estimate_of(
                    memory_in(step, self.target.chip), time_in(step, self.target), self.target
                )
        except JaxspeedError as error:
            return Estimate(refused=_first_line(error))


def search_problem(
    source: Source, program: Program, batch: Mapping[str, Any], target: Target
) -> SearchProblem:
    """The search problem of a program's config.

    Raises:
      ConfigError: the config cannot be searched.
    """
    config = source.config
    if config.elasticity.enabled:
        raise ConfigError(
            "--search: with elasticity the batch depends on the number of devices, and a search "
            "keeps the config's batch. Set elasticity.enabled to false"
        )
    return SearchProblem(
        source, batch, target, choice_of(config, target.count), program.batch.train
    )


def search_space(problem: SearchProblem, program: Program) -> Space:
    """The choices that the model, the target and the config's bounds allow."""
    config, target, tuning = problem.source.config, problem.target, program.config.autotuning
    samples = problem.samples
    low, high = tuning.min_train_batch_size, tuning.max_train_batch_size
    if tuning.enabled and not low <= samples <= (high or samples):
        raise ConfigError(
            f"autotuning: the config's batch is {samples} samples on {target}, outside of "
            f"min_train_batch_size {low} and max_train_batch_size {high}; a search does not "
            "change it"
        )
    leaves = [row.leaf for row in program.table]
    stack = find_stack(leaves, config.parallel.units, match)
    sizes = dict(program.mesh.shape)

    def holds(mesh: tuple[int, ...]) -> bool:
        return can_hold(target, {**sizes, **dict(zip(axis_names(), mesh))})

    def splits(mesh: tuple[int, ...]) -> bool:
        return bool(split_dims(target, {**sizes, **dict(zip(axis_names(), mesh))}))

    bounds = (1, samples)
    if tuning.enabled:
        bounds = (
            tuning.min_train_micro_batch_size_per_gpu,
            tuning.max_train_micro_batch_size_per_gpu,
        )
    space = Space(
        problem.base,
        target.count,
        samples,
        stack.layers if stack else 0,
        _tensor_degrees(problem, program),
        target.slice_count if target.topology else target.node,
        holds,
        splits,
        _may_offload(target),
        bounds,
        degrees={
            axis: tuple(sorted({1, sizes[axis], *(_dividing(axis, program, target.count) or ())}))
            for axis in sample_axes()
            if AXES[axis].dims
        }
        | {SEQ: _sequence_degrees(problem)},
    )
    if tuning.has("fast") and tuning.fast:
        return replace(space, changing=FAST)
    return space


def _sequence_degrees(problem: SearchProblem) -> tuple[int, ...]:
    """Sizes of the axis of sequences, inside of a node or slice.

    Another than the config's only for batches of tokens, where sequences are long or there are more
    devices than samples.
    """
    target, base = problem.target, problem.base.seq
    tokens = problem.batch.get("tokens")
    if tokens is None or len(tokens.shape) != 2:
        return (base,)
    length = tokens.shape[1] - ("targets" not in problem.batch)
    if base == 1 and length < LONG and problem.samples >= target.count:
        return (1,)
    within = target.slice_count if target.topology else target.node
    sizes = (n for n in divisors(within) if n <= MAX_SEQ and length % n == 0)
    return tuple(sorted({1, base, *sizes}))


def _tensor_degrees(problem: SearchProblem, program: Program) -> tuple[int, ...]:
    """Sizes of the tensor axis that divide the sharded dims, inside of a node or slice."""
    target, base = problem.target, problem.base.tensor
    tuning, config = problem.source.config.autotuning, problem.source.config
    if tuning.has("mp_size"):
        return (tuning.mp_size,)
    within = target.slice_count if target.topology else target.node
    degrees = _dividing(TENSOR, program, within)
    if degrees is None:  # names come from layer specs, or are inferred if the config has the axis
        known = config.layer_specs or base > 1
        return divisors(within) if known else (1,)
    return tuple(degree for degree in divisors(within) if degree == base or degree in degrees)


def _dividing(axis: str, program: Program, within: int) -> tuple[int, ...] | None:
    """Sizes of an axis that divide the dims that it shards; None if the model names none."""
    named = [
        row.leaf
        for row in program.table
        if any(LOGICAL_RULES.get(name or "") == axis for name in row.leaf.names)
    ]
    ones = dict.fromkeys(axis_names(), 1)

    def divides(degree: int) -> bool:
        sizes = {**ones, axis: degree}
        return not any(model_sharding(leaf.shape, leaf.names, sizes).misfits for leaf in named)

    return tuple(filter(divides, divisors(within))) if named else None


def _may_offload(target: Target) -> bool:
    """Whether this JAX version offloads correctly on such devices."""
    try:
        platform = target.chip.platform
        refuse_known_bugs(platform, installed(platform), ["a candidate"])
    except ConfigError:
        return False
    return True


def cost_model(problem: SearchProblem) -> CostModel:
    """The analytic cost model, from the model's loss traced on one sample and one device."""
    base, target = problem.base, problem.target
    alone = replace(
        base,
        mesh=(1,) * len(base.mesh),
        stage=0,
        recompute=NONE,
        offload_activations=0.0,
        offload_optimizer=False,
        offload_parameters=False,
        micro=1,
    )
    plain = with_keys(problem.given, keys_of(problem.given, base, alone, 1))
    keys = {"train_batch_size": None, MICRO: 1, ACCUMULATION: 1}
    keys |= {f"mesh.{axis}": 1 for axis in axis_names()}
    keys |= {f"parallel.{key}": None for key in plain.get("parallel", {}) if _is_ring_key(key)}
    config = load_config(with_keys(plain, keys))
    program, _ = Job(replace(problem.source, config=config))(jax.devices("cpu")[:1])
    sample = {k: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for k, x in problem.batch.items()}
    flops, sizes = (
        target.chip.flops,
        resolve_sizes(problem.source.config.mesh.model_dump(), target.count),
    )

    @functools.cache
    def links(mesh: tuple[int, ...]) -> Links:
        return Links(target, {**sizes, **dict(zip(axis_names(), mesh))})

    return CostModel(
        sizes_of(program, sample),
        target,
        links,
        problem.samples,
        max((x.shape[1] for x in sample.values() if len(x.shape) == 2), default=1),
        flops.get(config.compute_dtype, flops["bf16"]),
        problem.source.config.zero_optimization.offload_optimizer.device == "nvme",
    )


def _is_ring_key(key: str) -> bool:
    return key == "data_reduction" or key.startswith("ring_")


def estimate_of(memory: Memory, spent: Time, target: Target) -> Estimate:
    """The estimate of a choice from its memory and time."""
    chip = target.chip
    fits = memory.on(chip.memory)
    if memory.host > chip.host_memory:
        fits = "does not fit"
    parts = {COMPUTE: spent.compute, MEMORY: spent.memory, PIPELINE: spent.bubble}
    for exchange in spent.exchanges:
        what = f"{exchange.kind}s" if exchange.axes else f"transfers {exchange.kind}"
        name = f"{what} of {exchange.purpose}"
        parts[name] = parts.get(name, 0.0) + exchange.exposed
    return Estimate(
        memory.device,
        memory.host,
        chip.memory,
        chip.host_memory,
        fits,
        spent.step,
        spent.tokens_per_second,
        spent.mfu,
        parts,
        unit=spent.unit,
    )


def search_run(
    source: Source,
    program: Program,
    batch: Mapping[str, Any],
    target: Target,
    *,
    seconds: float,
    compiling: bool = False,
    patience: float,
    progress: Progress = lambda text: None,
) -> SearchResult:
    """Search for the fastest mesh, ZeRO stage, pipeline, remat, offload and micro-batch.

    Args:
      source, program, batch: the unchanged config.
      seconds: after which no more is estimated.
      compiling: whether the best candidates are compiled for the target.
      patience: timeout of each compile, in seconds.
      progress: called with progress messages.
    """
    began = time.monotonic()
    problem = search_problem(source, program, batch, target)
    space, costs = search_space(problem, program), cost_model(problem)
    tuning = source.config.autotuning
    trials = tuning.tuner_num_trials if tuning.has("tuner_num_trials") else 10**6

    def on_estimate(count: int, best: Choice | None) -> None:
        best_text = f"; best {best.name(problem.samples)}" if best else ""
        progress(f"searching {target}: {count} estimated{best_text}")

    progress(f"searching {target}: analytic costs")
    with _pool(problem) as pool:
        workers = WORKERS if isinstance(pool, Workers) else 1
        walk = SearchLoop(
            space,
            costs,
            lambda cost: memory_excess(cost, target),
            pool.submit,
            Limits(seconds, trials, workers),
            on_estimate,
        )
        done = walk.run()
    estimated = {choice: (estimate, problem.keys(choice)) for choice, estimate in done.items()}
    unit = done[space.base].unit
    took = time.monotonic() - began
    search_result = make_result(
        target, problem.samples, unit, walk.considered, took, estimated, walk.best
    )
    if compiling:
        search_result = _compile_best(search_result, problem, patience, progress)
    return replace(search_result, seconds=time.monotonic() - began)


def _pool(problem: SearchProblem) -> Workers | Inline:
    """Worker processes; this process if the problem cannot be pickled."""
    try:
        return Workers(pickled(problem), WORKERS, {"JAX_PLATFORMS": "cpu"})
    except ModelError:
        return Inline(problem.estimate)


def _compile_best(
    search_result: SearchResult, problem: SearchProblem, patience: float, progress: Progress
) -> SearchResult:
    """Compile the fastest candidates until one fits."""
    outcomes: list[tuple[int, Outcome]] = []
    able = [
        n
        for n, candidate in enumerate(search_result.candidates)
        if candidate.estimate.fits != "does not fit"
    ]
    # Those with headroom first, as the best is chosen.
    order = sorted(able, key=lambda n: (search_result.candidates[n].estimate.fits != "fits", n))
    for number in order[:MAX_COMPILED]:
        candidate = search_result.candidates[number]
        progress(f"compiling {candidate.name} for {search_result.target}")
        job = Job(replace(problem.source, config=problem.config(candidate.choice)), problem.batch)
        outcomes.append((number, compile_for(search_result.target, job, patience)))
        if outcomes[-1][1].fits(search_result.target):
            break
    return with_outcomes(search_result, outcomes)


def advice_of(
    source: Source,
    program: Program,
    batch: Mapping[str, Any],
    target: Target,
    needed: int | None = None,
) -> Advice | None:
    """Advice for a config that does not fit; None if the config cannot be searched.

    Args:
      needed: bytes per device by the target's compiler, if it ran: estimates are then scaled by
        its ratio to the config's estimate.
    """
    try:
        problem = search_problem(source, program, batch, target)
        space, costs = search_space(problem, program), cost_model(problem)
    except JaxspeedError:
        return None
    base = problem.estimate(problem.base)
    if base.refused:
        return None
    factor = max(1.0, needed / base.device) if needed and base.device else 1.0

    def estimate(choice: Choice) -> Estimate:
        return _scaled(problem.estimate(choice), factor)

    return Adviser(space, costs, estimate, problem.keys).advise()


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    """The estimate with device memory scaled by a factor."""
    if estimate.refused or factor == 1.0:
        return estimate
    device = int(estimate.device * factor)
    fits = "does not fit" if device > estimate.device_limit else estimate.fits
    return replace(estimate, device=device, fits=fits)


def _first_line(error: Exception) -> str:
    lines = [line.strip(" -") for line in str(error).splitlines()]
    text = lines[1] if len(lines) > 1 and lines[0].endswith("the config:") else lines[0]
    return shortened(text, _MAX_REASON)
