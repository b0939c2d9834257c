"""What a loss chooses to predict: shares of tokens, spans, and the key that they are drawn from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspeed.models import masking

import jaxspeed
from jaxspeed import models
from jaxspeed.data import ModelLimits, limits_of
from jaxspeed.run import train

KEY = jax.random.key(3)


def test_a_share_of_what_is_not_special_is_masked():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (40, 500)).astype(np.int32)
    counts = np.arange(500) < rng.integers(300, 500, (40, 1))
    found, labels = masking.masked(
        tokens, KEY, mask_token=255, vocab_size=200, special=(0, 1), rate=0.2, counts=counts
    )
    chosen = np.asarray(labels != -100)
    np.testing.assert_array_equal(labels[chosen], tokens[chosen])
    np.testing.assert_array_equal(found[~chosen], tokens[~chosen])
    assert not np.isin(tokens[chosen], (0, 1)).any()
    assert not chosen[~counts].any()
    assert chosen[counts & (tokens > 1)].mean() == pytest.approx(0.2, abs=0.01)
    assert (found[chosen] == 255).mean() == pytest.approx(0.8, abs=0.02)
    assert (found == tokens)[chosen].mean() == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("padded", [False, True])
def test_inputs_and_targets_hold_each_token_once(padded):
    """The tokens of a row, put together again from both by the sentinels."""
    rows, seq, first = 30, 100, 99
    tokens = np.random.default_rng(1).integers(100, 200, (rows, seq))
    counts = np.arange(seq) < np.random.default_rng(2).integers(50, seq, (rows, 1))
    inputs, targets, mask = masking.with_sentinels(
        tokens, KEY, first_sentinel=first, end=1, counts=counts if padded else None
    )
    assert inputs.shape == (rows, 85 + 5 + 1)  # 15 of 100 tokens in 5 spans of 3
    assert targets.shape == (rows, 15 + 5 + 1)
    lengths, kept = [], np.ones((rows, 91), bool) if mask is None else np.asarray(mask) != 0
    for row in range(rows):
        x, y = inputs[row].tolist(), targets[row].tolist()
        assert (x[-1], y[-1]) == (1, 1)
        spans, here = {}, None
        for token in y[:-1]:
            if first - 5 < token <= first:
                here = spans.setdefault(token, [])
            elif token != -100:
                here.append(token)
        assert padded or list(spans) == [first - i for i in range(5)]
        lengths += [len(span) for span in spans.values()]
        whole = []
        for token in [t for t, keep in zip(x[:-1], kept[row]) if keep]:
            whole += spans[token] if first - 5 < token <= first else [token]
        np.testing.assert_array_equal(whole, tokens[row][counts[row]] if padded else tokens[row])
    if not padded:
        assert (min(lengths), sum(lengths)) == (1, 15 * rows)
        assert len({*lengths}) > 4


def test_spans_of_a_row_are_drawn_evenly():
    """Every division of 4 tokens into 2 spans is as likely."""
    found = np.asarray(masking._lengths(KEY, 3000, 4, 2))
    kinds, counts = np.unique(found, axis=0, return_counts=True)
    assert kinds.tolist() == [[1, 3], [2, 2], [3, 1]]
    np.testing.assert_allclose(counts / 3000, 1 / 3, atol=0.03)


def test_fields_that_choose_nothing_are_errors():
    with pytest.raises(ValueError, match="mask_rate is 0"):
        models.build("bert", "tiny", {"mask_rate": 0.0})
    with pytest.raises(ValueError, match="34 spans of 679 tokens need more sentinels up to 20"):
        masking.with_sentinels(jnp.zeros((1, 679), int), KEY, first_sentinel=20, end=1)
    config = models.build("bert", "tiny").config  # without a mask's token
    with pytest.raises(KeyError, match="labels"):
        masking.masked_batch(config, 256, {"tokens": jnp.zeros((1, 8), int)}, KEY)


def losses(family, mesh, micro, **fields):
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": micro,
        "mesh": mesh,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "model": {"family": family, "preset": "tiny", "config": fields},
    }
    engine = jaxspeed.initialize(config=config)
    tokens = np.random.default_rng(0).integers(0, 250, (8, 64)).astype(np.int32)
    return [float(engine.train_batch({"tokens": tokens})["loss"]) for _ in range(2)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("bert", {"mask_token_id": 255}),
        pytest.param("modernbert", {"mask_token_id": 255}, marks=pytest.mark.full),
    ],
)
def test_what_is_masked_depends_on_the_step_and_not_on_the_mesh(family, fields):
    first, second = losses(family, {"data": 8}, 1, **fields)
    assert first != second
    found = losses(family, {"data": 2, "tensor": 4}, 4, **fields)
    np.testing.assert_allclose(found, [first, second], rtol=1e-5)


def test_rows_of_tokens_are_the_samples_where_the_loss_corrupts_them():
    def reads(family, **fields):
        return limits_of(models.build(family, "tiny", fields).config)

    assert reads("bert", mask_token_id=255) == ModelLimits("tokens", 128, 256, targets=True)
    assert reads("t5", first_sentinel_id=255) == ModelLimits("tokens", None, 256, targets=True)
    for family in ("bert", "modernbert", "t5"):  # records with labels, or pairs
        assert reads(family).sample is None
    assert reads("gpt2").sample == "tokens"
    assert not reads("gpt2").targets


PAIRS = [
    {"inputs": np.arange(i, i + 9) % 200, "targets": np.arange(i, i + 5) % 200} for i in range(32)
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "fields", "source"),
    [
        ("bert", {"mask_token_id": 255, "special_token_ids": [0]}, "synthetic"),
        ("t5", {"first_sentinel_id": 255}, "synthetic"),
        ("t5", {}, f"{__name__}:PAIRS"),
    ],
)
def test_a_run_trains_on_each_form(tmp_path, monkeypatch, family, fields, source):
    monkeypatch.chdir(tmp_path)
    config = {
        "model": {"family": family, "preset": "tiny", "config": fields},
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "data": {"source": source, "samples": 32, "seq_len": 64, "held_out": 0.25},
        "run": {"output": str(tmp_path / "run"), "steps": 6, "sample_tokens": 0},
    }
    train(config)
