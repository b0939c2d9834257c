"""GRPO and RLOO against TRL's trainers on the same rollouts, from advantages to gradients.

The completions were sampled by other weights than those that train, so that ratios are not 1.
"""

from typing import Any

import jax
import numpy as np
import pytest

from jaxspeed.objectives.model_logprobs import model_logprobs
from jaxspeed.objectives.terms_and_metrics import results
from jaxspeed.rewards.advantages import advantages, completion_metrics, row_weights
from jaxspeed.traced_loss.loss import parse_loss
from tests.objectives.preferred import SIZES, Bound, folders
from tests.objectives.test_policy_losses import objective_of

pytestmark = pytest.mark.sampled
GROUPS, SIZE, MOST, IGNORED = 4, 4, 24, -100
END = SIZES["eos_token_id"]
SEQUENCES = {"importance_sampling_level": "sequence"}
AGGREGATED = {"multi_objective_aggregation": "normalize_then_sum"}
CASES: list[dict[str, Any]] = [
    {},
    {"loss_type": "grpo", "beta": 0.2, "epsilon_high": 0.3, "scale_rewards": "batch"},
    {"loss_type": "dr_grpo", "scale_rewards": "none", "temperature": 0.7},
    {"loss_type": "cispo", "epsilon_high": 1.1, "reward_weights": [0.3, 2.0]},
    {"loss_type": "sapo", "beta": 0.1, "use_bias_correction_kl": False, **AGGREGATED},
    {"loss_type": "luspo", **SEQUENCES},
    {"loss_type": "luspo", "beta": 0.1},
    {"loss_type": "grpo", "delta": 1.15, **SEQUENCES},
    {"delta": 1.1, "beta": 0.3, "epsilon": 0.1, **SEQUENCES},
    {"mask_truncated_completions": True, "loss_type": "grpo"},
    {"mask_truncated_completions": True, "beta": 0.1, "temperature": 1.4},
    {"importance_sampling_mode": "token_truncate", "clip_max": 1.2},
    {"importance_sampling_mode": "token_mask", "clip_max": 1.3, "clip_min": 0.8},
    {"importance_sampling_mode": "sequence_truncate", "clip_max": 1.5, "clip_min": 0.7},
    {"importance_sampling_mode": "sequence_mask", "clip_max": 1.5, "beta": 0.1},
]
RLOO: list[dict[str, Any]] = [
    {},
    {"beta": 0.0, "reward_clip_range": [-0.5, 1.5], "temperature": 0.8},
    {"normalize_advantages": True, "reward_weights": [0.5, 2.0], "epsilon": 0.05},
]
RENAMED = {
    name: f"vllm_importance_sampling_{name.removeprefix('importance_sampling_')}"
    for name in ("importance_sampling_mode", "clip_max", "clip_min")
}


def recorded(with_tools: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rows = GROUPS * SIZE
    lengths = np.minimum(rng.geometric(0.15, rows), MOST)
    completions = [[*map(int, rng.integers(3, 400, n))] for n in lengths]
    for i, ids in enumerate(completions):
        if i % 3:
            ids[-1] = END
    rewards = rng.exponential(1, (rows, 2)) - 0.5
    rewards[3], rewards[5, 0], rewards[9:12] = np.nan, np.nan, np.nan
    masks = [[int(j not in (1, 2)) for j in range(n)] for n in lengths]
    logprobs = [[*map(float, rng.normal(-5.6, 0.4, n))] for n in lengths]
    logprobs[2][0] = None
    return {
        "prompts": [
            prompt
            for n in rng.integers(1, 6, GROUPS)
            for prompt in [[*map(int, rng.integers(3, 400, n))]] * SIZE
        ],
        "completions": completions,
        "logprobs": logprobs,
        "masks": masks if with_tools else None,
        "rewards": {
            name: [None if np.isnan(x) else float(x) for x in column]
            for name, column in zip(("exact", "length"), rewards.T)
        },
        "size": SIZE,
    }


def batch_of(rollout: dict[str, Any], masked: bool) -> dict[str, np.ndarray]:
    rows = len(rollout["completions"])
    seq = max(len(p) + len(c) for p, c in zip(rollout["prompts"], rollout["completions"])) - 1
    tokens, targets = np.zeros((rows, seq), np.int32), np.full((rows, seq), IGNORED, np.int32)
    sampled = np.zeros((rows, seq), np.float32)
    for i, (prompt, ids) in enumerate(zip(rollout["prompts"], rollout["completions"])):
        text = np.array([*prompt, *ids])
        tokens[i, : len(text) - 1] = text[:-1]
        here = slice(len(prompt) - 1, len(text) - 1)
        mask = [1] * len(ids) if rollout["masks"] is None else rollout["masks"][i]
        if not (masked and ids[-1] != END):
            targets[i, here] = np.where(mask, ids, IGNORED)
        sampled[i, here] = [np.nan if x is None else x for x in rollout["logprobs"][i]]
    return {"tokens": tokens, "targets": targets, "sampled_logprobs": sampled}


@pytest.fixture(scope="module")
def models(references, tmp_path_factory):
    """(of the sampler, of the model that trains, of the reference): their folders."""
    parts = [
        folders(references, tmp_path_factory.mktemp("a"), scale=scale) for scale in (0.08, 0.01)
    ]
    return parts[0][0], parts[1][0], parts[0][1]


def assert_equal_steps(
    references: Any, models: Any, kind: str, cases: list[dict[str, Any]]
) -> None:
    rollout = recorded(with_tools=kind == "grpo")
    defaults = {"max_completion_length": MOST, "num_iterations": 2}
    gradients = [*range(0, len(cases), 4)]
    theirs = references.call(
        "rollouts.steps",
        kind=kind,
        **dict(zip(("sampler", "model", "reference"), map(str, models))),
        rollout=rollout,
        cases=[
            defaults | {RENAMED.get(name, name): x for name, x in options.items()}
            for options in cases
        ],
        gradients=gradients,
    )
    sampler, model, reference = map(Bound, models)
    values = np.array(
        [[np.nan if x is None else x for x in column] for column in rollout["rewards"].values()]
    ).T
    losses, batches = [], []
    for options in cases:
        objective = objective_of(
            {
                "type": kind,
                "num_generations": SIZE,
                **defaults,
                **options,
                "rewards": ["a:b", "c:d"],
            }
        )
        o = objective.options
        batch = batch_of(rollout, o.mask_truncated_completions)
        counted = batch["targets"] != IGNORED
        batch["old_logprobs"] = np.asarray(
            model_logprobs(sampler(), batch, temperature=o.temperature).of_tokens.logprobs
        )
        if o.beta:
            batch |= objective.reference_logprobs(reference(), batch)
        kl = None
        if kind == "rloo" and o.beta:
            kl = np.sum((batch["old_logprobs"] - batch["reference_logprobs"]) * counted, 1)
        scored = advantages(values, o, kl, list(rollout["rewards"]))
        batch["advantages"] = scored.values
        batch["row_weights"] = row_weights(counted.sum(1), o)
        ended = [ids[-1] == END for ids in rollout["completions"]]
        lengths = [
            sum(m) for m in rollout["masks"] or [[1] * len(c) for c in rollout["completions"]]
        ]
        batches.append(
            (batch, scored.metrics | completion_metrics(np.array(lengths), np.array(ended)))
        )

        def loss(
            parameters: Any, part: slice, objective: Any = objective, batch: Any = batch
        ) -> Any:
            rows = {name: x[part] for name, x in batch.items()}
            parsed = parse_loss(objective.loss(model(parameters), rows))[0].folded(None)
            return parsed.total / parsed.weight, results(parsed.metrics)

        losses.append(loss)
    half = GROUPS * SIZE // 2
    parts = slice(0, half), slice(half, None), slice(None)
    mine = jax.jit(lambda p: [[loss(p, part) for part in parts] for loss in losses])(
        model.parameters
    )
    names = set()
    for options, steps, step, (batch, of_rewards) in zip(cases, mine, theirs, batches, strict=True):
        about = str(options)
        np.testing.assert_allclose(
            batch["advantages"], step["advantages"], rtol=1e-5, atol=1e-5, err_msg=about
        )
        np.testing.assert_allclose(
            [loss for loss, _ in steps[:2]], step["losses"], rtol=1e-5, atol=1e-5, err_msg=about
        )
        for name, wanted in step["metrics"].items():
            if name in of_rewards:
                of_ours = [of_rewards[name]]
            elif name.startswith("sampling/") or (name == "kl" and kind == "rloo"):
                of_ours = [steps[2][1][name]]
            elif name == "num_tokens":
                continue
            else:
                of_ours = [metrics[name] for _, metrics in steps[:2]]
            names.add(name)
            np.testing.assert_allclose(
                of_ours, wanted, rtol=1e-5, atol=1e-5, err_msg=f"{about}: {name}"
            )
    wanted_names = {"entropy", "reward", "frac_reward_zero_std", "kl", "clip_ratio/low_min"}
    if kind == "grpo":
        wanted_names |= {"sampling/importance_sampling_ratio/min", "cispo_clip_ratio"}
    assert wanted_names <= names
    for i in gradients:
        found = jax.jit(jax.grad(lambda p, i=i: sum(losses[i](p, part)[0] for part in parts[:2])))(
            model.parameters
        )
        tensors, expected = model.by_tensor(found), theirs[i]["gradients"]
        assert tensors.keys() == expected.keys()
        for name, x in expected.items():
            error, norm = np.linalg.norm(tensors[name] - x), np.linalg.norm(x)
            assert norm > 1e-6, name
            assert error <= 1e-4 * norm, f"{cases[i]}: {name} differs by {error / norm:.1e}"


def test_grpo_is_theirs(references, models):
    assert_equal_steps(references, models, "grpo", CASES)


def test_rloo_is_theirs(references, models):
    assert_equal_steps(references, models, "rloo", RLOO)
