"""No damaged checkpoint passes for a sound one: a hundred corruptions, drawn at random."""

import json
import logging
import os
import random
import shutil
from pathlib import Path

import pytest

import jaxspeed
from jaxspeed.checkpoint import Checkpointer, verify
from tests.checkpoint import states
from tests.support.covering import covering


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(an engine, a folder with two sound checkpoints, their states by tag)."""
    folder = tmp_path_factory.mktemp("sound")
    engine = states.engine(stage=3)
    values = {}
    for i in range(2):
        states.steps(engine, i, 1)
        values[engine.save_checkpoint(folder)] = states.held(engine)
    engine.close()
    assert verify(folder) == []
    return engine, folder, values


def files_in(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file())


def truncate(rng, newest, other):
    file = rng.choice(files_in(newest))
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content))])


def lengthen(rng, newest, other):
    file = rng.choice(files_in(newest))
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randint(1, 100)))


def flip(rng, newest, other):
    """One bit."""
    file = rng.choice(files_in(newest))
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def overwrite(rng, newest, other):
    """A block of zeros, as a torn disk leaves it; of the same length."""
    file = rng.choice(files_in(newest))
    content = bytearray(file.read_bytes())
    start = rng.randrange(len(content))
    stop = min(len(content), start + rng.randint(1, 4096))
    if any(content[start:stop]):
        content[start:stop] = bytes(stop - start)
        file.write_bytes(content)
    else:
        flip(rng, newest, other)


def delete(rng, newest, other):
    found = files_in(newest)
    for file in rng.sample(found, rng.randint(1, len(found) // 2)):
        file.unlink()


def swap_within(rng, newest, other):
    """Two files of one checkpoint, of unlike content."""
    pairs = files_in(newest)
    a = rng.choice(pairs)
    b = rng.choice([f for f in pairs if f.read_bytes() != a.read_bytes()])
    x, y = a.read_bytes(), b.read_bytes()
    a.write_bytes(y)
    b.write_bytes(x)


def swap_between(rng, newest, other):
    """A file of one checkpoint in place of the other's; the manifest, too."""
    a = rng.choice(files_in(newest))
    twin = other / a.relative_to(newest)
    b = twin if twin.is_file() and rng.random() < 0.7 else rng.choice(files_in(other))
    if a.read_bytes() == b.read_bytes():
        flip(rng, newest, other)
    else:
        a.write_bytes(b.read_bytes())


def swap_folders(rng, newest, other):
    """A part of one checkpoint, or all of it, under the other's name."""
    part = rng.choice(["arrays", "arrays/ocdbt.process_0", "arrays/d", "."])
    shutil.rmtree(newest / part)
    shutil.copytree(other / part, newest / part)


CORRUPTIONS = (
    *(truncate, lengthen, flip, overwrite, delete),
    *(swap_within, swap_between, swap_folders),
)


# The default set meets each kind of corruption twice.
@pytest.mark.default_cases("3", every=3)
@pytest.mark.parametrize("seed", covering(range(100), range(2 * len(CORRUPTIONS))))
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    saved, tmp_path, caplog, seed
):
    engine, sound, values = saved
    older, newest = sorted(values)
    folder = tmp_path / "damaged"
    shutil.copytree(sound, folder)
    rng = random.Random(seed)
    CORRUPTIONS[seed % len(CORRUPTIONS)](rng, folder / newest, folder / older)
    checkpointer = Checkpointer(folder)
    with caplog.at_level(logging.WARNING, logger="jaxspeed"):
        restored = checkpointer.restore(engine.program)
    assert restored.tag == older and restored.step == 1
    assert [newest in record.message for record in caplog.records] == [True]
    engine.state = restored.state
    states.assert_same(states.held(engine), values[older])
    with pytest.raises(jaxspeed.CheckpointError, match=newest):
        checkpointer.restore(engine.program, tag=newest)
    problems = verify(folder)
    assert problems and all(problem.startswith(newest) for problem in problems)


def test_where_all_are_damaged_none_is_taken(saved, tmp_path):
    engine, sound, values = saved
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    for tag in values:
        (tmp_path / tag / "checkpoint.json").unlink()
    assert not Checkpointer(tmp_path).is_empty()
    with pytest.raises(jaxspeed.CheckpointError, match="no checkpoint is valid; damaged: "):
        engine.load_checkpoint(tmp_path)


def test_a_manifest_that_forgets_a_file_is_not_believed(saved, tmp_path):
    """It is JSON still, and what it lists is there."""
    engine, sound, values = saved
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    older, newest = sorted(values)
    path = tmp_path / newest / "manifest.json"
    body = json.loads(path.read_text())
    forgotten = next(name for name in body["files"] if "/d/" in name)
    del body["files"][forgotten]
    path.write_text(json.dumps(body))
    (tmp_path / newest / forgotten).unlink()
    assert verify(tmp_path, newest) == [
        f"{newest}: manifest.json was modified: its checksum differs"
    ]
    assert engine.load_checkpoint(tmp_path)[0] == older


def test_a_checkpoint_that_lost_its_date_with_its_manifest_is_named(saved, tmp_path, caplog):
    engine, sound, values = saved
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    older, newest = sorted(values)
    (tmp_path / newest / "manifest.json").unlink()
    os.utime(tmp_path / newest, (0, 0))
    with caplog.at_level(logging.WARNING, logger="jaxspeed"):
        assert engine.load_checkpoint(tmp_path)[0] == older
    assert newest in caplog.text and "manifest.json is missing" in caplog.text
