"""Arrays that an nnx module keeps in lists, dicts and tuples, and Variables with metadata."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspeed import ModelError
from tests.engine import tiny
from tests.train.flax_loop import (
    SEED,
    SGD,
    SHARDED,
    STAGE_1,
    WIDTH,
    assert_alike,
    batches,
    loss,
    settings,
    train_jaxspeed,
    train_nnx,
)


class Tables(nnx.Module):
    """Tables without a Variable in each kind of container, parameters and state in others."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.listed = nnx.data([jnp.arange(WIDTH) / WIDTH, jnp.ones((WIDTH, 2)) / WIDTH])
        more = jnp.ones(1), np.full(2, 0.5)
        self.named = nnx.data({"scale": jnp.full(WIDTH, 0.5), "more": more})
        self.mixed = nnx.data((jnp.ones(3) / 3, {"bias": nnx.Param(jnp.zeros(WIDTH))}))
        self.seen = nnx.List([nnx.Variable(jnp.zeros(())), nnx.Linear(WIDTH, 1, rngs=rngs)])

    def __call__(self, x):
        self.seen[0][...] = self.seen[0][...] + x.mean()
        h = jnp.tanh(self.linear(x) * self.listed[0] + self.mixed[1]["bias"][...])
        h = h * self.named["scale"] * self.named["more"][0] + self.listed[1].sum()
        return self.seen[1](h)[:, 0] * self.mixed[0].sum() * self.named["more"][1].sum()


class Rotation:
    """Random features and a table, in a class that is no module."""

    def __init__(self, rngs):
        self.mixing = jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / WIDTH**0.5
        self.steps = [{"shift": jnp.arange(WIDTH) / WIDTH}, "no array"]

    def __call__(self, x):
        return x @ self.mixing + self.steps[0]["shift"]


class Rotated(nnx.Module):
    """Arrays in plain objects: an attribute, in a list, behind a bound method."""

    def __init__(self, rngs):
        self.rotation = Rotation(rngs)
        self.more = [Rotation(rngs), Rotation(rngs)]
        self.last = Rotation(rngs).__call__
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.up(self.rotation(x)))
        return self.head(self.last(self.more[1](x)))[:, 0]


class Hooked(nnx.Module):
    """Variables with hooks: a parameter is read doubled, a statistic with an offset."""

    def __init__(self, rngs):
        kernel = nnx.initializers.lecun_normal()(rngs.params(), (WIDTH, WIDTH))
        self.kernel = nnx.Param(kernel, on_get_value=lambda variable, value: 2 * value)
        self.seen = nnx.Variable(jnp.zeros(()), on_get_value=lambda variable, value: value + 1)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        self.seen.set_value(0.5 * self.seen.get_value() + x.mean())
        return self.head(jnp.tanh(x @ self.kernel.get_value()))[:, 0] * self.seen.get_value()


class Normalized(nnx.Module):
    """Flax's own layer with a dict of arrays."""

    def __init__(self, rngs):
        self.inner = nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.inner(x)))[:, 0]


class Described(nnx.Module):
    """Variables whose metadata has the names of an array's own attributes."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH), dtype=jnp.bfloat16, shape="a row")
        self.seen = nnx.Variable(jnp.zeros(()), dtype=jnp.int32)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        self.seen[...] = self.seen[...] + x.mean()
        return self.head(jnp.tanh(x * self.scale))[:, 0]


@pytest.mark.default_cases("Described-stage3-x4-tensor1")
@settings(SHARDED)
@pytest.mark.parametrize("model", [Tables, Normalized, Described])
def test_arrays_in_containers_are_state_as_for_plain_flax(model, setting):
    plain = train_nnx(model, loss, batches(), SGD, setting)
    assert_alike(train_jaxspeed(model, loss, batches(), SGD, setting), plain)


@settings(SHARDED, STAGE_1)
def test_arrays_in_plain_objects_are_those_of_the_runs_seed(setting):
    plain = train_nnx(Rotated, loss, batches(), SGD, setting)
    ours = train_jaxspeed(Rotated, loss, batches(), SGD, setting)
    assert_alike(ours, plain, also=("mixing", "shift"))
    wanted = Rotated(nnx.Rngs(SEED))
    np.testing.assert_allclose(ours.values["more/1.mixing"], wanted.more[1].mixing, rtol=1e-6)


def test_plain_objects_are_there_in_evaluation_and_in_engine_module():
    engine = tiny.engine(Rotated, loss)
    module = Rotated(nnx.Rngs(engine.config.run.seed))
    batch = tiny.batch()
    np.testing.assert_allclose(engine.eval_batch(batch)["loss"], loss(module, batch), rtol=1e-5)
    np.testing.assert_allclose(engine.module(batch["x"]), module(batch["x"]), rtol=1e-4, atol=1e-5)
    assert isinstance(engine.module.more[0], Rotation)


@dataclasses.dataclass
class Sizes:
    """Modules with such a base compare by these fields, and have no hash."""

    width: int = WIDTH


def test_a_module_with_a_dataclass_as_a_base_trains():
    class Sized(tiny.Listed, Sizes):
        def __init__(self, rngs):
            Sizes.__init__(self)
            tiny.Listed.__init__(self, rngs)

    engine = tiny.engine(Sized)
    alike = tiny.engine()
    for _ in range(2):
        wanted = alike.train_batch(tiny.batch())["loss"]
        np.testing.assert_allclose(engine.train_batch(tiny.batch())["loss"], wanted, rtol=1e-6)
    assert engine.module.width == WIDTH


@pytest.mark.parametrize("base", [object, Sizes])
def test_an_array_of_a_plain_object_that_the_loss_changes_is_named(base):
    class Counting(Rotated, base):
        def __call__(self, x):
            self.rotation.steps[0]["shift"] += 1
            return super().__call__(x)

    engine = tiny.engine(Counting, loss)
    with pytest.raises(ModelError, match=r"changes rotation.steps.0.shift, an array in a plain Ro"):
        engine.train_batch(tiny.batch())


@settings(SHARDED, STAGE_1)
@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
def test_hooks_of_variables_run_where_the_model_reads_them(setting):
    plain = train_nnx(Hooked, loss, batches(), SGD, setting)
    assert_alike(train_jaxspeed(Hooked, loss, batches(), SGD, setting), plain)
