"""A run whose checkpoints are in a bucket goes on as one whose are on a disk."""

import json
import signal

import pytest

import jaxspeed
from jaxspeed.checkpoint import Checkpointer, object_storage, verify
from jaxspeed.checkpoint.orbax_arrays import ArrayFiles
from jaxspeed.metrics import read_records
from jaxspeed.run import claim
from tests.run import small
from tests.support import s3 as faults

URL = f"s3://{faults.BUCKET}/run"
pytestmark = pytest.mark.sampled


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(claim, "TOUCH_SECONDS", 0.5)


def at(step, part):
    """Whether a request writes this part of the checkpoint of a step."""
    return lambda method, path: method == "PUT" and f"/step-{step:08}{part}" in path


@pytest.mark.parametrize("part", ["/arrays/ocdbt.process_0/manifest", "/manifest.json"])
def test_a_run_that_is_killed_in_a_save_into_a_bucket_ends_bitwise_as_one_never_killed(
    tmp_path, s3, part
):
    config = small.write(tmp_path, run={"steps": 8, "checkpoint_every": 2, "keep": 2})
    small.trained(config, tmp_path / "never")
    given = json.loads(config.read_text())
    given["run"]["checkpoints"] = URL
    config.write_text(json.dumps(given))
    killed, is_save = tmp_path / "killed", at(6, part)
    child = small.started(config, killed)
    s3.fault = lambda *request: (lambda _: child.kill()) if is_save(*request) else None
    _, said = child.communicate(timeout=240)
    assert child.returncode == -signal.SIGKILL, said
    s3.fault = lambda *_: None
    there = {info.tag: info.ok for info in Checkpointer(URL).list()}
    assert there == {"step-00000002": True, "step-00000004": True, "step-00000006": False}
    small.trained(config, killed)
    ends = small.kept(config, tmp_path / "never"), small.kept(config, URL)
    small.assert_bitwise_equal(*ends)
    assert verify(URL) == []
    seen, never = (
        [(r["step"], r["loss"]) for r in read_records(run / "metrics.jsonl") if "loss" in r]
        for run in (killed, tmp_path / "never")
    )
    assert seen == never
    # Another run starts from its weights; what was said and written has no credentials.
    small.trained(config, tmp_path / "next", init_from=URL, checkpoints=None, steps=1)
    written = [*s3.objects().values(), said.encode()]
    written += [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(faults.SECRET.encode() in content for content in written)


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_a_save_that_fails_is_a_warning_and_the_next_one_succeeds(
    tmp_path, s3, monkeypatch, caplog, place
):
    """A full disk, or a bucket that refuses for longer than it is retried."""
    monkeypatch.setitem(object_storage._RETRIES, "max_retries", 2)
    config = small.write(tmp_path, run={"steps": 8, "checkpoint_every": 2, "keep": 9})
    output, is_save, finish = tmp_path / "run", at(4, "/arrays/"), ArrayFiles.finish
    saves = []

    def full(self):
        saves.append(self)
        finish(self)
        if len(saves) == 2:
            raise OSError(28, "No space left on device")

    if place == "disk":
        monkeypatch.setattr(ArrayFiles, "finish", full)
    else:
        s3.fault = lambda *request: faults.unavailable if is_save(*request) else None
    where = URL if place == "bucket" else output / "checkpoints"
    small.trained(config, output, checkpoints=str(where))
    (warning,) = [r for r in caplog.messages if "could not be saved" in r]
    assert warning.startswith(f"the previous checkpoint could not be saved: {where}: saving failed")
    assert faults.SECRET not in caplog.text and "Traceback" not in caplog.text
    complete = [info.tag for info in Checkpointer(where).list() if info.ok]
    assert complete == [f"step-{step:08}" for step in (2, 6, 8)]


def test_a_second_run_in_the_same_bucket_is_refused_before_it_trains(tmp_path, s3):
    config = small.write(tmp_path, run={"steps": 2})
    first = jaxspeed.run.folder.RunFolder(tmp_path / "first", URL)
    first.open({"seed": 0}, {})
    try:
        with pytest.raises(jaxspeed.ConfigError, match=r"run\.checkpoints: .* in use by another"):
            small.trained(config, tmp_path / "second", checkpoints=URL)
    finally:
        first.close()
    assert not (tmp_path / "second" / "metrics.jsonl").exists()
    with pytest.raises(jaxspeed.ConfigError, match=r"run\.checkpoints: .* holds another run"):
        small.trained(config, tmp_path / "second", checkpoints=URL)
