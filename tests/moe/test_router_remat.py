"""Rematerialization saves which experts were chosen: the recomputed pass takes the same route."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspeed.jaxpr.traverse import bodies
from jaxspeed.ops import moe
from tests.engine import tiny

LAYERS, EXPERTS, K = 3, 4, 2


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.router = nnx.Param(jax.random.normal(rngs.params(), (tiny.FEATURES, EXPERTS)))
        self.scales = nnx.Param(jnp.linspace(0.5, 1.5, EXPERTS))

    def __call__(self, x):
        routing = moe.route(x[:, None], self.router[...], k=K, renormalize=True)
        scales = jnp.take(self.scales[...], routing.experts[:, 0])
        return jnp.sin(x * jnp.sum(scales * routing.weights[:, 0], -1, keepdims=True))


class Mixtures(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(tiny.FEATURES, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def choices(jaxpr):
    """How many experts a program chooses."""
    return sum(
        (eqn.primitive.name == "argmax") + sum(choices(body.jaxpr) for body in bodies(eqn))
        for eqn in jaxpr.eqns
    )


REMATS = {
    "none": "none",
    "full": "full",
    "dots": "dots",
    "names": {"save": ["router_logits"]},
}


@pytest.fixture(scope="module")
def trained():
    """Losses of three steps without rematerialization."""
    return losses(tiny.engine(Mixtures, parallel={"remat": "none"}))


def losses(engine):
    return [float(engine.train_batch(tiny.batch(seed=i))["loss"]) for i in range(3)]


@pytest.mark.parametrize("remat", REMATS)
def test_a_step_chooses_experts_once(remat, trained):
    """A layer's choice is not recomputed in the backward pass."""
    engine = tiny.engine(Mixtures, parallel={"remat": REMATS[remat]})
    program = engine.program
    step = program.step.trace(program.state, program.abstract_batch(tiny.batch()))
    assert choices(step.jaxpr.jaxpr) == LAYERS * K
    np.testing.assert_allclose(losses(engine), trained, rtol=1e-6)
