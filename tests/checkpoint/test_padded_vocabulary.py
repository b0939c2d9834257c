"""A vocabulary padded for sharding over tensor is saved without padding, for any other mesh."""

import numpy as np
import pytest

from jaxspeed.checkpoint.leaves import saved_leaves
from tests.checkpoint import states

# Seven "words": over two devices four rows each, over four two each, over one none is padded.
NAMES = {**states.NAMES, "narrow/kernel": [None, "vocab"], "narrow/bias": ["vocab"]}
NAMES["head/kernel"] = ["vocab", None]
TENSOR_2 = {"data": 4, "tensor": 2}
MESHES = {
    "tensor 1": {"stage": 3, "mesh": {"data": 8}},
    "tensor 4": {"stage": 1, "mesh": {"data": 2, "tensor": 4}},
    "tensor 2, whole over data": {"stage": 0, "mesh": TENSOR_2},
    "tensor 4, masters": {
        "stage": 1,
        "mesh": {"data": 2, "tensor": 4},
        "bf16": {"enabled": True},
    },
    "one device": {"stage": 0, "devices": 1},
}


def engine(**more):
    return states.engine(parallel={"logical_axes": NAMES}, **more)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, what was saved, what three more steps make of it, their losses)."""
    folder = tmp_path_factory.mktemp("saved")
    first = engine(stage=1, mesh=TENSOR_2)
    states.steps(first, 0, 3)
    first.save_checkpoint(folder)
    at_the_save = states.held(first)
    losses = states.steps(first, 3, 3)
    first.wait()
    return folder, at_the_save, states.held(first), losses


def test_the_stored_arrays_are_padded_and_the_saved_ones_are_not(saved):
    first = engine(stage=1, mesh=TENSOR_2)
    assert first.state.params["narrow/kernel"].shape == (12, 8)
    assert first.state.params["head/kernel"].shape == (8, 1)
    assert saved[1]["param narrow/kernel"].shape == (12, 7)
    assert saved[1]["param head/kernel"].shape == (7, 1)
    leaves = saved_leaves(first.program)
    assert leaves["params/narrow/kernel"].shape == (12, 7)
    moments = [leaf.shape for name, leaf in leaves.items() if name.endswith("mu/narrow/kernel")]
    assert moments == [(12, 7)]


@pytest.mark.default_cases("tensor 1", "tensor 4, masters")
@pytest.mark.parametrize("name", MESHES)
def test_another_mesh_restores_every_number_and_continues(saved, name):
    other = engine(**MESHES[name])
    other.load_checkpoint(saved[0])
    states.assert_same(states.held(other), saved[1])
    if "bf16" in MESHES[name]:
        return
    losses = states.steps(other, 3, 3)
    np.testing.assert_allclose(losses, saved[3], rtol=0, atol=1e-6)
    found = states.held(other)
    for key, value in saved[2].items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-6, err_msg=key)


def test_back_from_one_device_to_a_padded_mesh(saved, tmp_path):
    one = engine(**MESHES["one device"])
    one.load_checkpoint(saved[0])
    one.save_checkpoint(tmp_path)
    one.wait()
    again = engine(stage=3, mesh=TENSOR_2)
    again.load_checkpoint(tmp_path)
    states.assert_same(states.held(again), saved[1])
    assert again.state.params["head/kernel"].shape == (8, 1)
