"""Records on disk: read back as written, and as one run however often it was stopped."""

import csv
import importlib.machinery
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxspeed.config import Config
from jaxspeed.errors import ConfigError, RunError
from jaxspeed.metrics import CsvSink, JsonlSink, TensorBoardSink, read_records, sinks_of

pytestmark = pytest.mark.fast


def loss(step):
    return 5.0 / step


def written(sink, steps):
    for step in steps:
        sink.write({"step": step, "loss": loss(step)})
    sink.close()


def csv_rows(path):
    with path.open(newline="") as lines:
        return list(csv.reader(lines))


# -- JSONL --------------------------------------------------------------------------------------


def test_a_record_is_read_back_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    record = {"step": 3, "loss": 0.1 + 0.2, "mfu": None, "mfu_formula": "6 N é", "skipped": True}
    sink = JsonlSink(path)
    sink.write(record)
    assert read_records(path) == [record]  # before it is closed: each line is flushed
    step, data = jax.device_put((np.int32(4), np.float32(1)))
    sink.write({"step": step, "loss": np.float32(0.5), "wall": {"data": data}})
    sink.close()
    assert read_records(path)[1] == {"step": 4, "loss": 0.5, "wall": {"data": 1.0}}


def test_every_line_is_json_even_where_a_loss_is_not_finite(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    sink.close()

    def refuse(constant):
        pytest.fail(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = read_records(path)
    assert math.isnan(record["loss"])
    assert (record["grad_norm"], record["lr"]) == (math.inf, -math.inf)


def test_an_array_is_not_a_record_s_value(tmp_path):
    with pytest.raises(TypeError, match="a record holds"):
        JsonlSink(tmp_path / "metrics.jsonl").write({"step": 1, "loss": np.ones(2)})


stops = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40), st.integers(0, 6)), max_size=4)


@given(stops)
@example([(7, 0, 0), (12, 0, 0), (12, 0, 0)])
def test_a_run_that_was_stopped_anywhere_reads_as_one(tmp_path_factory, stops):
    """Each stop: steps written, bytes lost from the end, steps since the last checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    path, done = folder / "metrics.jsonl", 0
    for more, lost, behind in stops:
        written(JsonlSink(path, done + 1), range(done + 1, done + more + 1))
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) - lost])
        kept = path.read_bytes().count(b"\n")
        done = max(0, kept - behind)
    last = max(30, done)
    written(JsonlSink(path, done + 1), range(done + 1, last + 1))
    assert [(r["step"], r["loss"]) for r in read_records(path)] == [
        (step, loss(step)) for step in range(1, last + 1)
    ]


def test_a_killed_writer_leaves_complete_lines_and_at_most_one_truncated(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from jaxspeed.metrics import JsonlSink\n"
        "sink = JsonlSink(sys.argv[1])\n"
        "for step in range(1, 10**9): sink.write({'step': step, 'loss': 5.0 / step})"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
    while not path.exists() or path.stat().st_size < 20_000:
        assert child.poll() is None
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    written(JsonlSink(path, resume_from_step=100), range(100, 120))
    assert [r["step"] for r in read_records(path)] == list(range(1, 120))


def test_without_a_step_to_resume_from_all_lines_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(JsonlSink(path), [1, 2])
    before = path.stat().st_ino
    written(JsonlSink(path), [3])
    assert [r["step"] for r in read_records(path)] == [1, 2, 3]
    assert path.stat().st_ino == before  # nothing to drop: it was not written again


def test_a_truncated_last_line_is_dropped(tmp_path):
    written(JsonlSink(tmp_path / "metrics.jsonl"), [1, 2])
    written(CsvSink(tmp_path), [1, 2])
    for name, torn in (("metrics.jsonl", '{"step": 3}'), ("loss.csv", "3,1.6")):
        with (tmp_path / name).open("a") as file:
            file.write(torn)
    written(JsonlSink(tmp_path / "metrics.jsonl"), [3])
    written(CsvSink(tmp_path), [3])
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert csv_rows(tmp_path / "loss.csv")[1:] == [["1", "5.0"], ["2", "2.5"], ["3", str(5 / 3)]]


def test_a_line_that_cannot_be_read_is_dropped_with_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n\x00\x00\x00\n\xff\xfe\n[1]\n{"note": "no step"}\n{"step": 2}\n'
    )
    with caplog.at_level(logging.WARNING, "jaxspeed"):
        JsonlSink(path, resume_from_step=2).close()
    assert read_records(path) == [{"step": 1}, {"note": "no step"}]
    assert [r.args[1] for r in caplog.records] == [2, 3, 4]


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write .*file/metrics\.jsonl: "):
        JsonlSink(tmp_path / "file" / "metrics.jsonl")


# -- CSV ----------------------------------------------------------------------------------------


def test_csv_has_a_file_a_metric_with_its_steps(tmp_path):
    sink = CsvSink(tmp_path)
    sink.write({"step": 1, "loss": 2.5, "mfu": None, "mfu_formula": "6 N", "skipped": False})
    sink.write({"step": 2, "loss": math.nan, "wall/data": 0.125})
    sink.close()
    assert csv_rows(tmp_path / "loss.csv") == [["step", "loss"], ["1", "2.5"], ["2", "nan"]]
    assert csv_rows(tmp_path / "wall_data.csv") == [["step", "wall/data"], ["2", "0.125"]]
    assert csv_rows(tmp_path / "skipped.csv") == [["step", "skipped"], ["1", "0"]]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "loss.csv",
        "skipped.csv",
        "wall_data.csv",
    ]


def test_csv_files_read_as_one_run_after_a_restart(tmp_path):
    written(CsvSink(tmp_path), range(1, 8))
    with (tmp_path / "loss.csv").open("a") as file:
        file.write("8,0.")
    written(CsvSink(tmp_path, resume_from_step=5), range(5, 10))
    rows = csv_rows(tmp_path / "loss.csv")
    assert rows[0] == ["step", "loss"]
    assert [(int(a), float(b)) for a, b in rows[1:]] == [(n, loss(n)) for n in range(1, 10)]


# -- what a config asks for ---------------------------------------------------------------------


class Recorder:
    """Stands in for a library's writer, and keeps what it was told."""

    def __init__(self, **how):
        self.how, self.said, self.step = how, [], 0

    def __getattr__(self, name):
        return lambda *what, **more: self.said.append((name, *what, *more.values()))


@pytest.fixture
def tensorboard(monkeypatch):
    made = []
    module = types.ModuleType("tensorboardX")
    module.SummaryWriter = lambda **how: made.append(Recorder(**how)) or made[-1]
    module.__spec__ = importlib.machinery.ModuleSpec("a", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    return made


@pytest.fixture
def wandb(monkeypatch):
    made = []
    module = types.ModuleType("wandb")
    module.init = lambda **how: made.append(Recorder(**how)) or made[-1]
    module.__spec__ = importlib.machinery.ModuleSpec("a", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def test_jsonl_is_always_written_and_nothing_else_unasked(tmp_path):
    (sink,) = sinks_of(Config(), tmp_path)
    written(sink, [1])
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ({}, "run/csv"),
        ({"job_name": "mine"}, "run/csv/mine"),
        ({"output_path": "{tmp}/out"}, "out/DeepSpeedJobName"),
        ({"output_path": "{tmp}/out", "job_name": "mine"}, "out/mine"),
    ],
)
def test_csv_lies_where_deepspeed_s_words_say_or_in_the_run_s_folder(tmp_path, section, place):
    said = {key: value.format(tmp=tmp_path) for key, value in section.items()}
    config = Config(csv_monitor={"enabled": True, **said})
    _, sink = sinks_of(config, tmp_path / "run")
    written(sink, [1])
    assert csv_rows(tmp_path / place / "loss.csv") == [["step", "loss"], ["1", "5.0"]]


def test_tensorboard_gets_numbers_at_their_step_and_a_text_once(tmp_path, tensorboard):
    section = {"enabled": True, "output_path": str(tmp_path / "events"), "job_name": "mine"}
    _, sink = sinks_of(Config(tensorboard=section), tmp_path, resume_from_step=7)
    for step in (7, 8):
        sink.write({"step": step, "loss": loss(step), "mfu": None, "mfu_formula": "6 N"})
    sink.close()
    (writer,) = tensorboard
    assert writer.how["logdir"] == str(tmp_path / "events" / "mine")
    assert writer.how["purge_step"] == 7
    assert writer.said == [
        ("add_scalar", "loss", loss(7), 7),
        ("add_text", "mfu_formula", "6 N", 7),
        ("add_scalar", "loss", loss(8), 8),
        ("close",),
    ]


def test_tensorboard_s_files_hold_the_numbers(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    written(TensorBoardSink(tmp_path), [1, 2])
    (file,) = tmp_path.iterdir()
    data, found = file.read_bytes(), []
    while data:  # TFRecord: length, its checksum, the event, its checksum
        size = int.from_bytes(data[:8], "little")
        assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
        event = Event.FromString(data[12 : 12 + size])
        found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
        data = data[16 + size :]
    assert found == [(1, "loss", 5.0), (2, "loss", 2.5)]


def test_a_wandb_run_is_one_run_after_a_restart(tmp_path, wandb):
    section = {"enabled": True, "project": "p", "team": "t", "group": "g"}
    given = {"train_batch_size": 1, "wandb": section}
    for _ in range(2):
        _, sink = sinks_of(Config(**given), tmp_path)
    first, second = wandb
    assert first.how["id"] == second.how["id"]
    assert second.how["resume"] == "allow"
    named = {name: second.how[name] for name in ("project", "entity", "group", "config", "dir")}
    assert named == {
        "project": "p",
        "entity": "t",
        "group": "g",
        "config": given,
        "dir": str(tmp_path),
    }
    second.step = 11  # what W&B expects next
    for step in (10, 11):
        sink.write({"step": step, "loss": loss(step)})
    sink.close()
    assert second.said == [("log", {"loss": loss(11)}, 11), ("finish",)]


def test_a_wandb_run_that_cannot_start_says_what_would_work(tmp_path, wandb, monkeypatch):
    def fails(**how):
        raise ConnectionError("no route")

    monkeypatch.setattr(sys.modules["wandb"], "init", fails)
    with pytest.raises(RunError, match=r"'deepspeed': no route; .*WANDB_MODE=offline"):
        sinks_of(Config(wandb={"enabled": True}), tmp_path)


@pytest.mark.parametrize(("section", "library"), [("tensorboard", "tensorboardX"), ("wandb",) * 2])
def test_a_missing_library_is_named_with_its_extra_before_anything_is_written(
    tmp_path, monkeypatch, section, library
):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = Config(**{section: {"enabled": True}})
    with pytest.raises(ConfigError, match=rf'needs {library}.*pip install "jaxspeed\[{section}\]"'):
        sinks_of(config, tmp_path / "run")
    assert not Path(tmp_path / "run").exists()
