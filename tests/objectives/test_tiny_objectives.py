"""The small configs of preferences, rewards and distillation learn what they are for."""

import json
from pathlib import Path

import pytest

import jaxspeed
from jaxspeed.run import train

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def held_out(name, metric, folder, **run):
    """The values of a metric in the evaluations of a run of a config."""
    config = jaxspeed.Config.load(CONFIGS / name).given
    config["run"] |= {"output": str(folder), "checkpoint_every": 1000, **run}
    train(config)
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record[metric] for record in records if metric in record]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "metric"),
    [("dpo_tiny.yaml", "eval_rewards/accuracies"), ("reward_tiny.yaml", "eval_accuracy")],
)
def test_most_pairs_that_are_held_out_are_in_order(name, metric, seed, tmp_path):
    accuracies = held_out(name, metric, tmp_path, seed=seed)
    assert accuracies[-1] > 0.9, accuracies


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_a_model_learns_to_count_on_from_rewards(seed, tmp_path):
    rewards = held_out("grpo_tiny.yaml", "eval_reward", tmp_path, seed=seed)
    assert rewards[-1] > 0.8, rewards


@pytest.mark.full
def test_a_student_comes_nearer_to_its_teacher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the config names the teacher's folder in runs/
    config = jaxspeed.Config.load(CONFIGS / "tiny.yaml").given
    config["run"] |= {"steps": 40, "eval_every": 100, "sample_tokens": 0}
    trainer = train(config)
    trainer.engine.save_pretrained("runs/tiny_model")
    divergences = held_out(
        "distill_tiny.yaml", "eval_divergence", tmp_path / "student", steps=60, eval_every=20
    )
    assert divergences[0] > divergences[1] > divergences[2] > 0, divergences
