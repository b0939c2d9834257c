"""Errors of the user's own code keep the lines that matter, and lose the boilerplate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspeed import ModelError
from jaxspeed.metrics import program_model_flops
from jaxspeed.user_models.user_code import CHARACTERS, foreign, reason_of
from tests.engine import tiny


def test_the_types_of_a_loop_that_does_not_keep_them_are_shown():
    class Recurrent(nnx.Module):
        def __init__(self, rngs):
            self.cell = nnx.Linear(tiny.FEATURES, tiny.FEATURES, rngs=rngs)

        def __call__(self, x):
            def step(carry, _):
                return (carry[0] + self.cell(x).astype(jnp.bfloat16), carry[1] + 1.0), None

            return jax.lax.scan(step, (x, jnp.int32(0)), None, length=2)[0][0]

    engine = tiny.engine(Recurrent)
    with pytest.raises(ModelError) as told:
        engine.train_batch(tiny.batch())
    text = str(told.value)
    assert "carry[1]" in text and "int32[]" in text and "float32[]" in text
    assert "test_user_errors.py, line" in text and "its micro-batch: ['x'] float32[8, 8]" in text
    assert "docs.jax.dev" not in text and "-----" not in text


def test_numpy_in_a_loss_is_told_of_jnp_by_whatever_traces_it():
    def loss_fn(model, batch):
        return np.square(model(batch["x"])).mean()

    engine = tiny.engine(loss_fn=loss_fn)
    for trace in (
        lambda: engine.train_batch(tiny.batch()),
        lambda: program_model_flops(engine.program, tiny.batch()),
    ):
        with pytest.raises(ModelError, match=r"call jax\.numpy \(jnp\)") as told:
            trace()
        assert "test_user_errors.py, line" in str(told.value)
        assert "error occurred while tracing" not in str(told.value)


def test_a_multi_line_message_keeps_its_lines():
    message = "first line\n\nsecond line\n-------------------\nSee https://x.y\n"
    wanted = r"first line\nsecond line; its micro-batch: \['x'\] 3"
    with pytest.raises(ModelError, match=wanted), foreign("loss_fn(model, batch)", {"x": 3}):
        raise ValueError(message)


@pytest.mark.parametrize("text", ["a" * 5000, "a line\n" * 300])
def test_a_long_message_is_cut(text):
    found = reason_of(ValueError(text))
    assert len(found) <= CHARACTERS + 4 and found.endswith(" ...")


def test_an_empty_message_is_said():
    assert reason_of(ValueError("")) == "(no message)"
