"""Objectives of completions: their metrics, evaluation, forms of batches, dropout and keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxspeed.models import build

import jaxspeed
from jaxspeed.config import Config
from jaxspeed.errors import ConfigError
from jaxspeed.objectives.pair_losses import PAIR_LOSSES
from jaxspeed.train import build_program
from jaxspeed.user_models.config_model import resolve_model
from tests.moe.small_models import DEEPSEEK
from tests.objectives.plain_preferences import (
    ROWS,
    SIZES,
    VOCAB,
    PlainLoop,
    Scored,
    batch_of_pairs,
    sides_of,
)
from tests.objectives.test_preferences import BETA, GPT2, LORA, OBJECTIVES, config, ls


def one() -> Any:
    return jax.devices()[:1]


# -- the proof that each rank may compute its own pairs --------------------------------------------

KINDS = {name: objective for name, (objective, _) in OBJECTIVES.items()}
KINDS["all types"] = {
    "type": "dpo", "loss_type": [*PAIR_LOSSES, "sft"], "label_smoothing": 0.1, "ld_alpha": 0.3,
}  # fmt: skip
KINDS["js"] = {"type": "dpo", "f_divergence_type": "js_divergence", "loss_type": "ipo"}
KINDS["cpo"] = {"type": "cpo"}
KL = {"kl": np.zeros(ROWS, np.float32), "mismatched_ratios": np.zeros((ROWS, 2), np.float32)}


@pytest.mark.default_cases("all types", "kto", "orpo", "simpo")
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_proved_to_be_a_sum_over_rows(kind):
    loaded = Config.load(config(KINDS[kind], gradient_accumulation_steps=2))
    program = build_program(loaded, *resolve_model(loaded))
    batch = batch_of_pairs(unpaired=kind == "kto") | KL
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    found = program.in_mesh(
        lambda: program.gradients.reduction(program.state.variables, shapes, 0)
    )()
    assert found == ("step", "the loss is a weighted sum over samples")


# -- metrics ---------------------------------------------------------------------------------------


def scored_sides(engine: Any, batch: Any) -> tuple[Scored, Scored]:
    values = {path: jnp.array(np.asarray(x)) for path, x in engine.parameters.items()}
    loop = PlainLoop(build("gpt2", None, SIZES).factory, values, lambda *_: 0, 0.0)
    model = loop.model(values)
    chosen, rejected = (Scored(model, side) for side in sides_of(batch))
    return chosen, rejected


def of_tokens(values: Any, *sides: Scored) -> float:
    """The mean of values of tokens, [pairs, length - 1] each, over completions."""
    masks = [side.side.mask for side in sides]
    return float(sum((x * m).sum() for x, m in zip(values, masks)) / sum(m.sum() for m in masks))


def entropies(side: Scored) -> Any:
    logp = jax.nn.log_softmax(side.logits)
    return -(jnp.exp(logp) * logp).sum(-1)


def is_top(side: Scored) -> Any:
    return side.logits.argmax(-1) == side.side.tokens[:, 1:]


def metrics_of_pairs(chosen: Scored, rejected: Scored) -> dict[str, float]:
    c, r = BETA * chosen.ratio, BETA * rejected.ratio
    return {
        "rewards/chosen": c.mean(),
        "rewards/rejected": r.mean(),
        "rewards/accuracies": (c > r).mean(),
        "rewards/margins": (c - r).mean(),
        "logps/chosen": chosen.logp.mean(),
        "logps/rejected": rejected.logp.mean(),
        "logits/chosen": of_tokens([chosen.logits.mean(-1)], chosen),
        "logits/rejected": of_tokens([rejected.logits.mean(-1)], rejected),
        "mean_token_accuracy": of_tokens([is_top(chosen)], chosen),
        "entropy": of_tokens([entropies(chosen), entropies(rejected)], chosen, rejected),
    }


def metrics_of_records(labelled: Scored, mismatched: Scored) -> dict[str, float]:
    good, bad = labelled.side.label > 0, labelled.side.label < 0
    mean_logits = labelled.logits.mean(-1)
    reward = BETA * labelled.ratio
    found = {"kl": jnp.maximum(mismatched.ratio.mean(), 0)}
    for name, which in (("chosen", good), ("rejected", bad)):
        mask = labelled.side.mask * which[:, None]
        found |= {
            f"rewards/{name}": reward[which].mean(),
            f"logps/{name}": labelled.logp[which].mean(),
            f"logits/{name}": (mean_logits * mask).sum() / mask.sum(),
        }
    return {
        **found,
        "rewards/margins": found["rewards/chosen"] - found["rewards/rejected"],
        "entropy": of_tokens([entropies(labelled)], labelled),
    }


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_metrics_are_those_of_the_global_batch(name):
    engine = jaxspeed.initialize(config=config(KINDS[name], gradient_accumulation_steps=4))
    batch = batch_of_pairs(3, unpaired=name == "kto")
    scored = scored_sides(engine, batch)
    wanted = (metrics_of_pairs if name == "dpo" else metrics_of_records)(*scored)
    evaluated = engine.eval_batch(batch)
    for found in (evaluated, engine.train_batch(batch)):
        names = {metric for metric in found if "/" in metric}
        assert names == {metric for metric in wanted if "/" in metric}
        for metric, value in wanted.items():
            np.testing.assert_allclose(
                float(found[metric]), value, rtol=1e-5, atol=1e-6, err_msg=metric
            )
    np.testing.assert_allclose(evaluated["loss"], OBJECTIVES[name][1](*scored, None), rtol=1e-5)


def test_orpo_and_cpo_name_their_terms():
    batch = batch_of_pairs(3)
    engine = jaxspeed.initialize(config=config(KINDS["orpo"]), devices=one())
    chosen, rejected = scored_sides(engine, batch)
    found = engine.eval_batch(batch)

    def odds(x):
        return x.mean - jnp.log(-jnp.expm1(x.mean))

    log_odds = odds(chosen) - odds(rejected)
    wanted = {
        "log_odds_chosen": log_odds.mean(),
        "log_odds_ratio": ls(log_odds).mean(),
        "rewards/margins": BETA * (chosen.mean - rejected.mean).mean(),
        "logps/chosen": chosen.mean.mean(),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(float(found[name]), value, rtol=1e-5, err_msg=name)
    simpo = jaxspeed.initialize(config=config(KINDS["simpo"]), devices=one()).eval_batch(batch)
    nll = -chosen.logp.sum() / chosen.count.sum()
    np.testing.assert_allclose(float(simpo["nll_loss"]), nll, rtol=1e-5)
    total = float(simpo["preference_loss"] + 0.4 * simpo["nll_loss"])
    np.testing.assert_allclose(float(simpo["loss"]), total, rtol=1e-6)


@pytest.mark.parametrize("name", ["orpo", "kto"])
def test_samples_that_are_padding_have_no_weight(name):
    engine = jaxspeed.initialize(config=config(KINDS[name]), devices=one())
    objective = engine.program.traced_loss.loss_fn.__self__
    batch = batch_of_pairs(3, unpaired=name == "kto")
    fewer = {n: x[: ROWS // 4] for n, x in batch.items()}
    padded = objective.without_weight(batch, np.arange(ROWS) >= ROWS // 4)
    found, wanted = engine.eval_batch(padded), engine.eval_batch(fewer)
    assert {*found} == {*wanted}
    for metric, value in wanted.items():
        np.testing.assert_allclose(found[metric], value, rtol=1e-5, err_msg=metric)


# -- forms of batches ------------------------------------------------------------------------------


class OwnModel(nnx.Module):
    """A model of no family, which returns logits and takes no segments."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)
        self.mix = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        before = jnp.cumsum(x, axis=1) / jnp.arange(1, 1 + x.shape[1])[:, None]
        return self.embed.attend(x + jnp.tanh(self.mix(before)))


def pairs_alone(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """[pairs, 2, ...] of a batch of rows."""
    chosen, rejected = sides_of(batch)
    both = {
        "tokens": (chosen.tokens, rejected.tokens),
        "mask": [np.pad(side.mask, ((0, 0), (1, 0))) for side in (chosen, rejected)],
        "reference_logprobs": (chosen.reference, rejected.reference),
    }
    arrays = {name: np.stack(x, axis=1) for name, x in both.items()}
    if "desirable" in batch:
        first = np.zeros_like(arrays["tokens"])
        first[:, 0, 0] = chosen.label
        arrays["desirable"] = first
    return {name: x[:16] for name, x in arrays.items()}


@pytest.mark.default_cases("mixed", "kto", "orpo")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_model_without_segments_has_a_pair_a_row(name):
    keys = config(KINDS[name], train_batch_size=16)
    del keys["model"]
    engine = jaxspeed.initialize(OwnModel, config=keys)
    rows = pairs_alone(batch_of_pairs(3, unpaired=name == "kto"))
    model = engine.module
    sides = [
        type(side)(*(x[:16] for x in vars(side).values()))
        for side in sides_of(batch_of_pairs(3, unpaired=name == "kto"))
    ]
    wanted = float(OBJECTIVES[name][1](*(Scored(model, side) for side in sides), None))
    np.testing.assert_allclose(float(engine.train_batch(rows)["loss"]), wanted, rtol=1e-5)


# -- dropout ---------------------------------------------------------------------------------------


@pytest.mark.default_cases("False")
@pytest.mark.parametrize("lora", [False, True])
def test_dropout_acts_only_where_it_is_not_disabled(lora):
    batch = batch_of_pairs(3)

    def loss(**options):
        more = {"lora": {**LORA, "lora_dropout": 0.5}} if lora else {}
        model = GPT2 if lora else {**GPT2, "config": {**SIZES, "dropout": 0.5}}
        keys = config({"type": "dpo", **options}, **more) | {"model": model}
        engine = jaxspeed.initialize(config=keys, devices=one())
        return float(engine.eval_batch(batch)["loss"]), float(engine.train_batch(batch)["loss"])

    evaluated, trained = loss()
    assert trained == pytest.approx(evaluated, rel=1e-6)
    evaluated, trained = loss(disable_dropout=False)
    assert abs(trained - evaluated) > 1e-3


@pytest.mark.sampled
def test_a_mixture_counts_its_experts_tokens_without_dropout():
    keys = config({"type": "cpo"}) | {"model": DEEPSEEK}
    engine = jaxspeed.initialize(config=keys, devices=one())
    found = engine.train_batch(batch_of_pairs(3))
    assert float(found["aux_loss"]) > 0
    (bias,) = (x for path, x in engine.state.variables.items() if path.endswith("expert_bias"))
    assert np.abs(np.asarray(bias)).max() > 0
    assert "aux_loss" in engine.eval_batch(batch_of_pairs(3))


# -- what is refused -------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "smoothing without effect": (
        {"type": "dpo", "label_smoothing": 0.1},
        "objective.label_smoothing: found 0.1 with sigmoid. It acts in robust and "
        "exo_pair alone: remove it.",
    ),
    "exo_pair without smoothing": (
        {"type": "dpo", "loss_type": ["exo_pair"]},
        "objective.label_smoothing: found 0 with exo_pair. Needs more than 0, such as 0.001.",
    ),
    "robust with half": (
        {"type": "dpo", "loss_type": "robust", "label_smoothing": 0.5},
        "objective.label_smoothing: found 0.5 with robust. Needs less than 0.5.",
    ),
    "a sorted type": (
        {"type": "dpo", "loss_type": ["sigmoid", "aot"]},
        "objective.loss_type: found the list",
    ),
    "the reason of it": (
        {"type": "dpo", "loss_type": "aot_unpaired"},
        "Needs a type that is a sum over pairs: aot and aot_unpaired sort the pairs of a batch",
    ),
    "weights of pairs": (
        {"type": "dpo", "use_weighting": True},
        "objective.use_weighting: found true. Needs false: WPO's weights are not computed here",
    ),
    "a misspelt type": (
        {"type": "dpo", "loss_type": ["sigmoid", "hing"]},
        'Did you mean "hinge"?',
    ),
    "a type twice": (
        {"type": "dpo", "loss_type": ["sft", "sft"]},
        "objective.loss_type: found sft, sft. Needs each type once",
    ),
    "fewer weights": (
        {"type": "dpo", "loss_type": ["sft", "ipo"], "loss_weights": [1]},
        "objective.loss_weights: found [1.0] for sft, ipo. Needs a number for each type.",
    ),
    "a divergence of one completion": (
        {"type": "dpo", "loss_type": "apo_zero", "f_divergence_type": "forward_kl"},
        'objective.f_divergence_type: found "forward_kl" with apo_zero. Such types need '
        "reverse_kl; others work with sigmoid, hinge,",
    ),
    "CPO's smoothing without effect": (
        {"type": "cpo", "loss_type": "hinge", "label_smoothing": 0.1},
        "objective.label_smoothing: found 0.1 with hinge. It acts in sigmoid and simpo",
    ),
    "a margin without effect": (
        {"type": "cpo", "simpo_gamma": 1.0},
        "objective.simpo_gamma: found 1 with sigmoid. It acts in simpo alone: remove it.",
    ),
    "a temperature without effect": (
        {"type": "dpo", "discopop_tau": 0.1},
        "objective.discopop_tau: found 0.1 with sigmoid. It acts in discopop alone: remove it.",
    ),
    "an alpha without effect": (
        {"type": "dpo", "f_alpha_divergence_coef": 0.4},
        "objective.f_alpha_divergence_coef: found 0.4 with reverse_kl. It acts in alpha_divergence",
    ),
    "a misspelt key of the reference's section": (
        {"type": "dpo", "reference_model": {"pretrained": "x", "quantise": None}},
        "objective.reference_model.quantise: found an unknown key, set to null. Did you mean "
        '"quantize"?',
    ),
    "an unknown key of it": (
        {"type": "dpo", "reference_model": {"pretrained": "x", "beta": 1}},
        "Keys of objective.reference_model: pretrained, quantize, zero_stage, offload.",
    ),
    "a reference of ORPO": (
        {"type": "orpo", "reference": "each_step"},
        "objective.reference: found an unknown key",
    ),
    "a block of one row": (
        {"type": "kto", "kl_block": 1},
        "objective.kl_block: found 1. Needs a number that is at least 2",
    ),
    "a key of TRL's that is gone": (
        {"type": "dpo", "rpo_alpha": 1},
        "objective.rpo_alpha: found an unknown key",
    ),
}


@pytest.mark.parametrize(("objective", "message"), REFUSED.values(), ids=REFUSED)
def test_keys_that_do_nothing_are_refused(objective, message):
    with pytest.raises(ConfigError) as refused:
        Config.load({"train_batch_size": 8, "model": GPT2, "objective": objective})
    assert message in str(refused.value)


@pytest.mark.parametrize("family", ["t5", "vit", "bert"])
def test_another_model_than_one_of_language_is_refused(family):
    loaded = Config.load({"train_batch_size": 8, "model": {"family": family}, **OBJECTIVE})
    with pytest.raises(ConfigError, match=r'found "dpo"\. It trains language models; the model'):
        resolve_model(loaded)


OBJECTIVE = {"objective": {"type": "dpo"}}


def test_keys_are_explained():
    rows = jaxspeed.explain_config(config({"type": "dpo", "ld_alpha": 0.5}))
    (row,) = (row for row in rows if row.key == "objective.ld_alpha")
    assert row.verdict == "honoured" and row.sentence.startswith("Weight of the tokens beyond")
