"""Rematerialization saves what routers chose: the recomputed pass takes the same route."""

from typing import Any

import pytest

from jaxspeed.config import Config
from jaxspeed.jaxpr.traverse import bodies
from jaxspeed.train import build_program
from jaxspeed.user_models.config_model import resolve_model
from tests.moe.plain_mixtures import batches
from tests.moe.test_mixture_training import config
from tests.support.covering import covering


def count(jaxpr: Any, name: str) -> int:
    own = sum(eqn.primitive.name == name for eqn in jaxpr.eqns)
    return own + sum(count(body.jaxpr, name) for eqn in jaxpr.eqns for body in bodies(eqn))


REMATS = {
    "none": "none",
    "full": "full",
    "dots": "dots",
    "attention": "attention",
    "names": {"save": ["attn_out"]},
    "pairs": {"every_n": 2},
    "budget": {"budget": "1 MB"},
}
CASES = [(name, stage) for name in REMATS for stage in (0, 3)]
DEFAULT = [("full", 0), ("dots", 3), ("attention", 0), ("names", 3), ("budget", 0), ("pairs", 3)]


@pytest.mark.default_cases("full-0", "dots-3", "attention-0", "budget-0")
@pytest.mark.parametrize(("name", "stage"), covering(CASES, DEFAULT))
def test_nothing_is_chosen_again(name, stage):
    given = Config.load(config("mixtral", remat=REMATS[name], stage=stage, accumulation=1))
    batch = batches()[0]
    program = build_program(given, *resolve_model(given), example_batch=batch)
    with program.set_mesh():
        step = program.step.trace(program.state, program.abstract_batch(batch)).jaxpr
    assert count(step, "argmax") == 2  # the k of the forward scan over layers
