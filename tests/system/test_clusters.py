"""Two processes under real SLURM, Open MPI and sshd, on this machine.

Debian's packages slurmctld, slurmd, slurm-client and munge, openmpi-bin, openssh-server; what is
not installed is skipped by name. `.ci/run` installs them where it can.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Joins the others, and shows what it found.
JOIN = """
import jax, jaxspeed
found = jaxspeed.start_processes()
jaxspeed.simulate(4)
print("found", found.found_by, jax.process_index(), len(jax.devices()), flush=True)
"""


def environment(**more):
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return {**os.environ, "XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT), **more}


def require(*programs):
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in programs if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root")


def run(*command, env=None, **more):
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=300, env=env, **more
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def joined(out, by):
    lines = sorted(line.split("found ")[1] for line in out.splitlines() if "found " in line)
    assert lines == [f"{by} 0 4", f"{by} 1 4"], out


@pytest.fixture(scope="module")
def join(tmp_path_factory):
    file = tmp_path_factory.mktemp("join") / "join.py"
    file.write_text(JOIN)
    return file


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    require("slurmctld", "slurmd", "srun", "munged")
    folder = tmp_path_factory.mktemp("slurm")
    run(HERE / "one_node_slurm.sh", "start", folder)
    yield environment(SLURM_CONF=str(folder / "slurm.conf"))
    run(HERE / "one_node_slurm.sh", "stop", folder)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    """The ssh command that reaches 127.0.0.1 and 127.0.0.2."""
    require("sshd", "ssh", "ssh-keygen")
    folder = tmp_path_factory.mktemp("sshd")
    run(HERE / "one_host_sshd.sh", "start", folder)
    yield f"ssh -F {folder}/ssh_config -o BatchMode=yes"
    run(HERE / "one_host_sshd.sh", "stop", folder)


def test_slurm(slurm, join):
    joined(run("srun", "-n", 2, sys.executable, join, env=slurm), "slurm")


def test_open_mpi(join):
    require("mpirun")
    options = ("--allow-run-as-root", "--oversubscribe", "-n", 2)
    joined(run("mpirun", *options, sys.executable, join, env=environment()), "ompi")


# -- the hostfile's way ------------------------------------------------------------------------


def launched(sshd, folder, *words, slots=1):
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 slots={slots}\n127.0.0.2 slots={slots}\n")
    launch = [sys.executable, "-m", "jaxspeed", "launch", "--hostfile", hosts, "--ssh", sshd]
    return [*map(str, [*launch, "--all-output", "--", *words])]


@pytest.mark.full  # the parts: the tests below, and tests/launch
def test_a_hostfile_over_ssh(sshd, join, tmp_path):
    joined(run(*launched(sshd, tmp_path, join), env=environment()), "JAX_NUM_PROCESSES")


def test_a_host_whose_process_fails_is_named(sshd, tmp_path):
    code = "import os, time\nif os.environ['JAX_PROCESS_ID'] == '2': os.kill(os.getpid(), 9)\n"
    words = launched(sshd, tmp_path, sys.executable, "-c", code + "time.sleep(60)", slots=2)
    begun = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=100)
    assert time.monotonic() - begun < 40
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 2 of 4 on 127.0.0.2 was killed by SIGKILL" in done.stderr.splitlines()[-1]


def test_signals_reach_other_hosts_and_none_outlives_the_launcher(sshd, tmp_path):
    code = "import os, signal, sys, time\n"
    code += "signal.signal(15, lambda *_: (print('saving'), sys.exit(75)))\n"
    code += "print('pid', os.getpid(), flush=True); time.sleep(60)"
    words = launched(sshd, tmp_path, sys.executable, "-c", code)
    for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)):
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
        pids = [int(child.stdout.readline().split("pid")[1]) for _ in range(2)]
        child.send_signal(number)
        out, _ = child.communicate(timeout=60)
        assert child.returncode == code
        assert out.count("saving") == 2 * (number == signal.SIGTERM)
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_host_that_cannot_be_reached_is_named(tmp_path):
    require("ssh")
    words = launched("ssh -o BatchMode=yes -p 1", tmp_path, "true")
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 255
    assert "Connection refused" in done.stderr
    assert "(its host cannot be reached)" in done.stderr.splitlines()[-1]
