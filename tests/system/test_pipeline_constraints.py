"""What each constraint of a pipeline does: what is lost without it.

For four of them every compiler that was tried finds the same from what surrounds them (XLA:CPU,
stages 0 to 3); their loss can be told from the traced program alone.
"""

from typing import Any

import jax
import pytest

from jaxspeed.hlo import report
from tests.system.measured import without
from tests.system.pipeline_programs import pipeline_program

CASES: dict[str, dict[str, Any]] = {
    "pipeline.gather": {"stage": 3, "parallel": {"pipeline_gather": "step"}},
    "pipeline.samples": {"family": "vit", "micro": 8, "stage": 2},
}
TRACED: dict[str, dict[str, Any]] = {
    "pipeline.between": {"micro": 2, "stage": 2},
    "pipeline.gradients": {"stage": 2},
    "pipeline.accumulate": {"stage": 2},
    "pipeline.outer": {"stage": 2},
}


def compiled(site: str, dropped: bool):
    with without(site if dropped else None):
        program, batch = pipeline_program(jax.devices(), **CASES[site])
        step = program.step.lower(program.state, program.abstract_batch(batch)).compile()
    return report(step, program.mesh)


def gathered(found) -> int:
    return sum(c.bytes * c.runs for c in found.collectives if c.kind == "all-gather")


@pytest.mark.full
def test_a_stages_weights_are_gathered_once_a_step_only_where_it_says_so():
    kept, dropped = (compiled("pipeline.gather", d) for d in (False, True))
    assert gathered(dropped) > 4 * gathered(kept)


@pytest.mark.full
def test_without_samples_over_the_stages_each_computes_all_that_is_outside():
    kept, dropped = (compiled("pipeline.samples", d) for d in (False, True))
    assert dropped.flops > kept.flops


def constraints(site: str | None, case: dict[str, Any]) -> list[str]:
    """The shardings that the traced step says."""
    with without(site):
        program, batch = pipeline_program(jax.devices(), **case)
        traced = program.step.trace(program.state, program.abstract_batch(batch)).jaxpr
    found: list[str] = []

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "sharding_constraint":
                found.append(str(eqn.params["sharding"].spec))
            for value in eqn.params.values():
                for inner in value if isinstance(value, (tuple, list)) else [value]:
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(traced.jaxpr)
    return found


@pytest.mark.default_cases("pipeline.outer")
@pytest.mark.parametrize("site", TRACED)
def test_what_a_constraint_says_of_the_traced_step(site):
    kept, dropped = constraints(None, TRACED[site]), constraints(site, TRACED[site])
    lost = list(kept)
    for spec in dropped:
        lost.remove(spec)
    assert lost and all("data" in spec for spec in lost)
