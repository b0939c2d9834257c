"""A tiny Llama whose sequences are sharded over 8 devices learns to copy from distant shards."""

import jax
import numpy as np
import pytest

import jaxspeed
from tests.sequence.tiny_llama import SEED
from tests.support.covering import covering

VOCAB = 16


def copies(step: int, back: int, samples: int) -> dict[str, np.ndarray]:
    """Random tokens, which are repeated after `back` positions; only repeated ones count."""
    first = np.random.default_rng(step).integers(0, VOCAB, (samples, back))
    tokens = np.concatenate([first, first, first[:, :1]], 1).astype(np.int32)
    targets = tokens[:, 1:].copy()
    targets[:, : back - 1] = -100
    return {"tokens": tokens[:, :-1], "targets": targets}


@pytest.mark.sampled
@pytest.mark.parametrize("back", covering([256, 4096], [256]))
def test_a_token_is_copied_from_so_many_positions_back(back):
    """One layer does it, which has to attend to one distance: 4 shards of 64 tokens back.

    Knowing nothing of the past, the loss is ln 16 = 2.77.
    """
    samples = max(1, 2048 // back)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 64, "qkv_bias": True,
        "rope_theta": 4.0 * back, "max_position_embeddings": 2 * back,
    }  # fmt: skip
    engine = jaxspeed.initialize(
        config={
            "model": {"family": "llama", "preset": "tiny", "config": sizes},
            "mesh": {"seq": 8},
            "train_batch_size": samples,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 2},
            "run": {"seed": SEED, "compilation_cache": False},
        }
    )
    at = engine.program.batch_shardings(copies(0, back, samples))["tokens"]
    assert at.shard_shape((samples, 2 * back)) == (samples, back // 4)
    for step in range(400):
        loss = float(engine.train_batch(copies(step, back, samples))["loss"])
        if loss < 0.2:
            break
    held_out = copies(10**6, back, samples)
    assert engine.eval_batch(held_out)["loss"] < 0.3
    # What is copied is in another shard: without the first half there is nothing to copy.
    blank = held_out | {"tokens": np.where(np.arange(2 * back) < back, 0, held_out["tokens"])}
    assert engine.eval_batch(blank)["loss"] > np.log(VOCAB) / 2
    assert jax.device_count() == 8


@pytest.mark.full
def test_weights_set_by_hand_copy_from_30000_positions_back():
    """Queries and keys are constants, of which the rotation leaves the distance alone.

    A frequency f adds cos(f (distance - wanted)) to a score: its largest value is at the distance
    that is wanted. Values are the tokens, which the head reads from hidden dims of their own.
    """
    back, head_dim = 30_000, 128
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 2 * VOCAB, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": head_dim,
        "intermediate_size": 8, "qkv_bias": True, "rope_theta": 1e5,
        "max_position_embeddings": 2 * back, "tie_word_embeddings": False,
    }  # fmt: skip
    engine = jaxspeed.initialize(
        config={
            "model": {"family": "llama", "preset": "tiny", "config": sizes},
            "mesh": {"seq": 8},
            "train_batch_size": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_optimization": {"stage": 3},
            "run": {"compilation_cache": False},
        }
    )
    # Dim i rotates with dim i + head_dim / 2.
    angles = (back - 1) * 1e5 ** (-np.arange(0, head_dim, 2) / head_dim)
    query = 20 * np.concatenate([np.cos(angles), -np.sin(angles)])
    key = np.concatenate([np.ones(head_dim // 2), np.zeros(head_dim // 2)])
    token = np.eye(VOCAB, 2 * VOCAB)
    copied = np.eye(VOCAB, 2 * VOCAB, VOCAB)
    values = {path: np.zeros(x.shape, np.float32) for path, x in engine.parameters.items()}
    values |= {path: np.ones_like(x) for path, x in values.items() if "norm" in path}

    def put(end: str, value: np.ndarray) -> None:
        (path,) = (path for path in values if path.endswith(end))
        values[path] = value.reshape(values[path].shape).astype(np.float32)

    put("embed/table", token)
    put("q_proj/bias", query)
    put("k_proj/bias", key)
    put("v_proj/kernel", np.eye(2 * VOCAB, head_dim))
    put("o_proj/kernel", np.eye(head_dim, VOCAB) @ copied)
    put("head/table", 4 * copied)
    engine.parameters = values
    assert engine.eval_batch(copies(0, back, 1))["loss"] < 0.01
