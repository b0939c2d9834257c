"""A search for the config that is fastest on a target, and advice where one does not fit."""

import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxspeed.config import Config, load_config, match
from jaxspeed.errors import ConfigError, JaxspeedError
from jaxspeed.hardware.targets import Target
from jaxspeed.objective.config_model import resolve_model
from jaxspeed.offload.known_jax_bugs import refuse_faults
from jaxspeed.placement.mesh import AXES
from jaxspeed.placement.rules import LOGICAL_RULES, model_cut
from jaxspeed.placement.stacks import find_stack
from jaxspeed.planner.compile.in_child import compile_for
from jaxspeed.planner.compile.outcome import Outcome
from jaxspeed.planner.memory import Memory, memory_in, read_step
from jaxspeed.planner.memory.traced_step import as_on, with_overlap
from jaxspeed.planner.search import (
    FAST,
    Choice,
    Estimate,
    Limits,
    SearchLoop,
    Sketch,
    Space,
    applied,
    choice_of,
    lacking,
    sizes_of,
    words_of,
)
from jaxspeed.planner.search.advice import Advice, Adviser
from jaxspeed.planner.search.candidate import ACCUMULATION, MESH, MICRO, NONE
from jaxspeed.planner.search.candidate_estimate import COMPUTE, MEMORY, PIPELINE
from jaxspeed.planner.search.result import SearchResult, found_of, with_outcomes
from jaxspeed.planner.search.space import divisors
from jaxspeed.planner.search.workers import Inline, Workers
from jaxspeed.planner.time import Time, time_in
from jaxspeed.planner.time.torus import can_hold
from jaxspeed.run.start import Source
from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program

WORKERS = 2
PROVED = 4  # candidates that are compiled at most
_LONGEST = 160  # characters of why something cannot be

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Searched:
    """What is searched: a run, its batch's shapes and a target.

    It goes to other processes, which build programs of it.
    """

    source: Source
    batch: Mapping[str, jax.ShapeDtypeStruct]
    target: Target
    base: Choice
    samples: int

    @property
    def given(self) -> dict[str, Any]:
        return self.source.config.given

    def words(self, choice: Choice) -> dict[str, Any]:
        """The keys that make a choice of the config."""
        return words_of(self.given, self.base, choice, self.samples)

    def config(self, choice: Choice) -> Config:
        return load_config(applied(self.given, self.words(choice)))

    def __call__(self) -> Callable[[Choice], Estimate]:
        """In another process: the estimates, on as many simulated devices as the target has."""
        jax.config.update("jax_num_cpu_devices", self.target.count)
        return self.estimate

    def estimate(self, choice: Choice) -> Estimate:
        """What a choice takes, by its traced step."""
        platform, devices = self.target.chip.platform, jax.devices("cpu")[: self.target.count]
        try:
            with as_on(platform):
                program = self.program(with_overlap(self.config(choice), platform), devices)
                step = read_step(program, self.batch, platform)
                return estimate_of(memory_in(step), time_in(step, self.target), self.target)
        except JaxspeedError as error:
            return Estimate(refused=_first_line(error))

    def program(self, config: Config, devices: Sequence[Any]) -> Program:
        source = self.source
        model, loss_fn = resolve_model(config, source.model, source.loss_fn)
        return build_program(config, model, loss_fn, optimizer=source.optimizer, devices=devices)


@dataclass(frozen=True)
class _Chosen:
    """Builds the program of one choice on the devices of another process, to be compiled."""

    searched: Searched
    choice: Choice

    def __call__(self, devices: Sequence[Any]) -> tuple[Program, Any]:
        config = self.searched.config(self.choice)
        return self.searched.program(config, devices), self.searched.batch


def searched_of(
    source: Source, program: Program, batch: Mapping[str, Any], target: Target
) -> Searched:
    """The config of a program as a search begins with it.

    Raises:
      ConfigError: where the config leaves nothing to search.
    """
    config = source.config
    if config.elasticity.enabled:
        raise ConfigError(
            "--search: the batch of elasticity follows from the number of devices, and a search "
            "keeps the batch that the config gives. Switch elasticity.enabled off"
        )
    return Searched(source, batch, target, choice_of(config, target.count), program.batch.train)


def space_of(searched: Searched, program: Program) -> Space:
    """What may be changed of a config: what its model, its target and its bounds allow."""
    config, target, tuning = searched.source.config, searched.target, program.config.autotuning
    samples = searched.samples
    low, high = tuning.min_train_batch_size, tuning.max_train_batch_size
    if tuning.enabled and not low <= samples <= (high or samples):
        raise ConfigError(
            f"autotuning: the batch of the config is {samples} samples on {target}, outside of "
            f"min_train_batch_size {low} and max_train_batch_size {high}; a search keeps it"
        )
    leaves = [row.leaf for row in program.table]
    stack = find_stack(leaves, config.parallel.units, match)
    sizes = dict(program.mesh.shape)

    def holds(mesh: tuple[int, int, int, int]) -> bool:
        return can_hold(target, {**sizes, **dict(zip(MESH, mesh))})

    bounds = (1, samples)
    if tuning.enabled:
        bounds = (
            tuning.min_train_micro_batch_size_per_gpu,
            tuning.max_train_micro_batch_size_per_gpu,
        )
    space = Space(
        searched.base,
        target.count,
        samples,
        stack.layers if stack else 0,
        _degrees(searched, program),
        target.slice_count if target.topology else target.node,
        holds,
        _may_offload(target),
        bounds,
        fixed=math.prod(n for axis, n in sizes.items() if axis not in MESH),
    )
    if tuning.said("fast") and tuning.fast:
        return replace(space, changing=FAST)
    return space


def _degrees(searched: Searched, program: Program) -> tuple[int, ...]:
    """Of the tensor axis: those that divide what it cuts, inside of a node or slice."""
    target, base = searched.target, searched.base.tensor
    tuning, config = searched.source.config.autotuning, searched.source.config
    if tuning.said("mp_size"):
        return (tuning.mp_size,)
    within = target.slice_count if target.topology else target.node
    named = [
        row.leaf
        for row in program.table
        if any(LOGICAL_RULES.get(name or "") == "tensor" for name in row.leaf.names)
    ]
    if not named:  # names come with the axis: of layer specs, or inferred where it is there
        known = config.layer_specs or base > 1
        return divisors(within) if known else (1,)
    ones = dict.fromkeys(AXES, 1)

    def divides(degree: int) -> bool:
        sizes = {**ones, "tensor": degree}
        return not any(model_cut(leaf.shape, leaf.names, sizes).misfits for leaf in named)

    return tuple(degree for degree in divisors(within) if degree == base or divides(degree))


def _may_offload(target: Target) -> bool:
    """Whether this version of JAX moves rightly between such devices and their hosts."""
    try:
        refuse_faults(["a candidate"], target.chip.platform, jax.lib.__version__)
    except ConfigError:
        return False
    return True


def sketch_of(searched: Searched) -> Sketch:
    """Formulas for the model, from its loss traced on one sample and one device."""
    base, target = searched.base, searched.target
    alone = replace(
        base.on((1, 1, 1, 1)),
        stage=0,
        recompute=NONE,
        activations_wait=False,
        optimizer_waits=False,
        parameters_wait=False,
        micro=1,
    )
    plain = applied(searched.given, words_of(searched.given, base, alone, 1))
    words = {"train_batch_size": None, MICRO: 1, ACCUMULATION: 1}
    words |= {f"mesh.{axis}": 1 for axis in AXES}
    words |= {f"parallel.{key}": None for key in plain.get("parallel", {}) if _of_rings(key)}
    config = load_config(applied(plain, words))
    source = searched.source
    model, loss_fn = resolve_model(config, source.model, source.loss_fn)
    device = jax.devices("cpu")[:1]
    program = build_program(config, model, loss_fn, optimizer=source.optimizer, devices=device)
    one = {k: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for k, x in searched.batch.items()}
    flops = target.chip.flops
    return Sketch(
        sizes_of(program, one),
        target,
        searched.samples,
        max((x.shape[1] for x in one.values() if len(x.shape) == 2), default=1),
        flops.get(config.compute_dtype, flops["bf16"]),
    )


def _of_rings(key: str) -> bool:
    return key == "data_reduction" or key.startswith("ring_")


def estimate_of(memory: Memory, spent: Time, target: Target) -> Estimate:
    """As a search holds two of them against each other."""
    chip = target.chip
    fits = memory.on(chip.memory)
    if memory.host > chip.host_memory:
        fits = "does not fit"
    parts = {COMPUTE: spent.compute, MEMORY: spent.memory, PIPELINE: spent.bubble}
    for each in spent.exchanges:
        what = f"{each.kind}s" if each.axes else f"moves {each.kind}"
        name = f"{what} of {each.purpose}"
        parts[name] = parts.get(name, 0.0) + each.exposed
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
    """The fastest of all configs that are like this one but for how it is spread and what waits.

    Args:
      source, program, batch: the config as it is.
      seconds: after which no more is estimated.
      compiling: whether the best are proved by the target's compiler.
      patience: seconds that it has for each.
      progress: told how far it is.
    """
    began = time.monotonic()
    searched = searched_of(source, program, batch, target)
    space, sketch = space_of(searched, program), sketch_of(searched)
    tuning = source.config.autotuning
    trials = tuning.tuner_num_trials if tuning.said("tuner_num_trials") else 10**6

    def told(count: int, best: Choice | None) -> None:
        now = f"; best {best.name(searched.samples)}" if best else ""
        progress(f"searching {target}: {count} estimated{now}")

    progress(f"searching {target}: by formula")
    with _pool(searched) as pool:
        workers = WORKERS if isinstance(pool, Workers) else 1
        walk = SearchLoop(
            space,
            sketch,
            lambda found: lacking(found, target),
            pool.submit,
            Limits(seconds, trials, workers),
            told,
        )
        done = walk.run()
    estimated = {choice: (found, searched.words(choice)) for choice, found in done.items()}
    unit = done[space.base].unit
    took = time.monotonic() - began
    found = found_of(target, searched.samples, unit, walk.considered, took, estimated, walk.best)
    if compiling:
        found = _proved(found, searched, patience, progress)
    return replace(found, seconds=time.monotonic() - began)


def _pool(searched: Searched) -> Workers | Inline:
    """Other processes; where what is searched cannot be sent to them, this one."""
    try:
        job = pickle.dumps(searched)
    except (pickle.PicklingError, AttributeError, TypeError):
        return Inline(searched.estimate)
    if b"__main__" in job:
        return Inline(searched.estimate)
    return Workers(job, WORKERS, {"JAX_PLATFORMS": "cpu"})


def _proved(
    found: SearchResult, searched: Searched, patience: float, progress: Progress
) -> SearchResult:
    """With the fastest compiled, until one fits."""
    outcomes: list[tuple[int, Outcome]] = []
    able = [n for n, each in enumerate(found.candidates) if each.estimate.fits != "does not fit"]
    # With head room before without: as the best is chosen.
    order = sorted(able, key=lambda n: (found.candidates[n].estimate.fits != "fits", n))
    for number in order[:PROVED]:
        each = found.candidates[number]
        progress(f"compiling {each.name} for {found.target}")
        job = _Chosen(searched, each.choice)
        outcomes.append((number, compile_for(found.target, job, patience)))
        if outcomes[-1][1].fits(found.target):
            break
    return with_outcomes(found, outcomes)


def advice_of(
    source: Source,
    program: Program,
    batch: Mapping[str, Any],
    target: Target,
    needed: int | None = None,
) -> Advice | None:
    """What to change of a config that does not fit; None where nothing can be said.

    Args:
      needed: bytes of a device by the target's compiler, where it was asked: estimates are then
        held against as much less as they were below it.
    """
    try:
        searched = searched_of(source, program, batch, target)
        space, sketch = space_of(searched, program), sketch_of(searched)
    except JaxspeedError:
        return None
    base = searched.estimate(searched.base)
    if base.refused:
        return None
    factor = max(1.0, needed / base.device) if needed and base.device else 1.0

    def estimate(choice: Choice) -> Estimate:
        return _scaled(searched.estimate(choice), factor)

    return Adviser(space, sketch, estimate, searched.words).advise()


def _scaled(found: Estimate, factor: float) -> Estimate:
    """As if the device needed so much more."""
    if found.refused or factor == 1.0:
        return found
    device = int(found.device * factor)
    fits = "does not fit" if device > found.device_limit else found.fits
    return replace(found, device=device, fits=fits)


def _first_line(error: Exception) -> str:
    lines = [line.strip(" -") for line in str(error).splitlines()]
    text = lines[1] if len(lines) > 1 and lines[0].endswith("the config:") else lines[0]
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
