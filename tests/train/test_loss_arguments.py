"""What a loss gets beside its model and its samples: random keys, extra arrays, numbers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import BatchError, ModelError
from jaxspeed.user_models.rng import LOSS, batch_key
from tests.engine import tiny
from tests.support.covering import covering
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


@settings(SHARDED)
def test_a_key_in_the_batch_differs_by_micro_batch(setting):
    batches = [{**samples(i), "rng": jax.random.key(i)} for i in range(3)]
    ours = train_jaxspeed(Net, of_batch, batches, SGD, setting)

    def keys(step):
        return [batch_key(jax.random.key(step), i) for i in range(setting.accumulation)]

    assert_alike(ours, plain_run(batches, setting, keys))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "model",
    [pytest.param(LinenNet(), id="linen"), pytest.param(Net, id="nnx", marks=pytest.mark.full)],
)
def test_a_key_in_the_batch_works_with_every_method(model):
    key = jax.random.key(1)
    batch = {**tiny.batch(), "rng": key}

    def loss(model, batch):
        assert batch["rng"].dtype == key.dtype
        assert batch["rng"].shape == key.shape
        return of_batch(model, batch)

    engine = tiny.engine(model, loss, stage=3, example_batch=batch)
    engine.train_batch(batch)
    first, again = (float(engine.eval_batch(batch)["loss"]) for _ in range(2))
    other = {**batch, "rng": jax.random.split(jax.random.key(9))[0]}
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


class Growth(nnx.Module):
    """The mean of what it gets, times a parameter."""

    def __init__(self, rngs):
        self.factor = nnx.Param(jnp.ones((2,)))

    def __call__(self, x):
        return (x[:, None] * self.factor[...]).mean(1)


class LinenGrowth(nn.Module):
    @nn.compact
    def __call__(self, x):
        return (x[:, None] * self.param("factor", nn.initializers.ones, (2,))).mean(1)


@pytest.mark.parametrize(
    ("model", "stage", "accumulation", "tensor"),
    covering(
        [
            (model, *setting)
            for model in ("nnx", "linen")
            for setting in ((0, 2, 1), (1, 1, 1), (3, 1, 1), (3, 2, 2))
        ],
        [("nnx", 0, 2, 1), ("linen", 3, 1, 1)],
    ),
)
def test_two_numbers_of_uint32_are_no_key(model, stage, accumulation, tensor):
    def loss(model, batch):
        return model(batch["heights"].astype(jnp.float32)).mean() / 1000

    ranks = 2 // accumulation
    engine = tiny.engine(
        {"nnx": Growth, "linen": LinenGrowth()}[model],
        loss,
        stage=stage,
        devices=jax.devices()[: ranks * tensor],
        example_batch={"heights": np.uint32([0, 0])},
        gradient_accumulation_steps=accumulation,
        mesh={"tensor": tensor},
    )
    factor, tracked = np.ones(2), optax.sgd(0.05)
    state = tracked.init(factor)
    for heights in (np.uint32([170, 182]), np.uint32([150, 171])):
        seen = engine.train_batch({"heights": heights})["loss"]
        np.testing.assert_allclose(seen, heights.mean() * factor.mean() / 1000, rtol=1e-5)
        updates, state = tracked.update(np.full(2, heights.mean() / 2000), state)
        factor = optax.apply_updates(factor, updates)
    np.testing.assert_allclose(engine.parameters["factor"], factor, rtol=1e-5)


@pytest.mark.parametrize("model", [Net, LinenNet()], ids=["nnx", "linen"])
def test_a_raw_key_is_refused_with_advice(model):
    raw = {**tiny.batch(), "rng": jax.random.PRNGKey(0)}
    typed = {**raw, "rng": jax.random.wrap_key_data(raw["rng"])}
    engine = tiny.engine(model, of_batch, example_batch=typed)
    advice = r"jax.random.wrap_key_data\(batch\['rng'\]\)"
    for call in (engine.train_batch, engine.eval_batch, engine.check):
        with pytest.raises(BatchError, match=advice):
            call(raw)
    assert np.isfinite(float(engine.train_batch(typed)["loss"]))


@pytest.mark.sampled
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
