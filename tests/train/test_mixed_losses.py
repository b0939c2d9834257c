"""Losses and metrics that mix samples: of a micro-batch of all ranks, or refused."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import ModelError
from tests.parameter_server.serving import served
from tests.support.covering import covering
from tests.train.flax_loop import (
    SGD,
    WIDTH,
    Setting,
    assert_alike,
    batches,
    train_jaxspeed,
    train_linen,
    train_nnx,
)

SAMPLES = 64


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(jnp.tanh(nn.Dense(2 * WIDTH)(x)))


def contrastive(z, batch):
    """Each sample against all others of the micro-batch."""
    scores = z @ batch["x"].T
    return -jnp.diag(jax.nn.log_softmax(scores)).sum(), len(z)


def advantages(z, batch):
    """Rewards, normalized over the micro-batch."""
    reward = batch["y"]
    advantage = (reward - reward.mean()) / (reward.std() + 1e-3)
    return (advantage * jnp.square(z).mean(-1)).sum(), len(z)


def ranked(z, batch):
    """A sum over the order of samples."""
    return jnp.square(jnp.sort(z, axis=0) - jnp.sort(batch["x"], axis=0)).sum(), len(z)


def written(z, batch):
    """The first sample is replaced."""
    first = jnp.full((1, WIDTH), 3.0)
    return jnp.square(jax.lax.dynamic_update_slice(z, first, (0, 0))).sum(), len(z)


@jax.custom_vjp
def centred_gradient(z):
    return z


centred_gradient.defvjp(lambda z: (z, None), lambda _, g: (g - g.mean(0) / 2,))


def centred(z, batch):
    return jnp.square(centred_gradient(z) - batch["y"][:, None]).sum(), len(z)


def by_number(z, batch):
    """Another loss for a few samples, as ranks have them."""
    return jnp.square(z).sum() * (10 if len(z) < 4 else 1), len(z)


LOSSES = {"contrastive": contrastive, "advantages": advantages, "ranked": ranked}
LOSSES |= {"written": written, "centred": centred, "by number": by_number}
# Stages 0 and 1 with micro-batches reduced once a step; the others are where that is not done.
POINTS = [
    (name, kind, Setting(*setting))
    for name in LOSSES
    for kind in ("nnx", "linen")
    for setting in ((0, 4, 1), (1, 4, 1), (3, 4, 1), (0, 1, 1), (1, 4, 2))
]
DEFAULT = [
    ("contrastive", "nnx", Setting(0, 4, 1)),
    ("advantages", "linen", Setting(1, 4, 2)),
    ("ranked", "nnx", Setting(1, 4, 1)),
    ("written", "nnx", Setting(0, 4, 1)),
    ("centred", "nnx", Setting(1, 4, 1)),
    ("by number", "nnx", Setting(0, 4, 1)),
]


@pytest.mark.default_cases("ranked-nnx-setting21")
@pytest.mark.parametrize(("name", "kind", "setting"), covering(POINTS, DEFAULT))
def test_samples_are_those_of_a_micro_batch_of_all_ranks(name, kind, setting):
    loss, steps = LOSSES[name], batches(3, SAMPLES)

    def ours(model, batch):
        return loss(model(batch["x"]), batch)

    def mean(out, batch):
        total, weight = loss(out, batch)
        return total / weight

    if kind == "nnx":
        plain = train_nnx(Net, lambda m, b: mean(m(b["x"]), b), steps, SGD, setting)
    else:
        plain = train_linen(LinenNet(), lambda z, _, b: mean(z, b), steps, SGD, setting)
    model = Net if kind == "nnx" else LinenNet()
    assert_alike(train_jaxspeed(model, ours, steps, SGD, setting), plain)


@pytest.mark.sampled
@pytest.mark.parametrize("samples", [32, 64])
def test_one_sample_a_rank_and_two_are_those_of_a_micro_batch(samples):
    steps, setting = batches(2, samples), Setting(1, 4, 1)
    for loss in (by_number, centred):

        def mean(model, batch, loss=loss):
            total, weight = loss(model(batch["x"]), batch)
            return total / weight

        def ours(model, batch, loss=loss):
            return loss(model(batch["x"]), batch)

        plain = train_nnx(Net, mean, steps, SGD, setting)
        assert_alike(train_jaxspeed(Net, ours, steps, SGD, setting), plain)


SETTING = Setting(0, 4, 1)


def engine(loss, **parallel):
    config = SETTING.config(SAMPLES, parallel=parallel)
    return jaxspeed.initialize(Net, loss, config, SGD, example_batch=batches(1, SAMPLES)[0])


def by_contrast(model, batch):
    return contrastive(model(batch["x"]), batch)


@pytest.mark.parametrize(
    ("parallel", "who"),
    [
        ({"gradient_reduction": "step"}, "each data rank"),
        ({"data_reduction": "ring"}, "each rank"),
    ],
    ids=["step", "ring"],
)
def test_where_each_has_only_its_own_samples_it_is_refused(parallel, who):
    with pytest.raises(ModelError) as raised:
        engine(by_contrast, **parallel).train_batch(batches(1, SAMPLES)[0])
    said = str(raised.value)
    assert f"{next(iter(parallel))} " in said
    assert "mixes samples (a dot_general mixes samples (test_mixed_losses.py, line " in said
    assert f"and {who} has only its own samples" in said


def test_parts_of_a_micro_batch_are_refused():
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "mesh": {"data": 1},
        "parallel": {"batch_parts": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    batch = batches(1, 8)[0]
    made = jaxspeed.initialize(
        Net, by_contrast, config, example_batch=batch, devices=jax.devices()[:1]
    )
    with pytest.raises(ModelError, match="batch_parts 2: the loss's sum mixes samples"):
        made.train_batch(batch)


def squares(model, batch):
    error = jnp.square(model(batch["x"])).mean(-1)
    largest = {"largest": error.max(), "mean": error.mean()}
    return error.sum(), jnp.float32(len(error)), largest


def unlike_of_all_workers(model, batch):
    """Another loss for a micro-batch than for a worker's part and for two of them."""
    total, weight, _ = squares(model, batch)
    return total * (10 if len(batch["x"]) > 4 else 1), weight


@pytest.mark.default_cases("by_contrast")
@pytest.mark.parametrize("loss", [by_contrast, unlike_of_all_workers])
def test_a_worker_of_a_parameter_server_has_only_its_own_samples(loss):
    with pytest.raises(ModelError, match="and each worker has only its own samples; use"):
        run = served(model=Net, loss_fn=loss)
        run.train_batch(batches(1, run.program.batch.train)[0])


def test_a_metric_that_mixes_is_that_of_a_micro_batch_of_all_ranks():
    batch = batches(1, SAMPLES)[0]
    made = engine(squares)
    parts = [squares(made.module, part)[2] for part in SETTING.micro_batches(batch)]
    found = made.train_batch(batch)
    for name in ("largest", "mean"):
        expected = np.mean([float(part[name]) for part in parts])
        np.testing.assert_allclose(float(found[name]), expected, rtol=1e-6)


def test_rings_name_a_metric_that_mixes(caplog):
    with caplog.at_level(logging.WARNING, logger="jaxspeed"):
        engine(squares, data_reduction="ring").train_batch(batches(1, SAMPLES)[0])
    (said,) = {r.getMessage() for r in caplog.records if "the metric" in r.getMessage()}
    assert "ring" in said and "the metric largest mixes samples (a reduce_max" in said
