"""A run that is killed, wherever it is, and started again ends as if it had never been."""

import json
import random
import signal
import subprocess
import time

import numpy as np
import pytest

from jaxspeed.cli.main import main
from jaxspeed.metrics import read_records
from tests.interop import folders
from tests.run import small

ENOUGH = 240  # seconds for a child


def count(records):
    return len(records.read_bytes().splitlines()) if records.exists() else 0


def wait_for_steps(child, records, more):
    """Until the child has done so many steps of its own."""
    before, deadline = count(records), time.monotonic() + ENOUGH
    while child.poll() is None and count(records) < before + more:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_a_save(child, checkpoints):
    while child.poll() is None and not any(checkpoints.glob("*.writing")):
        time.sleep(0.001)


# The log-probabilities of its reference are stored with the run.
PREFERENCES = {"objective": {"type": "dpo"}, "data": {"source": "synthetic", "path": None}}

# Its state is packed.
OWNERS = {"optimizer": {"type": "SOAP", "params": {"precondition_frequency": 3}}}

# A rollout serves four steps, and checkpoints are within it.
REWARDS = {
    "objective": {
        "type": "grpo",
        "rewards": "tests.run.rewarded:low",
        "num_generations": 4,
        "max_completion_length": 6,
        "num_iterations": 2,
        "steps_per_generation": 4,
    },
    "data": {"source": "synthetic", "path": None},
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kills", "more"),
    [
        (1, {}),
        pytest.param(20, {}, marks=pytest.mark.full),
        pytest.param(1, PREFERENCES, marks=pytest.mark.full),
        pytest.param(1, OWNERS, marks=pytest.mark.full),
        pytest.param(1, REWARDS, marks=pytest.mark.full),
    ],
)
def test_a_run_killed_at_random_moments_ends_bitwise_as_one_never_killed(tmp_path, kills, more):
    # A save every second step: most kills fall into one, the first for sure.
    steps = 20 if kills == 1 else 50 * kills
    config = small.write(tmp_path, run={"steps": steps, "checkpoint_every": 2, "keep": 2}, **more)
    small.trained(config, tmp_path / "whole")
    rng, in_a_save = random.Random(kills), 0
    killed = tmp_path / "killed"
    for kill in range(kills):
        child = small.started(config, killed)
        if kill % 4 == 1:  # while it starts, or restores
            time.sleep(rng.uniform(0, 5))
        else:
            wait_for_steps(child, killed / "metrics.jsonl", rng.randint(1, 20))
            if kill == 0:
                wait_for_a_save(child, killed / "checkpoints")
            else:
                time.sleep(rng.uniform(0, 0.3))
        child.kill()
        _, said = child.communicate()
        assert child.returncode == -signal.SIGKILL, said
        in_a_save += any((killed / "checkpoints").glob("*.writing"))
    assert in_a_save and (killed / "computed").exists() == (more is PREFERENCES)
    small.trained(config, killed)
    small.assert_bitwise_equal(small.kept(config, tmp_path / "whole"), small.kept(config, killed))
    seen, never = (
        [(r["step"], r["loss"]) for r in read_records(run / "metrics.jsonl") if "loss" in r]
        for run in (killed, tmp_path / "whole")
    )
    assert seen == never


def with_adapters(config, base):
    """A config of adapters of a folder's model, whose checkpoints have them alone."""
    folders.folder(base, folders.LLAMA | {"vocab_size": 256}, folders.llama_tensors())
    given = json.loads(config.read_text())
    given["model"] = {"pretrained": str(base), "quantize": {"weights": "nf4"}}
    given["data"]["seq_len"] = 16
    given["lora"] = {"r": 2, "init_lora_weights": False}
    config.write_text(json.dumps(given))


@pytest.mark.full
@pytest.mark.parametrize("lora", [True, False])
def test_8_bit_moments_of_a_run_that_was_killed_are_bitwise_those_of_one_never_killed(
    tmp_path, monkeypatch, lora
):
    optimizer = {"type": "AdamW8bit", "params": {"lr": 0.003, "min_8bit_size": 1 if lora else 512}}
    changes = {"run": {"steps": 5, "checkpoint_every": 3}, "data": {"held_out": 0}}
    config = small.write(tmp_path, optimizer=optimizer, **changes)
    if lora:
        monkeypatch.setattr(folders, "VOCAB", 256)
        with_adapters(config, tmp_path / "base")
    killed = tmp_path / "killed"
    child = small.started(config, killed)
    deadline = time.monotonic() + 2 * ENOUGH  # two programs of a quantized state compile
    try:
        while child.poll() is None and not (killed / "checkpoints" / "step-00000003").exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        child.kill()
    _, said = child.communicate()
    assert child.returncode == -signal.SIGKILL, said
    assert not (killed / "checkpoints" / "step-00000005").exists()
    small.trained(config, killed)
    small.trained(config, tmp_path / "never")
    ends = [small.kept(config, folder) for folder in (killed, tmp_path / "never")]
    small.assert_bitwise_equal(*ends)
    assert any(x.dtype == np.uint8 and ".opt" in path for path, x in ends[0].items())
    assert int(ends[0][".step"]) == 5
    leaves = json.loads((killed / "checkpoints" / "step-00000005" / "checkpoint.json").read_text())
    assert bool(leaves["excluded"]) == lora


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGTERM, 75),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.full),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.full),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_shows_how_to_resume(tmp_path, sent, code, capsys):
    config = small.write(tmp_path, run={"steps": 4000, "checkpoint_every": 4000})
    child = subprocess.Popen(
        small.command("train", config),
        env=small.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    records = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + ENOUGH
    while not (records.exists() and len(records.read_text().splitlines()) > 5):
        assert child.poll() is None and time.monotonic() < deadline, child.stdout.read()
        time.sleep(0.1)
    child.send_signal(sent)
    said, _ = child.communicate(timeout=ENOUGH)
    assert child.returncode == code, said
    assert f"stopped by {sent.name}" in said and "Traceback" not in said
    assert main(["checkpoint", "list", str(tmp_path / "run")]) == 0
    listed = capsys.readouterr().out
    steps = [r["step"] for r in read_records(records) if "loss" in r]
    assert f"step-{steps[-1]:08}" in listed
    assert steps == list(range(1, steps[-1] + 1))
    assert f"jaxspeed train {tmp_path / 'run'}" in " ".join(said.split())
