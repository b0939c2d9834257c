"""What a loss gets beside its model and its samples: random keys, extra arrays, numbers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import ModelError
from jaxspeed.objective.rng import LOSS, batch_key
from tests.engine import tiny
from tests.train.flax_loop import (
    SEED,
    SHARDED,
    Setting,
    assert_alike,
    settings,
    train_jaxspeed,
    train_nnx,
)

WIDTH, SAMPLES = 8, 32
SGD = optax.sgd(0.1, momentum=0.9)


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


def samples(step=0):
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(SAMPLES, WIDTH)).astype(np.float32)}


def denoised(model, x, key):
    """Corrupted input is mapped to the input."""
    return jnp.mean((model(x + jax.random.normal(key, x.shape)) - x) ** 2)


def of_rng(model, batch, rng):
    return denoised(model, batch["x"], rng)


def of_batch(model, batch):
    return denoised(model, batch["x"], batch["rng"])


def with_plain_keys(batch, step, setting):
    """The batch whose samples have the numbers of each micro-batch's key, and those keys."""
    key = jax.random.key(SEED)
    folded = [jaxspeed.micro_batch_key(key, step, i) for i in range(setting.accumulation)]
    return [jax.random.fold_in(k, LOSS) for k in folded]


def plain_run(batches, setting, keys_of):
    """`keys_of(step) -> [key of each micro-batch]`."""
    keys = [key for step in range(len(batches)) for key in keys_of(step)]
    drawn = iter(keys)

    def loss(model, part):
        return denoised(model, part["x"], part["key"])

    class Keyed(Setting):
        def micro_batches(self, batch):
            parts = setting.micro_batches({"x": batch["x"]})
            return [{**part, "key": next(drawn)} for part in parts]

    return train_nnx(Net, loss, batches, SGD, Keyed(*setting))


@settings(SHARDED)
def test_a_loss_draws_from_its_key_of_each_micro_batch(setting):
    batches = [samples(i) for i in range(3)]
    ours = train_jaxspeed(Net, of_rng, batches, SGD, setting)
    plain = plain_run(batches, setting, lambda step: with_plain_keys(batches[step], step, setting))
    ours.values.pop("(seed)", None)
    assert_alike(ours, plain)


@pytest.mark.parametrize("raw", [False, True], ids=["typed", "raw"])
@settings(SHARDED)
def test_a_key_in_the_batch_differs_by_micro_batch(setting, raw):
    make = jax.random.PRNGKey if raw else jax.random.key
    batches = [{**samples(i), "rng": make(i)} for i in range(3)]
    ours = train_jaxspeed(Net, of_batch, batches, SGD, setting)

    def keys(step):
        return [batch_key(jax.random.key(step), i) for i in range(setting.accumulation)]

    assert_alike(ours, plain_run(batches, setting, keys))


@pytest.mark.parametrize(
    ("model", "key"),
    [
        pytest.param(LinenNet(), jax.random.key(1), id="linen-typed"),
        pytest.param(Net, jax.random.PRNGKey(1), id="nnx-raw"),
        pytest.param(LinenNet(), jax.random.PRNGKey(1), id="linen-raw", marks=pytest.mark.full),
        pytest.param(Net, jax.random.key(1), id="nnx-typed", marks=pytest.mark.full),
        pytest.param(Net, np.uint32([0, 1]), id="nnx-numpy", marks=pytest.mark.full),
    ],
)
def test_a_key_in_the_batch_works_with_every_method(model, key):
    batch = {**tiny.batch(), "rng": key}

    def loss(model, batch):
        assert batch["rng"].dtype == key.dtype
        assert batch["rng"].shape == key.shape
        return of_batch(model, batch)

    engine = tiny.engine(model, loss, stage=3, example_batch=batch)
    engine.train_batch(batch)
    first, again = (float(engine.eval_batch(batch)["loss"]) for _ in range(2))
    other = {**batch, "rng": jax.random.split(jax.random.key(9))[0]}
    if key.dtype == other["rng"].dtype:
        assert float(engine.eval_batch(other)["loss"]) != first
    assert first == again
    assert engine.check(batch).ok
    assert engine.compiled(batch).collectives
    assert engine.diagnose(batch).finite


def test_a_key_of_each_sample_is_divided_like_the_samples():
    def loss(model, batch):
        draw = jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))
        return jnp.mean((model(batch["x"] + draw(batch["rng"])) - batch["x"]) ** 2)

    batch = {**tiny.batch(), "rng": jax.random.split(jax.random.key(0), 8)}
    engine = tiny.engine(Net, loss)
    assert np.isfinite(float(engine.train_batch(batch)["loss"]))
    assert engine.check(batch).ok


def test_two_samples_of_uint32_are_no_raw_key():
    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["ids"][:, None].astype(jnp.float32)) ** 2)

    batch = {"x": samples()["x"][:2], "ids": np.uint32([3, 4])}
    engine = tiny.engine(Net, loss, devices=jax.devices()[:1], train_micro_batch_size_per_gpu=2)
    assert np.isfinite(float(engine.train_batch(batch)["loss"]))


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"mesh": {"pipe": 2}, "gradient_accumulation_steps": 2}, id="pipe"),
        pytest.param({"parallel": {"data_reduction": "ring"}}, id="ring"),
        pytest.param(
            {"parallel": {"data_reduction": "parameter_server", "servers": 2}}, id="servers"
        ),
    ],
)
def test_a_loss_with_a_key_trains_over(sections):
    def loss(model, batch, rng):
        noise = jax.random.normal(rng, batch["x"].shape)
        noise += jax.random.normal(batch["rng"], batch["x"].shape)
        return tiny.squared_error(model, {**batch, "x": batch["x"] + noise})

    config = {**tiny.config(), **sections}
    engine = jaxspeed.initialize(lambda rngs: tiny.Listed(rngs, layers=4), loss, config)
    batch = {**tiny.batch(engine.program.batch.train), "rng": jax.random.key(0)}
    assert np.isfinite(float(engine.train_batch(batch)["loss"]))
    report = engine.check(batch)
    assert report.ok, str(report)


def test_a_pair_takes_a_key_in_model_and_loss():
    def init(key):
        return {"w": jax.random.normal(key, (WIDTH, WIDTH))}

    def apply(params, x, rng):
        return x @ params["w"] + jax.random.normal(rng, x.shape)

    engine = tiny.engine((init, apply), of_rng)
    engine.train_batch(tiny.batch())
    assert engine.check(tiny.batch()).ok


def test_a_parameter_of_the_loss_that_nothing_fills_is_named():
    with pytest.raises(ModelError, match="loss_fn has a parameter state; it is called as"):
        tiny.engine(Net, lambda model, batch, state: 0.0).train_batch(tiny.batch())
