"""Estimate of a step's peak memory per device by component, from the traced step, uncompiled."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxspeed.communication import dtype_text
from jaxspeed.generation.rollout_programs import MODEL
from jaxspeed.hardware.known_chips import Chip
from jaxspeed.jaxpr.primitives import PRODUCTS
from jaxspeed.jaxpr.traverse import consts_and_carry
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.placement.show import bytes_text
from jaxspeed.planner.memory.components import ROLLOUT, Component, Memory
from jaxspeed.planner.memory.liveness import LiveArray, Peak, peaks
from jaxspeed.planner.trace.materialization import ScopeAnalysis
from jaxspeed.planner.trace.tiles import Sizes, array_text, local_shape, nbytes
from jaxspeed.planner.trace.trace_ir import Op
from jaxspeed.planner.trace.traced_step import Step, TracedPhase, read_step
from jaxspeed.train.phases import STATE
from jaxspeed.train.program import Program

MOST_TERMS = 4  # of a formula; the rest is summed
# {field of a TrainState: its component's name}.
FIELDS = {
    "params": "parameters", "sources": "parameters", "master": "masters", "opt": "optimizer",
    "ema": "average",
}  # fmt: skip
REST, BETWEEN = "other state", "values of earlier phases"


def memory_of(program: Program, batch: Any, platform: str | None = None) -> Memory:
    """Estimate device and host memory per device for a step.

    Args:
      program: for any devices, simulated ones too.
      batch: arrays or their shapes, of an entire step.
      platform: "tpu", "cuda" or "cpu", for its kernels and layouts; by default the devices'.
    """
    return memory_in(read_step(program, batch, platform))


def memory_in(step: Step, chip: Chip | None = None) -> Memory:
    """As `memory_of`, for a step that is already traced, and a chip with on-chip memory.

    Of several phases it is the largest, with what the step holds meanwhile; so it is of a step and
    the rollout before it.
    """
    of_step = _largest({phase.name: _of_phase(phase, chip) for phase in step.phases}, step.assumes)
    if step.rollout is None:
        return of_step
    of_rollout = _largest(
        {phase.name: _of_phase(phase, chip) for phase in step.rollout.phases}, step.assumes
    )
    return _largest({ROLLOUT: of_rollout, "step": of_step}, step.assumes)


def _largest(phases: Mapping[str, Memory], assumes: str) -> Memory:
    if len(phases) == 1:
        return next(iter(phases.values()))
    largest = max(phases.values(), key=lambda memory: memory.device)
    with_host = max(phases.values(), key=lambda memory: memory.host)
    components = (
        *(component for component in largest.components if not component.host),
        *(component for component in with_host.components if component.host),
    )
    return replace(largest, components=components, assumes=assumes, phases=phases)


def _of_phase(phase: TracedPhase, chip: Chip | None) -> Memory:
    scope = phase.scope
    sizes = replace(phase.sizes, chip=chip)
    device, host = peaks(scope, sizes, phase.donated)
    components = _joined(
        *_arguments(phase, sizes),
        *_temporary(device, phase, sizes, False),
        *_temporary(host, phase, sizes, True),
    )
    ordered = sorted(components, key=lambda c: (c.host, not c.lasting, -c.bytes))
    loops = [op for op in scope.ops if op.name == "scan"]
    recomputed = max((_recomputed(op, sizes) for op in loops), default=0)
    early = sum(_early(op, sizes) for op in loops)
    return Memory(tuple(ordered), recomputed, early, device.chip.bytes, phase.assumes)


def _joined(*components: Component) -> Iterator[Component]:
    """Those of one name in one place together, as the caches that a program reads and returns."""
    alike: dict[Any, list[Component]] = defaultdict(list)
    for component in components:
        alike[component.host, component.name, component.lasting].append(component)
    for same in alike.values():
        formula = " + ".join(component.formula for component in same)
        yield replace(same[0], bytes=sum(c.bytes for c in same), formula=formula)


def _early(loop: Op, sizes: Sizes) -> int:
    """Bytes of what a loop of a pipeline's last round writes slice by slice.

    XLA:TPU allocated these buffers when the step began in some programs (libtpu 0.0.52).
    """
    if not (loop.inlined and sizes.tiled):
        return 0
    _, carry = consts_and_carry(loop)
    return sum(sizes.of(out) for out in loop.outs[carry:] if out.shape)


def _recomputed(loop: Op, sizes: Sizes) -> int:
    """Bytes of what a loop recomputes and XLA may compute at another time than estimated.

    In a loop over micro-batches that holds forward and backward passes of layers that are in no
    loop, XLA:TPU merged the two through barriers in some programs (libtpu 0.0.52).
    """
    (body,) = loop.bodies
    analysis = ScopeAnalysis(body, sizes, (), 1, {})
    analysis.analyze()
    computed = ((v, body.ops[analysis.producers[v]]) for v in analysis.materialized if not v.host)
    recomputed = sum(sizes.of(v) for v, op in computed if op.rematerialized)
    inner = max((_recomputed(op, sizes) for op in body.ops if op.name == "scan"), default=0)
    forward = any(op.name in PRODUCTS and not op.backward for op in body.ops)
    return inner or recomputed * (sizes.tiled and forward)


def _arguments(phase: TracedPhase, sizes: Sizes) -> Iterator[Component]:
    """Components that are there when the program starts: its inputs, and what the step holds."""
    total: dict[tuple[bool, str, bool], int] = defaultdict(int)
    by_dtype: dict[tuple[bool, str, bool], Counter[str]] = defaultdict(Counter)

    def add(owner: str, path: Any, shape: tuple[int, ...], dtype: Any, host: bool) -> None:
        size = nbytes(shape, dtype, sizes.tiled and not host)
        key = host, _name(owner, path, phase), owner in phase.lasting
        total[key] += size
        by_dtype[key][f"{dtype_text(dtype)}"] += size

    inputs = zip(phase.ins, phase.paths, phase.scope.ins, phase.in_host, strict=True)
    for owner, path, value, host in inputs:
        add(owner, path, local_shape(value, sizes.mesh), value.dtype, host)
    for owner, shapes in phase.held.items():
        for path, x in jax.tree_util.tree_flatten_with_path(shapes)[0]:
            shape = x.sharding.shard_shape(x.shape)
            add(owner, path, shape, x.dtype, in_host(x.sharding))
    for key, size in total.items():
        if size:
            host, name, lasting = key
            formula = " + ".join(f"{bytes_text(n)} {d}" for d, n in by_dtype[key].items())
            yield Component(name, size, formula, host, lasting)


def _name(owner: str, path: Sequence[Any], phase: TracedPhase) -> str:
    """The component of an array: a field of the state, or the name of its value."""
    if owner in (STATE, MODEL):
        return FIELDS.get(str(getattr(path[0], "name", None)), REST)
    return owner if owner in phase.lasting else phase.components.get(owner, BETWEEN)


def _temporary(peak: Peak, phase: TracedPhase, sizes: Sizes, host: bool) -> Iterator[Component]:
    """Components alive at the peak."""
    by_kind: dict[str, list[LiveArray]] = defaultdict(list)
    results = {v: phase.components.get(name) for v, name in zip(phase.scope.outs, phase.outs)}
    for array in peak.arrays:
        kind = phase.kinds.of(array.value, array.op, array.saved)
        by_kind[results.get(array.value) or kind].append(array)
    for kind, arrays in by_kind.items():
        if size := sum(array.bytes for array in arrays):
            yield Component(kind, size, _formula(arrays, sizes), host)


def _formula(arrays: Sequence[LiveArray], sizes: Sizes) -> str:
    """`6 bf16[12,8,1024,2816] + ...`: shapes per device, the largest first."""
    bytes_: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for array in arrays:
        text = array_text(array.value, sizes.mesh)
        bytes_[text] += array.bytes
        counts[text] += 1
    largest = sorted(bytes_.items(), key=lambda item: (-item[1], item[0]))[:MOST_TERMS]
    terms = [f"{counts[t]} x {t}" if counts[t] > 1 else t for t, _ in largest]
    rest = sum(bytes_.values()) - sum(size for _, size in largest)
    return " + ".join([*terms, *([f"{bytes_text(rest)} in smaller arrays"] if rest else [])])
