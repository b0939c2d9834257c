"""Adapters with settings that other tests do not combine them with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from tests.adapters.lora_loop import adapted_cases, split_of, train_plainly
from tests.adapters.test_adapted_kinds import CASE as KINDS
from tests.adapters.test_adapted_kinds import CONV, DOWN, TABLE, UP, cross_entropy, plain_loss

CASES = adapted_cases()


def losses_of(engine, batches):
    return np.array([float(engine.train_batch(batch)["loss"]) for batch in batches])


@pytest.mark.sampled
def test_dora_of_some_layers_merged_equals_it_applied():
    lora = {"use_dora": True, "layers_to_transform": [1], "target_modules": [UP, DOWN]}
    engine = KINDS.engine(3, devices=jax.devices()[:2], lora=lora)
    (batch,) = KINDS.batches(1)
    engine.train_batch(batch)
    applied = float(engine.eval_batch(batch)["loss"])
    assert engine.diagnose(batch).finite
    values = {path: np.array(x) for path, x in engine.parameters.items()}
    assert applied == pytest.approx(float(cross_entropy(engine.module, batch)), rel=1e-5)
    for path in (UP, DOWN):  # the magnitude of a layer that is not adapted is its weight's norm
        assert not values[f"lora/{path}/B"][0].any()
        values[f"lora/{path}/magnitude"][0] = np.linalg.norm(values[path][0], axis=0)
    for path in (TABLE, CONV):  # outside of layers
        *_, outputs = values[path].shape
        values[f"lora/{path}/A"] = np.zeros((*values[path].shape[:-1], 1), np.float32)
        values[f"lora/{path}/B"] = np.zeros((1, outputs), np.float32)
    assert applied == pytest.approx(float(plain_loss(values, batch, None)), rel=1e-5)


class ZeroAtFirst(nnx.Module):
    """A branch that begins without an effect, in two stacked layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.Dict(kernel=nnx.Param(jnp.zeros((2, 8, 8)), logical_axes=("layers",)))
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        def block(x, kernel):
            return x + jnp.tanh(x) @ kernel, None

        return self.head(jax.lax.scan(block, x, self.blocks.kernel[...])[0])


@pytest.mark.default_cases("layers1")
@pytest.mark.parametrize("layers", [None, [1]])
def test_dora_of_weights_that_are_zero_is_finite_and_trains(layers):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 8)), "y": rng.normal(size=(8, 3))}
    batch = {name: x.astype(np.float32) for name, x in batch.items()}
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "lora": {"r": 2, "use_dora": True, "layers_to_transform": layers},
    }
    engine = jaxspeed.initialize(
        ZeroAtFirst,
        lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
        config,
        example_batch=batch,
        devices=jax.devices()[:1],
    )
    losses = losses_of(engine, [batch] * 4)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


@pytest.mark.sampled
def test_int8_base_on_stages_with_biases_and_8_bit_moments_trains_as_on_one():
    case = CASES["gpt2"]
    more = {
        "model": {"quantize": {"weights": "int8"}},
        "optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "lora": {"bias": "all"},
    }
    few = jax.devices()
    stages = case.engine(1, pipe=2, devices=few[:2], **more)
    one = case.engine(devices=few[:1], **more)
    base, adapters = split_of(stages.parameters)
    batches = case.batches(3)
    expected, own = train_plainly(
        case,
        {**base, **adapters},
        batches,
        1.5,
        lambda path: path.startswith("lora/") or path.endswith("/bias"),
    )
    assert any(path.endswith("/bias") and "norm" not in path for path in own)
    for engine in (stages, one):
        found = losses_of(engine, batches)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        for path, value in engine.parameters.items():
            if path.endswith("k_proj/bias"):  # the loss does not depend on it
                continue
            wanted = own.get(path, base.get(path))
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-5, err_msg=path)


def test_a_head_over_tensor_is_adapted_once():
    """Its loss passes each shard of the head through a barrier with a derivative of its own."""
    case = CASES["gpt2"]
    engine = case.engine(tensor=2, devices=jax.devices()[:2], lora={"target_modules": ["embed"]})
    base, adapters = split_of(engine.parameters)
    assert {*adapters} == {"lora/embed/table/A", "lora/embed/table/B"}
    batches = case.batches(2)
    expected, own = train_plainly(case, {**base, **adapters}, batches, 1.5)
    np.testing.assert_allclose(losses_of(engine, batches), expected, rtol=1e-5)
    for path, value in split_of(engine.parameters)[1].items():
        np.testing.assert_allclose(value, own[path], rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.sampled
@pytest.mark.parametrize("lora", [{}, pytest.param({"use_dora": True}, marks=pytest.mark.full)])
def test_a_parameter_server_trains_adapters_as_data_parallelism_does(lora):
    case = CASES["pair"]
    server = {"data_reduction": "parameter_server", "servers": 2}
    mesh = {"data": 2}
    few = jax.devices()
    served = case.engine(devices=few[:4], mesh=mesh, parallel=server, lora=lora)
    plain = case.engine(devices=few[:2], mesh=mesh, lora=lora)
    before = split_of(plain.parameters)
    batches = case.batches(3)
    np.testing.assert_allclose(
        losses_of(served, batches), losses_of(plain, batches), rtol=1e-5, atol=1e-6
    )
    for path, value in plain.parameters.items():
        np.testing.assert_allclose(
            served.parameters[path], value, rtol=1e-5, atol=1e-5, err_msg=path
        )
    for path, value in before[0].items():
        np.testing.assert_array_equal(plain.parameters[path], value)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.full)])
def test_int8_rings_reduce_gradients_of_adapters(stage):
    """Near the exact ones: each step's error is fed back to the next."""
    case = CASES["pair"]
    rings = {"data_reduction": "ring", "ring_wire": "int8"}
    engine = case.engine(stage, parallel=rings, devices=jax.devices()[:2])
    base, adapters = split_of(engine.parameters)
    batches = case.batches(5)
    expected, own = train_plainly(case, {**base, **adapters}, batches, 1.5)
    np.testing.assert_allclose(losses_of(engine, batches), expected, rtol=2e-2)
    after, trained = split_of(engine.parameters)
    for path, value in after.items():
        np.testing.assert_array_equal(value, base[path], err_msg=path)
    moved = sum(np.sum((own[path] - adapters[path]) ** 2) for path in own)
    apart = sum(np.sum((own[path] - trained[path]) ** 2) for path in own)
    assert 0 < apart < moved / 25
