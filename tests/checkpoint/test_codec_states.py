"""Checkpoints of values that a codec stores: saved as they are stored, restored as anything."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspeed.checkpoint import Checkpointer
from jaxspeed.config.optimizers import OPTIMIZERS, AdamParams
from jaxspeed.config.tree import VOCABULARY
from jaxspeed.errors import CheckpointError
from jaxspeed.interop.exporting import export
from jaxspeed.placement.codec import CodecRule
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.quantization.codecs import CODECS
from jaxspeed.quantization.moments import MOMENT_RULES
from tests.support.int8_blocks import rounded
from tests.train.test_codecs import (
    BASE,
    FOURS,
    INT8,
    MOMENTS,
    OF_HEAD,
    batch,
    by_name,
    engine,
    is_encoded,
    trained,
)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    for codec in (INT8, OF_HEAD.codec):
        monkeypatch.setitem(CODECS, " ".join(codec.name.split()[:2]), type(codec))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(an engine after a few steps, the folder of its checkpoint)."""
    folder = tmp_path_factory.mktemp("codecs")
    made = engine("stacked", 3)
    trained(made)
    checkpoints = Checkpointer(folder)
    checkpoints.save(made.program, made.state, tag="first")
    checkpoints.close()
    return made, folder


def restored(made, folder, **more):
    found = Checkpointer(folder).restore(made.program, tag="first", **more)
    made.state = found.state
    return found


def moments(made):
    stored = made.program.layout.logical(jax.device_get(made.state.opt))
    return by_name(stored)


def same_values(made, other):
    for one, two in ((made.parameters, other.parameters), (moments(made), moments(other))):
        for path, x in one.items():
            np.testing.assert_array_equal(np.asarray(two[path]), np.asarray(x), err_msg=path)


def test_the_arrays_are_saved_as_they_are_stored_with_the_codecs_name(saved):
    _, folder = saved
    leaves = json.loads((folder / "first" / "checkpoint.json").read_text())["leaves"]
    base = leaves["params/layers/w"]
    assert base["codec"] == INT8.name and base["dtype"] == "float32"
    assert base["arrays"]["codes"] == [[3, 16, 16], "int8"]
    assert base["arrays"]["scales"] == [[3, 16, 8], "float32"]
    assert leaves["params/head"]["codec"] == "plain"
    assert [name for name, x in leaves.items() if name.startswith("opt/") and x["arrays"]]


def test_it_resumes_bit_by_bit(saved):
    made, folder = saved
    other = engine("stacked", 3)
    found = restored(other, folder)
    assert not found.notes
    of_both = [(e.state.params, e.state.opt, e.state.step) for e in (other, made)]
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get(of_both))


@pytest.mark.default_cases("into fp32")
@pytest.mark.parametrize(
    ("codecs", "more"),
    [
        ((), {"stage": 1}),  # fp32: each value decoded
        ((BASE, OF_HEAD, MOMENTS), {"stage": 3, "tensor": 2, "offload": "optimizer param"}),
        (
            (CodecRule("param", "w", FOURS), CodecRule("opt", "**", FOURS)),
            {"stage": 0},
        ),
    ],
    ids=["into fp32", "another mesh", "another codec"],
)
def test_it_restores_into_another_storage(saved, codecs, more):
    made, folder = saved
    other = engine("stacked", codecs=codecs, **more)
    notes = restored(other, folder).notes
    if codecs and codecs[0].codec is FOURS:
        assert "params/layers/w was rounded by the codec int8 blocks of 4" in notes
        largest = np.abs(by_name(made.parameters)["layers/w"]).max()
        found = by_name(other.parameters)["layers/w"]
        apart = np.abs(found - by_name(made.parameters)["layers/w"]).max()
        assert 0 < apart <= largest / 127
        assert other.state.params["layers/w"]["scales"].shape == (3, 16, 4)
    else:
        assert not notes
        same_values(made, other)
    for path, stored in other.state.params.items():
        assert is_encoded(stored) == (bool(codecs) and path.endswith("w"))
    other.train_batch(batch(7))


def test_a_plain_checkpoint_becomes_an_encoded_base(saved, tmp_path):
    plain = engine("stacked", 2, ())
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(plain.program, plain.state, tag="first")
    checkpoints.close()
    other = engine("stacked", 3)
    for more in ({}, {"weights_only": True}):
        restored(other, tmp_path, **more)
        w = plain.parameters["layers/w"]
        np.testing.assert_allclose(other.parameters["layers/w"], rounded(w, INT8), rtol=1e-6)


def test_an_export_has_the_decoded_values(saved, tmp_path):
    made, folder = saved
    export(folder, tmp_path, tag="first")
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    for path, x in by_name(made.parameters).items():
        np.testing.assert_array_equal(tensors[path], x, err_msg=path)


def test_a_codec_that_is_not_there_is_named(saved, monkeypatch):
    _, folder = saved
    monkeypatch.delitem(CODECS, "int8 blocks")
    with pytest.raises(CheckpointError, match="by the codec 'int8 blocks of 2'; this version has"):
        restored(engine("stacked", 1, ()), folder)


def test_parameters_that_are_assigned_are_encoded():
    made = engine("listed", 3)
    ones = jnp.linspace(-1, 1, 256).reshape(16, 16)
    made.parameters = {"layers/1/w": ones}
    assert is_encoded(made.state.params["layers/1/w"])
    np.testing.assert_allclose(made.parameters["layers/1/w"], rounded(ones, INT8), rtol=1e-6)


class Adam9bitParams(AdamParams):
    min_9bit_size: int = 1


def test_an_optimizer_with_a_codec_of_its_own_is_added_by_tables(monkeypatch, tmp_path):
    """Its parameters, the rule of its moments, and the codec that a checkpoint names."""
    monkeypatch.setitem(OPTIMIZERS, "Adam9bit", Adam9bitParams)
    key = "optimizer.params.min_{}bit_size"  # in the source, VOCABULARY has what OPTIMIZERS has
    monkeypatch.setitem(VOCABULARY, key.format(9), VOCABULARY[key.format(8)])
    rules = {"min_9bit_size": lambda leaves, least: CodecRule("opt", "*/nu/**", FOURS)}
    monkeypatch.setitem(MOMENT_RULES, *rules.popitem())
    optimizer = {"type": "Adam9bit", "params": {"lr": 0.01}}
    made = engine("stacked", 3, (), optimizer=optimizer)
    made.train_batch(batch(1))
    encoded = {path for path in flat_with_paths(made.state.opt) if path.endswith("/codes")}
    assert encoded and all("/nu/" in path for path in encoded)
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(made.program, made.state, tag="first")
    checkpoints.close()
    other = engine("stacked", 3, (), optimizer=optimizer)
    assert not restored(other, tmp_path).notes
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((other.state.opt, made.state.opt)))
