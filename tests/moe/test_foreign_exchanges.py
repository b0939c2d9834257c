"""The experts of a foreign mixture stay where they are: their tokens travel.

Read from compiled programs, of simulated devices and of a TPU.
"""

from collections import Counter
from typing import Any

import jax
import pytest

from tests.moe import foreign_programs as programs
from tests.moe.foreign_programs import EMBED, ROWS, SITES, TOKENS, WEIGHT
from tests.support.covering import covering
from tests.support.topology import run_on_topology
from tests.system.measured import collectives_of

MESH = {"data": 2, "expert": 4}
EXCHANGES = {("all-to-all", ROWS): 4}


def over_experts(found: dict[str, Any]) -> Counter[Any]:
    """{(kind, elements, as activations of a device): how often it runs}, of what is large."""
    counted: Counter[Any] = Counter()
    for c in collectives_of(found):
        if "expert" in c.axes and c.elements >= WEIGHT / 2:
            counted[c.kind, c.elements // (TOKENS * EMBED)] += c.runs
    return counted


def test_rows_travel_to_their_experts_and_back_once_in_each_pass():
    found = programs.compiled(jax.devices(), "gshard", MESH)
    assert over_experts(found) == EXCHANGES


def test_where_every_expert_computes_every_token_tokens_are_gathered_and_results_summed():
    found = programs.compiled(jax.devices(), "dense", MESH)
    # XLA:CPU has no reduce-scatter. Backward the gradients of gate and up are summed in one.
    assert over_experts(found) == {
        ("all-gather", 4): 2,
        ("all-reduce", 4): 1,
        ("all-reduce", 2 * 4): 1,
    }


@pytest.mark.default_cases("experts.exchange")
@pytest.mark.parametrize("site", SITES)
def test_a_dropped_constraint_around_experts_is_caught(site):
    found = programs.compiled(jax.devices(), "gshard", MESH, dropped=site)
    assert over_experts(found) != EXCHANGES


@pytest.mark.sampled
@pytest.mark.parametrize("stage", covering((0, 3), [3]))
def test_a_tpus_program_exchanges_rows_too(stage):
    mesh = {"data": 2, "expert": 2, "tensor": 2}
    found = run_on_topology(
        "tests.moe.foreign_programs:compiled", "v5e:2x4", form="gshard", mesh=mesh, stage=stage
    )
    assert over_experts(found) == EXCHANGES
