"""What goes wrong while saving or is wrong with what was asked: one clear error, nothing lost."""

import asyncio
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxspeed
from jaxspeed.checkpoint import Checkpointer, verify
from jaxspeed.checkpoint.header import NAME as HEADER
from jaxspeed.checkpoint.orbax_arrays import ArrayFiles
from jaxspeed.interop import export
from tests.checkpoint import states

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine():
    return states.engine(stage=1)


def reseal(checkpoint: Path, change) -> None:
    """Changes the manifest, with a checksum that is right."""
    path = checkpoint / "manifest.json"
    body = json.loads(path.read_text())
    del body["crc32"]
    change(body)
    crc = zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps({**body, "crc32": crc}))


def test_a_checkpoint_of_another_format_is_refused_not_passed_over(engine, tmp_path):
    """To go on from the one before it would lose work."""
    engine.save_checkpoint(tmp_path, "old")
    engine.save_checkpoint(tmp_path, "new")
    engine.wait()
    reseal(tmp_path / "new", lambda body: body.update(format=2))
    for tag in (None, "new"):
        with pytest.raises(jaxspeed.CheckpointError, match=r"format 2; this version .* format 1"):
            engine.load_checkpoint(tmp_path, tag)
    assert "format 2" in verify(tmp_path, "new")[0]


def test_another_model_is_refused_with_names_and_shapes(engine, tmp_path):
    other = states.engine(model=states.Stateful)
    other.save_checkpoint(tmp_path)
    other.wait()
    with pytest.raises(jaxspeed.CheckpointError) as error:
        engine.load_checkpoint(tmp_path)
    assert "has params/head/kernel [16, 1], expected [7, 1]" in str(error.value)
    assert "opt/" not in str(error.value) and "weights_only=True" in str(error.value)


def test_another_optimizer_is_refused_and_weights_alone_are_offered(engine, tmp_path):
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    other = states.engine(optimizer=sgd)
    other.save_checkpoint(tmp_path)
    other.wait()
    with pytest.raises(
        jaxspeed.CheckpointError, match=r"of another optimizer.*[^*]*weights_only=True"
    ):
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("tag", ["", "a/b", "..", ".hidden", "x.writing", "a:b", "x" * 300, 7])
def test_a_tag_that_is_no_folder_name_is_refused(engine, tmp_path, tag):
    with pytest.raises(jaxspeed.CheckpointError, match="not usable as a folder name"):
        engine.save_checkpoint(tmp_path, tag)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": {"b": (1, 2)}}, r"client_state\['a'\]\['b'\] is a tuple.*a list"),
        ({"a": [np.ones(2)]}, r"client_state\['a'\]\[0\] is a ndarray.*tolist"),
        ({1: 2}, "has the key 1; use a string: '1'"),
        ({"a": object()}, "is a object"),
    ],
)
def test_a_client_state_that_would_come_back_otherwise_is_refused(engine, tmp_path, value, says):
    with pytest.raises(jaxspeed.CheckpointError, match=says):
        engine.save_checkpoint(tmp_path, client_state=value)


def test_a_folder_that_cannot_be_made_is_one_error_before_anything_is_written(engine, tmp_path):
    (tmp_path / "file").write_text("x")
    folder = tmp_path / "file" / "checkpoints"
    for ask in (
        lambda: Checkpointer(folder).check(engine.program),
        lambda: engine.save_checkpoint(folder),
    ):
        with pytest.raises(jaxspeed.CheckpointError, match="cannot be written to"):
            ask()


def test_a_full_disk_is_reported_with_the_missing_bytes(engine, tmp_path, monkeypatch):
    nbytes = sum(x.nbytes for x in states.held(engine).values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(jaxspeed.CheckpointError) as error:
        engine.save_checkpoint(tmp_path)
    needs = int(str(error.value).split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert nbytes <= needs < 2 * nbytes  # padding
    assert "the disk has 100 free" in str(error.value)


def child(mode: str, folder: Path, **how) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.child", mode, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


def test_a_disk_that_fills_up_is_one_error_and_the_checkpoint_before_stays(tmp_path):
    """Files may grow to a limit only, as a quota does it."""
    run = child("too large", tmp_path)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert out.startswith("CheckpointError: ") and str(tmp_path) in out, out
    assert out.count("\n") == 1
    assert "Traceback" not in err, err
    assert [info.tag for info in Checkpointer(tmp_path).list() if info.ok] == ["small"]
    assert verify(tmp_path) == []
    assert os.listdir(tmp_path) == ["small"]  # what was half written has given its room back


FAILING_WRITES = """
import asyncio

async def write():
    raise ValueError("the disk is full")

async def array():
    await asyncio.gather(write(), write())

async def run():
    first = asyncio.gather(write(), write())
    await asyncio.wait([asyncio.create_task(array()), asyncio.create_task(write()), first])
"""


@pytest.mark.parametrize(
    ("module", "logged"),
    [("orbax.checkpoint._src.serialization.serialization", 0), ("of_the_user", 3)],
)
def test_only_the_first_array_that_fails_is_reported(caplog, module, logged):
    """asyncio logs a future whose error nobody has asked for, once it is collected."""
    ArrayFiles().close()
    names: dict = {"__name__": module}
    exec(FAILING_WRITES, names)
    asyncio.run(names["run"]())
    gc.collect()
    assert len([each for each in caplog.records if each.name == "asyncio"]) == logged


def test_killed_within_a_save_the_checkpoints_before_are_sound(tmp_path):
    run = child("for ever", tmp_path)
    try:
        assert run.stdout is not None
        for _ in range(3):
            assert run.stdout.readline().startswith("saved"), run.stderr and run.stderr.read()
        seen = 0
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not seen:
            seen = sum(name.endswith(".writing") for name in os.listdir(tmp_path))
        assert seen
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
    checkpointer = Checkpointer(tmp_path)
    infos = checkpointer.list()
    assert len([info for info in infos if info.ok]) >= 3
    assert verify(tmp_path) == []
    engine = states.engine(stage=3)
    restored = checkpointer.restore(engine.program)
    assert restored.step == int(restored.state.step) == restored.client_state["step"]
    # The next save clears away what was cut short.
    checkpointer.save(engine.program, restored.state, tag="next")
    checkpointer.close()
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".writing")]


def test_killed_between_the_two_renames_of_a_tag_it_is_recovered(engine, tmp_path):
    """The old folder was moved away, the new one not yet in its place."""
    engine.save_checkpoint(tmp_path, "last")
    engine.wait()
    (tmp_path / "last").rename(tmp_path / "last.writing")
    (tmp_path / "last.removed").mkdir()
    assert engine.load_checkpoint(tmp_path)[0] == "last"
    assert verify(tmp_path) == []


def test_a_state_that_is_given_up_is_freed_only_once_the_other_is_known_to_fit(engine, tmp_path):
    other = states.engine(model=states.Stateful)
    other.save_checkpoint(tmp_path / "other")
    other.wait()
    before = engine.state
    with pytest.raises(jaxspeed.CheckpointError):
        engine.load_checkpoint(tmp_path / "other")
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    engine.save_checkpoint(tmp_path / "own")
    engine.load_checkpoint(tmp_path / "own")
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))


def test_an_export_needs_a_sound_checkpoint(engine, tmp_path):
    engine.save_checkpoint(tmp_path / "c", "one")
    engine.wait()
    (tmp_path / "c" / "one" / HEADER).write_text("{}")
    with pytest.raises(jaxspeed.CheckpointError, match="no checkpoint is valid"):
        export(tmp_path / "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()
