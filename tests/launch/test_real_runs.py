"""A run in several processes on this host: as in one process, and after failures."""

import json
import os
import signal
import subprocess
import time

import pytest

from jaxspeed.errors import ExitCode
from jaxspeed.metrics import read_records
from jaxspeed.run import train
from tests.run import small

STEPS = 12


def command(config, *options, output, processes=2, devices=4):
    launch = [*small.command("launch", "--processes", processes, "--no-core-binding")]
    launch += ["--devices-per-process", devices, *options]
    return [*map(str, launch), "--", "train", str(config), "--output", str(output)]


def launched(*words, **more):
    done = subprocess.run(
        command(*words, **more), capture_output=True, text=True, env=environment(), timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def environment():
    return {k: v for k, v in small.environment().items() if k != "JAX_NUM_CPU_DEVICES"}


def losses(folder):
    return [r["loss"] for r in read_records(folder / "metrics.jsonl") if "loss" in r]


def wait_for_steps(child, folder, more):
    records, deadline = folder / "metrics.jsonl", time.monotonic() + 300
    while not records.exists() or len(records.read_bytes().splitlines()) < more:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return small.write(folder, run={"steps": STEPS, "checkpoint_every": 3}, bf16={"enabled": False})


def in_one_process(config, folder):
    given = json.loads(config.read_text())
    train(given | {"run": given["run"] | {"output": str(folder)}}).folder.close()
    return losses(folder)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A run of four steps without a held-out part: of its three programs one is compiled less."""
    changes = {"run": {"steps": 4, "checkpoint_every": 4}, "data": {"held_out": 0.0}}
    return small.write(tmp_path_factory.mktemp("few"), bf16={"enabled": False}, **changes)


@pytest.fixture(scope="module")
def two(few):
    """(its folder, what was printed) of that run in two processes."""
    folder = few.parent / "two"
    return folder, launched(few, output=folder).stdout


@pytest.mark.sampled
def test_two_processes_train_as_one(few, two):
    folder, printed = two
    assert "8 devices simulated on this CPU, 2 processes" in printed
    assert len(losses(folder)) == 4
    assert losses(folder) == pytest.approx(in_one_process(few, few.parent / "one"), abs=1e-6)


@pytest.mark.sampled
def test_processes_sample_the_run_that_they_trained(few, two):
    launch = small.command("launch", "--processes", "2", "--devices-per-process", "4")
    words = ("sample", few, "--tokens", "2", "--set", f"run.output={two[0]}")
    done = subprocess.run(
        [*launch, "--", *map(str, words)], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.full
def test_processes_train_as_one_for_many_steps(config):
    one = in_one_process(config, config.parent / "one")
    assert len(one) == STEPS
    for processes, devices in ((2, 4), (4, 2)):
        folder = config.parent / f"of-{processes}"
        launched(config, output=folder, processes=processes, devices=devices)
        assert losses(folder) == pytest.approx(one, abs=1e-6)


@pytest.mark.full
def test_a_checkpoint_of_two_processes_is_evaluated_sampled_and_exported(config, tmp_path):
    run = tmp_path / "run"
    launched(config, output=run)
    launch = small.command("launch", "--processes", "2", "--devices-per-process", "4", "--")
    last, results = ["--set", f"run.output={run}"], {}
    for words in (["eval", config, "--json"], ["sample", config, "--tokens", "4", "--json"]):
        done = subprocess.run(
            [*launch, *map(str, words), *last], capture_output=True, text=True, env=environment()
        )
        assert done.returncode == 0, done.stderr[-4000:]
        results |= json.loads(done.stdout[done.stdout.index("{") :])
    (held_out,) = [r["eval_loss"] for r in read_records(run / "metrics.jsonl") if "eval_loss" in r]
    assert results["eval_loss"] == pytest.approx(held_out, abs=1e-6)
    assert len(results["text"]) >= 4
    (tmp_path / "a.txt").write_text("a file that no batch size divides")
    evaluated = ("eval", config, "--json", "--data", tmp_path / "a.txt", *last)
    found = []
    for start in (launch, small.command()):
        done = subprocess.run(
            [*start, *map(str, evaluated)], capture_output=True, text=True, env=environment()
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(json.loads(done.stdout[done.stdout.index("{") :]))
    assert found[0]["tokens"] == found[1]["tokens"] == len("a file that no batch size divides")
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], abs=1e-6)
    done = small.jaxspeed("checkpoint", "export", run, tmp_path / "weights")
    assert done.returncode == 0 and list((tmp_path / "weights").glob("*.safetensors"))


@pytest.mark.full
def test_a_run_whose_process_is_killed_restarts_and_ends_bitwise_as_one_never_killed(config):
    undisturbed, killed = (config.parent / name for name in ("undisturbed", "killed"))
    launched(config, output=undisturbed)
    words = command(config, "--max-restarts", 2, "--logs", config.parent / "logs", output=killed)
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment())
    wait_for_steps(child, killed, 5)
    (rank_1,) = (pid for pid in children(child.pid) if b"JAX_PROCESS_ID=1" in variables(pid))
    os.kill(rank_1, signal.SIGKILL)
    _, err = child.communicate(timeout=600)
    assert child.returncode == 0, err[-4000:]
    assert "rank 1 of 2" in err and "was killed by SIGKILL" in err and "restart 1 of" in err
    small.assert_bitwise_equal(small.kept(config, undisturbed), small.kept(config, killed))
    assert losses(killed) == losses(undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_stop_saves_in_all_processes(config, number, tmp_path):
    words = command(config, "--max-restarts", 2, output=tmp_path / "run")
    words += ["--set", "run.steps=4000", "--set", "run.checkpoint_every=4000"]
    child = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    wait_for_steps(child, tmp_path / "run", 3)
    child.send_signal(number)
    out, err = child.communicate(timeout=600)
    assert child.returncode in (ExitCode.PREEMPTED, 128 + number), err[-4000:]
    assert "everything is saved" in out and "restart" not in err
    assert f"jaxspeed launch: stopped by {number.name}" in err.splitlines()[-1]


@pytest.mark.full
def test_a_config_error_is_one_message_of_each_rank_and_no_restart(config, tmp_path):
    words = command(config, "--max-restarts", 2, output=tmp_path / "run")
    done = subprocess.run(
        [*words, "--set", "run.stepz=1"], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == ExitCode.CONFIG
    assert done.stderr.count("Did you mean") <= 3 and "Traceback" not in done.stderr
    assert "(a config or usage error)" in done.stderr.splitlines()[-1]


def children(pid):
    return [int(p) for p in open(f"/proc/{pid}/task/{pid}/children").read().split()]


def variables(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().split(b"\0")
