"""Scratch folders: private, removed at the end, and by the next run after a kill."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from jaxspeed.disk.scratch import MARK, Scratch, remove_dead
from jaxspeed.errors import DiskError

pytestmark = pytest.mark.fast

CHILD = """
import sys, time
from jaxspeed.disk.scratch import Scratch
scratch = Scratch(sys.argv[1], 3)
(scratch.folder / "state").write_bytes(b"x")
print(scratch.folder, flush=True)
time.sleep(60)
"""


@pytest.fixture
def child(tmp_path):
    started = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    started.stdout.readline()
    yield started
    started.kill()
    started.wait()
    started.stdout.close()


def test_a_folder_is_private_and_removed(tmp_path):
    scratch = Scratch(tmp_path / "new", 1)
    assert scratch.folder.parent == tmp_path / "new"
    assert scratch.folder.stat().st_mode & 0o777 == 0o700
    (scratch.folder / "state").write_bytes(b"x")
    other = Scratch(tmp_path / "new", 1)
    assert other.folder != scratch.folder and scratch.folder.is_dir()
    scratch.close()
    assert not scratch.folder.exists() and other.folder.is_dir()
    scratch.close()
    other.close()


def test_what_a_killed_process_has_left_is_removed_by_the_next(tmp_path, child):
    (left,) = tmp_path.iterdir()
    Scratch(tmp_path).close()
    assert (left / "state").exists()  # it is alive
    child.kill()
    child.wait()
    time.sleep(0.05)
    Scratch(tmp_path).close()
    assert not left.exists()


def test_a_removal_that_is_interrupted_leaves_the_mark(tmp_path, monkeypatch):
    scratch = Scratch(tmp_path)
    (scratch.folder / "state").write_bytes(b"x")

    def killed(*_, **options):
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        scratch.close()
    assert [path.name for path in scratch.folder.iterdir()] == [MARK]
    remove_dead(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_only_what_is_known_to_be_scratch_is_removed(tmp_path):
    kept = [tmp_path / "mine", tmp_path / "jaxspeed-state-notes.txt", tmp_path / "target"]
    kept[0].mkdir()
    kept[1].write_text("x")
    kept[2].mkdir()
    (kept[2] / MARK).touch()
    link = tmp_path / "jaxspeed-state-link"
    link.symlink_to(kept[2])
    unmarked = tmp_path / "jaxspeed-state-0-files"
    unmarked.mkdir()
    (unmarked / "data").touch()
    empty = tmp_path / "jaxspeed-state-0-empty"
    empty.mkdir()
    remove_dead(tmp_path)
    assert all(path.exists() for path in (*kept, link, unmarked)) and not empty.exists()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=f"nvme_path {tmp_path}/file"):
        Scratch(tmp_path / "file")


def test_a_forked_process_does_not_remove_it(tmp_path, monkeypatch):
    scratch = Scratch(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 0)
    scratch.close()
    assert scratch.folder.is_dir()
