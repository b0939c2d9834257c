"""Checkpoints of 8-bit moments: resumed bit by bit, moved to other meshes, converted to fp32."""

import json

import jax
import numpy as np
import pytest

from jaxspeed.checkpoint import Checkpointer
from tests.train.eight_bit import ENCODED, batch, coded, engine, moments

ALONE = {"devices": jax.devices()[:1]}


def trained(made, steps):
    for step in steps:
        made.train_batch(batch(step))
    return made


def save(made, folder):
    checkpoints = Checkpointer(folder)
    checkpoints.save(made.program, made.state, tag="first")
    checkpoints.close()


def restored(made, folder):
    found = Checkpointer(folder).restore(made.program, tag="first")
    made.state = found.state
    return found.notes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(an engine with AdamW8bit, the folder of its checkpoint after three steps)."""
    folder = tmp_path_factory.mktemp("moments")
    made = trained(engine("AdamW8bit", **ALONE), range(3))
    save(made, folder)
    return made, folder, jax.device_get(made.state)


def test_the_codes_are_saved_with_the_codecs_name(saved):
    _, folder, _ = saved
    leaves = json.loads((folder / "first" / "checkpoint.json").read_text())["leaves"]
    up = leaves["opt/0/nu/layers/up"]
    assert up["codec"] == "8-bit unsigned by layer"
    assert up["arrays"] == {
        "codes": [[2, 64, 72], "uint8"],
        "scales": [[2, 2, 9], "float32"],
    }
    assert leaves["opt/0/mu/layers/up"]["codec"] == "8-bit signed by layer"
    assert leaves["opt/0/mu/embed"]["codec"] == "plain"


def test_training_goes_on_bit_by_bit(saved):
    made, folder, state = saved
    other = engine("AdamW8bit", **ALONE)
    assert not restored(other, folder)
    jax.tree.map(np.testing.assert_array_equal, state.opt, jax.device_get(other.state.opt))
    trained(other, range(3, 5))
    trained(made, range(3, 5))
    of_both = [(e.state.params, e.state.opt) for e in (other, made)]
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get(of_both))


@pytest.mark.sampled
def test_another_mesh_has_the_same_codes(saved):
    """Padded otherwise: no code is decoded, which would round it again."""
    _, folder, state = saved
    other = engine("AdamW8bit", 3, mesh={"tensor": 2}, offload=True)
    assert not restored(other, folder)
    before = moments(type("", (), {"program": other.program, "state": state}))
    after = moments(other)
    assert after["mu/layers/up"]["codes"].shape != before["mu/layers/up"]["codes"].shape
    for path in (f"{name}/{path}" for name in ("mu", "nu") for path in ENCODED):
        codes, scales = before[path]["codes"], before[path]["scales"].reshape(2, -1)
        found = np.asarray(after[path]["codes"])[tuple(map(slice, codes.shape))]
        np.testing.assert_array_equal(found, codes, err_msg=path)
        found = np.asarray(after[path]["scales"]).reshape(2, -1)[:, : scales.shape[1]]
        np.testing.assert_array_equal(found, scales, err_msg=path)
    other.train_batch(batch(3))


def test_adamws_moments_become_8_bit_ones_and_back(saved, tmp_path):
    _, folder, _ = saved
    wide = engine("AdamW", **ALONE)
    assert not restored(wide, folder)
    values = moments(wide)
    assert not any(isinstance(x, dict) for x in values.values())
    trained(wide, range(3, 5))
    save(wide, tmp_path)
    other = engine("AdamW8bit", **ALONE)
    notes = restored(other, tmp_path)
    assert len(notes) == 2 and notes[0].startswith("2 moments were rounded by the codec 8-bit ")
    for path in ENCODED:
        codes, scales, _ = coded(np.asarray(moments(wide)[f"nu/{path}"]), signed=False)
        found = moments(other)[f"nu/{path}"]
        np.testing.assert_array_equal(found["codes"], codes)
        np.testing.assert_array_equal(np.asarray(found["scales"]).reshape(2, -1), scales)
    other.train_batch(batch(5))
