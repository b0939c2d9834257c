"""Optimizer state that has not its parameter's shape: placed by its own, shown with its bytes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jaxspeed
from jaxspeed.placement.show import as_text
from jaxspeed.train_state import opt_layout
from tests.support.covering import covering
from tests.train.flax_loop import (
    WIDTH,
    Setting,
    assert_alike,
    batches,
    loss,
    train_jaxspeed,
    train_nnx,
)

WIDE = 4 * WIDTH


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDE, rngs=rngs)
        self.head = nnx.Linear(WIDE, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.up(x)))[:, 0]


class Preconditioners(NamedTuple):
    left: dict  # [rows, rows] of each matrix
    right: dict  # [columns, columns]


def preconditioned(rate=0.02):
    """Shampoo's form: each matrix between sums of its gradients' Gram matrices."""

    def start(size):
        return jnp.eye(size)

    def init(params):
        matrices = jax.tree.map(lambda p: p if p.ndim == 2 else jnp.zeros((1, 1)), params)
        return Preconditioners(
            jax.tree.map(lambda p: start(p.shape[0]), matrices),
            jax.tree.map(lambda p: start(p.shape[1]), matrices),
        )

    def update(grads, state, params=None):
        def gram(old, grad, transposed):
            if grad.ndim != 2:
                return old
            grad = grad.T if transposed else grad
            return 0.9 * old + 0.1 * grad @ grad.T

        left = jax.tree.map(lambda s, g: gram(s, g, False), state.left, grads)
        right = jax.tree.map(lambda s, g: gram(s, g, True), state.right, grads)

        def step(grad, a, b):
            if grad.ndim != 2:
                return -rate * grad
            return (
                -rate
                * jnp.linalg.solve(a + jnp.eye(len(a)), grad)
                @ jnp.linalg.inv(b + jnp.eye(len(b)))
            )

        return jax.tree.map(step, grads, left, right), Preconditioners(left, right)

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "preconditioners": preconditioned(),
    "factored": optax.adafactor(0.02, min_dim_size_to_factor=4),
}
POINTS = [
    (name, Setting(*setting))
    for name in OPTIMIZERS
    for setting in ((0, 1, 1), (1, 4, 1), (2, 1, 1), (3, 4, 1), (3, 1, 2))
]


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(opt_layout, "LARGE", 64)


@pytest.mark.default_cases("factored-setting9")
@pytest.mark.parametrize(
    ("name", "setting"),
    covering(POINTS, [("preconditioners", Setting(3, 4, 1)), ("factored", Setting(3, 1, 2))]),
)
def test_it_trains_as_plain_optax(name, setting):
    optimizer = OPTIMIZERS[name]
    plain = train_nnx(Net, loss, batches(), optimizer, setting)
    assert_alike(train_jaxspeed(Net, loss, batches(), optimizer, setting), plain)


def engine(stage, optimizer, tensor=1):
    setting = Setting(stage, 1, tensor)
    return jaxspeed.initialize(
        Net, loss, setting.config(64), optimizer, example_batch=batches(1)[0]
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_large_state_is_sharded_from_stage_1_on_and_shown(stage):
    made = engine(stage, OPTIMIZERS["preconditioners"])
    (right,) = [
        x
        for path, x in jax.tree_util.tree_leaves_with_path(made.state.opt)
        if x.shape == (WIDE, WIDE) and "right" in jax.tree_util.keystr(path)
    ]
    share = 1 if stage == 0 else 8
    assert right.addressable_shards[0].data.nbytes == right.nbytes // share
    text = as_text(made.placements, 160)
    line = next(x for x in text.splitlines() if "right/up/kernel" in x)
    assert "32x32" in line and ("data@" in line) is (stage == 1)
    assert line.rstrip().endswith("4.1 kB" if stage == 0 else "512 B")


def others(engine):
    return engine.placements._opt_leaves_of_other_shapes()


def test_dims_of_the_parameter_have_its_axes():
    made = engine(0, OPTIMIZERS["factored"], tensor=2)
    assert made.placements["up/kernel"].opt.spec == PartitionSpec(None, "tensor")
    found = {shape: at.spec for path, shape, at, _ in others(made) if path.endswith("up/kernel")}
    assert found[(WIDE,)] == PartitionSpec("tensor")
    assert found[(WIDTH,)] == PartitionSpec()


def test_small_state_is_replicated(monkeypatch):
    monkeypatch.setattr(opt_layout, "LARGE", 1 << 20)
    found = others(engine(3, OPTIMIZERS["preconditioners"]))
    assert found and all(not any(at.spec) for _, _, at, _ in found)
