"""What Linen modules create, and when: only in training, or from the values of the first batch."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspeed
from jaxspeed import ModelError
from tests.engine import tiny
from tests.train.flax_loop import (
    REPLICATED,
    SEED,
    SGD,
    STAGE_1,
    WIDTH,
    Setting,
    assert_alike,
    batches,
    loss,
    settings,
    squared,
    train_jaxspeed,
    train_linen,
)


class Counting(nn.Module):
    """A counter, a parameter and a stream, all of them in training alone."""

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.Dense(2 * WIDTH)(x)
        if train:
            count = self.variable("counters", "calls", jnp.zeros, ())
            count.value += 1
            x = x * self.param("gain", nn.initializers.ones, (2 * WIDTH,))
            x = x + 0.1 * count.value
            if self.has_rng("noise"):
                x = x + 1
        return nn.Dense(1)(jnp.tanh(x))[:, 0]


@pytest.mark.sampled
@settings(REPLICATED, STAGE_1)
def test_what_exists_only_in_training_is_created_once(setting):
    plain = train_linen(
        Counting(),
        lambda out, after, batch: squared(out, batch),
        batches(),
        SGD,
        setting,
        carried=("counters",),
        rngs={"noise": jax.random.key(0)},
    )
    ours = train_jaxspeed(Counting(), loss, batches(), SGD, setting)
    assert_alike(ours, plain)
    assert ours.values["counters/calls"] == 1 + 4 * setting.accumulation


def test_the_value_of_a_counter_is_carried_from_step_to_step():
    class Counter(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = True):
            out = nn.Dense(1, kernel_init=nn.initializers.zeros)(x)[:, 0]
            if train:
                count = self.variable("counters", "calls", jnp.zeros, ())
                count.value += 1
                out = out + 100 * jax.lax.stop_gradient(count.value)
            return out

    engine = tiny.engine(Counter(), lambda model, batch: model(batch["x"]).mean(), stage=3)
    batch = {"x": np.zeros((8, WIDTH), np.float32), "y": np.zeros(8, np.float32)}
    seen = [float(engine.train_batch(batch)["loss"]) for _ in range(3)]
    # Less the bias, which moves by the learning rate in each step.
    np.testing.assert_allclose(seen, [200, 300 - 0.05, 400 - 0.1], rtol=1e-6)


def test_what_the_calls_of_init_with_do_not_create_is_named():
    class Two(nn.Module):
        def setup(self):
            self.body = nn.Dense(1)

        def __call__(self, x):
            return self.body(x)[:, 0]

        @nn.compact
        def counted(self, x):
            self.variable("counters", "calls", jnp.zeros, ()).value += 1
            return self(x)

    def counted(model, batch):
        return jnp.mean((model.counted(batch["x"]) - batch["y"]) ** 2)

    engine = tiny.engine(Two(), counted, init_with=lambda model, batch: model(batch["x"]))
    with pytest.raises(ModelError, match="creates the variable counters/calls in each training"):
        engine.train_batch(tiny.batch())


class ActNorm(nn.Module):
    """Activations are normalized by the first batch."""

    @nn.compact
    def __call__(self, x):
        shift = self.param("shift", lambda key: -x.mean(0))
        scale = self.param("scale", lambda key: 1 / x.std(0))
        return (x + shift) * scale


class WeightNorm(nn.Module):
    """Salimans & Kingma 2016: g and b from the first batch."""

    @nn.compact
    def __call__(self, x):
        v = self.param("v", nn.initializers.normal(0.05), (x.shape[-1], 1))
        t = x @ (v / jnp.linalg.norm(v))
        g = self.param("g", lambda key: 1 / t.std(0))
        return t * g + self.param("b", lambda key: -t.mean(0) * g)


class Flow(nn.Module):
    @nn.compact
    def __call__(self, x):
        center = self.variable("batch_stats", "center", lambda: x.mean(0))
        x = ActNorm()(nn.Dense(2 * WIDTH)(x - 0.5 * center.value))
        return WeightNorm()(jnp.tanh(x))[:, 0]


def offset(steps=4):
    """Batches whose values are far from zero."""
    return [{**batch, "x": batch["x"] * 3 + 7} for batch in batches(steps)]


@pytest.mark.sampled
@settings(REPLICATED, STAGE_1)
def test_initialization_by_the_first_batch_sees_its_values(setting):
    plain = train_linen(
        Flow(), lambda out, after, batch: squared(out, batch), offset(), SGD, setting
    )
    ours = train_jaxspeed(Flow(), loss, offset(), SGD, setting)
    assert_alike(ours, plain)


def test_the_init_of_a_pair_sees_the_values_of_its_batch():
    def init(key, batch):
        kernel = jax.random.normal(key, (WIDTH, 1))
        return {"kernel": kernel, "bias": -(batch["x"] @ kernel).mean(0)}

    def apply(params, x):
        return (x @ params["kernel"] + params["bias"])[:, 0]

    batch, setting = offset(1)[0], Setting(3, 4, 1)
    config = setting.config(64)
    engine = jaxspeed.initialize((init, apply), loss, config, SGD, example_batch=batch)
    wanted = init(jax.random.key(SEED), batch)
    np.testing.assert_allclose(engine.parameters["bias"], wanted["bias"], rtol=1e-5)
    first = squared(apply(wanted, batch["x"]), batch)
    np.testing.assert_allclose(engine.train_batch(batch)["loss"], first, rtol=1e-5)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    with pytest.raises(ModelError, match=r"depends on the values of example_batch\['x'\]"):
        jaxspeed.initialize((init, apply), loss, config, SGD, example_batch=shapes)


def test_shapes_are_refused_where_values_are_read():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny.batch())
    with pytest.raises(ModelError, match=r"values of example_batch\['x'\], of which only the sh"):
        tiny.engine(Flow(), loss, example_batch=shapes)


def test_shapes_are_enough_for_layers_in_a_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.remat(nn.Dense)(WIDTH)(jnp.tanh(x)), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            form = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
            x, _ = nn.scan(Layer, **form)()(x, None)
            return nn.Dense(1)(x)[:, 0]

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny.batch())
    engine = tiny.engine(Scanned(), loss, example_batch=shapes)
    assert np.isfinite(float(engine.train_batch(tiny.batch())["loss"]))
