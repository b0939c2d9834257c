"""`check` finds errors of model adapters that are put back: it does not share their code."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspeed.objective import traced_loss
from jaxspeed.objective.by_parts import ByParts
from jaxspeed.train.program import Program
from jaxspeed.user_models import linen_calls, nnx_model
from jaxspeed.user_models.batches import zeros_of
from jaxspeed.user_models.example_batch import ExampleBatch
from jaxspeed.user_models.linen_model import LinenModel
from tests.engine import tiny

WIDTH = tiny.FEATURES


def squared(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"][:, None]).mean()


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.gain = 1.0

    def eval(self, **attributes):
        super().eval(**attributes)
        self.gain = 3.0

    def __call__(self, x):
        return self.gain * self.up(self.drop(x))


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def in_batch(model, batch):
    scores = model(batch["x"]) @ batch["x"].T
    return -jnp.diag(jax.nn.log_softmax(scores)).sum(), len(scores)


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        if train:
            count = self.variable("counters", "calls", jnp.zeros, ())
            count.value += 1
            x = x * count.value
        return nn.Dense(1)(x)


class ByData(nn.Module):
    """Scaled by the first batch, as an ActNorm is."""

    @nn.compact
    def __call__(self, x):
        shift = self.variable("scales", "mean", lambda: x.mean(0))
        scale = self.param("scale", lambda key: 1 / (x.std(0) + 0.1))
        return nn.Dense(1)((x - shift.value) * scale)


class Inner(nn.Module):
    training: bool = True

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=not self.training)(x)


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(Inner()(x))


def with_numbers(model, batch):
    heights = batch["h"].astype(jnp.float32)
    return (model(batch["x"])[:, 0] * heights).mean()


def mixing_is_trusted(monkeypatch):
    monkeypatch.setattr(traced_loss, "by_parts", lambda *args: ByParts())


def listed_in_evaluation(monkeypatch):
    create = LinenModel._create

    def only_in_evaluation(model, *args):
        model._creates_in_training = False
        return create(model, *args)

    monkeypatch.setattr(LinenModel, "_create", only_in_evaluation)
    monkeypatch.setattr(LinenModel, "_refuse_new", lambda *args: None)


def initialized_by_zeros(monkeypatch):
    monkeypatch.setattr(ExampleBatch, "arrays", lambda batch: zeros_of(batch.shapes))


def nested_modes_stay(monkeypatch):
    monkeypatch.setattr(linen_calls, "_in_evaluation", contextlib.nullcontext)


def own_eval_is_not_called(monkeypatch):
    monkeypatch.setattr(nnx_model, "_has_own", lambda module, mode: False)


def numbers_are_a_key(monkeypatch):
    read = Program.read_batch

    def typed(x):
        if x.dtype != jnp.uint32 or x.shape != (2,):
            return x
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(x), 1))

    monkeypatch.setattr(Program, "read_batch", lambda *args: jax.tree.map(typed, read(*args)))


ERRORS = {
    "mixing": (mixing_is_trusted, Wide, in_batch, {"gradient_accumulation_steps": 4}, "DIFFERS"),
    "only in training": (
        listed_in_evaluation, Counting(), squared, {},
        "counters/calls is created by the training pass",
    ),
    "by data": (
        initialized_by_zeros, ByData(), squared, {}, "scales/mean at the start differs"
    ),
    "nested mode": (nested_modes_stay, Outer(), squared, {}, "the loss in evaluation differs"),
    "own eval": (own_eval_is_not_called, Net, squared, {}, "the loss in evaluation differs"),
    "numbers": (numbers_are_a_key, tiny.Linen(), with_numbers, {}, "DIFFERS"),
}  # fmt: skip


@pytest.mark.default_cases("nested mode")
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_an_adapter_is_found(name, monkeypatch):
    put_back, model, loss, more, says = ERRORS[name]
    devices = 2 if name == "numbers" else 4
    samples = devices * more.get("gradient_accumulation_steps", 1)
    batch = tiny.batch(samples)
    if name == "numbers":
        batch["h"] = np.arange(1, 3, dtype=np.uint32)

    def checked():
        made = tiny.engine(
            model, loss, devices=jax.devices()[:devices], example_batch=batch, **more
        )
        return made.check(batch)

    right = checked()
    assert right.ok, str(right)
    put_back(monkeypatch)
    wrong = checked()
    assert not wrong.ok
    assert says in str(wrong)
