"""Reward models: the loss against its formula, steps against plain Optax, and what is refused."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxspeed.models import build

import jaxspeed
from jaxspeed.objectives.reward import Reward
from tests.adapters.lora_loop import merged
from tests.moe.small_models import MIXTRAL
from tests.objectives.plain_preferences import ROWS, SEQ, SIZES, PlainLoop, batch_of_pairs, sides_of
from tests.support.reference import slice_of_each_rank

PAD, CENTER, LR = 5, 0.3, 0.02
GPT2 = {"family": "gpt2", "config": {**SIZES, "pad_token_id": PAD}}
MIXTURE = {**MIXTRAL, "config": {**MIXTRAL["config"], "pad_token_id": PAD}}


def batch_of(seed: int = 0, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Rows of pairs with margins, some of whose completions end with the padding token."""
    rng = np.random.default_rng(seed)
    batch = batch_of_pairs(seed, rows=rows)
    del batch["reference_logprobs"]
    segments = batch["segment_ids"]
    ends = segments != np.pad(segments[:, 1:], ((0, 0), (0, 1)))
    batch["tokens"][ends & (rng.random(ends.shape) < 0.4)] = PAD
    begins = (segments % 2 == 1) & (batch["positions"] == 0)
    batch["margins"] = np.where(begins, rng.normal(0, 1, begins.shape), 0).astype(np.float32)
    return batch


def with_targets(batch: dict[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Inputs and targets [rows, length], of which the last token of a completion is an input."""
    wide = {n: np.pad(x, ((0, 0), (0, length - x.shape[1]))) for n, x in batch.items()}
    after = {n: np.pad(x[:, 1:], ((0, 0), (0, 1))) for n, x in wide.items()}
    counted = (after["segment_ids"] == wide["segment_ids"]) & (after["mask"] != 0)
    targets = np.where(counted, after["tokens"], -100).astype(np.int32)
    return {**wide, "mask": counted.astype(np.int32), "targets": targets}


def last_tokens(side) -> np.ndarray:
    """[completions]: the last token of each that is not padding."""
    length = (side.mask + side.prompts).sum(1) + 1
    real = (np.arange(SEQ + 1) < length[:, None]) & (side.tokens[:, : SEQ + 1] != PAD)
    return SEQ - real[:, ::-1].argmax(1)


def sides(batch):
    shaped = {**batch, "reference_logprobs": np.zeros((len(batch["tokens"]), SEQ), np.float32)}
    segments = batch["segment_ids"]
    rows, at = np.nonzero((segments % 2 == 1) & (batch["positions"] == 0))
    return *sides_of(shaped), batch["margins"][rows, at]


# -- the formula ----------------------------------------------------------------------------------


class Scores:
    """A model whose score of each token is a parameter."""

    config = SimpleNamespace(pad_token_id=PAD)

    def __init__(self, scores):
        self.scores = scores

    def hidden(self, tokens, *, segment_ids, positions):
        return self.scores[..., None]

    def token_scores(self, hidden):
        return hidden


def in_numpy(scores, batch, center):
    """(loss, gradient by scores, rewards [pairs, 2]) in fp64."""
    sums, rewards = [], []
    gradient = np.zeros_like(scores)
    places = []
    for row, segments in enumerate(batch["segment_ids"]):
        for pair in range(segments.max() // 2):
            at = [np.flatnonzero(segments == 2 * pair + side) for side in (1, 2)]
            last = [where[batch["tokens"][row, where] != PAD][-1] for where in at]
            margin = batch["margins"][row, at[0][0]]
            c, r = (scores[row, i] for i in last)
            sums.append(np.log1p(np.exp(margin - (c - r))) + center * (c + r) ** 2)
            slope = -1 / (1 + np.exp(c - r - margin))
            places.append((row, last, slope, 2 * center * (c + r)))
            rewards.append((c, r))
    for row, last, slope, pull in places:
        gradient[row, last[0]] += (slope + pull) / len(sums)
        gradient[row, last[1]] += (-slope + pull) / len(sums)
    return np.mean(sums), gradient, np.array(rewards)


def result(loss_of, batch, scores):
    """(loss, metrics) of what the objective returns."""
    terms, metrics = loss_of(Scores(scores), batch)
    total, weight = terms["reward"]
    return total / weight, {name: metric.result for name, metric in metrics.items()}


@pytest.mark.parametrize("form", ["tokens", "targets", "in any order"])
def test_loss_gradients_and_metrics_are_the_formulas(form):
    rng = np.random.default_rng(1)
    batch, options = batch_of(), {"center_rewards_coefficient": CENTER}
    length = SEQ + 4
    scores = rng.normal(0, 2, (ROWS, length))
    given = with_targets(batch, length)
    order = rng.permutation(length) if form == "in any order" else np.arange(length)
    if form == "tokens":
        wide = {n: np.pad(x, ((0, 0), (0, length - SEQ - 1))) for n, x in batch.items()}
        given = wide
    given = {name: jnp.asarray(x[:, order]) for name, x in given.items()}
    loss_of = Reward(Reward.Options(**options)).loss
    with jax.enable_x64(True):
        (loss, metrics), gradient = jax.value_and_grad(
            lambda s: result(loss_of, given, s), has_aux=True
        )(jnp.asarray(scores[:, order]))
    wanted, by_scores, rewards = in_numpy(scores, batch, CENTER)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    np.testing.assert_allclose(gradient, by_scores[:, order], rtol=1e-6, atol=1e-9)
    difference = rewards[:, 0] - rewards[:, 1]
    expected = {
        "min_reward": rewards.min(), "mean_reward": rewards.mean(), "max_reward": rewards.max(),
        "accuracy": (difference > 0).mean(), "margin": difference.mean(),
    }  # fmt: skip
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)


def test_pairs_without_weight_and_padding_change_nothing():
    batch, rng = batch_of(), np.random.default_rng(2)
    scores = jnp.asarray(rng.normal(0, 2, (ROWS, SEQ + 1)))
    objective = Reward()
    half = np.arange(ROWS) >= ROWS // 2
    marked = objective.without_weight(batch, half)
    few = {name: x[~half] for name, x in batch.items()}
    found = result(objective.loss, marked, scores)
    wanted = result(objective.loss, few, scores[~half])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted)


def test_a_pair_a_row_is_the_same_as_packed_pairs():
    _, model = make()
    batch = batch_of()
    chosen, rejected, margins = sides(batch)
    tokens = np.stack([chosen.tokens, rejected.tokens], axis=1)
    mask = np.stack([np.pad(s.mask, ((0, 0), (1, 0))) for s in (chosen, rejected)], axis=1)
    apart = {"tokens": tokens, "mask": mask, "margins": np.zeros(tokens.shape, np.float32)}
    apart["margins"][:, 0, 0] = margins
    objective = Reward()
    found, wanted = (jax.jit(lambda b: parsed(objective.loss(model, b)))(b) for b in (apart, batch))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def parsed(returned):
    terms, _ = returned
    return jnp.stack(terms["reward"])


def make():
    built = build("gpt2", None, GPT2["config"], 1)
    return built, built.factory(nnx.Rngs(0))


# -- steps ----------------------------------------------------------------------------------------


class RewardLoop(PlainLoop):
    """Steps in plain Optax: each completion alone, without segments."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.trained["score/kernel"] = self.fixed.pop(
            "score/kernel", self.trained.get("score/kernel")
        )
        self.opt = self.optimizer.init(self.trained)

    def loss(self, trained, batch, _, micro):
        values = self.fixed | trained
        model = self.model(merged(values, self.scale) if self.scale else values)
        chosen, rejected, margins = sides(batch)
        c, r = (
            (model.hidden(s.tokens)[np.arange(len(s.tokens)), last_tokens(s)] @ kernel)[:, 0]
            for s, kernel in ((s, values["score/kernel"]) for s in (chosen, rejected))
        )
        total = jnp.mean(-jax.nn.log_sigmoid(c - r - margins) + CENTER * (c + r) ** 2)
        if self.auxiliary:
            total += sum(self.auxiliary(model, part) for part in micro) / len(micro)
        return total

    def step(self, batch, micro):
        loss, grads = jax.jit(jax.value_and_grad(lambda p: self.loss(p, batch, None, micro)))(
            self.trained
        )
        updates, self.opt = self.optimizer.update(grads, self.opt, self.trained)
        self.trained = optax.apply_updates(self.trained, updates)
        return float(loss), float(optax.tree.norm(grads))


def auxiliary(model, batch):
    context = {n: batch[n] for n in ("segment_ids", "positions")}
    return model.hidden_and_auxiliary(batch["tokens"], **context)[1]


LORA = {"r": 2, "lora_alpha": 3, "init_lora_weights": False}
SETTINGS: dict[str, dict[str, Any]] = {
    f"stage {stage}, accumulation {accumulation}": {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_accumulation_steps": accumulation,
    }
    for stage in range(4)
    for accumulation in (1, 4)
}
SETTINGS |= {
    "tensor 2": {"mesh": {"tensor": 2}, "zero_optimization": {"stage": 1}},
    "pipe 2": {"mesh": {"pipe": 2}, "gradient_accumulation_steps": 2},
    "seq 2": {
        "mesh": {"seq": 2}, "zero_optimization": {"stage": 3},
        "parallel": {"sequence": {"layout": "zigzag"}},
    },
    "expert 2": {"mesh": {"expert": 2}, "model": MIXTURE, "gradient_accumulation_steps": 2},
    "rings": {"parallel": {"data_reduction": "ring"}, "gradient_accumulation_steps": 2},
    "adapters": {"lora": LORA, "zero_optimization": {"stage": 3}},
    "NF4": {"lora": LORA, "model": {**GPT2, "quantize": {"weights": "nf4"}}},
}  # fmt: skip


def compare(setting: str, steps: int) -> None:
    more = {"model": GPT2} | SETTINGS[setting]
    config = {
        "objective": {"type": "reward", "center_rewards_coefficient": CENTER},
        "train_batch_size": ROWS,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "run": {"seed": 1},
        **more,
    }
    engine = jaxspeed.initialize(config=config)
    model = more["model"]
    factory = build(model["family"], model.get("preset"), model["config"], 1).factory
    values = {path: jnp.array(np.asarray(x)) for path, x in engine.parameters.items()}
    of_routers = auxiliary if model is MIXTURE else None
    loop = RewardLoop(factory, values, None, LR, 1.5 * ("lora" in more), of_routers)
    parts, ranks = engine.program.batch.accumulation, engine.program.ranks
    for seed in range(steps):
        batch = batch_of(seed)
        micro = [
            {n: slice_of_each_rank(x, i, parts, ranks) for n, x in batch.items()}
            for i in range(parts)
        ]
        wanted = loop.step(batch, micro)
        metrics = engine.train_batch(with_targets(batch, 36) if "seq" in setting else batch)
        found = float(metrics["loss"]), float(metrics["grad_norm"])
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    trained = engine.parameters
    for path, value in loop.trained.items():
        np.testing.assert_allclose(trained[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


DEFAULT = ("stage 3, accumulation 4", "seq 2")


@pytest.mark.default_cases(*DEFAULT)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_step_equals_plain_optax(setting):
    compare(setting, 1)


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
def test_ten_steps_equal_plain_optax(setting):
    compare(setting, 10)
