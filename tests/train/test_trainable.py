"""`trainable` with filters of nnx, against nnx.Optimizer with the same filter."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.engine import tiny
from tests.train.flax_loop import SEED, SGD, WIDTH, Setting, batches, loss, train_jaxspeed


class Prompt(nnx.Variable):
    """State that is no Param."""


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.prompt = Prompt(jnp.ones(WIDTH))
        self.body = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.lora = nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        x = x + self.prompt
        return self.head(jnp.tanh(self.norm(self.body(x)) + self.lora(x)))[:, 0]


full = pytest.mark.full
HEAD = nnx.PathContains("head")
FILTERS = [  # (trainable, the filter of the plain optimizer)
    pytest.param(HEAD, HEAD, id="path", marks=full),
    pytest.param(Prompt, Prompt, id="type"),
    pytest.param(nnx.Any(Prompt, HEAD), nnx.Any(Prompt, HEAD), id="any"),
    pytest.param([Prompt, "head/**"], nnx.Any(Prompt, HEAD), id="list"),
    pytest.param(
        nnx.All(nnx.Param, nnx.Not(HEAD)), nnx.All(nnx.Param, nnx.Not(HEAD)), id="not", marks=full
    ),
    pytest.param(..., nnx.Param, id="ellipsis", marks=full),
    pytest.param(
        lambda path, x: path[0] == "lora", nnx.PathContains("lora"), id="predicate", marks=full
    ),
    pytest.param(nnx.LoRAParam, nnx.LoRAParam, id="lora", marks=full),
]


def frozen(filter):
    """Whether the normalisation has no trained parameter, so that its statistics stay."""
    return not nnx.filterlib.to_predicate(filter)(("norm", "scale"), nnx.Param(0.0))


@pytest.mark.parametrize(("trainable", "plain"), FILTERS)
def test_filters_train_what_they_train_in_plain_flax(trainable, plain):
    module = Adapted(nnx.Rngs(SEED))
    if frozen(plain):  # documented: frozen parts normalise by their running statistics
        module.norm.set_attributes(use_running_average=True)
    optimizer = nnx.Optimizer(module, SGD, wrt=plain)

    @nnx.jit
    def step(module, optimizer, batch):
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, plain))(module, batch)
        optimizer.update(module, grads)
        return value

    losses = [float(step(module, optimizer, batch)) for batch in batches()]
    setting = Setting(3, 1, 1)
    ours = train_jaxspeed(Adapted, loss, batches(), SGD, setting, trainable=trainable)
    np.testing.assert_allclose(ours.losses, losses, rtol=1e-5)
    for keys, x in nnx.to_flat_state(nnx.state(module)):
        path = "/".join(map(str, keys))
        if path in ours.values:
            np.testing.assert_allclose(ours.values[path], x.get_value(), atol=1e-5, err_msg=path)
    assert {"prompt", "head/kernel", "lora/lora_a"} <= set(ours.values)


def test_a_filter_of_paths_does_for_linen():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, name="head")(jnp.tanh(nn.Dense(WIDTH, name="body")(x)))

    engine = tiny.engine(Two(), trainable=HEAD)
    before = {path: np.asarray(x) for path, x in engine.parameters.items()}
    engine.train_batch(tiny.batch())
    moved = {p for p, x in engine.parameters.items() if (np.asarray(x) != before[p]).any()}
    assert moved == {"head/kernel", "head/bias"}
