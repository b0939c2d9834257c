"""A stack of which some layers are frozen is one parameter in checkpoints, folders and modules."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from jaxspeed.models import gpt2

import jaxspeed
from jaxspeed.checkpoint.header import NAME
from jaxspeed.errors import CheckpointError
from tests.train.frozen_nets import Stacked, batches, forward
from tests.train.test_frozen_layers import ADAM, start

KERNEL = "blocks/up/kernel"
BF16 = {"bf16": {"enabled": True}, "optimizer": ADAM | {"ema_decay": 0.9}}


class Deep(Stacked):
    layers = 12


def arrays(engine):
    return {path: np.asarray(x, np.float32) for path, x in engine.parameters.items()}


def averages(engine):
    return {path: np.asarray(x) for path, x in engine.ema_parameters.items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for path, x in a.items():
        np.testing.assert_array_equal(x, b[path], err_msg=path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, engine) after two steps in bf16, stage 2."""
    folder = tmp_path_factory.mktemp("frozen")
    engine = start(zero_optimization={"stage": 2}, **BF16)
    for batch in batches(2):
        engine.train_batch(batch)
    engine.save_checkpoint(folder, "two")
    engine.wait()
    return folder, engine


def test_a_checkpoint_has_each_parameter_and_average_once(saved):
    folder, _ = saved
    leaves = json.loads((folder / "two" / NAME).read_text())["leaves"]
    names = {name: tuple(leaf["shape"]) for name, leaf in leaves.items()}
    assert names[f"params/{KERNEL}"] == names[f"ema/{KERNEL}"] == (6, 16, 32)
    assert [n for n in names if "[" in n and not n.startswith("opt/")] == []
    moments = [shape for n, shape in names.items() if n.startswith("opt/") and KERNEL in n]
    assert moments == [(2, 16, 32)] * 2


@pytest.mark.sampled
def test_it_is_resumed_on_another_mesh_and_stage_as_if_it_had_gone_on(saved):
    folder, engine = saved
    again = start(zero_optimization={"stage": 3}, mesh={"data": 4, "tensor": 2}, **BF16)
    again.load_checkpoint(folder)
    assert_equal(arrays(again), arrays(engine))
    assert_equal(averages(again), averages(engine))
    batch = batches(3)[-1]
    ours, theirs = again.train_batch(batch), engine.train_batch(batch)
    assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=2e-2)
    for path, x in arrays(engine).items():
        np.testing.assert_allclose(arrays(again)[path], x, atol=2e-3, err_msg=path)
    engine.load_checkpoint(folder)


def test_ranges_are_saved_in_the_order_of_their_layers(tmp_path):
    """That of their names is another one: [10:12] is before [2:10]."""
    given = {"model": Deep, "trainable": ["blocks[2:10]/**"]}
    given["optimizer"] = ADAM | {"ema_decay": 0.9}
    engine, again = start(**given), start(**given, run={"seed": 4, "compilation_cache": False})
    engine.train_batch(batches(1)[0])
    engine.save_checkpoint(tmp_path)
    engine.wait()
    again.load_checkpoint(tmp_path)
    assert_equal(arrays(again), arrays(engine))
    assert_equal(averages(again), averages(engine))


@pytest.mark.default_cases("None")
@pytest.mark.parametrize("trainable", [None, ("blocks[1:]/**",)])
def test_its_weights_start_a_run_that_trains_other_layers(saved, trainable):
    folder, engine = saved
    engine.load_checkpoint(folder)
    other = start(trainable=trainable)
    with pytest.raises(CheckpointError, match=r"(?s)another optimizer.*run\.init_from"):
        other.load_checkpoint(folder)
    other.load_checkpoint(folder, weights_only=True)
    assert_equal(arrays(other), arrays(engine))


@pytest.mark.sampled
def test_a_run_of_all_layers_starts_one_of_some(tmp_path):
    every = start(trainable=None)
    every.train_batch(batches(1)[0])
    every.save_checkpoint(tmp_path)
    every.wait()
    some = start(zero_optimization={"stage": 3})
    some.load_checkpoint(tmp_path, weights_only=True)
    assert_equal(arrays(some), arrays(every))


def test_parameters_are_assigned_and_the_module_computes_with_all_layers(saved):
    _, engine = saved
    values = {p: np.asarray(x) for p, x in start(trainable=None).parameters.items()}
    engine = start()
    engine.parameters = {path: x + 0.5 for path, x in values.items()}
    assert_equal(arrays(engine), {path: x + 0.5 for path, x in values.items()})
    x = batches(1)[0]["x"]
    wanted = forward({path: jnp.asarray(x) + 0.5 for path, x in values.items()}, x)
    np.testing.assert_allclose(engine.module(x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled
def test_a_hugging_face_folder_has_one_tensor_a_layer_and_starts_such_a_run(tmp_path):
    def run(folder=None, **sections):
        family = {"family": "gpt2", "preset": "tiny", "config": {"num_hidden_layers": 4}}
        config = {
            "train_batch_size": 8,
            "optimizer": ADAM,
            "model": family if folder is None else {"pretrained": str(folder)},
            "run": {"compilation_cache": False},
            **sections,
        }
        return jaxspeed.initialize(config=config)

    engine = run(trainable=["blocks[-1:]/**", "norm/**"])
    vocabulary = engine.program.model.leaves
    size = next(leaf.shape[0] for leaf in vocabulary if "vocab" in leaf.names)
    tokens = np.random.default_rng(0).integers(0, size, (8, 17)).astype(np.int32)
    engine.train_batch({"tokens": tokens})
    engine.save_pretrained(tmp_path / "hf")
    again = run(tmp_path / "hf", trainable=["blocks[:2]/**"], zero_optimization={"stage": 3})
    assert_equal(arrays(again), arrays(engine))
    said = [each.generate([[1, 2, 3]], 5, temperature=0)[0].tokens for each in (engine, again)]
    assert said[0] == said[1]
    ranges = {row.leaf.range[1:3] for row in again.placements if row.leaf.range}
    assert ranges == {(0, 2), (2, 4)}
    assert isinstance(engine.module, gpt2.GPT2)
