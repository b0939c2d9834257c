"""An nnx model's own `eval` and `train`, as a loop of one's own calls them."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.engine import tiny
from tests.train.flax_loop import (
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


class Switched(nnx.Module):
    """A mode under a name of its own, and statistics that its author leaves as they are."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * WIDTH, momentum=0.5, rngs=rngs)
        self.fixed = nnx.BatchNorm(2 * WIDTH, momentum=0.5, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, 1, rngs=rngs)
        self.shift = None

    def train(self, **attributes):
        super().train(**attributes)
        self.fixed.eval()
        self.shift = 0.5

    def eval(self, **attributes):
        super().eval(**attributes)
        self.shift = -1.0

    def __call__(self, x):
        return self.head(jnp.tanh(self.fixed(self.norm(self.up(x)))))[:, 0] + self.shift


@settings(SHARDED, STAGE_1)
def test_own_modes_are_called(setting):
    plain = train_nnx(Switched, loss, batches(), SGD, setting)
    assert_alike(train_jaxspeed(Switched, loss, batches(), SGD, setting), plain)


def test_own_eval_is_called_in_evaluation():
    engine = tiny.engine(Switched, loss)
    module = Switched(nnx.Rngs(engine.config.run.seed))
    module.eval()
    batch = tiny.batch()
    np.testing.assert_allclose(engine.eval_batch(batch)["loss"], loss(module, batch), rtol=1e-5)
    np.testing.assert_allclose(engine.module(batch["x"]), module(batch["x"]), rtol=1e-5)


@pytest.mark.parametrize(
    ("last", "shift"), [(Switched.eval, -1.0), (Switched.train, 0.5)], ids=["eval", "train"]
)
def test_a_factory_that_calls_eval_last_leaves_it(last, shift):
    def factory(rngs):
        module = Switched(rngs)
        module.eval()
        last(module)
        return module

    engine = tiny.engine(factory, lambda model, batch: model(batch["x"]).mean() * 0 + model.shift)
    assert float(engine.train_batch(tiny.batch())["loss"]) == shift


def test_a_method_eval_with_arguments_is_no_mode():
    class Evaluated(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(WIDTH, 1, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def eval(self, x):
            return self.head(x)

        def __call__(self, x):
            return self.drop(self.eval(x))[:, 0]

    engine = tiny.engine(Evaluated, loss)
    module = Evaluated(nnx.Rngs(engine.config.run.seed))
    wanted = loss(lambda x: module.head(x)[:, 0], tiny.batch())
    np.testing.assert_allclose(engine.eval_batch(tiny.batch())["loss"], wanted, rtol=1e-5)
    assert engine.check(tiny.batch()).ok
