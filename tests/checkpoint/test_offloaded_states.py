"""States in host memory are saved and restored as any other, and back to where they lay."""

import jax
import numpy as np
import pytest

from tests.checkpoint import states
from tests.support.covering import covering

PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


def engine(stage, offloaded, **more):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offloaded:
        zero["offload_optimizer"] = {"device": "cpu"}
    return states.engine(zero_optimization=zero, **more)


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@pytest.mark.default_cases("3-1-fp32")
@pytest.mark.parametrize(
    ("stage", "other", "precision"),
    covering(
        [(*stages, each) for stages in ((3, 1), (0, 3), (1, 3)) for each in PRECISIONS],
        [(3, 1, "fp32"), (0, 3, "bf16")],
    ),
)
def test_offloaded_to_resident_and_back(tmp_path, stage, other, precision):
    precision = PRECISIONS[precision]
    first = engine(stage, True, **precision)
    states.steps(first, 0, 2)
    first.save_checkpoint(tmp_path / "offloaded")
    first.wait()
    resident = engine(other, False, **precision)
    resident.load_checkpoint(tmp_path / "offloaded")
    states.assert_same(states.held(resident), states.held(first))
    resident.save_checkpoint(tmp_path / "resident")
    resident.wait()
    again = engine(other, True, **precision)
    again.load_checkpoint(tmp_path / "resident")
    states.assert_same(states.held(again), states.held(first))
    for made in (first, again):
        assert kinds(made.state.opt) == {"pinned_host"}
        assert kinds(made.state.params) == {"device"}
        assert kinds(made.state.master) <= {"pinned_host"}
    assert kinds(resident.state) == {"device"}
    losses = [states.steps(each, 2, 3) for each in (first, again, resident)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(losses[2], losses[0], rtol=0, atol=1e-5)


def test_a_save_is_not_changed_by_steps_that_donate_its_state(tmp_path):
    ours = engine(1, True)
    states.steps(ours, 0, 1)
    at_the_save = states.held(ours)
    ours.save_checkpoint(tmp_path)
    states.steps(ours, 1, 2)
    ours.wait()
    again = engine(1, True)
    again.load_checkpoint(tmp_path)
    states.assert_same(states.held(again), at_the_save)
