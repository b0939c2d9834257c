"""Error feedback of int8 rings: a step's quantization error is added to the next step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspeed
from jaxspeed.ring_reduction import wire as wire_module
from tests.support.covering import covering
from tests.train.cases import CASES
from tests.train.parity import config

STEPS = 200
LARGE, SMALL = 1.0, 1e-3  # a gradient's parts; a step of int8 is LARGE / 127


def pushed(wire, stage=0, mesh=None, scale=1.0):
    """The parameters after SGD on a constant gradient, of which some parts are small."""
    slopes = np.where(np.arange(64) % 8 == 0, LARGE, SMALL).astype(np.float32)

    def loss(params, batch):
        return jnp.sum(batch["x"] @ (params["w"] * slopes)), jnp.asarray(batch["x"].shape[0], float)

    engine = jaxspeed.initialize(
        (lambda key: {"w": jnp.zeros(64)}, lambda params, batch: params),
        lambda model, batch: loss(model(batch), batch),
        {
            **config(stage, samples=8),
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "parallel": {"data_reduction": "ring", "ring_wire": wire},
            "mesh": mesh or {},
        },
    )
    batch = {"x": np.ones((8, 64), np.float32)}
    for _ in range(STEPS):
        engine.train_batch(batch)
    return np.asarray(engine.parameters["w"]), -STEPS * slopes, engine


@pytest.mark.parametrize(
    ("stage", "mesh"),
    covering([(0, None), (1, None), (2, {"replica": 2})], [(1, None)]),
)
def test_error_feedback_delivers_gradients_below_one_int8_step(stage, mesh):
    """The sum lags by the ranks' saved errors: at most one int8 step per rank."""
    found, wanted, _ = pushed("int8", stage, mesh)
    assert np.abs(found - wanted).max() <= 8 * LARGE / 127


@pytest.mark.full
def test_without_error_feedback_small_gradients_are_lost(monkeypatch):
    monkeypatch.setattr(wire_module.BlockInt8, "feedback", False)
    found, wanted, engine = pushed("int8")
    assert engine.state.ring_errors == {}
    small = wanted > -STEPS * LARGE / 2
    assert (found[small] == 0).all()


@pytest.mark.sampled
def test_int8_trains_within_two_hundredths_of_fp32():
    """After 200 steps, on the mean of the last twenty batches."""
    case = CASES["pair"]
    batches = case.batches(1, STEPS)

    def ended(wire):
        engine = jaxspeed.initialize(
            case.model,
            case.loss,
            {
                **config(1, samples=len(batches[0]["x"])),
                "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
                "parallel": {"data_reduction": "ring", "ring_wire": wire},
            },
        )
        losses = [engine.train_batch(batch)["loss"] for batch in batches]
        return float(losses[0]), float(np.mean(jax.device_get(losses[-20:])))

    first, plain = ended("none")
    _, packed = ended("int8")
    assert plain < 0.6 * first, "it has learnt something to lose"
    assert packed == pytest.approx(plain, rel=0.02)
    assert packed != plain
