"""Runs that sample completions, score them and train on them."""

import io
import json
import math
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

import jaxspeed
from jaxspeed.config.rollout_options import GrpoOptions
from jaxspeed.engine import Engine
from jaxspeed.errors import DataError, RunError
from jaxspeed.metrics import read_records
from jaxspeed.rewards.scoring import RewardTable
from jaxspeed.run import evaluate_run, show_ending, source_of
from jaxspeed.run.rollouts import evaluate_prompts
from tests.run import rewarded, small

# A rollout serves four steps, in two passes over two of them.
SEVERAL = {"num_iterations": 2, "steps_per_generation": 4, "temperature": 0.7, "top_p": 0.9}


def completions(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def losses(folder):
    return {r["step"]: r["loss"] for r in read_records(folder / "metrics.jsonl") if "loss" in r}


def failing(train_batch, step):
    """An engine's method that fails in this step."""

    def fails(engine, batch):
        if int(engine.state.step) == step - 1:
            raise ValueError(f"step {step}")
        return train_batch(engine, batch)

    return fails


@pytest.mark.parametrize("objective", [SEVERAL, pytest.param({}, marks=pytest.mark.sampled)])
def test_a_run_that_resumes_within_a_rollout_ends_bitwise_as_one_without_a_pause(
    tmp_path, objective, monkeypatch
):
    config = rewarded.write(tmp_path, objective)
    entire, paused = tmp_path / "entire", tmp_path / "paused"
    trainer = small.trained(config, entire)
    if objective:  # the last step of the first rollout fails, whose batch has been read
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="step 4"):
            patch.setattr(Engine, "train_batch", failing(Engine.train_batch, 4))
            small.trained(config, paused, checkpoint_every=6)
    else:
        small.trained(config, paused, steps=3)
    assert len(completions(paused)) == (32 if objective else 48)
    changed = {**objective, "reward_timeout": 30.0, "reward_error": "drop", "reward_workers": 1}
    small.trained(rewarded.write(tmp_path, changed), paused)  # as after a reward that failed
    small.assert_bitwise_equal(small.kept(config, entire), small.kept(config, paused))
    assert completions(entire) == completions(paused)
    assert losses(entire) == losses(paused) and [*losses(entire)] == [*range(1, 7)]

    # What was sampled is what is trained on: the ratio of both is 1, as long as they are the same.
    first = read_records(entire / "metrics.jsonl")[0]
    assert first["sampling/sampling_logp_difference/max"] < 1e-4
    assert first["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-4)
    rows = completions(entire)[: 32 if objective else 16]
    assert {row["step"] for row in rows} == {1}
    rewards = np.array([row["reward"] for row in rows])
    centered = rewards.reshape(-1, 4) - rewards.reshape(-1, 4).mean(1, keepdims=True)
    by_hand = centered / (centered.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose([row["advantage"] for row in rows], by_hand.reshape(-1), rtol=1e-5)
    assert first["reward"] == pytest.approx(rewards.mean())
    assert first["completions/mean_length"] == np.mean([row["tokens"] for row in rows])
    assert all(row["rewards"] == {"early": row["reward"]} and "wanted" in row for row in rows)
    assert first["distance"] > 0 and 0 < first["entropy"] < math.log(257)
    passes = {1: 2, 5: 1} if objective else dict.fromkeys(range(1, 7), 1)
    counted = [
        passes[row["step"]] * (row["tokens"] + len(row["prompt"])) for row in completions(entire)
    ]
    assert trainer.reached.tokens == sum(counted)
    last = {k: x for r in read_records(entire / "metrics.jsonl") for k, x in r.items()}
    show_ending(Console(file=(said := io.StringIO())), trainer, again="")
    line = f"step 6, reward {last['reward']:.3f}, held-out reward {last['eval_reward']:.3f}\n"
    assert line in said.getvalue()


def test_held_out_prompts_of_which_none_has_a_reward_have_no_mean_reward():
    def score(sampled, step):
        return RewardTable(["a", "b"], np.array([[np.nan, 1.0]] * 2 + [[np.nan] * 2]), {}, {}, [])

    options = GrpoOptions(rewards=["m:a", "m:b"])
    program = SimpleNamespace(batch=SimpleNamespace(train=8, accumulation=1))
    completer = SimpleNamespace(
        options=options,
        engine=SimpleNamespace(program=program),
        rewards="there",
        sample=lambda *_, **how: SimpleNamespace(lengths=np.ones(3), ended=np.ones(3, bool)),
        score=score,
    )
    means = evaluate_prompts(completer, SimpleNamespace(samples=3), 0).means
    assert math.isnan(means["rewards/a/mean"]) and means["rewards/b/mean"] == means["reward"] == 1


MIXTURE = {
    "family": "mixtral",
    "config": {**rewarded.MODEL, "num_experts": 4, "num_experts_per_tok": 2},
}
RATIO = "sampling/importance_sampling_ratio/min"
ADAPTER = {"r": 2, "target_modules": "all-linear"}
KINDS = {
    "KL, mixed precision": (
        {"beta": 0.1, "loss_type": "sapo", "mask_truncated_completions": True},
        {"lora": ADAPTER, "bf16": {"enabled": True}},
    ),
    "RLOO": ({"type": "rloo", "normalize_advantages": True}, {"lora": ADAPTER}),
    "two turns": ({"rollout": "tests.run.rewarded:turns", "num_generations_eval": 3}, {}),
    "mixture": ({"num_iterations": 2}, {"model": MIXTURE, "mesh": {"expert": 2}}),
    "tensor": ({"top_k": 20}, {"mesh": {"tensor": 2}}),
    "the temperature alone": ({"top_p": 0.5, "mirror_sampling": False, "num_iterations": 2}, {}),
    "distillation": (
        {"type": "distill", "on_policy": True, "rewards": None, "num_generations": None},
        {"model": MIXTURE},
    ),
}


def teacher(folder, family="llama", **sizes):
    """A folder of a model."""
    config = {
        "model": {"family": family, "config": {**rewarded.MODEL, **sizes}},
        "train_batch_size": 8,
        "run": {"seed": 5},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    engine = jaxspeed.initialize(config=config)
    engine.save_pretrained(folder)
    return str(folder)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_objectives_that_sample_train_and_are_evaluated(tmp_path, kind):
    objective, sections = KINDS[kind]
    if kind == "distillation":
        # The teacher's routers choose for themselves: it has others.
        other = {"family": "mixtral", "num_hidden_layers": 2, "num_experts": 4}
        objective = objective | {"teacher": teacher(tmp_path / "teacher", **other)}
    config = rewarded.write(tmp_path, objective, **sections)
    small.trained(config, tmp_path / "run", steps=2, eval_every=1)
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    count = 16 * 2 // objective.get("num_iterations", 1)
    assert len(losses(tmp_path / "run")) == 2 and len(completions(tmp_path / "run")) == count
    held_out = [record for record in records if "eval_completions/mean_length" in record]
    evaluated = [record for record in records if {"eval_reward", "eval_loss"} & {*record}]
    assert len(evaluated) == 2
    source = source_of(json.loads(config.read_text()))
    again = evaluate_run(source)
    name = "eval_loss" if kind == "distillation" else "eval_reward"
    assert again[name.removeprefix("eval_") if held_out else name] == pytest.approx(
        evaluated[-1][name], rel=1e-5
    )
    if kind == "distillation":
        assert evaluated[-1]["eval_loss"] > 1e-3
    if kind == "two turns":
        assert all(row["tokens"] in range(3, 6) for row in completions(tmp_path / "run"))
        assert 0 <= evaluated[-1]["eval_pass@3"] <= 1
    if kind == "KL, mixed precision":
        first, second = (record["kl"] for record in records if "kl" in record)
        assert first == 0 < second
    if kind == "the temperature alone":  # no ratio of the first pass is clipped
        assert records[0]["clip_ratio/region_mean"] == 0
    if kind == "mixture":  # the second pass has other parameters
        ratios = [record[RATIO] for record in records if RATIO in record]
        assert ratios[0] == pytest.approx(1, abs=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("errors", ["drop", "error"])
def test_a_reward_that_hangs_is_named_and_the_run_goes_on_or_ends_as_told(tmp_path, errors, caplog):
    objective = {
        "rewards": ["tests.run.rewarded:early", "tests.run.rewarded:sleeps"],
        "reward_timeout": 1.0,
        "reward_error": errors,
    }
    config = rewarded.write(tmp_path, objective, data={"shuffle": False, "held_out": 0.0})
    if errors == "error":
        with pytest.raises(RunError, match=r"reward sleeps, .*took more than 1 s"):
            small.trained(config, tmp_path / "run", steps=2)
        return
    small.trained(config, tmp_path / "run", steps=2)
    assert "reward sleeps" in caplog.text
    rows = completions(tmp_path / "run")
    late = [i for i, row in enumerate(rows) if row["rewards"]["sleeps"] is None]
    assert late == [12, 13, 14, 15]


@pytest.mark.parametrize("during", ["rewards", pytest.param("rollout", marks=pytest.mark.sampled)])
def test_a_signal_during_a_rollout_stops_the_run_at_once_with_a_checkpoint(
    tmp_path, during, monkeypatch
):
    """Before the third step; checkpoints are due at other ones."""
    objective = {"rewards": "tests.run.rewarded:waits", "reward_workers": 1}  # a single signal
    config = rewarded.write(tmp_path, objective)
    if during == "rollout":
        rollout, segments = Engine.rollout, []

        def interrupted(engine, *prompts, tick, **how):
            def at_segment():
                segments.append(int(engine.state.step))
                if segments.count(2) == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                tick()

            return rollout(engine, *prompts, tick=at_segment, **how)

        monkeypatch.setattr(Engine, "rollout", interrupted)
    begun = time.monotonic()
    trainer = small.trained(config, tmp_path / "run")
    assert time.monotonic() - begun < 60  # the limit of a call
    assert (trainer.stopped_by, trainer.reached.step) == ("SIGTERM", 2)
    assert {row["step"] for row in completions(tmp_path / "run")} == {1, 2}
    assert trainer.checkpointer.latest().endswith("2")
    assert during == "rewards" or segments.count(2) == 2


def test_a_column_with_the_name_of_an_argument_is_an_error_before_the_run(tmp_path):
    config = rewarded.write(tmp_path, {})
    records = (tmp_path / "prompts.jsonl").read_text().replace("wanted", "completions")
    (tmp_path / "prompts.jsonl").write_text(records)
    with pytest.raises(DataError, match="the column 'completions' has the name of another"):
        small.trained(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
