"""A model that writes attention itself trains over `seq` as plain JAX does on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspeed
from jaxspeed.sequence_parallel import shard_sequence

SAMPLES, SEQ, DIM, HEADS, LAYERS, VOCAB = 4, 16, 16, 4, 2, 11


def init(key: jax.Array) -> Any:
    keys = iter(jax.random.split(key, 4))
    normal = jax.random.normal
    return {
        "embed": normal(next(keys), (VOCAB, DIM)),
        "qkv": normal(next(keys), (LAYERS, DIM, 3 * DIM)) / 4,
        "out": normal(next(keys), (LAYERS, DIM, DIM)) / 4,
        "slopes": jnp.linspace(0.1, 0.4, HEADS),
    }


def attention(x: jax.Array, qkv: jax.Array, mask: jax.Array, bias: Any) -> jax.Array:
    batch, seq, _ = x.shape
    q, k, v = jnp.split(x @ qkv, 3, -1)
    q, k, v = (y.reshape(batch, seq, HEADS, -1).transpose(0, 2, 1, 3) for y in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + bias
    shares = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return (shares @ v).transpose(0, 2, 1, 3).reshape(x.shape)


def with_bias(biased: bool) -> Any:
    def loss(params: Any, batch: Any) -> Any:
        tokens, ids = batch["tokens"], batch["segment_ids"]
        place = jnp.arange(tokens.shape[1])
        mask = (place[:, None] >= place) & (ids[:, None, :, None] == ids[:, None, None])
        distance = jnp.abs(place[:, None] - place)
        bias = -params["slopes"][:, None, None] * distance if biased else 0.0

        def layer(x: jax.Array, weights: Any) -> Any:
            qkv, out = weights
            return x + jnp.tanh(attention(x, qkv, mask, bias) @ out), None

        x, _ = jax.lax.scan(layer, params["embed"][tokens], (params["qkv"], params["out"]))
        logits = jax.nn.log_softmax(x @ params["embed"].T)
        return -jnp.take_along_axis(logits, batch["targets"][..., None], -1).mean()

    return loss


def batch() -> Any:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (SAMPLES, SEQ + 1)).astype(np.int32)
    ids = np.cumsum(rng.random((SAMPLES, SEQ)) < 0.2, 1).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ids}


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("biased", [False, True])
def test_own_attention_over_a_sharded_sequence(biased: bool, monkeypatch: Any) -> None:
    loss, given = with_bias(biased), batch()
    forms = []
    real = shard_sequence.over_sequence

    def recorded(form: Any, *rest: Any) -> Any:
        forms.append(form)
        return real(form, *rest)

    monkeypatch.setattr(shard_sequence, "over_sequence", recorded)
    config = {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0.0,
        "mesh": {"seq": 4, "data": 2},
        "zero_optimization": {"stage": 1},
        "run": {"seed": 0, "compilation_cache": False},
    }
    engine = jaxspeed.initialize((init, loss), lambda model, batch: model(batch), config)
    before = {path: np.array(x) for path, x in engine.parameters.items()}
    found = float(engine.train_batch(given)["loss"])
    assert forms
    for form in forms:
        assert (form.rows is not None) == biased
        assert biased or (form.mask.causal and form.segments)
    expected, grads = jax.jit(jax.value_and_grad(loss))(before, given)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for path, x in engine.parameters.items():
        update, error = -0.5 * grads[path], np.array(x) - before[path] + 0.5 * grads[path]
        assert np.linalg.norm(error) <= 1e-5 * np.linalg.norm(update) + 1e-6, path
