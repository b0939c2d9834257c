"""Losses, metrics and gradients of GRPO and RLOO equal numpy's on recorded rollouts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.config.objective_keys import objective_class
from jaxspeed.objectives.terms_and_metrics import results
from jaxspeed.traced_loss.loss import parse_loss
from tests.objectives.plain_policy import Batch, plain_loss, plain_metrics, recorded

ROWS, SEQ, VOCAB = 10, 16, 12
CISPO = {"loss_type": "cispo", "epsilon_high": 1.3}
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
DEFAULT: dict[str, dict[str, Any]] = {
    "dapo": {"temperature": 0.7},
    "grpo, KL": {"loss_type": "grpo", "beta": 0.3, "epsilon_high": 0.4},
    "sequences, KL": {"importance_sampling_level": "sequence", "beta": 0.3},
    "luspo, sequences": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "cispo, token mask": {**CISPO, "importance_sampling_mode": "token_mask", "clip_max": 1.5},
    "sapo": {"loss_type": "sapo", "beta": 0.1, "use_bias_correction_kl": False},
    "dr_grpo, delta": {"loss_type": "dr_grpo", "delta": 1.1},
    "rloo": {"type": "rloo", "beta": 0.05, "epsilon_high": 0.5},
}
MORE = {
    **{
        f"{kind}, {level}": {
            "loss_type": kind, "importance_sampling_level": level,
            **(CISPO if kind == "cispo" else {}), "beta": beta,
        }
        for kind in ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo")
        for level in ("token", "sequence")
        for beta in [0.2 * (kind in ("dapo", "sapo", "luspo"))]
    },
    **{
        f"{mode}, {name}": {"importance_sampling_mode": mode, "clip_max": 1.6, **more}
        for mode in MODES
        for name, more in (
            ("upper", {}),
            ("both, KL", {"clip_min": 0.7, "beta": 0.2}),
            ("sequences", {"importance_sampling_level": "sequence", "loss_type": "grpo"}),
        )
    },
    "delta, sequences": {"delta": 1.4, "importance_sampling_level": "sequence"},
    "sapo temperatures": {
        "loss_type": "sapo", "sapo_temperature_pos": 1.4, "sapo_temperature_neg": 0.6,
    },
    "not mirrored": {"mirror_sampling": False, "temperature": 1.3, "beta": 0.2},
    "rloo, no KL": {"type": "rloo", "beta": 0.0, "temperature": 0.8},
}  # fmt: skip


class Table:
    """A model whose logits are rows of a table by token and place."""

    def __init__(self, table: jax.Array):
        self.table = table

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table[jnp.arange(tokens.shape[1]), tokens]


def objective_of(options: dict[str, Any]) -> Any:
    cls = objective_class(options.get("type", "grpo"))
    keys = {k: x for k, x in options.items() if k != "type"}
    return cls(cls.Options.model_validate({"rewards": "a:b", **keys}))


def assert_equal(cases: dict[str, dict[str, Any]], batch: Batch, of_plain: Any = None) -> None:
    """Compare losses of a batch with numpy's, by default of the same rows."""
    rows = batch if of_plain is None else of_plain
    rng = np.random.default_rng(5)
    table = rng.normal(0, 1.5, (SEQ, VOCAB, VOCAB)).astype(np.float32)
    logits = table[np.arange(SEQ), rows["tokens"]].astype(np.float64)
    objectives = [objective_of(options) for options in cases.values()]

    def step(objective: Any, table: Any) -> tuple[Any, Any]:
        parsed = parse_loss(objective.loss(Table(table), batch))[0].folded(None)
        return parsed.total / parsed.weight, results(parsed.metrics)

    def plain(options: dict[str, Any], table: Any) -> Any:
        logits = table[np.arange(SEQ), rows["tokens"]]
        return plain_loss(jnp, logits, rows, options)[0]

    def all_steps(table: Any) -> Any:
        return [
            (
                jax.value_and_grad(lambda t, objective=objective: step(objective, t), has_aux=True)(
                    table
                ),
                jax.grad(lambda t, options=options: plain(options, t))(table),
            )
            for objective, options in zip(objectives, cases.values())
        ]

    outcomes = jax.jit(all_steps)(table)
    for (name, options), (((loss, metrics), gradient), expected) in zip(cases.items(), outcomes):
        wanted, seen = plain_loss(np, logits, rows, options)
        np.testing.assert_allclose(loss, wanted, rtol=1e-6, atol=1e-6, err_msg=name)
        expected_metrics = plain_metrics(seen, options)
        assert metrics.keys() == expected_metrics.keys(), name
        for key, value in expected_metrics.items():
            about = f"{name}: {key}"
            np.testing.assert_allclose(metrics[key], value, rtol=1e-6, atol=1e-6, err_msg=about)
        assert np.abs(expected).max() > 1e-3, name
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_losses_metrics_and_gradients_are_those_of_numpy():
    assert_equal(DEFAULT, recorded(ROWS, SEQ, VOCAB))


@pytest.mark.sampled
@pytest.mark.parametrize("names", [list(MORE)[i::3] for i in range(3)], ids=["0", "1", "2"])
def test_further_losses_are_those_of_numpy(names):
    assert_equal({name: MORE[name] for name in names}, recorded(ROWS, SEQ, VOCAB, 1))


@pytest.mark.sampled
def test_losses_of_the_model_that_sampled_are_those_of_numpy():
    """Without `old_logprobs`, and without thresholds."""
    batch = recorded(ROWS, SEQ, VOCAB, 2, old=False)
    del batch["thresholds"]
    assert_equal(DEFAULT, batch)


@pytest.mark.sampled
def test_rows_of_padding_have_no_part():
    batch = recorded(ROWS, SEQ, VOCAB, 3)
    padding = np.arange(ROWS) % 4 == 0
    names = ("dapo", "sequences, KL", "cispo, token mask", "rloo")
    rows = {name: x[~padding] for name, x in batch.items()}
    padded = objective_of({}).without_weight(batch, padding)
    assert_equal({name: DEFAULT[name] for name in names}, padded, rows)
