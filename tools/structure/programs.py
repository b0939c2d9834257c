"""Flops, collectives and memory of compiled steps, on simulated CPU devices and for a TPU."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

import jaxspeed
from tools.structure.cases import CASES, OWN_MODELS, SEQ, Case, batch_of

TPU = "v5e:2x4"


def on_cpu(case: Case) -> dict[str, Any]:
    """Figures of a case's step compiled by XLA:CPU on 8 simulated devices."""
    model, loss = OWN_MODELS.get(case.family, (None, None))
    example = batch_of(case.family, 8) if case.family in OWN_MODELS else None
    engine = jaxspeed.initialize(model, loss, case.config(), example_batch=example)
    report = engine.compiled(batch_of(case.family, engine.program.batch.train))
    engine.close()
    jax.clear_caches()
    return _figures(report)


def on_tpu(case: Case) -> dict[str, Any]:
    """Figures of libtpu's compile for a `v5e:2x4`, in a child process; the planner's estimate."""
    config = {**case.config(), "data": {"seq_len": SEQ}}
    plan = jaxspeed.plan(config, TPU, compile=True)
    assert plan.compiled is not None, plan.outcome
    return {**_figures(plan.compiled), "estimate": _estimate(plan.figures())}


def _figures(report: Any) -> dict[str, Any]:
    return {
        "flops": report.flops,
        "temp_bytes": report.temp_bytes,
        "argument_bytes": report.argument_bytes,
        "host_bytes": report.host_bytes,
        "collectives": _collectives(report.collectives),
    }


def _estimate(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The planner's figures, without the names of its parts."""
    memory, time = figures["memory"], figures["time"]
    exchanges = Counter(
        (one["kind"], " x ".join(one["axes"]), one["bytes"], one["runs"])
        for one in time["exchanges"]
    )
    return {
        **{f"{name}_bytes": memory[name] for name in ("device", "state", "temporary", "host")},
        "model_flops": time["model_flops"],
        **{f"{name}_s": _rounded(time[name]) for name in ("compute", "memory", "bubble", "step")},
        "exchanges": [
            f"{count} {kind} over {axes or 'the host link'}, {size} bytes, {runs} runs"
            for (kind, axes, size, runs), count in sorted(exchanges.items())
        ],
    }


def _rounded(seconds: float) -> float:
    """Round to 9 digits, so that another order of summation is no difference."""
    return float(f"{seconds:.9g}")


def _collectives(found: Any) -> list[str] | None:
    """Equal collectives as one line with their count, sorted; None without HLO text."""
    if found is None:
        return None
    alike = Counter((c.kind, " x ".join(c.axes), c.dtype, c.bytes, c.runs) for c in found)
    return [
        f"{count} {kind} over {axis}, {dtype}, {size} bytes, {runs} runs"
        for (kind, axis, dtype, size, runs), count in sorted(alike.items())
    ]


def cpu_programs(progress: Callable[[str], None]) -> dict[str, Any]:
    """{case: figures} of all cases on simulated devices."""
    return _each(CASES, on_cpu, progress)


def tpu_programs(progress: Callable[[str], None]) -> dict[str, Any]:
    """{case: figures} of the cases that are compiled for a TPU."""
    return _each([case for case in CASES if case.tpu], on_tpu, progress)


def _each(
    cases: Iterable[Case],
    measure: Callable[[Case], dict[str, Any]],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    found = {}
    for case in cases:
        progress(case.name)
        found[case.name] = measure(case)
    return found
