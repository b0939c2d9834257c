"""A checkpoint of eight devices under stage 3 is taken by any mesh, stage and precision."""

import jax
import numpy as np
import pytest

from tests.checkpoint import states
from tests.support.covering import covering

BF16 = {"bf16": {"enabled": True}}
MESHES = {
    "the same": {"stage": 3},
    "data 2 x tensor 2": {"stage": 3, "devices": 4, "mesh": {"data": 2, "tensor": 2}},
    "replica 2 x data 2 x tensor 2": {"stage": 1, "mesh": {"replica": 2, "data": 2, "tensor": 2}},
    "one device": {"stage": 3, "devices": 1},
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
}
OTHER_STEPS = {
    "three devices": {"stage": 3, "devices": 3, "train_batch_size": 9},
    "bf16 with masters": dict(stage=1, **BF16),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, what was saved, what five more steps make of it, their losses)."""
    folder = tmp_path_factory.mktemp("saved")
    engine = states.engine(stage=3)
    states.steps(engine, 0, 3)
    engine.save_checkpoint(folder)
    at_the_save = states.held(engine)
    losses = states.steps(engine, 3, 5)
    engine.wait()
    return folder, at_the_save, states.held(engine), losses


@pytest.fixture(scope="module", params=[*MESHES, *OTHER_STEPS])
def restored(request, saved):
    """An engine that took the checkpoint."""
    engine = states.engine(**{**MESHES, **OTHER_STEPS}[request.param])
    engine.load_checkpoint(saved[0])
    return engine


@pytest.mark.default_cases(every=2)
def test_every_number_is_what_was_saved(restored, saved):
    states.assert_same(states.held(restored), saved[1])


def test_each_device_holds_what_a_fresh_state_would(restored):
    """As many bytes, in the same shards: nothing is replicated that should be sharded."""
    state, fresh = restored.state, restored.program.init(1)
    assert states.bytes_per_device(state) == states.bytes_per_device(fresh)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
        assert a.sharding == b.sharding and a.dtype == b.dtype and a.shape == b.shape


def test_what_layers_read_is_made_from_the_masters(saved):
    engine = states.engine(**OTHER_STEPS["bf16 with masters"])
    engine.load_checkpoint(saved[0])
    assert engine.state.params.keys() == engine.state.master.keys()
    for path, param in engine.state.params.items():
        whole = np.asarray(engine.state.master[path])[tuple(map(slice, param.shape))]
        np.testing.assert_array_equal(np.asarray(param), whole.astype(param.dtype))


@pytest.mark.default_cases("the same", "data 2 x tensor 2", "one device")
@pytest.mark.parametrize("name", covering(MESHES, [*MESHES][:4]))
def test_five_more_steps_are_those_of_the_unbroken_run(saved, name):
    engine = states.engine(**MESHES[name])
    engine.load_checkpoint(saved[0])
    losses = states.steps(engine, 3, 5)
    np.testing.assert_allclose(losses, saved[3], rtol=0, atol=1e-6)
    found = states.held(engine)
    for key, value in saved[2].items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-6, err_msg=key)


def test_a_step_uses_up_what_was_restored(saved):
    """The step's donation finds buffers of its own: otherwise it would need the state twice."""
    engine = states.engine(stage=3)
    engine.load_checkpoint(saved[0])
    before = engine.state
    states.steps(engine, 3, 1)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.opt)))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
def test_masters_of_a_bf16_run_are_the_parameters_of_an_fp32_run_and_back(tmp_path, stage):
    mixed = states.engine(stage=3, **BF16)
    states.steps(mixed, 0, 2)
    mixed.save_checkpoint(tmp_path / "mixed")
    mixed.wait()
    single = states.engine(stage=stage)
    single.load_checkpoint(tmp_path / "mixed")
    states.assert_same(states.held(single), states.held(mixed))
    single.save_checkpoint(tmp_path / "single")
    single.wait()
    again = states.engine(stage=2, **BF16)
    again.load_checkpoint(tmp_path / "single")
    states.assert_same(states.held(again), states.held(mixed))
    states.steps(again, 2, 1)
    states.steps(mixed, 2, 1)
    for key, value in states.held(mixed).items():
        np.testing.assert_allclose(states.held(again)[key], value, rtol=0, atol=1e-6, err_msg=key)
