"""Runs with a parameter server, from the command line: progress, checkpoints, going on."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run import small

WORDS = {"data_reduction": "parameter_server", "servers": 6}
OWN = {"train_batch_size": 8, "zero_optimization": {"stage": 0}}


def written(folder: Path, steps: int, run: dict | None = None, **parallel) -> Path:
    run = {"steps": steps, "eval_every": 4, "eval_batches": 1, **(run or {})}
    path = small.write(folder, run=run)
    config = {**json.loads(path.read_text()), **OWN, "parallel": {**WORDS, **parallel}}
    path.write_text(json.dumps(config))
    return path


def records(folder: Path) -> list[dict]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def trained(config: Path) -> str:
    told = small.jaxspeed("train", config)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


IN_TURN = """
import sys
from jaxspeed.cli.main import main
for config in sys.argv[1:]:
    print("--", flush=True)
    assert main(["train", config]) == 0
"""


def trained_in_turn(*configs: Path) -> list[str]:
    """What each run prints, one after the other in one process of its own."""
    command = [sys.executable, "-c", IN_TURN, *map(str, configs)]
    told = subprocess.run(command, capture_output=True, text=True, env=small.environment())
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout.split("--\n")[1:]


@pytest.mark.sampled
def test_a_run_is_reported_and_resumed(tmp_path):
    few = {"devices": "cpu:3", "sample_tokens": 2}
    four = written(tmp_path, 4, few, servers=1).rename(tmp_path / "four.json")
    begun = time.perf_counter()
    shown, more = trained_in_turn(four, written(tmp_path, 6, few, servers=1))
    first = [one for one in records(tmp_path) if one["step"] <= 4]
    assert_adds_up(first, time.perf_counter() - begun)
    assert "1 server, 2 workers in step; each worker pulls" in shown
    assert "step 4/4" in shown and "held-out" in shown and "a sample" in shown
    # A line may be wrapped, as folders of tests have names of several lengths.
    assert "resumed after step 4 of 6" in " ".join(more.split()) and "step 6/6" in more
    made = [r for r in records(tmp_path) if "loss" in r]
    assert [r["step"] for r in made] == [r["version"] for r in made] == [1, 2, 3, 4, 5, 6]


def assert_adds_up(made: list[dict], elapsed: float) -> None:
    """The phases are all of the wall time, and the steps all of the phases that train."""
    wall = [one for one in made if "wall/total" in one][-1]
    parts = {name: x for name, x in wall.items() if name.startswith("wall/")}
    total = parts.pop("wall/total")
    assert sum(parts.values()) == pytest.approx(total) and 0.05 * elapsed < total < elapsed
    first, *steps = [one for one in made if "loss" in one]
    trained = sum(one["step_seconds"] for one in steps)
    assert trained == pytest.approx(parts["wall/compute"] + parts["wall/data"], rel=0.3, abs=0.05)
    assert first["step_seconds"] < parts["wall/compile"] + parts["wall/compute"]
    for one in steps:
        assert one["samples_per_second"] * one["step_seconds"] == pytest.approx(8)


@pytest.mark.full
def test_a_run_in_step_is_continued_as_if_it_had_not_stopped(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    for folder, steps in ((whole, 6), (parts, 4), (parts, 6)):
        trained(written(folder, steps))
    config = written(whole, 6)
    kept = [small.kept(config, folder / "run") for folder in (whole, parts)]
    small.assert_bitwise_equal(*kept)


@pytest.mark.full
def test_an_asynchronous_run_is_resumed_and_reports_staleness(tmp_path):
    for steps in (4, 6):
        shown = trained(written(tmp_path, steps, max_staleness=2, on_stale="drop"))
    assert "at most 2 versions stale" in shown
    made = [r for r in records(tmp_path) if "loss" in r]
    assert [r["step"] for r in made] == [1, 2, 3, 4, 5, 6]
    assert all({"accepted", "dropped", "staleness_mean"} <= set(r) for r in made)


@pytest.mark.full
def test_plan_and_check_know_servers(tmp_path):
    config = written(tmp_path, 4)
    plan = json.loads(small.jaxspeed("plan", config, "--json").stdout)
    assert plan["devices"]["count"] == 8 and plan["batch"]["train"] == 8
    assert (plan["server"]["servers"], plan["server"]["workers"]) == (6, 2)
    assert 0 < plan["server"]["bytes_down"] <= plan["server"]["bytes_up"]
    told = small.jaxspeed("check", config)
    assert told.returncode == 0 and "agrees with the step on one device" in told.stdout
