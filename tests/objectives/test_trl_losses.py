"""Preferences against TRL's trainers: log-probabilities, losses, metrics, gradients of a batch."""

import jax
import numpy as np
import pytest

import jaxspeed
from jaxspeed.config.objective_keys import objective_class
from jaxspeed.objectives.terms_and_metrics import results
from jaxspeed.traced_loss.loss import parse_loss
from tests.objectives.preferred import PAIRS, Bound, folders, rows

pytestmark = pytest.mark.sampled
SEQ_LEN, PER_ROW = 64, 2
TYPES = (
    *("sigmoid", "hinge", "ipo", "sigmoid_norm", "nca_pair", "robust", "bco_pair", "sppo_hard"),
    *("apo_zero", "apo_down", "discopop", "sft"),
)
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
DPO = [
    {},
    *({"loss_type": [each], "beta": 0.4} for each in TYPES),
    {"loss_type": ["exo_pair"], "label_smoothing": 0.05},
    {"loss_type": ["robust"], "label_smoothing": 0.2},
    {"loss_type": ["discopop"], "discopop_tau": 0.2},
    {"ld_alpha": 0.3},
    {"ld_alpha": 0.0, "loss_type": ["ipo"]},
    {"ld_alpha": 0.6, "loss_type": ["sft", "apo_zero"]},
    *(
        {"f_divergence_type": divergence, "loss_type": [each]}
        for divergence in DIVERGENCES
        for each in ("sigmoid", "ipo", "sigmoid_norm", "hinge", "robust", "discopop", "sft")
    ),
    *(
        {"f_divergence_type": d, "loss_type": ["exo_pair"], "label_smoothing": 0.1}
        for d in DIVERGENCES
    ),
    {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.7},
    {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.5]},
]
KTO = [
    {},
    {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.6},
    {"loss_type": "apo_zero_unpaired"},
    {"loss_type": "apo_zero_unpaired", "beta": 0.4, "undesirable_weight": 2.0},
]
ORPO = [{}, {"beta": 0.4}]
CPO = [
    {},
    {"beta": 0.4, "cpo_alpha": 0.3, "label_smoothing": 0.1},
    {"loss_type": "hinge"},
    {"loss_type": "ipo"},
    {"loss_type": "simpo", "cpo_alpha": 0.0},
    {"loss_type": "simpo", "simpo_gamma": 1.2, "beta": 2.0, "label_smoothing": 0.1},
]
REWARD = [{}, {"center_rewards_coefficient": 0.05}]
NOT_OURS = {"num_tokens"}
# Means over all positions of a padded batch there, prompts and padding included.
OF_POSITIONS = {"logits/chosen", "logits/rejected"}


@pytest.fixture(scope="module")
def pair_of_folders(references, tmp_path_factory):
    return folders(references, tmp_path_factory.mktemp("preferred"))


def theirs(references, trainer, folders, cases, gradients, records=PAIRS):
    """(their steps, their pairs as (tokens, mask) of both sides)."""
    model, reference = folders
    steps = references.call(
        "preferences.steps",
        trainer=trainer,
        folder=model,
        reference=reference,
        records=records,
        cases=cases,
        gradients=gradients,
    )
    return steps, [list(pair) for pair in zip(*steps[0]["sides"])]


def ours(kind, options, batch, model, reference):
    """(loss, metrics) as a function of parameters."""
    cls = objective_class(kind)
    objective = cls(cls.Options.model_validate(options))

    def loss(parameters):
        bound, read = model(parameters), dict(batch)
        for entry in objective.computed():
            read |= entry.function(reference() if entry.model == "reference" else bound, read)
        parsed = parse_loss(objective.loss(bound, jax.lax.stop_gradient(read)))[0].folded(None)
        return parsed.total / parsed.weight, results(parsed.metrics)

    return loss


def assert_equal_steps(kind, cases, steps, batch, model, reference, absent=frozenset()):
    """Losses and metrics of all cases, in one program; gradients where the steps have them."""
    losses = [ours(kind, options, batch, model, reference) for options in cases]
    found = jax.jit(lambda p: [loss(p) for loss in losses])(model.parameters)
    for options, step, (loss, metrics) in zip(cases, steps, found, strict=True):
        np.testing.assert_allclose(loss, step["loss"], rtol=1e-5, err_msg=str(options))
        expected = {k: x for k, x in step["metrics"].items() if k not in absent | NOT_OURS}
        assert expected.keys() <= metrics.keys(), options
        for name, value in expected.items():
            np.testing.assert_allclose(
                metrics[name], value, rtol=1e-5, atol=1e-7, err_msg=f"{options}: {name}"
            )
    with_gradients = [i for i, step in enumerate(steps) if "gradients" in step]
    assert with_gradients
    for i in with_gradients:
        gradients = jax.jit(jax.grad(lambda p, i=i: losses[i](p)[0]))(model.parameters)
        tensors, expected = model.by_tensor(gradients), steps[i]["gradients"]
        assert tensors.keys() == expected.keys()
        for name, x in expected.items():
            error, norm = np.linalg.norm(tensors[name] - x), np.linalg.norm(x)
            assert norm > 1e-6, name
            assert error <= 1e-4 * norm, f"{cases[i]}: {name} differs by {error / norm:.1e}"


def test_token_logprobs_are_theirs(references, pair_of_folders):
    """By an engine, in rows with each completion's own prompt."""
    records = [PAIRS[i % len(PAIRS)] for i in range(2 * jax.device_count())]
    (step,), pairs = theirs(references, "dpo", pair_of_folders, [{}], [], records)
    batch = rows(pairs, SEQ_LEN, PER_ROW)
    segments = np.asarray(batch["segment_ids"])[:, :-1]
    for folder, name in zip(pair_of_folders, ("logprobs", "reference"), strict=True):
        engine = jaxspeed.initialize(
            config={
                "model": {"pretrained": str(folder)},
                "train_batch_size": len(segments),
                "optimizer": {"type": "SGD"},
                "mesh": {"tensor": 2},
            }
        )
        found = np.asarray(engine.logprobs(batch).logprobs)
        for i, pair in enumerate(pairs):
            row, p = divmod(i, PER_ROW)
            for side, (tokens, _) in enumerate(pair):
                count = len(tokens) - 1
                mine = found[row][segments[row] == 2 * p + 1 + side][:count]
                wanted = step[name][side][i][:count]
                np.testing.assert_array_equal(wanted != 0, mine != 0)
                error = np.abs(mine - wanted) / np.maximum(1, np.abs(wanted))
                assert error.max() <= 1e-5


def test_dpo_is_theirs(references, pair_of_folders):
    gradients = [0, 3, 12, 13, len(DPO) - 1]
    steps, pairs = theirs(references, "dpo", pair_of_folders, DPO, gradients)
    model, reference = map(Bound, pair_of_folders)
    batch = rows(pairs, SEQ_LEN, PER_ROW)
    assert_equal_steps("dpo", DPO, steps, batch, model, reference)


@pytest.mark.parametrize(("trainer", "cases"), [("orpo", ORPO), ("cpo", CPO)])
def test_those_without_a_reference_are_theirs(references, pair_of_folders, trainer, cases):
    steps, pairs = theirs(references, trainer, pair_of_folders, cases, [0, len(cases) - 1])
    model, reference = map(Bound, pair_of_folders)
    batch = rows(pairs, SEQ_LEN, PER_ROW)
    if trainer == "cpo":  # TRL reports the likelihood of a loss in which it has no part as 0
        assert steps[4]["metrics"].pop("nll_loss") == 0
        assert steps[5]["metrics"]["nll_loss"] > 0
    assert_equal_steps(trainer, cases, steps, batch, model, reference, absent=OF_POSITIONS)


def test_kto_is_theirs(references, pair_of_folders):
    """Of pairs that are divided; with the completions' KL of all records."""
    steps, records = theirs(references, "kto", pair_of_folders, KTO, [1, 3])
    assert steps[0]["metrics"]["kl"] > 0
    for step in steps[2:]:  # a type without a KL reports 0
        assert step["metrics"].pop("kl") == 0
    model, reference = map(Bound, pair_of_folders)
    batch = rows(records, SEQ_LEN, PER_ROW)
    segments = np.asarray(batch["segment_ids"])
    desirable = np.zeros_like(segments)
    for i in range(len(records)):
        row, p = divmod(i, PER_ROW)
        desirable[row, np.argmax(segments[row] == 2 * p + 1)] = 1 if i < len(PAIRS) else -1
    batch["desirable"] = jax.numpy.asarray(desirable)
    assert_equal_steps("kto", KTO, steps, batch, model, reference)


@pytest.mark.parametrize("margins", [[], [0.5, 0.0, -0.3, 2.0, 1.0]], ids=["plain", "margins"])
def test_reward_models_are_theirs(references, tmp_path, margins):
    records = [{**pair, "margin": x} for pair, x in zip(PAIRS, margins)] or PAIRS
    both = folders(references, tmp_path, classifier=True)
    steps, pairs = theirs(references, "reward", both, REWARD, [0, 1], records)
    model, reference = map(Bound, both)
    batch = rows(pairs, SEQ_LEN, PER_ROW)
    if margins:
        segments = np.asarray(batch["segment_ids"])
        at_pairs = np.zeros(segments.shape, np.float32)
        for i, margin in enumerate(margins):
            row, p = divmod(i, PER_ROW)
            at_pairs[row, np.argmax(segments[row] == 2 * p + 1)] = margin
        batch["margins"] = jax.numpy.asarray(at_pairs)
    assert_equal_steps("reward", REWARD, steps, batch, model, reference)


def test_steps_against_a_folder_are_theirs(references, pair_of_folders):
    """SGD with a reference that stays: each step's loss and metrics, and the parameters."""
    size, steps, rate = 4, 3, 0.2
    records = [PAIRS[i % len(PAIRS)] for i in range(size * steps)]
    model, _ = pair_of_folders
    wanted = references.call(
        "preferences.trained",
        trainer="dpo",
        folder=model,
        records=records,
        options={"learning_rate": rate, "per_device_train_batch_size": size},
    )
    assert wanted["logs"][-1]["rewards/margins"] > 0.1
    (step,), pairs = theirs(references, "dpo", (model, model), [{}], [], records)
    reference = {"reference": "each_step", "reference_model": str(model)}
    engine = jaxspeed.initialize(
        config={
            "model": {"pretrained": str(model)},
            "objective": {"type": "dpo", **reference},
            "train_batch_size": size,
            "mesh": {"tensor": 2},
            "optimizer": {"type": "SGD", "params": {"lr": rate}},
            "gradient_clipping": 0,
        }
    )
    for i, log in enumerate(wanted["logs"]):
        metrics = engine.train_batch(rows(pairs[i * size :][:size], SEQ_LEN, 1))
        for name in log.keys() & {"loss", *step["metrics"]} - NOT_OURS:
            np.testing.assert_allclose(
                float(metrics[name]), log[name], rtol=1e-4, atol=1e-6, err_msg=f"{i}: {name}"
            )
