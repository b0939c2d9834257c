"""The configs of this repository and the README's example run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxspeed
from tests.engine.tiny import Listed, batch, squared_error

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {path.name: path for path in sorted((ROOT / "configs").iterdir())}


def falls(engine, data, steps):
    losses = [float(engine.train_batch(data)["loss"]) for _ in range(steps)]
    return np.isfinite(losses).all() and losses[-1] < losses[0]


def test_the_tiny_gpt2_trains_under_zero_3():
    engine = jaxspeed.initialize(config=CONFIGS["gpt2_tiny_zero3.json"])
    tokens = np.random.default_rng(0).integers(0, 256, (16, 33)).astype(np.int32)
    assert engine.placements.stage == 3
    assert falls(engine, {"tokens": tokens}, 10)


def test_a_plain_deepspeed_config_trains_ones_own_model():
    engine = jaxspeed.initialize(Listed, squared_error, CONFIGS["ds_config.json"])
    assert falls(engine, batch(32), 10)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_key_of_a_config_is_refused(name):
    rows = jaxspeed.explain_config(CONFIGS[name])
    assert rows and all(row.verdict != "refused" for row in rows)


def test_the_readmes_example_runs_as_it_stands(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = tmp_path / "train.py"
    program.write_text(blocks[0])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_P", "XLA_"))}
    child = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**inherited, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert child.returncode == 0, child.stderr
    shown = (ROOT / "README.md").read_text()
    for line in child.stdout.splitlines():
        if "data@" in line:  # the placement table is quoted as it is printed
            assert line.rstrip() in shown, line
    assert "agrees with the step on one device" in child.stdout
