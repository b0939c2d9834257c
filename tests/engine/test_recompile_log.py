"""A batch of a new shape compiles once, is logged with its shapes, and warns when it goes on."""

import logging

import jax
import numpy as np
import pytest

from jaxspeed import ModelError
from tests.engine import tiny


@pytest.fixture
def engine(caplog):
    caplog.set_level(logging.INFO, logger="jaxspeed")
    return tiny.engine(tiny.PAIR)


@pytest.fixture
def compilations():
    """How often the step was compiled, and traced, so far; call it."""
    seen = []

    def count(name, seconds, **about):
        if "step" in str(about.get("fun_name")):
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(count)
    yield lambda: tuple(
        sum(name == f"/jax/core/compile/{what}_duration" for name in seen)
        for what in ("backend_compile", "jaxpr_trace")
    )
    jax.monitoring.unregister_event_duration_listener(count)


def padded(length):
    """A batch whose second dim is a length of its own; the rest is cut off by the loss."""
    batch = tiny.batch()
    extra = np.zeros((8, length), np.float32)
    return {**batch, "extra": extra}


def lines(caplog, level):
    return [r.getMessage() for r in caplog.records if r.levelno == level and "batch" in r.msg]


def test_a_shape_is_compiled_once_and_a_new_one_once_more(engine, compilations):
    for _ in range(3):
        engine.train_batch(padded(1))
    assert compilations() == (1, 1)
    engine.train_batch(padded(2))
    assert compilations() == (2, 2)
    engine.train_batch(padded(1))
    engine.train_batch(padded(2))
    assert compilations() == (2, 2)


def test_a_new_shape_is_logged_with_all_shapes_and_an_old_one_is_not(engine, caplog):
    engine.train_batch(padded(3))
    engine.train_batch(padded(3))
    (said,) = lines(caplog, logging.INFO)
    assert said == (
        "train_batch: compiling for batch ['extra'] float32[8, 3], ['x'] float32[8, 8], "
        "['y'] float32[8]"
    )
    engine.eval_batch(padded(3))  # another program, so it compiles for itself
    assert lines(caplog, logging.INFO)[1:] == [said.replace("train_batch", "eval_batch")]


def test_shapes_that_keep_changing_are_warned_of(engine, caplog):
    for length in range(1, 4):
        engine.train_batch(padded(length))
    assert not lines(caplog, logging.WARNING)
    engine.train_batch(padded(4))
    (warning,) = lines(caplog, logging.WARNING)
    assert "the 4th batch shape" in warning
    assert "pad batches" in warning
    assert "float32[8, 4]" in warning


def test_a_batch_that_the_loss_refuses_has_no_new_shape(engine, caplog):
    wide = {**tiny.batch(), "x": np.zeros((8, 9), np.float32)}
    for call in (engine.train_batch, engine.eval_batch):
        with pytest.raises(ModelError):
            call(wide)
    assert not lines(caplog, logging.INFO)
    for length in range(1, 4):
        engine.train_batch(padded(length))
    assert len(lines(caplog, logging.INFO)) == 3 and not lines(caplog, logging.WARNING)


def test_a_dtype_that_jax_stores_alike_is_no_new_shape(engine, compilations, caplog):
    batch = tiny.batch()
    engine.train_batch(batch)
    engine.train_batch({"x": batch["x"].astype(np.float64), "y": batch["y"]})
    assert len(lines(caplog, logging.INFO)) == 1
    assert compilations() == (1, 1)
