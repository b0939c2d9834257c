"""A local Ray is this process's own: others of the host cannot use it, and it ends with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxspeed.errors import RunError
from jaxspeed.parameter_server.ray import cluster
from jaxspeed.parameter_server.ray.reaper import descendants
from tests.launch.hostile_user import NOBODY, listening
from tests.support.processes import ROOT

RUN = """
import sys, time
from jaxspeed.parameter_server.ray.cluster import connected, ray_module
with connected():
    ray = ray_module()
    actor = ray.remote(num_cpus=0.1)(type("Actor", (), {"answer": lambda self: 42})).remote()
    assert ray.get(actor.answer.remote()) == 42
    print(ray.get_runtime_context().gcs_address, flush=True)
    time.sleep(300)
"""
JOIN = """
import sys, ray
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1])
"""
# As that user, who may enter no folder of root's: only what is imported already can be used.
CONNECT = """
import os, socket, sys
os.setuid({user})
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except PermissionError:
    sys.exit(7)
"""


def python(code, *words, **environment):
    own = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**own, "PYTHONPATH": str(ROOT), **environment},
    )


@pytest.mark.ray
def test_a_local_ray_is_on_loopback_takes_its_token_alone_and_ends_with_its_driver(tmp_path):
    pytest.importorskip("ray")
    driver = python(RUN)
    try:
        address = driver.stdout.readline().strip()
        assert address, driver.stderr.read()[-3000:]
        pids = [driver.pid, *descendants(driver.pid)]
        found = set(listening(pids))
        ports = {place for place in found if not place.startswith("unix:")}
        assert address.rpartition(":")[2] in {port.rpartition(":")[2] for port in ports}
        hosts = {port.rpartition(":")[0].removeprefix("::ffff:") for port in ports}
        assert hosts == {"127.0.0.1"}
        stranger = python(JOIN, address, RAY_AUTH_MODE="disabled", HOME=str(tmp_path))
        if os.geteuid() == 0:
            for path in found - ports:
                tried = python(CONNECT.format(user=NOBODY), path.removeprefix("unix:"))
                assert tried.wait(60) == 7, tried.stderr.read()
        assert stranger.wait(120)
        assert "InvalidAuthToken" in stranger.stderr.read()
        assert driver.poll() is None
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.fast
def test_a_folder_that_others_can_enter_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "short_temporary_folder", lambda: str(tmp_path))
    folder = Path(cluster._own_folder()).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert Path(cluster._own_folder()).parent == folder
    folder.chmod(0o755)
    with pytest.raises(RunError, match="not a folder of this user alone"):
        cluster._own_folder()
