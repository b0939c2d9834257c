"""`trainable` with filters of nnx, against nnx.Optimizer with the same filter; shared Variables."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspeed.placement.show import as_text
from tests.engine import tiny
from tests.train.flax_loop import (
    SEED,
    SGD,
    SHARDED,
    STAGE_1,
    WIDTH,
    Setting,
    assert_alike,
    batches,
    loss,
    settings,
    train_jaxspeed,
    train_nnx,
)


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


@pytest.mark.default_cases("any")
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


# -- shared Variables -----------------------------------------------------------------------------


class Tied(nnx.Module):
    """The kernel of `body` is that of `head` too, and `other` has all of `body`."""

    def __init__(self, rngs):
        self.body = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head.kernel = self.body.kernel
        self.other = nnx.List([self.body])

    def __call__(self, x):
        return self.head(jnp.tanh(self.other[0](jnp.tanh(self.body(x))))).sum(-1)


KERNEL, BIAS, HEAD_BIAS = "body/kernel", "body/bias", "head/bias"
TIED = {  # `trainable`, and what it trains
    "pattern": ("head/**", {KERNEL, HEAD_BIAS}),
    "first": ("body/**", {KERNEL, BIAS}),
    "module": (["other/0/bias"], {BIAS}),
    "function": (lambda path: path.startswith("head/"), {KERNEL, HEAD_BIAS}),
    "filter": (HEAD, {HEAD_BIAS}),  # a filter of nnx gets the path under which Flax lists it
}


def frozen_but(trained):
    return lambda path: path not in trained


@settings(SHARDED, STAGE_1)
def test_a_pattern_covers_every_path_of_a_shared_variable(setting):
    trainable, trained = TIED["pattern"]
    plain = train_nnx(Tied, loss, batches(), SGD, setting, frozen_but(trained))
    ours = train_jaxspeed(Tied, loss, batches(), SGD, setting, trainable=trainable, check=True)
    assert_alike(ours, plain)


def engine(**more):
    return tiny.jaxspeed.initialize(Tied, loss, tiny.config(**more.pop("config", {})), **more)


def trained_of(engine):
    return {row.path for row in engine.placements if row.leaf.trainable}


@pytest.mark.parametrize("case", TIED)
def test_one_path_of_a_shared_variable_is_enough(case):
    trainable, trained = TIED[case]
    assert trained_of(engine(trainable=trainable)) == trained


def test_groups_of_the_optimizer_cover_every_path_too():
    def optimizer(**group):
        params = {"lr": 0.1, "momentum": 0.9}
        return {"optimizer": {"type": "SGD", "params": params, "groups": [group]}}

    assert trained_of(engine(config=optimizer(pattern="head", frozen=True))) == {BIAS}
    slow = engine(config=optimizer(pattern="head/kernel", lr_factor=0.0))
    before = {path: np.asarray(x) for path, x in slow.parameters.items()}
    slow.train_batch(batches(samples=8)[0])
    moved = {p for p, x in slow.parameters.items() if (np.asarray(x) != before[p]).any()}
    assert moved == {BIAS, HEAD_BIAS}


def test_the_table_shows_the_other_paths():
    shown = as_text(engine(trainable="body/bias").placements, 160)
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert lines[KERNEL].rstrip().endswith("frozen, also head/kernel, other/0/kernel")
    assert lines[BIAS].rstrip().endswith("also other/0/bias")
    assert "also" not in lines[HEAD_BIAS]


def test_modules_that_refer_to_those_that_hold_them_have_their_paths_once():
    class Layer(nnx.Module):
        def __init__(self, model, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.model = model

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Layer(self, rngs) for _ in range(3)])
            self.last = self.layers[2]

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer.linear(x))
            return x.sum(-1)

    made = tiny.jaxspeed.initialize(Model, loss, tiny.config(), trainable="layers/2")
    assert {row.leaf.paths for row in made.placements if row.leaf.trainable} == {
        (f"last/linear/{name}", f"layers/2/linear/{name}") for name in ("bias", "kernel")
    }
