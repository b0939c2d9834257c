"""engine.check: values that are rounding noise, models in their own 16 bits, and updates."""

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxspeed.train.gradients import Gradients
from tests.engine import tiny

WIDTH = 16


class Normalized(nnx.Module):
    """Biases before batch normalizations: their gradients are zero but for rounding."""

    def __init__(self, rngs, dtype=None):
        self.layers = nnx.List(
            [nnx.Linear(n, WIDTH, dtype=dtype, rngs=rngs) for n in (tiny.FEATURES, WIDTH)]
        )
        self.norms = nnx.List([nnx.BatchNorm(WIDTH, dtype=dtype, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 1, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = jnp.tanh(norm(layer(x)))
        return self.head(x)


class Shifted(nnx.Module):
    """Single numbers before batch normalizations: one draw of rounding noise can be about 0."""

    def __init__(self, rngs):
        self.shifts = nnx.List([nnx.Param(jnp.zeros(())) for _ in range(6)])
        self.layer = nnx.Linear(tiny.FEATURES, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.layer(x)
        return sum(self.norm(x + shift[...]) for shift in self.shifts) / len(self.shifts)


def small(model, batch):
    """Close activations: their small variance magnifies rounding."""
    return jnp.mean((model(10 + 1e-1 * batch["x"])[:, 0] - batch["y"]) ** 2)


def plain(model, batch):
    return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


def checked(model, loss, **more):
    engine = tiny.engine(model, loss, train_micro_batch_size_per_gpu=8, **more)
    return engine.check(tiny.batch(64))


ADAM = {"type": "Adam", "params": {"lr": 1e-2}}


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.full)])
def test_noise_is_no_difference(stage):
    report = checked(Normalized, small, stage=stage, optimizer=ADAM)
    assert report.ok, str(report)
    assert "DIFFERS" not in str(report)


@pytest.mark.sampled
def test_noise_is_measured_by_more_than_one_draw():
    report = checked(Shifted, small, stage=3)
    assert report.ok, str(report)


def test_updates_that_noise_makes_are_explained():
    report = checked(Normalized, plain, stage=3, optimizer=ADAM)
    assert report.ok and report.lower == "", str(report)
    noisy = [leaf for leaf in report.leaves if leaf.update > 0.1]
    assert noisy and all("bias" in leaf.path for leaf in noisy)
    text = " ".join(str(report).split())
    assert "differ although the gradients agree" in text and noisy[0].path in text


def test_a_wrong_gradient_of_a_model_with_noise_is_found(monkeypatch):
    right = Gradients.__call__

    def wrong(self, *args):
        sums, variables = right(self, *args)
        if self.table.mesh.size > 1:
            name = "head/kernel"
            sums = sums._replace(grads={**sums.grads, name: 1.01 * sums.grads[name]})
        return sums, variables

    monkeypatch.setattr(Gradients, "__call__", wrong)
    report = checked(Normalized, plain, stage=0)
    assert not report.ok
    assert [leaf.path for leaf in report.leaves if leaf.gradient > 5e-3] == ["head/kernel"]


@pytest.mark.sampled
def test_a_model_in_its_own_16_bits_is_measured_by_them():
    report = checked(lambda rngs: Normalized(rngs, jnp.bfloat16), plain, stage=3)
    assert report.ok, str(report)
    assert report.tolerance == 5e-2
    assert "the model computes in bfloat16" in " ".join(str(report).split())
