"""Several adapters of one engine: each has its own moments, and a checkpoint has them all."""

import jax
import numpy as np
import pytest

from jaxspeed.errors import ConfigError
from tests.adapters.lora_loop import adapted_cases, split_of, train_plainly

PAIR = adapted_cases()["pair"]
BATCHES = PAIR.batches(6)
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 9}}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}, "ema_decay": 0.5}


def engine():
    return PAIR.engine(2, devices=jax.devices()[:2], optimizer=OPTIMIZER)


def train(made, *numbers):
    for number in numbers:
        made.train_batch(BATCHES[number])
    return split_of(made.parameters)[1]


def copied(tree):
    return jax.tree.map(np.array, jax.device_get(tree))


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, copied(found), copied(expected))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The folder of an adapter, and its values."""
    folder = tmp_path_factory.mktemp("b")
    made = PAIR.engine(devices=jax.devices()[:1], run={"seed": 8})
    made.save_adapter(folder)
    return folder, split_of(made.parameters)[1]


def test_each_adapter_is_trained_as_if_it_were_alone(other):
    """By Optax's AdamW, whose moments and counts are those of one adapter."""
    folder, second = other
    made = engine()
    base, first = split_of(made.parameters)
    train(made, 0, 1)
    average = copied(made.state.ema)
    made.load_adapter(folder, "b")
    made.use_adapter("b")
    assert_equal(split_of(made.ema_parameters)[1], second)
    found_b = train(made, 2, 3)
    made.use_adapter("default")
    assert_equal(made.state.ema, average)
    found = train(made, 4, 5)
    assert int(made.state.step) == 6
    for own, start, numbers in ((found_b, second, (2, 3)), (found, first, (0, 1, 4, 5))):
        batches = [BATCHES[number] for number in numbers]
        _, expected = train_plainly(PAIR, {**base, **start}, batches, 1.5)
        for path, value in own.items():
            np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=1e-5, err_msg=path)


def count_of_schedule(made):
    return int(made.program.layout.flat(made.state.opt)["2/count"])


@pytest.mark.sampled
@pytest.mark.parametrize("moments", ["fp32", pytest.param("8bit", marks=pytest.mark.full)])
def test_a_checkpoint_has_them_all(other, tmp_path, moments):
    """On another stage too; the schedule counts the run's steps."""
    eight = {"type": "AdamW8bit", "params": {"lr": 1e-2, "min_8bit_size": 1}}
    given = {"scheduler": WARMUP, "bf16": {"enabled": True}}
    given["optimizer"] = eight if moments == "8bit" else OPTIMIZER

    def start(stage):
        return PAIR.engine(stage, devices=jax.devices()[:2], **given)

    made = start(2)
    for name in ("b", "c"):
        made.load_adapter(other[0], name)
    train(made, 0)
    made.use_adapter("b")
    train(made, 1)
    assert count_of_schedule(made) == 2
    made.save_checkpoint(tmp_path)
    made.wait()
    again = start(1)
    again.load_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="there are b, c, default"):
        again.use_adapter("d")
    for name in ("default", "c", "b"):
        for each in (made, again):
            each.use_adapter(name)
        of_both = [each.program.layout.logical(each.state.opt) for each in (made, again)]
        assert_equal(*of_both)
        assert_equal(*(split_of(each.parameters)[1] for each in (made, again)))
    train(again, 2)
    assert count_of_schedule(again) == 3
    fresh = start(2)
    fresh.load_checkpoint(tmp_path, weights_only=True)
    with pytest.raises(ConfigError, match="there are default"):
        fresh.use_adapter("c")


def test_a_name_is_given_once(other):
    made = engine()
    with pytest.raises(ConfigError, match="load_adapter: 'default' is in use"):
        made.load_adapter(other[0], "default")
    with pytest.raises(ConfigError, match="load_adapter: 'a/b' is no name"):
        made.load_adapter(other[0], "a/b")
