"""T5: distances in buckets, padded inputs, its shifted targets, generation with a cache."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxspeed.models.t5 import buckets

import jaxspeed
from jaxspeed import models
from tests.models.test_forward import close, make

RNG = np.random.default_rng(0)
INPUTS, TARGETS = RNG.integers(2, 256, (2, 13)), RNG.integers(2, 256, (2, 7))


@pytest.mark.parametrize(("count", "farthest"), [(16, 128), (32, 128), (16, 200)])
def test_buckets_have_one_distance_each_then_grow_geometrically(count, farthest):
    found, alone = buckets(count, farthest), count // 2
    assert found[:alone].tolist() == [*range(alone)]
    for distance in range(alone, farthest + 1):
        exact = alone * math.log(distance / alone, farthest / alone) + alone
        wanted = {min(math.floor(exact + each), count - 1) for each in (-1e-5, 1e-5)}
        assert found[distance] in wanted
    assert len({*found.tolist()}) == count


def test_a_bias_is_that_of_the_distance_before_or_after():
    _, model = make("t5")
    table = np.asarray(model.encoder_bias.table[...])
    found = np.asarray(model.encoder_bias(jnp.arange(40), jnp.arange(40)))
    assert found.shape == (4, 40, 40)
    np.testing.assert_array_equal(found[:, 9, 9], table[0])
    np.testing.assert_array_equal(found[:, 9, 4], table[5])  # five before
    np.testing.assert_array_equal(found[:, 4, 9], table[16 + 5])  # five after
    causal = np.asarray(model.decoder_bias(jnp.arange(40), jnp.arange(40)))
    np.testing.assert_array_equal(causal[:, 30, 15], np.asarray(model.decoder_bias.table)[15])


def test_padding_changes_nothing_and_targets_are_read_shifted():
    built, model = make("t5", "tiny-v1.1")
    call = jax.jit(lambda model, tokens, **context: model(tokens, **context))
    mask = np.arange(13) < [[9], [13]]
    read = np.concatenate([np.zeros((2, 1), int), TARGETS[:, :-1]], axis=1)
    logits = call(model, read, inputs=np.where(mask, INPUTS, 3), mask=mask)
    alone = call(model, read[:1], inputs=INPUTS[:1, :9])
    close(logits[0], np.asarray(alone, np.float64)[0], 1e-6)
    targets = np.where(np.arange(7) < [[4], [7]], TARGETS, -100)
    batch = {"inputs": INPUTS, "mask": mask, "targets": targets}
    total, weight = jax.jit(built.loss)(model, batch)
    assert weight == 11
    likelihood = np.asarray(jax.nn.log_softmax(logits), np.float64)
    wanted = -np.take_along_axis(likelihood, TARGETS[..., None], -1)[..., 0][targets >= 0].sum()
    assert float(total) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.sampled
def test_a_cache_gives_the_tokens_of_a_model_without_one():
    """Inputs of unequal lengths; the most likely tokens, from the model as it is."""
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "SGD"},
        "mesh": {"tensor": 2},
        "model": {"family": "t5", "preset": "tiny-v1.1"},  # a tied head repeats one token
    }
    engine = jaxspeed.initialize(config=config)
    prompts = [INPUTS[0].tolist(), INPUTS[1, :5].tolist()]
    found = engine.generate(prompts, 12, temperature=0)
    model = models.build("t5", "tiny-v1.1").factory(nnx.Rngs(0))
    values = {path: np.asarray(x) for path, x in engine.parameters.items()}
    for keys, v in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        v.set_value(jnp.asarray(values["/".join(map(str, keys))]))
    call = jax.jit(lambda model, tokens, inputs: model(tokens, inputs=inputs))
    for prompt, generated in zip(prompts, found):
        tokens = np.zeros((1, 13), int)
        for at in range(12):
            logits = call(model, tokens, np.asarray([prompt]))
            tokens[0, at + 1] = int(jnp.argmax(logits[0, at]))
        assert list(generated.tokens) == tokens[0, 1:].tolist()
    assert len({token for each in found for token in each.tokens}) > 3
