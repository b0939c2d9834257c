"""What `flops_profiler`, `comms_logger` and the monitors under `initialize` print and write."""

import csv
import logging
import math
import re

import pytest

import jaxspeed
from jaxspeed.metrics import monitors_of
from tests.engine import tiny
from tests.engine.tiny import PAIR


@pytest.fixture(autouse=True)
def information(caplog):
    caplog.set_level(logging.INFO, logger="jaxspeed")


def said(caplog, title):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith(title)]


def trained(steps=3, **config):
    engine = tiny.engine(PAIR, **config)
    for _ in range(steps):
        engine.train_batch(tiny.batch())
    engine.wait()
    return engine


def scaled(text):
    number, prefix = re.fullmatch(r"([\d.]+) ([kMGT]?)\D*", text).groups()
    return float(number) * 1000 ** "_kMGT".index(prefix or "_")


def test_the_named_step_is_profiled_with_the_programs_numbers(caplog, tmp_path):
    engine = trained(flops_profiler={"enabled": True, "profile_step": 2, "module_depth": 1})
    (text,) = said(caplog, "flops profiler:")
    assert text.startswith("flops profiler: step 2\n")
    found = dict(re.findall(r"^  (\D+?) ([\d.]+ ?\S*)(?: .*)?$", text, re.M))
    report = engine.compiled(tiny.batch())
    assert scaled(found["fwd+bwd flops per device, with recomputation"]) == pytest.approx(
        report.flops, rel=1e-2
    )
    parameters = sum(math.prod(row.leaf.shape) for row in engine.program.table)
    assert scaled(found["params of model"]) == pytest.approx(parameters, rel=1e-2)
    assert 0 < scaled(found["fwd flops per device"]) < report.flops
    assert float(found["world size"].split()[0]) == engine.program.mesh.size
    assert text.count("depth ") == 1


def test_the_profile_is_written_to_its_file(caplog, tmp_path):
    path = tmp_path / "a" / "profile.txt"
    trained(1, flops_profiler={"enabled": True, "output_file": str(path), "top_modules": 2})
    assert path.read_text().startswith("flops profiler: step 1\n")
    assert not said(caplog, "flops profiler:")


def test_collectives_of_the_first_step_are_logged(caplog):
    config = {"stage": 2}
    engine = trained(comms_logger={"enabled": True}, **config)
    (text,) = said(caplog, "comms logger:")
    rows = [line.split() for line in text.splitlines()[2:]]
    found = engine.compiled(tiny.batch()).collectives
    assert {row[0] for row in rows} == {one.kind for one in found}
    assert len(rows) < len(found) or len(found) == len({(o.kind, o.bytes, o.axes) for o in found})
    caplog.clear()
    trained(comms_logger={"enabled": True, "verbose": True, "debug": True}, **config)
    (text,) = said(caplog, "comms logger:")
    assert text.count("comm op: ") == len(found)
    assert text.count(" | ") > 2 * len(found)
    caplog.clear()
    only = {"enabled": True, "prof_all": False, "prof_ops": ["all_gather_into_tensor"]}
    trained(comms_logger=only, **config)
    (text,) = said(caplog, "comms logger:")
    assert {line.split()[0] for line in text.splitlines()[2:]} == {"all-gather"}


def test_nothing_is_profiled_that_is_not_asked_for(caplog):
    trained(flops_profiler={"enabled": False, "profile_step": 1}, comms_logger={"enabled": False})
    assert not said(caplog, "flops profiler:")
    assert not said(caplog, "comms logger:")


def test_monitors_are_written_under_initialize(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where they are written without the key
    csv_monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "mine"}
    engine = tiny.engine(PAIR, csv_monitor=csv_monitor)
    losses = [float(engine.train_batch(tiny.batch())["loss"]) for _ in range(3)]
    engine.close()
    with (tmp_path / "mine" / "loss.csv").open(newline="") as lines:
        rows = list(csv.reader(lines))
    assert rows[0] == ["step", "loss"]
    assert [(int(step), pytest.approx(float(loss))) for step, loss in rows[1:]] == list(
        enumerate(losses, 1)
    )


def test_a_monitor_of_tensorboard_writes_event_files(tmp_path):
    pytest.importorskip("tensorboardX")
    config = jaxspeed.Config(tensorboard={"enabled": True, "output_path": str(tmp_path)})
    (sink,) = monitors_of(config, ".")
    sink.write({"step": 1, "loss": 2.0})
    sink.close()
    assert list((tmp_path / "DeepSpeedJobName").glob("events.out.tfevents*"))


def test_auto_is_filled_in_by_initialize(caplog):
    config = tiny.config(bf16={"enabled": "auto"}, gradient_clipping="auto", msamp={"a": 1})
    del config["train_micro_batch_size_per_gpu"]
    auto = {"preset": "hf", "train_micro_batch_size_per_gpu": 1}
    auto["scheduler.params.total_num_steps"] = 5
    engine = jaxspeed.initialize(PAIR, tiny.squared_error, config, auto=auto)
    assert engine.program.batch.train == engine.program.mesh.size
    assert engine.config.gradient_clipping == 1.0
    assert not engine.config.bf16.enabled
    assert 'bf16.enabled: "auto" is false in Hugging Face\'s Trainer' in caplog.text
    assert "scheduler.type: Not set: linear, as Hugging Face's Trainer has it." in caplog.text
    assert "msamp: Ignored, as by DeepSpeed." in caplog.text
