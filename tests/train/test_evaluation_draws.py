"""Evaluation of models that draw random numbers: keys of the step, dropout as the model says."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from tests.engine import tiny

LATENT = 4


class Vae(nn.Module):
    """Samples in evaluation too; its dropout is switched by its stream or by its argument."""

    by_stream: bool = True

    @nn.compact
    def __call__(self, x, train):
        off = not self.has_rng("dropout") if self.by_stream else not train
        h = nn.Dropout(0.5, deterministic=off)(jnp.tanh(nn.Dense(16)(x)))
        mean, log_var = nn.Dense(LATENT)(h), nn.Dense(LATENT)(h)
        noise = jax.random.normal(self.make_rng("latent"), mean.shape)
        return nn.Dense(x.shape[1])(mean + jnp.exp(log_var / 2) * noise)


class NnxVae(nnx.Module):
    def __init__(self, rngs):
        self.encode = nnx.Linear(tiny.FEATURES, LATENT, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.decode = nnx.Linear(LATENT, tiny.FEATURES, rngs=rngs)
        self.rngs = nnx.Rngs(latent=5)

    def __call__(self, x):
        h = self.drop(jnp.tanh(self.encode(x)))
        return self.decode(h + self.rngs.latent.normal(h.shape))


def rebuilt(model, batch):
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2)


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("by_stream", [True, False])
def test_a_linen_model_that_samples_is_evaluated_as_by_plain_flax(by_stream):
    module, batch = Vae(by_stream), tiny.batch()
    engine = tiny.engine(module, rebuilt, stage=3)
    apply = jax.jit(lambda params, x, rngs: module.apply(params, x, train=False, rngs=rngs))
    for step in range(2):
        mine = float(engine.eval_batch(batch)["loss"])
        assert mine == float(engine.eval_batch(batch)["loss"])
        key = jaxspeed.micro_batch_key(engine.state.variables["(seed)"], step, 0)
        params = {"params": tree_of(engine.parameters)}
        rngs = {"params": jax.random.fold_in(key, 0)}
        out = apply(params, batch["x"], rngs)
        np.testing.assert_allclose(mine, jnp.mean((out - batch["x"]) ** 2), rtol=1e-5)
        engine.train_batch(batch)
    assert engine.module(batch["x"]).shape == batch["x"].shape


def tree_of(flat):
    tree = {}
    for path, x in flat.items():
        name, leaf = path.split("/")
        tree.setdefault(name, {})[leaf] = x
    return tree


def test_a_stream_that_a_linen_model_asks_for_is_there_in_training():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(1)(x)
            return x + 100.0 if self.has_rng("noise") else x

    engine = tiny.engine(Noisy(), lambda model, batch: jnp.mean(model(batch["x"])))
    assert float(engine.eval_batch(tiny.batch())["loss"]) < 50
    assert float(engine.train_batch(tiny.batch())["loss"]) > 50


def test_an_nnx_model_that_samples_is_evaluated_twice_alike():
    engine = tiny.engine(NnxVae, rebuilt)
    first, second = (float(engine.eval_batch(tiny.batch())["loss"]) for _ in range(2))
    assert first == second
    assert engine.check(tiny.batch()).ok
