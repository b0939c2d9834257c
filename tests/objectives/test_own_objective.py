"""An objective of a user's own, and a factory's loss, from the command line on eight devices."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxspeed.cli.main import main
from jaxspeed.config import Config
from jaxspeed.run import source_of
from jaxspeed.traced_loss import loss_traces
from jaxspeed.train import build_program
from jaxspeed.user_models.config_model import resolve_model
from tests.objectives import ranking

HERE = "tests.objectives.ranking"
BATCH, STEPS, LR, SEED = 8, 3, 0.05, 3
MODELS = {
    "objective": {
        "model": {"family": "gpt2", "config": ranking.SIZES},
        "objective": {"type": f"{HERE}:Ranking", "beta": 2.0},
    },
    "model.loss": {"model": {"factory": f"{HERE}:scored", "loss": f"{HERE}:plain_loss"}},
}
BETA = {"objective": 2.0, "model.loss": 1.0}


def config(folder: Path, named: str) -> Path:
    path = folder / "config.json"
    keys = {
        **MODELS[named],
        "data": {"source": f"{HERE}:pairs", "held_out": 1 / 3},
        "run": {"devices": "cpu:8", "steps": STEPS, "seed": SEED, "output": str(folder / "run")},
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "mesh": {"pipe": 2, "tensor": 2},
    }
    path.write_text(json.dumps(keys))
    return path


def plain_training(path: Path, beta: float) -> tuple[list[float], list[float], float, float]:
    """Losses and gradients' norms of the steps, and loss and accuracy of what is held out."""
    corpus = source_of(path).corpus()
    model = nnx.jit(lambda: ranking.scored(rngs=nnx.Rngs(SEED)))()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.sgd(LR)
    state = optimizer.init(params)

    def loss_of(params, pairs):
        model = nnx.merge(graph, params, rest)
        chosen, rejected = model(pairs[:, 0]), model(pairs[:, 1])
        margins = beta * (chosen - rejected)
        return -jax.nn.log_sigmoid(margins).mean(), (margins > 0).mean()

    step_of = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    losses, norms = [], []
    for step in range(STEPS):
        (loss, _), grads = step_of(params, corpus.train.batch(step, BATCH)["pairs"])
        losses.append(float(loss))
        norms.append(float(optax.tree.norm(grads)))
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert corpus.held_out.samples == 15  # 3 batches of 4, and 3 pairs
    loss, accuracy = jax.jit(loss_of)(params, corpus.held_out.slice(0, 15)["pairs"])
    return losses, norms, float(loss), float(accuracy)


@pytest.mark.default_cases("objective")
@pytest.mark.parametrize("named", MODELS)
def test_it_trains_and_evaluates_like_plain_flax(named, tmp_path, capsys):
    path = config(tmp_path, named)
    assert main(["train", str(path), "--json"]) == 0, capsys.readouterr().err
    records = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    steps = [record for record in records if "loss" in record]
    losses, norms, held_out_loss, accuracy = plain_training(path, BETA[named])
    np.testing.assert_allclose([record["loss"] for record in steps], losses, rtol=1e-5)
    np.testing.assert_allclose([record["grad_norm"] for record in steps], norms, rtol=1e-5)
    assert losses[0] - losses[-1] > 0.01
    counted = [record.get("tokens") for record in steps]
    own = [2 * ranking.SEQ * BATCH * (1 + step) for step in range(STEPS)]
    assert counted == (own if named == "objective" else [None] * STEPS)

    capsys.readouterr()
    assert main(["eval", str(path), "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(found["eval_loss"], held_out_loss, rtol=1e-5)
    np.testing.assert_allclose(found["accuracy"], accuracy, rtol=1e-6)
    assert found["eval_weight"] == 15 and "perplexity" not in found

    if named == "objective":  # its options are part of the run, as the model is
        assert main(["train", str(path), "--set", "objective.beta=1"]) == 2
        assert "objective.beta: 2.0 there, 1 here" in capsys.readouterr().err


def reduction_of(name: str) -> tuple[str, str]:
    loaded = Config.load(
        {
            "model": MODELS["objective"]["model"],
            "objective": {"type": f"{HERE}:{name}"},
            "train_batch_size": 16,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
        }
    )
    program = build_program(loaded, *resolve_model(loaded))
    batch = {"pairs": jax.ShapeDtypeStruct((16, 2, ranking.SEQ), "int32")}
    reduction = program.gradients.reduction
    return program.in_mesh(lambda: reduction(program.state.variables, batch, 0))()


def test_a_loss_that_is_declared_of_the_entire_batch_is_not_proved_otherwise(monkeypatch):
    assert reduction_of("Ranking") == ("step", "the loss is a weighted sum over samples")
    monkeypatch.setattr(loss_traces, "by_parts", None)  # a proof would call it
    kind, why = reduction_of("EntireRanking")
    assert kind == "micro_batch" and why.startswith("EntireRanking declares entire_batch")


@pytest.mark.parametrize(
    ("objective", "entropy"), [("next_token", True), (f"{HERE}:Doubled", False)]
)
def test_another_loss_of_tokens_is_not_compared_with_their_entropy(objective, entropy):
    source = source_of(
        {
            "model": MODELS["objective"]["model"],
            "objective": {"type": objective},
            "data": {"source": "synthetic"},
            "run": {"devices": "cpu:8"},
            "train_batch_size": 8,
        }
    )
    assert source.reads.sample == "tokens"
    assert (source.corpus().unigram_entropy is not None) == entropy
