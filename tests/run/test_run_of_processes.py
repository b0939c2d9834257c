"""The whole command in several processes: trained, killed, continued, evaluated, sampled, exported,
and on other numbers of devices. (By default tests/launch/test_real_runs.py trains and samples.)"""

import json
import random
import re
import signal
import time
from itertools import chain

import numpy as np
import pytest

from jaxspeed.checkpoint import Checkpointer
from jaxspeed.errors import ExitCode
from jaxspeed.metrics import read_records
from jaxspeed.run import train
from tests.run import rewarded, small
from tests.support import processes

PLAIN = {"bf16": {"enabled": False}, "zero_optimization": {"stage": 1}}
MODEL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
MODEL |= {"max_position_embeddings": 16, "dropout": 0.0}


def written(folder, **run):
    """A config for two simulated devices, one for each of two processes."""
    folder.mkdir(exist_ok=True)
    watchdog = {"silence": 20.0, "step": 30.0, "save": 30.0, "compile": 120.0}
    given = {"devices": "cpu:2", "steps": 6, "checkpoint_every": 2, "watchdog": watchdog, **run}
    return small.write(folder, run=given, **PLAIN)


def ran(folder, count, *words, **more):
    group = processes.start(folder, count, "tests.run.process", *words, **more)
    return group, group.codes(500)


def losses(run):
    return {r["step"]: r["loss"] for r in read_records(run / "metrics.jsonl") if "loss" in r}


def kept(config, run):
    """The checkpoint of a run, restored onto this process's eight devices."""
    given = json.loads(config.read_text())
    given["run"]["devices"] = "cpu:8"
    path = config.with_name("of-eight.json")
    path.write_text(json.dumps(given))
    return small.kept(path, run)


@pytest.mark.full
def test_a_run_whose_process_was_killed_ends_bitwise_as_one_undisturbed(tmp_path):
    """And it is evaluated and sampled by processes too: by one of them in words, not by all."""
    config = written(tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    group, codes = ran(tmp_path, 2, "train", config, "--output", whole)
    assert codes == [0, 0], group.said(1)
    faults = ["", "step:kill:3"]
    group, codes = ran(tmp_path, 2, "train", config, "--output", killed, faults=faults)
    assert codes == [ExitCode.PEER, -9], group.said(0)
    assert "jaxspeed: process 1 on " in group.said(0)
    group, codes = ran(tmp_path, 2, "train", config, "--output", killed)
    assert codes == [0, 0], group.said(0)
    small.assert_bitwise_equal(kept(config, whole), kept(config, killed))
    assert losses(whole) == losses(killed)
    words = ("--set", f"run.output={whole}")
    group, codes = ran(tmp_path, 2, "eval", config, *words)
    assert codes == [0, 0] and "held out" in group.said(0)
    assert "held out" not in group.said(1)
    group, codes = ran(tmp_path, 2, "sample", config, "--tokens", "4", *words)
    assert codes == [0, 0], group.said(1)
    exported = small.jaxspeed("checkpoint", "export", whole, tmp_path / "weights")
    assert exported.returncode == 0, exported.stderr
    assert list((tmp_path / "weights").glob("*.safetensors"))


@pytest.mark.full
@pytest.mark.parametrize("errors", ["drop", "error"])
def test_a_reward_that_sleeps_for_ever_is_named_in_a_run_of_processes(tmp_path, errors):
    """The run goes on or ends as told; its first completions are those of a run of one process."""
    objective = {
        "rewards": ["tests.run.rewarded:low", "tests.run.rewarded:sleeps"],
        "reward_timeout": 3.0,
        "reward_error": errors,
    }
    data = {"shuffle": False, "held_out": 0.0}
    run = {"devices": "cpu:2", "steps": 4}
    config = rewarded.write(tmp_path, objective, data=data, run=run)
    group, codes = ran(tmp_path, 2, "train", config, "--output", tmp_path / "two")
    line = "reward sleeps"
    assert line in group.said(0) and "took more than 3 s" in group.said(0)
    if errors == "error":
        assert 0 not in codes
        return
    assert codes == [0, 0], group.said(0)
    small.trained(config, tmp_path / "one", devices="cpu:8", steps=1)
    two, one = (
        [json.loads(x) for x in (tmp_path / n / "completions.jsonl").read_text().splitlines()]
        for n in ("two", "one")
    )
    assert len(two) == 64 and two[:16] == one  # later ones are of other roundings


MOMENTS = {"kill": 20, "stop": 10, "block": 10}
LIMITS = {"silence": 15.0, "start": 120.0, "compile": 120.0, "step": 30.0, "save": 30.0}
BOUND = 60.0  # seconds after the time-out of a section
NAMED = r"jaxspeed: process {} on \S+, in (start|restore|compile|save|evaluate|step)\b.*: "


@pytest.mark.full
@pytest.mark.parametrize("kind", MOMENTS)
def test_failures_at_random_moments_lose_nothing(tmp_path, kind):
    """Any one of 4 processes, in start, compile, step, save: the others end and name it."""
    count = MOMENTS[kind]
    rng = random.Random(kind)
    run = {"devices": "cpu:4", "steps": 4 * count, "checkpoint_every": 2, "watchdog": LIMITS}
    config = written(tmp_path, **run)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert ran(tmp_path, 4, "train", config, "--output", whole)[1] == [0] * 4
    time_out = {"kill": 0.0, "stop": LIMITS["silence"], "block": LIMITS["compile"]}[kind]
    worst = 0.0
    for moment in range(count):
        rank, section = rng.randrange(4), ("step", "save", "compile", "start")[moment % 4]
        step = rng.randint(3 * moment, 3 * moment + 2) if section in ("step", "save") else 0
        fault = f"{section}:{kind}:{step}:{rng.uniform(0, 1):.3f}"
        faults = [fault if i == rank else "" for i in range(4)]
        group = processes.start(
            tmp_path, 4, "tests.run.process", "train", config, "--output", broken, faults=faults
        )
        others = [i for i in range(4) if i != rank]
        try:
            codes = [group.runs[i].wait(300) for i in others]
            last = time.time()
        finally:
            group.end()
        shown = (faults, codes, [group.said(i)[-2000:] for i in range(4)])
        assert "fault:" in group.said(rank), shown
        seconds = last - float(group.said(rank).partition("fault:")[2].split()[0])
        worst = max(worst, seconds)
        assert seconds < time_out + BOUND, shown
        assert set(codes) == {ExitCode.PEER}, shown
        for other in others:
            line = re.search(NAMED.format(rank), group.said(other))
            assert line, shown
        print(f"{fault} in process {rank}: {line[0]} all ended after {seconds:.1f} s", flush=True)
    print(f"{kind}: {count} moments, all ended after {worst:.1f} s at most")
    assert ran(tmp_path, 4, "train", config, "--output", broken)[1] == [0] * 4
    small.assert_bitwise_equal(kept(config, whole), kept(config, broken))
    assert losses(whole) == losses(broken)


@pytest.mark.full
def test_one_run_on_4_then_2_then_8_devices_reads_each_sample_once(tmp_path):
    elastic = {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [1, 2, 4]}
    config = small.write(
        tmp_path,
        run={"checkpoint_every": 100},
        model={"config": MODEL},
        elasticity=elastic,
        **PLAIN,
    )
    given = json.loads(config.read_text())
    del given["train_batch_size"], given["gradient_accumulation_steps"]
    config.write_text(json.dumps(given))
    undisturbed = given["run"] | {"output": str(tmp_path / "whole"), "steps": 9}
    trainer = train(given | {"run": undisturbed})
    batch = trainer.engine.program.batch
    trainer.close()
    steps = 0
    for devices, count in ((4, 2), (2, 1), (8, 2)):
        steps += 3
        words = ("--devices", f"cpu:{devices}", "--set", f"run.steps={steps}")
        ids = {"TEST_IDS": str(tmp_path / f"ids-{steps}-")}
        group, codes = ran(tmp_path, count, "train", config, *words, **ids)
        assert codes == [0] * count, group.said(0)
        files = [tmp_path / f"ids-{steps}-{rank}" for rank in range(count)]
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        for step in range(steps - 3, steps):  # those that were trained; more are read ahead
            read = [ids for at, ids in lines if at == step]
            expected = trainer.corpus.train.sample_ids(step, batch.train)
            assert sorted(chain(*read)) == sorted(expected.tolist())
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert list(found) == list(expected) == list(range(1, 10))
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=2e-6)


@pytest.mark.full
def test_sigterm_to_one_process_saves_on_all_and_the_run_goes_on(tmp_path):
    config = written(tmp_path, steps=400, checkpoint_every=400)
    group = processes.start(tmp_path, 2, "tests.run.process", "train", config)
    records = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (records.exists() and len(records.read_text().splitlines()) > 3):
        assert time.monotonic() < deadline, group.said(0)
        time.sleep(0.05)
    began = time.monotonic()
    group.runs[1].send_signal(signal.SIGTERM)
    codes = group.codes(120)
    print(f"ended {time.monotonic() - began:.1f} s after the signal")
    assert codes == [ExitCode.PREEMPTED] * 2, group.said(0)
    assert "stopped by SIGTERM" in group.said(0)
    saved = [info.step for info in Checkpointer(tmp_path / "run" / "checkpoints").list()]
    assert saved == [max(losses(tmp_path / "run"))]


@pytest.mark.full
def test_a_compilation_that_takes_longer_on_one_process_is_no_failure(tmp_path):
    """Gloo gives up after 30 s."""
    config = written(tmp_path)
    faults = ["", "compile:slow"]
    group, codes = ran(tmp_path, 2, "train", config, faults=faults, TEST_SLOW="40")
    assert codes == [0, 0], group.said(0)
