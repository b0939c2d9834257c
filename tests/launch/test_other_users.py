"""Another user of the host connects to all that a launch listens at: the run ends as it would.

Gloo's ports are attacked with garbage alone: docs/clusters.md says what else can happen there.
"""

import os
import socket
import subprocess
import sys

import pytest

from tests.support.processes import ROOT, free_port

# Rank 1 comes late, so that process 0 waits for it; then both compute together for a while.
RUN = """
import os, time, jax, jaxspeed
if os.environ["JAX_PROCESS_ID"] == "1": time.sleep(2)
found = jaxspeed.start_processes(60.0)
jaxspeed.simulate(2)
import numpy as np
from jax.experimental import multihost_utils
total = 0
for step in range(40):
    total += int(multihost_utils.process_allgather(np.array(found.rank + step)).sum())
    time.sleep(0.1)
print("total", total, flush=True)
"""


def outside_address():
    """An address of this host that is not a loopback one; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        try:
            towards.connect(("192.0.2.200", 9))  # sends nothing
        except OSError:
            return None
        return towards.getsockname()[0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "coordinator", ["", pytest.param("127.0.0.1", marks=pytest.mark.full)], ids=["socket", "port"]
)
def test_a_run_is_not_disturbed_by_another_user_of_the_host(tmp_path, coordinator):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    options = ["--coordinator", f"{coordinator}:{free_port()}"] if coordinator else []
    words = ["launch", "--processes", "2", "--all-output", *options, "--"]
    command = [sys.executable, "-m", "jaxspeed", *words, sys.executable, "-c", RUN]
    # Gloo listens at the address of the host's name by default.
    if name := outside_address():
        command = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "-", *command]
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}
    with (tmp_path / "out").open("w+") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, text=True
        )
        attack = [sys.executable, "-m", "tests.launch.hostile_user", str(child.pid)]
        hostile = subprocess.Popen(attack, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            code = child.wait(120)
            attacked = hostile.communicate(timeout=30)[0].splitlines()
        finally:
            for each in (child, hostile):
                each.kill()
                each.wait()
        out.seek(0)
        said = out.read()
    assert code == 0, said[-4000:]
    assert said.count("total 1600\n") == 2, said[-4000:]
    reached = {tuple(line.split("\t")) for line in attacked}
    ports = {address for address, _ in reached if not address.startswith("unix:")}
    assert len(ports) >= 2  # Gloo's
    hosts = {address.rpartition(":")[0].removeprefix("::ffff:") for address in ports}
    assert hosts == {"127.0.0.1"}
    if coordinator:
        assert said.count("process 0 refused a connection from 127.0.0.1: it") == 1
    else:
        ((_, what),) = ((a, what) for a, what in reached if a.startswith("unix:"))
        assert what == "Permission denied"
