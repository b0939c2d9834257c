"""Two processes under real SLURM, Open MPI and sshd, on this machine.

Debian's packages slurmctld, slurmd, slurm-client and munge, openmpi-bin, openssh-server; what is
not installed is skipped by name. `.ci/run` installs them where it can.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from jaxspeed.errors import ExitCode
from jaxspeed.launch.agent import encoded_job
from jaxspeed.launch.local_group import HostJob
from tests.launch.hostile_user import tree

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Joins the others, and shows what it found.
JOIN = """
import os, jax, jaxspeed
found = jaxspeed.start_processes()
jaxspeed.simulate(4)
line = f"found {found.found_by} {jax.process_index()} {len(jax.devices())}\\n"
os.write(1, line.encode())  # at once: print writes each word where Python does not buffer
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


@pytest.fixture
def two_hosts(tmp_path):
    """`jaxspeed launch` on two network namespaces, and their folder."""
    require("ip", "unshare")
    folder = tmp_path / "hosts"
    made = subprocess.run([HERE / "two_netns_hosts.sh", "start", folder], capture_output=True)
    if made.returncode:
        subprocess.run([HERE / "two_netns_hosts.sh", "stop", folder], capture_output=True)
        pytest.skip(f"no network namespaces: {made.stderr.decode().strip()}")
    launch = [sys.executable, "-m", "jaxspeed", "launch", "--hostfile", folder / "hosts"]
    yield [*map(str, [*launch, "--ssh", folder / "ssh", "--all-output", "--"])], folder
    run(HERE / "two_netns_hosts.sh", "stop", folder)


def test_slurm(slurm, join):
    joined(run("srun", "-n", 2, sys.executable, join, env=slurm), "slurm")


@pytest.mark.sampled
def test_open_mpi(join):
    """Also with a proxy that JAX must not use: it would not answer."""
    require("mpirun")
    options = ("--allow-run-as-root", "--oversubscribe", "-n", 2)
    proxy = environment(http_proxy="http://127.0.0.1:9", no_proxy="example.com")
    joined(run("mpirun", *options, sys.executable, join, env=proxy), "ompi")


# -- the tiny config ---------------------------------------------------------------------------


def tiny(folder):
    """The words that train the tiny config for four steps on two devices."""
    words = ["train", ROOT / "configs/tiny.yaml", "--devices", "cpu:2", "--output", folder / "run"]
    sets = ("run.steps=4", "run.eval_every=null", "run.sample_tokens=0")
    return [*map(str, words), *(word for one in sets for word in ("--set", one))]


def trained(folder):
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4]
    assert (folder / "run/checkpoints/step-00000004").is_dir()


@pytest.mark.full
def test_slurm_runs_the_tiny_config(slurm, tmp_path):
    run("srun", "-n", 2, sys.executable, "-m", "jaxspeed", *tiny(tmp_path), env=slurm)
    trained(tmp_path)


@pytest.mark.full
def test_open_mpi_runs_the_tiny_config(tmp_path):
    require("mpirun")
    words = ["--on", "mpi", "--processes", 2, "--option=--allow-run-as-root"]
    words += ["--option=--oversubscribe", "--cache", tmp_path / "cache"]
    launch = [sys.executable, "-m", "jaxspeed", "launch", *words, "--", *tiny(tmp_path)]
    run(*launch, env=environment(), cwd=tmp_path)
    trained(tmp_path)
    assert (tmp_path / "logs/ranks").is_dir()


@pytest.mark.full
def test_a_hostfile_runs_the_tiny_config(sshd, tmp_path):
    run(*launched(sshd, tmp_path, *tiny(tmp_path)), env=environment())
    trained(tmp_path)


@pytest.mark.full
def test_two_hosts_train_and_end_when_their_link_is_cut(two_hosts, tmp_path):
    launch, folder = two_hosts
    run(*launch, *tiny(tmp_path), env=environment())
    trained(tmp_path)
    words = [*launch, *tiny(tmp_path / "long"), "--set", "run.steps=100000"]
    child = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )
    records, deadline = tmp_path / "long/run/metrics.jsonl", time.monotonic() + 240
    while not records.exists() or len(records.read_bytes().splitlines()) < 3:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    run(HERE / "two_netns_hosts.sh", "cut", folder)
    begun = time.monotonic()
    said, _ = child.communicate(timeout=400)
    assert time.monotonic() - begun < 180
    assert child.returncode not in (0, ExitCode.CONFIG, ExitCode.PREEMPTED), said[-3000:]
    named = re.search(r"rank (\d) of 2 on (host-.) .*: process (\d) on (host-.), in ", said)
    assert named and {named[1], named[3]} == {"0", "1"}, said[-3000:]
    assert {named[2], named[4]} == {"host-a", "host-b"}


@pytest.mark.ray
@pytest.mark.full
def test_ray_runs_the_tiny_config(tmp_path):
    pytest.importorskip("ray")
    command = (sys.executable, "-m", "jaxspeed", *tiny(tmp_path))
    job = {"job": encoded_job(HostJob(command, 1, 2, "", bind=False)), "restarts": {}, "logs": None}
    driver = [sys.executable, "-m", "jaxspeed.launch.ray.driver", json.dumps(job)]
    run(*driver, env=environment())
    trained(tmp_path)


@pytest.mark.ray
@pytest.mark.full
def test_on_ray_a_killed_process_is_named_and_the_others_end(tmp_path):
    pytest.importorskip("ray")
    code = "import os, time\n"
    code += "assert os.environ['JAX_COORDINATOR_ADDRESS'].startswith('unix:/')\n"
    code += "assert len(os.environ['JAXSPEED_TOKEN']) == 64\n"
    code += "os.environ['JAX_PROCESS_ID'] == '1' and os.kill(os.getpid(), 9)\n"
    command = (sys.executable, "-c", code + "time.sleep(60)")
    job = {"job": encoded_job(HostJob(command, 1, 2, "", bind=False)), "restarts": {}, "logs": None}
    driver = [sys.executable, "-m", "jaxspeed.launch.ray.driver", json.dumps(job)]
    done = subprocess.run(driver, capture_output=True, text=True, env=environment(), timeout=200)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 of 2 on" in done.stderr.strip().splitlines()[-1]


@pytest.mark.ray
@pytest.mark.full
def test_on_ray_nothing_outlives_a_driver_that_is_killed(tmp_path):
    pytest.importorskip("ray")
    command = (sys.executable, "-S", "-c", f"{saves('TERM')}; time.sleep(600)")
    job = encoded_job(HostJob(command, 1, 2, "", bind=False, folder=str(tmp_path)))
    given = json.dumps({"job": job, "restarts": {}, "logs": None})
    driver = [sys.executable, "-m", "jaxspeed.launch.ray.driver", quote(given)]
    child = subprocess.Popen(driver, env=environment())
    try:
        wait_for_files(tmp_path, "ready-*", 2, seconds=120)
        pids = [*tree(child.pid)]
        ranks = {int(file.name.removeprefix("ready-")) for file in tmp_path.glob("ready-*")}
        assert ranks < set(pids)
    finally:
        child.kill()
        child.wait()
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


@pytest.mark.full
def test_a_preempted_slurm_job_is_queued_again(slurm, tmp_path):
    """Its first start ends as a saved run does, its second one succeeds."""
    code = "import os, sys; sys.exit(75 * (os.environ.get('SLURM_RESTART_COUNT', '0') == '0'))"
    words = ["--on", "slurm", "--processes", 2, "--", sys.executable, "-c", code]
    out = run(sys.executable, "-m", "jaxspeed", "launch", *words, env=slurm, cwd=tmp_path)
    job = out.split()[-1]
    log, deadline = tmp_path / "logs" / f"job-{job}.log", time.monotonic() + 240
    while not log.exists() or "before this one 1" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        state = run("squeue", "--job", job, "--noheader", "--format=%T %r", env=slurm)
        if "BeginTime" in state:  # SLURM holds a requeued job for two minutes
            run("scontrol", "update", f"JobId={job}", "StartTime=now", env=slurm)
        time.sleep(0.5)
    assert "exit code 75, starts before this one 0" in log.read_text()
    assert "exit code 0, starts before this one 1" in log.read_text()


@pytest.mark.full
def test_a_canceled_slurm_job_saves_and_is_not_queued_again(slurm, tmp_path):
    words = ["--on", "slurm", "--processes", 2, "--", sys.executable, "-c", saves("TERM")]
    out = run(sys.executable, "-m", "jaxspeed", "launch", *words, env=slurm, cwd=tmp_path)
    job, deadline = out.split()[-1], time.monotonic() + 60
    wait_for_files(tmp_path, "ready-*", 2)
    run("scancel", job, env=slurm)
    while run("squeue", "--job", job, "--noheader", "--format=%T", env=slurm) == "COMPLETING\n":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert not run("squeue", "--job", job, "--noheader", "--states=pending", env=slurm)
    assert "exit code 75, starts" in (tmp_path / "logs" / f"job-{job}.log").read_text()
    assert len(list(tmp_path.glob("saved-*"))) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_open_mpi_passes_a_request_to_stop_on_and_waits(tmp_path, number):
    require("mpirun")
    words = ["--on", "mpi", "--processes", "2", "--option=--allow-run-as-root"]
    words += ["--option=--oversubscribe", "--max-restarts", "3", "--"]
    launch = [sys.executable, "-m", "jaxspeed", "launch", *words]
    child = subprocess.Popen(
        [*launch, sys.executable, "-c", saves("USR1")],
        cwd=tmp_path,
        env=environment(),
        process_group=0,
    )
    wait_for_files(tmp_path, "ready-*", 2)
    os.killpg(child.pid, number)  # as a terminal does
    assert child.wait(30) == ExitCode.PREEMPTED
    assert len(list(tmp_path.glob("saved-*"))) == 2


def saves(name):
    """A program that takes its time to save when the signal asks it to stop."""
    return (
        "import os, pathlib, signal, sys, time\n"
        "touch = lambda name: pathlib.Path(f'{name}-{os.getpid()}').touch()\n"
        "save = lambda *_: (time.sleep(3), touch('saved'), sys.exit(75))\n"
        f"signal.signal(signal.SIG{name}, save)\n"
        "touch('ready'); time.sleep(60)"
    )


def wait_for_files(folder, pattern, count, seconds=60):
    deadline = time.monotonic() + seconds
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


# -- the token of a run ------------------------------------------------------------------------

# Keeps a hash of its token, and the processes whose command line has the token.
TOKEN = """
import glob, hashlib, os, pathlib, sys, time
token = os.environ["JAXSPEED_TOKEN"].encode()
shown = []
for file in glob.glob("/proc/[0-9]*/cmdline"):
    try: text = pathlib.Path(file).read_bytes()
    except OSError: continue
    if token in text: shown.append(text)
said = [len(token), hashlib.sha256(token).hexdigest(), *shown]
part = pathlib.Path(sys.argv[1], f"part-{os.getpid()}")
part.write_text(repr(said))
part.rename(part.with_name(f"token-{os.getpid()}"))
"""


@pytest.mark.parametrize("way", ["slurm", "mpi", "hostfile"])
def test_both_processes_have_a_token_that_no_command_line_shows(way, request, tmp_path):
    words = [sys.executable, "-S", "-c", TOKEN, tmp_path]
    launch = [sys.executable, "-m", "jaxspeed", "launch"]
    if way == "hostfile":
        command, given = launched(request.getfixturevalue("sshd"), tmp_path, *words), environment()
    elif way == "slurm":
        given = request.getfixturevalue("slurm")
        command = [*launch, "--on", "slurm", "--processes", 2, "--", *words]
    else:
        require("mpirun")
        options = ["--option=--allow-run-as-root", "--option=--oversubscribe"]
        command, given = [*launch, "--on", "mpi", "--processes", 2, *options, "--", *words], None
    run(*command, env=given or environment(), cwd=tmp_path)
    wait_for_files(tmp_path, "token-*", 2)
    first, second = (file.read_text() for file in tmp_path.glob("token-*"))
    assert first == second and first.startswith("[64, ") and first.count(",") == 1


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
