"""Blocks of stages found in the traced loss: by a scan on any dim, and not by numbered names."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed.config import Config
from jaxspeed.errors import ModelError, PlacementError
from jaxspeed.placement.stacks import UnlikeStages
from jaxspeed.train import build_program
from jaxspeed.train.tensor_names import traced_example
from tests.train import flax_loop

WIDTH = 16
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 6)).astype(np.float32),
    "y": RNG.normal(size=(16, 1)).astype(np.float32),
}
CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
}


def loss(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(2 * WIDTH)(x))), None


class Scanned(nn.Module):
    """Unnamed blocks that `nn.scan` stacks along dim `axis`."""

    axis: int

    @nn.compact
    def __call__(self, x):
        stacked = {"variable_axes": {"params": self.axis}, "split_rngs": {"params": True}}
        x, _ = nn.scan(Block, **stacked, length=4)(name="layers")(nn.Dense(WIDTH)(x), None)
        return nn.Dense(1)(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def nnx_scanned(axis):
    """A factory of unnamed blocks that `nnx.vmap` creates and `nnx.scan` runs along dim `axis`."""

    class NnxScanned(nnx.Module):
        def __init__(self, rngs):
            self.enter = nnx.Linear(6, WIDTH, rngs=rngs)
            stacked = nnx.StateAxes({nnx.Param: axis, ...: 0})
            make = nnx.vmap(NnxBlock, in_axes=0, out_axes=stacked)
            self.layers = make(rngs.fork(split=4))
            self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, x):
            stacked = nnx.StateAxes({nnx.Param: axis, ...: 0})
            run = nnx.scan(
                lambda x, block: block(x), in_axes=(nnx.Carry, stacked), out_axes=nnx.Carry
            )
            return self.head(run(self.enter(x), self.layers))

    return NnxScanned


def losses_of(model, **config):
    engine = jaxspeed.initialize(
        config={**CONFIG, **config}, model=model, loss_fn=loss, example_batch=BATCH
    )
    return [float(engine.train_batch(BATCH)["loss"]) for _ in range(3)]


@functools.cache
def unsharded_losses():
    return losses_of(Scanned(0))


def stack_of(model, **config):
    settings = Config(**{**CONFIG, "mesh": {"pipe": 2}, **config})
    return build_program(settings, model, loss, example_batch=BATCH).table.stack


EQUAL_BLOCKS = {"parallel": {"pipeline_recompute": "layers"}}  # unlike blocks exclude it
STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
SETTINGS = {
    "first dim": (0, {"mesh": {"pipe": 2}}),
    "second dim, stage 3": (1, {"mesh": {"pipe": 2}, "zero_optimization": STAGE_3}),
    "second dim, stage 1, tensor": (
        1,
        {"mesh": {"pipe": 2, "tensor": 2}, "zero_optimization": {"stage": 1}},
    ),
    "second dim, chunks": (
        1,
        {
            "mesh": {"pipe": 2},
            "parallel": {"pipeline_schedule": "interleaved", "pipeline_chunks": 2},
        },
    ),
    "second dim, remat": (1, {"parallel": {"remat": "full"}}),
    "second dim, stage 3, no stages": (1, {"zero_optimization": STAGE_3}),
}
DEFAULT = ("second dim, stage 3", "second dim, remat")


@pytest.mark.default_cases("second dim, remat")
@pytest.mark.parametrize(
    "name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.full) for n in SETTINGS]
)
def test_blocks_that_are_scanned_need_no_names(name):
    axis, config = SETTINGS[name]
    # The two models have equal values: Flax draws them per layer and stacks them.
    np.testing.assert_allclose(losses_of(Scanned(axis), **config), unsharded_losses(), rtol=1e-5)


@pytest.mark.default_cases("second dim, remat")
@pytest.mark.parametrize(
    "name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.full) for n in SETTINGS]
)
def test_blocks_under_nnx_scan_need_no_names(name):
    axis, config = SETTINGS[name]
    found = losses_of(nnx_scanned(axis), gradient_clipping=0, **config)
    np.testing.assert_allclose(found, plain_losses(axis), rtol=1e-5)


@functools.cache
def plain_losses(axis):
    factory = nnx_scanned(axis)
    graph, params, rest = nnx.split(factory(nnx.Rngs(0)), nnx.Param, ...)
    tx = optax.sgd(0.05, momentum=0.9)
    state, losses = jax.jit(tx.init)(params), []

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(lambda p: loss(nnx.merge(graph, p, rest), BATCH))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    for _ in range(3):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_stack_under_nnx_scan_is_found_on_any_dim(axis):
    stack = stack_of(nnx_scanned(axis))
    assert stack.layers == 4 and all(path.startswith("layers/") for path in stack.paths)
    assert len(stack.paths) == 4
    dims = {"layers/up/kernel": axis % 3, "layers/up/bias": axis % 2}
    assert {path: stack.layers_dim(path) for path in dims} == dims


@pytest.mark.parametrize("axis", [0, 1])
def test_the_layer_under_nnx_scan_is_a_unit_and_writes_no_parameter(axis):
    config = Config(**CONFIG, zero_optimization=STAGE_3)
    program = build_program(config, nnx_scanned(axis), loss, example_batch=BATCH)
    traced = traced_example(program.model, loss, BATCH, program.mesh)
    assert traced.units.kinds == (("NnxBlock", 4),)
    assert not traced.written


def test_the_stack_is_that_of_the_scan():
    stack = stack_of(Scanned(1))
    assert stack.layers == 4 and all(path.startswith("layers/") for path in stack.paths)
    assert stack.layers_dim("layers/Dense_0/kernel") == 1
    assert not stack.in_place and stack_of(Scanned(0)).in_place


def test_without_an_example_the_error_says_how_the_scan_is_found():
    def factory(rngs):
        class Stack(nnx.Module):
            def __init__(self, rngs):
                self.kernel = nnx.Param(jnp.ones((4, WIDTH, WIDTH)))

            def __call__(self, x):
                return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, self.kernel[...])[0]

        return Stack(rngs)

    config = Config(**CONFIG, mesh={"pipe": 2})
    with pytest.raises(PlacementError, match="example_batch"):
        build_program(config, factory, loss)
    example = {"x": np.zeros((16, WIDTH), np.float32), "y": np.zeros((16, WIDTH), np.float32)}
    assert build_program(config, factory, loss, example_batch=example).table.stack.layers == 4


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Numbered(nnx.Module):
    """Two large projections by number, which are no blocks, and a list of smaller blocks."""

    def __init__(self, rngs):
        self.mix1 = nnx.Linear(64, 64, rngs=rngs)
        self.mix2 = nnx.Linear(64, 64, rngs=rngs)
        self.enter = nnx.Linear(6, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(3)])
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        wide = jnp.pad(x, ((0, 0), (0, 58)))
        a, b = self.mix1(wide), self.mix2(wide)  # beside each other
        x = self.enter((a * b)[:, :6])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_numbered_submodules_that_do_not_follow_each_other_are_no_blocks():
    assert next(iter(stack_of(Numbered, **EQUAL_BLOCKS).leaves)).startswith("layers/*")


class Unlike(nnx.Module):
    """Two pairs of equal parameters, neither of which is a stack of blocks."""

    def __init__(self, rngs):
        self.conv1, self.conv2 = (nnx.Linear(6, 6, rngs=rngs) for _ in range(2))
        self.norm1, self.norm2 = (nnx.LayerNorm(6, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        a, b = self.conv1(self.norm1(x)), self.conv2(self.norm2(x))
        return (a * b).sum(-1, keepdims=True)


def test_where_no_stack_can_be_split_the_reason_names_each():
    with pytest.raises(ModelError) as error:
        stack_of(Unlike, **EQUAL_BLOCKS)
    assert "conv*" in str(error.value) and "norm*" in str(error.value)
    assert "reads no output of block 0" in str(error.value)
    assert isinstance(stack_of(Unlike), UnlikeStages)


class OpenEnded(nnx.Module):
    """The last of the equal layers is not followed by the activation."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(5)])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x)[:, 0]


@pytest.mark.sampled
def test_equal_layers_at_which_the_loss_does_not_split_are_unlike_stages():
    def as_sum(model, batch):
        error = (model(batch["x"]) - batch["y"]) ** 2
        return error.sum(), error.size

    setting = flax_loop.Setting(0, 4, 4)  # as on two data ranks
    batches, optimizer = flax_loop.batches(), flax_loop.SGD
    plain = flax_loop.train_nnx(OpenEnded, flax_loop.loss, batches, optimizer, setting)
    mesh = {"pipe": 4, "data": 2}
    ours = flax_loop.train_jaxspeed(OpenEnded, as_sum, batches, optimizer, setting, mesh=mesh)
    flax_loop.assert_alike(ours, plain)
