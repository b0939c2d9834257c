"""Whether a step fits the devices at hand is said before anything is allocated on them."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspeed
from jaxspeed.engine import memory_precheck
from jaxspeed.train.program import Program

CONFIG = {
    "model": {
        "family": "gpt2",
        "config": {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
        },
    },
    "data": {"seq_len": 64},
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
WORDS = "not expected to fit"


@pytest.fixture
def limited(monkeypatch):
    """Devices that say how many bytes they have."""

    def limited(size):
        monkeypatch.setattr(memory_precheck, "device_limit", lambda program: size)

    return limited


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_step_that_is_too_large_is_warned_of_with_what_would_help(limited, caplog):
    limited(100_000)
    jaxspeed.initialize(config=CONFIG)
    (said,) = [each for each in warnings(caplog) if WORDS in each]
    assert "and cpu has 100 kB" in said and "saved activations" in said
    assert "what would free most" in said and "zero_optimization.stage" in said


def test_it_is_said_before_anything_is_allocated(limited, caplog, monkeypatch):
    limited(100_000)

    made = Program.init.fget

    def init(self):
        def full(seed):
            if not isinstance(seed, jax.core.Tracer):  # shapes cost nothing
                raise RuntimeError("the device is full")
            return made(self)(seed)

        return full

    monkeypatch.setattr(Program, "init", property(init))
    with pytest.raises(RuntimeError, match="full"):
        jaxspeed.initialize(config=CONFIG)
    assert any(WORDS in each for each in warnings(caplog))


def test_with_room_nothing_is_said(limited, caplog):
    limited(10**9)
    jaxspeed.initialize(config=CONFIG)
    assert not warnings(caplog)


def test_the_size_that_is_warned_of_is_that_of_the_plan(limited, caplog):
    limited(100_000)
    engine = jaxspeed.initialize(config=CONFIG)
    shapes = {"tokens": jax.ShapeDtypeStruct((16, 65), jnp.int32)}
    needed = memory_precheck.memory_of(engine.program, shapes)
    (said,) = [each for each in warnings(caplog) if WORDS in each]
    assert f"it needs {memory_precheck.bytes_text(needed.device)} per device" in said


def pair():
    def init(key):
        return {"w": jax.random.normal(key, (64, 64))}

    def apply(params, x):
        return jnp.tanh(x @ params["w"])

    return init, apply


def loss_fn(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def of_own(**more):
    config = {"train_batch_size": 4096, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return jaxspeed.initialize(pair(), loss_fn, config, **more)


def test_a_model_of_ones_own_is_estimated_for_its_example_batch(limited, caplog):
    limited(100_000)
    of_own()
    assert not warnings(caplog)  # nobody knows what a batch looks like
    of_own(example_batch={"x": np.zeros((2, 64), np.float32)})  # a step has 4096 such samples
    (said,) = warnings(caplog)
    assert WORDS in said


def test_an_array_alone_may_be_the_example(limited, caplog):
    limited(100_000)
    config = {"train_batch_size": 4096, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    loss = lambda model, batch: jnp.mean(model(batch) ** 2)  # noqa: E731
    jaxspeed.initialize(pair(), loss, config, example_batch=np.zeros((2, 64), np.float32))
    assert any(WORDS in each for each in warnings(caplog))


def test_where_nothing_is_known_of_the_devices_nothing_is_estimated(monkeypatch):
    """Simulated devices do not say what they have: a run of theirs pays nothing."""

    def refused(*_):
        raise AssertionError("estimated")

    monkeypatch.setattr(memory_precheck, "memory_of", refused)
    monkeypatch.setattr(memory_precheck, "shapes_by_config", refused)
    jaxspeed.initialize(config=CONFIG)


def test_a_device_that_does_not_tell_is_known_by_its_kind(limited):
    limited(None)
    kinds = ("TPU v5 lite", "NVIDIA H100 80GB HBM3", "cpu", "abacus")
    programs = [SimpleNamespace(devices=[SimpleNamespace(device_kind=kind)]) for kind in kinds]
    assert [memory_precheck.room_of(p) for p in programs] == [16911433728, 84942979072, None, None]


def test_an_estimate_that_fails_stops_nothing(limited, caplog, monkeypatch):
    limited(100_000)

    def failing(*_):
        raise KeyError("an operation that nobody knows")

    monkeypatch.setattr(memory_precheck, "memory_of", failing)
    batch = {"x": np.ones((4096, 64), np.float32)}
    engine = of_own(example_batch=batch)
    assert any("could not be estimated" in each for each in warnings(caplog))
    assert engine.train_batch(batch)["loss"] > 0
