"""Step time on a target: a roofline per operation, plus communication that is not overlapped."""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxspeed.axes import PIPE
from jaxspeed.communication import FROM_HOST
from jaxspeed.hardware.targets import Target
from jaxspeed.jaxpr.traverse import consts_and_carry
from jaxspeed.metrics import counted_tokens, program_model_flops
from jaxspeed.offload.transfer_report import ACTIVATIONS
from jaxspeed.planner.time.host_transfers import host_moves
from jaxspeed.planner.time.infer_collectives import CollectiveOp, infer_collectives
from jaxspeed.planner.time.links import Links
from jaxspeed.planner.time.overlap import UNITS, TimedTask, schedule_scope
from jaxspeed.planner.time.step_time import CommunicationGroup, RolloutTime, Time
from jaxspeed.planner.trace.materialization import ScopeAnalysis
from jaxspeed.planner.trace.op_cost import works
from jaxspeed.planner.trace.tiles import array_text
from jaxspeed.planner.trace.trace_ir import Scope, Value
from jaxspeed.planner.trace.traced_step import Step, TracedPhase, TracedRollout, on_chip, read_step
from jaxspeed.train.program import Program
from jaxspeed.user_models.config_model import own_objective

COMBINED = 1 << 20  # bytes below which collectives of the same kind and axes are combined


def time_of(program: Program, batch: Any, target: Target) -> Time:
    """Estimate the time of a step on the target.

    Args:
      program: on as many devices as the target has, simulated ones too.
      batch: arrays or their shapes, of an entire step.
    """
    with on_chip(target.chip):
        return time_in(read_step(program, batch, target.chip.platform), target)


def time_in(step: Step, target: Target) -> Time:
    """As `time_of`, for a step that is already traced.

    Programs run one after the other, so their times are summed. That of host work is unknown.
    """
    program, several = step.program, len(step.phases) > 1
    clocks = [_Clock(phase, target) for phase in step.phases]
    exchanges = [[*clock.exchanges(named=several)] for clock in clocks]
    seconds = [clock.total(exchanged) for clock, exchanged in zip(clocks, exchanges)]
    flops, tokens = program_model_flops(program, step.batch), counted_tokens(program, step.batch)
    if tokens is None and (flops.item == "token" or own_objective(program.config) is not None):
        tokens = _predicted(step.batch)
    samples = program.batch.train
    items = samples if tokens is None else samples * tokens
    return Time(
        compute=sum(clock.compute for clock in clocks),
        memory=sum(clock.memory for clock in clocks),
        exchanges=tuple(itertools.chain(*exchanges)),
        bubble=sum(clock.bubble for clock in clocks),
        step=sum(seconds),
        devices=target.count,
        tokens=items,
        unit="samples" if tokens is None else "tokens",
        model_flops=flops.per_item * (items if flops.item == "token" else samples),
        formula=flops.formula,
        peak=_peak(program, target),
        assumes=step.assumes,
        phases={phase.name: s for phase, s in zip(step.phases, seconds)} if several else {},
        on_host=step.on_host,
        rollout=_rollout(step.rollout, target) if step.rollout else None,
    )


def _rollout(rollout: TracedRollout, target: Target) -> RolloutTime:
    clocks = {phase.name: _Clock(phase, target) for phase in rollout.phases}
    seconds = {name: clock.total([*clock.exchanges(False)]) for name, clock in clocks.items()}
    programs = rollout.programs
    return RolloutTime(
        seconds["decode"],
        seconds.get("prefill", 0.0),
        programs.shape.rows,
        programs.rows,
        programs.batches_of_starts,
        programs.tokens,
        programs.steps,
    )


def _predicted(batch: Mapping[str, Any]) -> int | None:
    """Tokens of a sample that are predicted, in one text or several."""
    if "tokens" not in batch:
        return None
    *texts, length = batch["tokens"].shape[1:]
    return math.prod(texts) * (length - ("targets" not in batch))


class _Clock:
    """The times of one program, by cause."""

    def __init__(self, phase: TracedPhase, target: Target) -> None:
        self.phase, self.target = phase, target
        self.links = Links(target, phase.mesh)
        self.at: dict[tuple[int, int], list[CollectiveOp]] = defaultdict(list)
        collectives = infer_collectives(phase) + host_moves(phase)
        self.seconds = _alone(collectives, self.links)
        self.moved = collectives
        for moved in collectives:
            self.at[id(moved.scope), id(moved.op)].append(moved)
        self.exposed: dict[int, float] = defaultdict(float)
        self.compute = self.memory = self.bubble = 0.0
        self.run(ScopeAnalysis(phase.scope, phase.sizes, (), 0, {}), 1)

    # -- scope by scope --------------------------------------------------------------------------

    def run(
        self,
        analysis: ScopeAnalysis,
        runs: int,
        busy: float = 1.0,
        slices: Collection[Value] = (),
    ) -> float:
        """Seconds of one run of a scope, added to the totals.

        `busy` is the share of its runs in which a pipeline stage is not idle; `slices` are the
        inputs of a loop's body that are another slice of an array in each trip.
        """
        analysis.analyze()
        chip, scope = self.target.chip, analysis.scope
        tasks: list[list[TimedTask]] = []
        ahead: dict[int, list[TimedTask]] = {}
        op_works = works(analysis, self.phase.sizes, chip)
        for i, (op, work) in enumerate(zip(scope.ops, op_works, strict=True)):
            at = self.at.get((id(scope), id(op)), [])
            sends = {True: [], False: []}  # type: ignore[var-annotated]
            for moved in at:
                task = TimedTask(self.links.link(moved.communication), self.seconds[id(moved)])
                if self._a_trip_ahead(moved, slices):
                    ahead.setdefault(i, []).append(task)
                else:
                    sends[moved.before].append(task)
            if op.bodies:
                share = busy * (1 - self._idle(op.bodies))
                seconds = max(self._inside(analysis, op, runs, share))
            else:
                seconds = work.seconds
                self.compute += work.compute * runs * busy
                self.memory += (seconds - work.compute) * runs * busy
            tasks.append([*sends[True], TimedTask(UNITS, seconds), *sends[False]])
        ran = schedule_scope(scope, tasks, ahead)
        slowed = 0.0
        for i, op in enumerate(scope.ops):
            of = self.at.get((id(scope), id(op)), [])
            total = sum(self.seconds[id(m)] for m in of)
            waited = ran.waited.get(i, 0.0)
            for moved in of if total else ():
                alone = self.seconds[id(moved)]
                # The cores on which a collective runs do not compute meanwhile.
                slows = moved.communication.axes and 1 / chip.reached["concurrent"] - 1
                cost = (max(total - waited, 0.0) * slows if slows else 0.0) * alone / total
                slowed += cost
                self.exposed[id(moved)] += (waited * alone / total + cost) * runs * busy
        return ran.seconds + slowed

    def _inside(self, analysis: ScopeAnalysis, op: Any, runs: int, busy: float) -> list[float]:
        """Seconds of all trips of each of its bodies."""
        per_body = []
        for body in op.bodies:
            trips = max(op.trips, 1)
            if op.name == "scan":
                analysis.pass_origins(op.ins, body.ins)
            inner = ScopeAnalysis(body, self.phase.sizes, (), analysis.depth + 1, analysis.origins)
            slices = body.ins[sum(consts_and_carry(op)) :] if op.name == "scan" else []
            seconds = self.run(inner, runs * trips, busy, slices if trips > 1 else []) * trips
            if busy < 1 and self._idle([body]):
                self.bubble += seconds * (1 - busy) * runs
            per_body.append(seconds)
        return per_body or [0.0]

    def _a_trip_ahead(self, moved: CollectiveOp, slices: Collection[Value]) -> bool:
        """Whether the trip before starts a transfer from the host.

        XLA:TPU does for saved activations in a program for several devices: the loop of the
        backward pass carries those of the next trip. It does not for parameters, nor for one
        device (libtpu 0.0.52, seen in compiled programs).
        """
        communication, target = moved.communication, self.target
        if communication.kind != FROM_HOST or communication.purpose != ACTIVATIONS:
            return False
        several = target.chip.platform == "tpu" and target.count > 1
        return several and all(v in slices for v in moved.op.values if v.host)

    def _idle(self, bodies: Iterable[Scope]) -> float:
        """The bubble fraction, if the bodies are a pipeline's loop over ticks."""
        pipeline = self.phase.program.pipeline
        if pipeline is None:
            return 0.0
        ticks = any(
            op.name == "ppermute" and PIPE in str(op.params["axis_name"])
            for body in bodies
            for op in body.ops
        )
        return pipeline.schedule(self.phase.program.batch.accumulation).bubble if ticks else 0.0

    # -- the result ------------------------------------------------------------------------------

    def total(self, exchanges: Sequence[CommunicationGroup]) -> float:
        """Seconds of the program, of a loop of unknown length one trip."""
        return self.compute + self.memory + self.bubble + sum(e.exposed for e in exchanges)

    def exchanges(self, named: bool) -> Iterator[CommunicationGroup]:
        """Its communications by kind, axes and purpose; `named` after the phase."""
        groups: dict[Any, list[CollectiveOp]] = defaultdict(list)
        for moved in self.moved:
            communication = moved.communication
            link = self.links.link(communication)
            key = communication.kind, communication.axes, communication.purpose, link
            groups[key].append(moved)
        for (*_, link), group in groups.items():
            yield CommunicationGroup(
                tuple(moved.communication for moved in group),
                link,
                seconds=sum(self.seconds[id(m)] * m.communication.runs for m in group),
                exposed=sum(self.exposed.get(id(m), 0.0) for m in group),
                formula=_formula(group, self.phase.mesh),
                phase=self.phase.name if named else "",
            )


def _alone(collectives: Sequence[CollectiveOp], links: Links) -> dict[int, float]:
    """Seconds per run of each. Small ones have no latency, as compilers combine collectives."""
    largest: dict[Any, CollectiveOp] = {}

    def key(moved: CollectiveOp) -> Any:
        return id(moved.scope), moved.communication.kind, moved.communication.axes

    for moved in collectives:
        most = largest.setdefault(key(moved), moved)
        if moved.communication.bytes > most.communication.bytes:
            largest[key(moved)] = moved
    seconds = {}
    for moved in collectives:
        communication = moved.communication
        alone = communication.bytes >= COMBINED or communication.kind == "collective-permute"
        pays = alone or moved is largest[key(moved)]
        seconds[id(moved)] = links.seconds(communication, latency=pays)
    return seconds


def _formula(group: Sequence[CollectiveOp], mesh: Mapping[str, int]) -> str:
    """`32 x bf16[4096,14336] + ...`: runs and shape per device, the largest first."""
    terms: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for m in group:
        name = array_text(m.value, mesh)
        terms[name][0] += m.communication.runs
        terms[name][1] += m.communication.payload
    most = sorted(terms.items(), key=lambda item: -item[1][1])
    shown = [f"{runs} x {name}" for name, (runs, _) in most[:3]]
    return " + ".join([*shown, *(["..."] if len(most) > 3 else [])])


def _peak(program: Program, target: Target) -> float:
    """Peak FLOP/s in the compute dtype."""
    flops, config = target.chip.flops, program.config
    if config.fp16.enabled and "fp16" in flops:
        return flops["fp16"]
    return flops["bf16"]
