"""engine.diagnose names what was not finite first: an entry, a parameter, a layer, a gradient."""

import dataclasses
import sys
from itertools import product

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed.ops import moe
from tests.engine import tiny
from tests.support.covering import covering


class Growing(nnx.Module):
    """x * exp(power): finite parameters, an infinite output where power is large."""

    def __init__(self, rngs):
        self.power = nnx.Param(jnp.zeros(tiny.FEATURES))

    def __call__(self, x):
        return x * jnp.exp(self.power[...])


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Growing(rngs) for _ in range(3)])
        self.head = nnx.Linear(tiny.FEATURES, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Scanned(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs):
            return Growing(rngs)

        self.layers = stack(rngs)
        self.head = nnx.Linear(tiny.FEATURES, 1, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def through(layer, x):
            return layer(x)

        return self.head(through(self.layers, x))


class LinenGrowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * jnp.exp(self.param("power", nn.initializers.zeros, (tiny.FEATURES,)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = LinenGrowing()(x)
        return nn.Dense(1)(x)


@jaxspeed.unit
def grow(power, x):
    return x * jnp.exp(power)


def init(key):
    return {"powers": [jnp.zeros(tiny.FEATURES)] * 3, "head": jnp.ones((tiny.FEATURES, 1))}


def apply(params, x):
    for power in params["powers"]:
        x = grow(power, x)
    return x @ params["head"]


def with_value(engine, path, value, index=...):
    """The same engine with a value written over a part of one stored parameter."""
    old = engine.state.params[path]
    new = np.asarray(old).copy()
    new[index] = value
    params = {**engine.state.params, path: jax.device_put(new, old.sharding)}
    engine.state = dataclasses.replace(engine.state, params=params)
    return engine


MODELS = {
    "a list of layers": (Listed, "layers/1/power", ..., "layers/1 (Growing)"),
    "a scanned stack": (Scanned, "layers/power", 1, "layer 1: Growing"),
    "linen": (LinenNet(), "LinenGrowing_1/power", ..., "LinenGrowing_1 (LinenGrowing)"),
    "marked functions": ((init, apply), "powers/1", ..., "grow"),
}


# Each model at each stage in one of the next two tests.
BY_TURNS = [*zip(MODELS, [0, 3, 3, 0], strict=True)]
OTHERS = [*zip(MODELS, [3, 0, 0, 3], strict=True)]


@pytest.mark.default_cases("a list of layers-0", "linen-3", "marked functions-0")
@pytest.mark.parametrize(("case", "stage"), covering(product(MODELS, [0, 3]), BY_TURNS))
def test_the_first_layer_whose_output_is_infinite_is_named(case, stage):
    model, path, index, layer = MODELS[case]
    engine = with_value(tiny.engine(model, stage=stage), path, 1000.0, index)
    found = engine.diagnose(tiny.batch())
    assert found.batch is None and found.parameter is None
    assert found.layer == layer
    assert found.gradients
    assert not found.finite
    assert f"the first layer whose output is not finite: {layer}" in str(found)


@pytest.mark.default_cases("a list of layers-3", "linen-0", "marked functions-3")
@pytest.mark.parametrize(("case", "stage"), covering(product(MODELS, [0, 3]), OTHERS))
def test_a_parameter_that_is_not_finite_is_named_before_the_layers(case, stage):
    model, path, index, layer = MODELS[case]
    engine = with_value(tiny.engine(model, stage=stage), path, np.nan, index)
    found = engine.diagnose(tiny.batch())
    assert found.parameter == path
    assert found.layer == layer
    assert f"the first parameter that is not finite: {path}" in str(found)


class Mixture(nnx.Module):
    """Finite for tokens and a router of any size, but for the router's own logits."""

    remat = False

    def __init__(self, rngs):
        self.router = nnx.Param(jax.random.normal(rngs.params(), (tiny.FEATURES, 4)))

    def __call__(self, x):
        def mixed(x, router):
            weights = moe.route(x[:, None], router, k=2, renormalize=True).weights
            return x + jnp.sum(jnp.nan_to_num(weights), axis=-1)

        return (jax.checkpoint(mixed) if self.remat else mixed)(x, self.router[...])


class RematMixture(Mixture):
    remat = True


@pytest.mark.default_cases("Mixture-Scanned", "RematMixture-Listed", "RematMixture-Scanned")
@pytest.mark.parametrize("stack", [Listed, Scanned])
@pytest.mark.parametrize("layer", [Mixture, RematMixture])
def test_a_router_whose_logits_are_not_finite_is_named(monkeypatch, stack, layer):
    """Although what its layer returns is finite, also within a checkpoint of the model's own."""
    monkeypatch.setattr(sys.modules[__name__], "Growing", layer)
    path, index = {Listed: ("layers/1/router", ...), Scanned: ("layers/router", 1)}[stack]
    engine = with_value(tiny.engine(stack), path, 3e38, index)
    name = layer.__name__
    place = {Listed: f"layers/1 ({name})", Scanned: f"layer 1: {name}"}[stack]
    assert engine.diagnose(tiny.batch()).layer == f"{place}: the router's logits"


def test_of_several_parameters_the_first_is_named():
    engine = tiny.engine(Listed)
    for path in ("layers/2/power", "layers/0/power"):
        with_value(engine, path, np.inf)
    assert engine.diagnose(tiny.batch()).parameter == "layers/0/power"


@pytest.mark.parametrize(("entry", "value"), [("x", np.nan), ("x", -np.inf), ("y", np.nan)])
def test_an_entry_of_the_batch_is_named(entry, value):
    engine, batch = tiny.engine(Listed), tiny.batch()
    batch[entry] = batch[entry].copy()
    batch[entry].flat[3] = value
    found = engine.diagnose(batch)
    assert found.batch == entry and found.parameter is None
    assert f"the batch is not finite: {entry}" in str(found)


def test_all_is_finite_and_the_state_is_unchanged():
    engine = tiny.engine(Listed, gradient_accumulation_steps=2)
    state = engine.state
    found = engine.diagnose(tiny.batch(16))
    assert found.finite
    assert str(found).startswith("all values are finite")
    assert engine.state is state
    engine.train_batch(tiny.batch(16))


def test_a_non_finite_loss_after_finite_layers_is_named():
    def undefined(model, batch):
        return jnp.log(-jnp.square(model(batch["x"])).sum() - 1.0)

    found = tiny.engine(Listed, undefined).diagnose(tiny.batch())
    assert found.layer == "outside of the layers (the loss)"


def test_a_gradient_that_breaks_behind_a_finite_loss_is_named():
    """sqrt is 0 at 0, and its derivative is infinite."""

    def rooted(model, batch):
        return jnp.sqrt(jnp.square(0.0 * model(batch["x"])).sum())

    found = tiny.engine(Listed, rooted).diagnose(tiny.batch())
    assert (found.batch, found.parameter, found.layer) == (None, None, None)
    assert set(found.gradients) == set(tiny.engine(Listed).parameters)
    assert f"{len(found.gradients)} gradients are not finite" in str(found)
