"""configs/dpo_tiny.yaml learns which completion of a pair is chosen."""

import json
from pathlib import Path

import pytest

import jaxspeed
from jaxspeed.run import train

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "dpo_tiny.yaml"


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_most_pairs_that_are_held_out_are_in_order(seed, tmp_path):
    config = jaxspeed.Config.load(CONFIG).given
    config["run"] |= {"seed": seed, "output": str(tmp_path), "checkpoint_every": 1000}
    train(config)
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    held_out = [r["eval_rewards/accuracies"] for r in records if "eval_loss" in r]
    assert held_out[-1] > 0.9, held_out
