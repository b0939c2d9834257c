"""Keys of objectives that sample completions: what cannot be is one problem each."""

import pytest

from jaxspeed.config import Config
from jaxspeed.errors import ConfigError

pytestmark = pytest.mark.fast
GRPO = {"type": "grpo", "rewards": "module:reward"}
DISTILL = {"type": "distill", "teacher": "folder", "on_policy": True}


def config(objective, **more):
    return {
        "model": {"family": "gpt2", "preset": "tiny"},
        "objective": objective,
        "train_batch_size": 16,
        "optimizer": {"type": "SGD"},
        **more,
    }


def accumulation(steps):
    return {"gradient_accumulation_steps": steps}


REFUSED = {
    "no reward": (
        {"rewards": []}, {},
        "objective.rewards: found the list []. Needs a list of at least 1 item.",
    ),
    "TRL's name of rewards": (
        {"reward_funcs": "a:b"}, {},
        'objective.reward_funcs: found an unknown key, set to "a:b". Did you mean "rewards"?',
    ),
    "TRL's name of rollouts": ({"rollout_func": "a:b"}, {}, 'Did you mean "rollout"?'),
    "TRL's batch of a rollout": (
        {"generation_batch_size": 8}, {}, "Write train_batch_size, which counts completions.",
    ),
    "another engine": ({"use_vllm": True}, {}, "The model that trains samples itself"),
    "a limit of prompts": ({"max_prompt_length": 8}, {}, "Prompts longer than data.seq_len are"),
    "a group of 1": ({"num_generations": 1}, {}, "objective.num_generations"),
    "a group that does not divide": (
        {"num_generations": 6}, {},
        "train_batch_size: found 16, of 16 completions at once, with num_generations 6. It counts "
        "completions, and those of a prompt are sampled together: needs 12 or 18, or a "
        "num_generations that divides 16.",
    ),
    "a group that does not divide a rollout": (
        {"num_generations": 12, "steps_per_generation": 4}, accumulation(2),
        "train_batch_size: found 16, of 32 completions at once, with num_generations 12.",
    ),
    "a part of a step at once": (
        {"steps_per_generation": 3}, accumulation(2),
        "objective.steps_per_generation: found 3 with gradient_accumulation_steps 2. It counts "
        "micro-batches, and a step has 2: needs a multiple of these, such as 2.",
    ),
    "an empty stop string": ({"stop": ["a", ""]}, {}, "objective.stop.1"),
    "vespo": ({"loss_type": "vespo"}, {}, "vespo is not computed here"),
    "bnpo": ({"loss_type": "bnpo"}, {}, "dapo, which it is on one device"),
    "gspo": ({"loss_type": "gspo"}, {}, 'importance_sampling_level: "sequence"'),
    "quantiles": ({"top_entropy_quantile": 0.2}, {}, "objective.top_entropy_quantile"),
    "entropy": ({"entropy_coef": 0.1}, {}, "objective.entropy_coef"),
    "off-policy mask": (
        {"off_policy_mask_threshold": 0.5}, {}, "objective.off_policy_mask_threshold",
    ),
    "penalty": ({"repetition_penalty": 1.1}, {}, "objective.repetition_penalty"),
    "cispo without its bound": (
        {"loss_type": "cispo"}, {}, "objective.epsilon_high: found nothing with cispo. Needs",
    ),
    "delta where nothing is clipped": (
        {"loss_type": "sapo", "delta": 2.0}, {}, "objective.delta: found 2.0 without it. It acts",
    ),
    "a scale that is not read": (
        {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"}, {},
        "objective.scale_rewards",
    ),
    "a bound of no correction": ({"clip_max": 2.0}, {}, "objective.clip_max"),
    "crossed bounds": (
        {"importance_sampling_mode": "token_mask", "clip_min": 4.0}, {}, "objective.clip_min",
    ),
    "a reference without beta": (
        {"reference_model": "folder"}, {}, "objective.reference_model: found a reference with beta",
    ),
    "rings": (
        {}, {"parallel": {"data_reduction": "ring"}},
        'parallel.data_reduction: found "ring" with objective.type "grpo". Completions are sampled',
    ),
    "servers": (
        {}, {"parallel": {"data_reduction": "parameter_server"}},
        'parallel.data_reduction: found "parameter_server" with objective.type "grpo"',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(case):
    keys, more, message = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        Config.load(config({**GRPO, **keys}, **more))
    assert message in str(refused.value) and "1 problem in" in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        ({}, {}),
        ({"num_generations": 12, "steps_per_generation": 6}, accumulation(2)),
        ({"num_generations": 16, "loss_type": "cispo", "epsilon_high": 5.0}, {}),
        ({"top_entropy_quantile": 1.0, "entropy_coef": 0.0, "repetition_penalty": 1.0}, {}),
        ({"importance_sampling_mode": "token_mask", "clip_min": 0.5, "clip_max": 2.0}, {}),
    ],
)
def test_what_can_be(keys, more):
    Config.load(config({**GRPO, **keys}, **more))


def test_keys_of_sampling_are_of_on_policy_distillation():
    Config.load(config({**DISTILL, "max_completion_length": 8, "top_p": 0.8}))
    Config.load(config({**DISTILL, "on_policy": False, "temperature": 2.0}))
    with pytest.raises(ConfigError, match=r"objective\.top_p: found 0\.8 without it"):
        Config.load(config({**DISTILL, "on_policy": False, "top_p": 0.8}))
    with pytest.raises(ConfigError, match=r"objective\.rewards"):
        Config.load(config({**DISTILL, "rewards": "module:reward"}))
