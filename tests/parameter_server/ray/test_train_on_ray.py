"""`jaxspeed train CONFIG --engine ray`: a run of real processes, some of which are killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxspeed
from jaxspeed.cli import main
from jaxspeed.config import load_config
from jaxspeed.metrics import read_records
from jaxspeed.run import source_of
from tests.run import small

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "configs" / "tiny.yaml"
ENOUGH = 400  # seconds for a child
BATCH = 8


def settings(folder, **more):
    """Of the tiny config: fewer steps, a corpus that is read at once, workers and servers."""
    given = {
        "run.steps": 1000,
        "run.checkpoint_every": 4,
        "run.sample_tokens": 0,
        "train_batch_size": BATCH,
        "data.source": "text",
        "data.path": folder / "corpus.txt",
        "mesh.data": 2,
        "zero_optimization.stage": 0,
        **more,
    }
    return [part for key, value in given.items() for part in ("--set", f"{key}={value}")]


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    lines = (" ".join(rng.choice(list("abcdef"), 60)) for _ in range(2000))
    (tmp_path / "corpus.txt").write_text("\n".join(lines))
    return tmp_path


def started(folder, name):
    words = ("train", TINY, "--engine", "ray", "--output", folder / name, "--json")
    return subprocess.Popen(
        small.command(*words, *settings(folder, **{"parallel.servers": 2})),
        env=small.environment() | {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(200 * 2**20)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes(child, kind):
    """The child's processes of this kind; all, where none is said."""
    shown = subprocess.run(["ps", "-eo", "pid,sid,args"], capture_output=True, text=True).stdout
    rows = (line.split(None, 2) for line in shown.splitlines()[1:])
    found = {int(pid): words for pid, session, words in rows if int(session) == child.pid}
    return [pid for pid, words in found.items() if words.startswith(f"ray::{kind}")]


def wait_for(child, what):
    deadline = time.monotonic() + ENOUGH
    while not what():
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def losses(folder):
    records = read_records(folder / "metrics.jsonl")
    return [(one["step"], one["loss"]) for one in records if "loss" in one]


def done(folder):
    return len(losses(folder)) if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.full
def test_the_tiny_config_trains_though_processes_are_killed_until_ctrl_c(folder):
    run = folder / "ray"
    child = started(folder, "ray")
    wait_for(child, lambda: done(run) >= 1)
    workers, servers = processes(child, "WorkerActor"), processes(child, "ServerActor")
    assert len(workers) == len(servers) == 2
    os.kill(workers[1], signal.SIGKILL)
    wait_for(child, (run / "checkpoints" / "step-00000004" / "manifest.json").exists)
    os.kill(servers[1], signal.SIGKILL)
    wait_for(child, lambda: done(run) >= 10)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal sends it, to all of them
    out, errors = child.communicate(timeout=ENOUGH)
    assert child.returncode == 128 + signal.SIGINT, errors
    printed = json.loads(out)  # and nothing else was printed
    assert printed["stopped_by"] == "SIGINT" and printed["steps"] == done(run)
    said = " ".join(errors.split())
    for phase in ("starting workers and servers", "compiling the step"):
        assert re.search(rf"{phase}: \d+\.\d s", said), phase
    assert re.search(r"worker [01] died", said) and "a server died" in said
    assert (
        said.count("; restarting it and repeating its task")
        == said.count("; the run resumes after")
        == 1
    )
    assert processes(child, "") == []

    # Data parallelism on two devices of this process, in which nobody died.
    batches = source_of(load_config(TINY, settings(folder, **{"mesh.data": -1})[1::2])).corpus()
    config = load_config(TINY, settings(folder)[1::2])
    engine = jaxspeed.initialize(config=config, devices=jax.devices()[:2])
    expected = [
        float(engine.train_batch(batches.train.batch(step, BATCH))["loss"])
        for step in range(printed["steps"])
    ]
    steps, found = zip(*losses(run), strict=True)
    assert list(steps) == list(range(1, printed["steps"] + 1))  # what was done twice is there once
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    parameters = {path: np.asarray(x) for path, x in engine.parameters.items()}
    engine.load_checkpoint(run / "checkpoints")
    for path, value in engine.parameters.items():
        np.testing.assert_allclose(value, parameters[path], atol=1e-3, err_msg=path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ray-address", "127.0.0.1:1"], "needs --engine ray"),
        (["--engine", "ray", "--ray-address", "somewhere"], "needs HOST:PORT"),
        (["--engine", "ray", "--ray-address", "127.0.0.1:1"], "nothing answers there"),
        (
            ["--engine", "ray", "--set", "mesh.data=-1", "--devices", "cpu"],
            "mesh.data: found nothing",
        ),
        (["--engine", "ray", "--set", "parallel.worker_pace=[1.0, 2.0]"], "its own pace"),
    ],
)
def test_unsupported_configs_are_refused_before_anything_starts(folder, capsys, words, message):
    assert main(["train", str(TINY), *settings(folder), *words]) in (1, 2)
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_without_ray_the_extra_is_named(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # an import of it fails
    assert main(["train", str(TINY), *settings(folder), "--engine", "ray"]) == 2
    assert 'pip install "jaxspeed[ray]"' in capsys.readouterr().err
