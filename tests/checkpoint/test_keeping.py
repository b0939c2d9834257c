"""Which checkpoints a folder holds, in which order, and which are removed."""

import os

import pytest

import jaxspeed
from jaxspeed.checkpoint import Checkpointer, header, show, verify
from tests.checkpoint import states


@pytest.fixture(scope="module")
def engine():
    return states.engine(stage=1)


def save_steps(engine, saver, count, **more):
    """A checkpoint after each of so many steps, from step 1 on."""
    engine.state = engine.program.init(0)
    for i in range(count):
        states.steps(engine, i, 1)
        saver.save(engine.program, engine.state, **more)
    saver.close()


def tags(folder):
    return [info.tag for info in Checkpointer(folder).list()]


def test_the_newest_and_those_at_intervals_are_retained(engine, tmp_path):
    save_steps(engine, Checkpointer(tmp_path, keep=2, keep_every=3), 8)
    steps = [info.step for info in Checkpointer(tmp_path).list()]
    assert steps == [3, 6, 7, 8]
    assert verify(tmp_path) == []


def test_without_a_count_all_are_retained(engine, tmp_path):
    save_steps(engine, Checkpointer(tmp_path), 3)
    assert tags(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_checkpoints_with_tags_of_their_own_stay(engine, tmp_path):
    saver = Checkpointer(tmp_path, keep=1)
    saver.save(engine.program, engine.state, tag="best")
    save_steps(engine, saver, 3)
    assert tags(tmp_path) == ["best", "step-00000003"]


def test_a_damaged_checkpoint_does_not_count_as_retained(engine, tmp_path):
    save_steps(engine, Checkpointer(tmp_path), 2)
    (tmp_path / "step-00000002" / "checkpoint.json").unlink()
    saver = Checkpointer(tmp_path, keep=2)
    states.steps(engine, 2, 1)
    saver.save(engine.program, engine.state)
    saver.close()
    assert tags(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_the_newest_is_the_one_that_was_saved_last(engine, tmp_path):
    save_steps(engine, Checkpointer(tmp_path), 3)
    restored = Checkpointer(tmp_path).restore(engine.program, tag="step-00000001")
    saver = Checkpointer(tmp_path)
    saver.save(engine.program, restored.state, tag="branch")
    saver.close()
    assert saver.latest() == "branch"


def test_a_checkpoints_info_is_what_was_saved(engine, tmp_path):
    save_steps(engine, Checkpointer(tmp_path), 1, client_state={"a": 1}, files={"f": b"x"})
    info = show(tmp_path)
    assert (info.tag, info.step, info.ok, info.stage) == ("step-00000001", 1, True, 1)
    assert info.mesh["data"] == 8 and info.processes == 1
    assert info.client_state == {"a": 1} and info.files == ("f",)
    on_disk = sum(f.stat().st_size for f in (tmp_path / info.tag).rglob("*") if f.is_file())
    assert info.bytes == on_disk - (tmp_path / info.tag / "manifest.json").stat().st_size
    shapes = {row.path: row.leaf.shape for row in engine.placements}
    written = {n: x for n, x in info.leaves.items() if n.startswith("params/")}
    assert {n.removeprefix("params/"): x.shape for n, x in written.items()} == shapes
    assert {x.dtype for x in written.values()} == {"float32"}


def test_folders_that_are_no_checkpoints_are_left_alone(engine, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.jsonl").write_text("{}")
    save_steps(engine, Checkpointer(tmp_path, keep=1), 2)
    assert tags(tmp_path) == ["step-00000002"]
    assert sorted(os.listdir(tmp_path)) == ["logs", "step-00000002"]


def test_a_missing_tag_is_reported_with_the_existing_ones(engine, tmp_path):
    save_steps(engine, Checkpointer(tmp_path), 1)
    for ask in (
        lambda: engine.load_checkpoint(tmp_path, "step-7"),
        lambda: show(tmp_path, "step-7"),
        lambda: verify(tmp_path, "step-7"),
    ):
        with pytest.raises(
            jaxspeed.CheckpointError, match=r"no checkpoint 'step-7'.*step-00000001"
        ):
            ask()


def test_a_clock_that_is_set_back_makes_no_checkpoint_older(engine, tmp_path, monkeypatch):
    clock = iter(range(1_000_000, 0, -1000))
    monkeypatch.setattr(header.time, "time", lambda: float(next(clock)))
    save_steps(engine, Checkpointer(tmp_path, keep=2), 4)
    assert tags(tmp_path) == ["step-00000003", "step-00000004"]


def test_what_cannot_be_removed_fails_no_save(engine, tmp_path, monkeypatch, caplog):
    def busy(*_):
        raise OSError("device or resource busy")

    monkeypatch.setattr("jaxspeed.checkpoint.stores.LocalStore.remove", busy)
    save_steps(engine, Checkpointer(tmp_path, keep=1), 2)
    assert tags(tmp_path) == ["step-00000001", "step-00000002"]
    assert "cannot be removed: device or resource busy" in caplog.text
