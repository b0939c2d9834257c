"""The tiny config with a parameter server: stale gradients still train it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspeed import Config
from jaxspeed.run import source_of

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny.yaml"
STEPS = 100
SERVERS = ("parallel.data_reduction=parameter_server", "parallel.servers=4")
# A version is of a quarter of the batch, so there are four times as many, at half the rate.
OWN_PACE = (
    "parallel.max_staleness=2",
    "optimizer.params.lr=0.0025",
    f"scheduler.params.total_num_steps={4 * STEPS}",
    "scheduler.params.warmup_num_steps=80",
)


def held_out_loss(*words: str) -> float:
    overrides = [f"run.steps={STEPS}", "zero_optimization.stage=0", *SERVERS, *words]
    source = source_of(Config.load(TINY, overrides))
    corpus, engine = source.corpus(), source.engine()
    for step in range(STEPS):
        engine.train_batch(corpus.train.batch(step, 32))
    held_out: Any = corpus.held_out
    return float(np.mean([engine.eval_batch(held_out.batch(i, 32))["loss"] for i in range(8)]))


@pytest.mark.full
def test_the_tiny_config_at_its_own_pace_comes_to_within_5_percent_of_in_step():
    in_step, apart = held_out_loss(), held_out_loss(*OWN_PACE)
    assert apart <= 1.05 * in_step < 2.5
