"""A model with images trains alike on any mesh; a frozen tower costs its forward pass alone."""

import re

import jax
import numpy as np
import pytest

import jaxspeed
from jaxspeed.jaxpr.traverse import equations
from tests.support.covering import examples

IMAGE, PATCHES, SIZE, SEQ = 255, 16, 48, 48
TOWER = "tower/"
ADAM = {"type": "Adam", "params": {"lr": 1e-2, "eps": 1e-4}}


def batch(samples=8, seed=0, images=2, seq=SEQ):
    """Samples with 0, 1 or 2 images."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 250, (samples, seq + 1)).astype(np.int32)
    for row, ids in enumerate(tokens):
        for number in range(row % (images + 1)):
            start = 2 + number * (PATCHES + 2)
            ids[start : start + PATCHES] = IMAGE
    is_image = tokens == IMAGE
    rows = np.where(is_image, np.cumsum(is_image, axis=1) - 1, -1).astype(np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": np.where(is_image, -100, tokens)[:, 1:],
        "image_rows": rows[:, :-1],
        "patches": rng.normal(size=(samples, images * PATCHES, SIZE)).astype(np.float32),
    }


def engine(changes=None, devices=None, **arguments):
    config = {
        "train_batch_size": 8, "gradient_accumulation_steps": 2, "optimizer": ADAM,
        "model": {"family": "llava", "preset": "tiny"}, **(changes or {}),
    }  # fmt: skip
    return jaxspeed.initialize(config=config, devices=devices, example_batch=batch(), **arguments)


def trained(engine, steps=2):
    losses = [float(engine.train_batch(batch(seed=step))["loss"]) for step in range(steps)]
    return losses, {path: np.asarray(x) for path, x in engine.parameters.items()}


@pytest.fixture(scope="module")
def alone():
    return trained(engine(devices=jax.devices()[:1]))


MESHES = {
    "stage 3, tensor 2": {
        "mesh": {"data": 4, "tensor": 2}, "zero_optimization": {"stage": 3},
    },
    "pipe 2": {"mesh": {"data": 4, "pipe": 2}, "zero_optimization": {"stage": 1}},
    "seq 2": {"mesh": {"data": 4, "seq": 2}, "zero_optimization": {"stage": 2}},
    "stage 3, seq 2, tensor 2": {
        "mesh": {"data": 2, "seq": 2, "tensor": 2}, "zero_optimization": {"stage": 3},
    },
    "data 8": {"mesh": {"data": 8}, "gradient_accumulation_steps": 1},
}  # fmt: skip


@pytest.mark.default_cases("stage 3, tensor 2")
@pytest.mark.parametrize("mesh", MESHES)
def test_two_steps_are_those_of_one_device(alone, mesh):
    losses, parameters = trained(engine(MESHES[mesh]))
    np.testing.assert_allclose(losses, alone[0], atol=1e-5, rtol=0)
    for path, x in parameters.items():
        np.testing.assert_allclose(x, alone[1][path], atol=1e-5, rtol=0, err_msg=path)


def test_the_tower_is_not_sharded_over_tensor_and_its_images_are():
    made = engine(MESHES["stage 3, tensor 2"] | {"zero_optimization": {"stage": 0}})
    for row in made.program.table:
        if row.path.startswith(TOWER):
            assert "tensor" not in str(row.read.spec), row.path
    text = made.program.step.lower(made.state, batch()).compile().as_text()
    # A micro-batch of 4 samples with 2 images each, on 8 devices: one each, of 17 tokens.
    products = re.findall(r"f32\[([\d,]+)\]\S* dot\(.*tower", text)
    assert products and all("8,17" not in shape and "4,17" not in shape for shape in products)


FROZEN = {"trainable": ["language/**", "projector/**"]}


def test_a_frozen_tower_has_no_gradient_no_state_and_no_residual():
    made = engine(FROZEN | {"gradient_accumulation_steps": 1}, devices=jax.devices()[:1])
    for row in made.program.table:
        if row.path.startswith(TOWER):
            assert row.grad is None and row.opt is None and not row.leaf.trainable, row.path
    before = {path: np.asarray(x) for path, x in made.parameters.items()}

    def of_tower(eqn):
        """A scan that reads the tower's stacked feed-forward."""
        return any(v.aval.shape == (2, SIZE, 96) for v in eqn.invars)

    def outputs(config):
        other = engine(config | {"gradient_accumulation_steps": 1}, devices=jax.devices()[:1])
        jaxpr = jax.make_jaxpr(other.program.step)(other.state, batch()).jaxpr
        scans = [
            eqn for eqn in equations(jaxpr.eqns) if eqn.primitive.name == "scan" and of_tower(eqn)
        ]
        return [[v.aval.shape for v in eqn.outvars] for eqn in scans]

    (only,) = outputs(FROZEN)
    assert len(only) == 1, "the carry alone: nothing is saved of a layer"
    assert len(outputs({})) >= 2
    _, after = trained(made, examples(1, 2))
    for path, x in after.items():
        assert (x == before[path]).all() == path.startswith(TOWER), path
