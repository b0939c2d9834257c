"""Folders that killed launchers left are removed by the next one; those in use are not."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from jaxspeed.launch.launch_folder import LaunchFolder

pytestmark = pytest.mark.fast

HOLD = "from jaxspeed.launch.launch_folder import LaunchFolder; import sys, time\n"
HOLD += "folder = LaunchFolder(); print(folder.name, flush=True); time.sleep(60)"


@pytest.fixture
def temporary(monkeypatch):
    """A folder with a short path, as those of pytest may not be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(folder)


def launched(*words, **options):
    command = [sys.executable, "-m", "jaxspeed", "launch", "--processes", "1", "--", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def age(folder):
    past = time.time() - 3600
    os.utime(folder, (past, past))


def test_what_a_killed_launcher_left_is_removed_by_the_next(temporary):
    child = launched(sys.executable, "-c", "print('up', flush=True); import time; time.sleep(60)")
    assert child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    (left,) = temporary.glob("jaxspeed-launch-*")
    age(left)
    assert launched("true").wait() == 0
    assert not [*temporary.glob("jaxspeed-launch-*")]


def test_a_folder_in_use_another_users_and_a_new_one_are_not(temporary, monkeypatch):
    held = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    name = held.stdout.readline().strip()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / "jaxspeed-launch-link").symlink_to(elsewhere)
    (temporary / "jaxspeed-launch-new").mkdir()
    (temporary / "jaxspeed-launch-other").mkdir()
    for folder in (name, elsewhere, temporary / "jaxspeed-launch-other"):
        age(folder)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    LaunchFolder().cleanup()
    assert (temporary / "jaxspeed-launch-other").exists()
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with LaunchFolder() as own:
        assert os.path.isdir(own)
        assert not (temporary / "jaxspeed-launch-other").exists()
    assert not os.path.exists(own)
    assert os.path.isdir(name) and elsewhere.is_dir()
    assert (temporary / "jaxspeed-launch-new").is_dir()
    held.kill()
    held.wait()
    LaunchFolder().cleanup()
    assert not os.path.exists(name)


def test_a_socket_fits_into_it_and_no_other_user_enters_it(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with LaunchFolder() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/coordinator")
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert not os.path.exists(folder)
