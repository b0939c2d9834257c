"""`jaxspeed launch` on one host, with processes that take milliseconds instead of a run's."""

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxspeed.cli.main import main
from jaxspeed.errors import ExitCode
from jaxspeed.launch.local_group import HostJob, Output, process_environment
from jaxspeed.launch.output import Display
from jaxspeed.launch.supervisor import how_it_ended

pytestmark = pytest.mark.fast

LAUNCH = [sys.executable, "-m", "jaxspeed", "launch"]
# What every process of these tests begins with.
HEAD = """
import os, signal, sys, time
rank = int(os.environ["JAX_PROCESS_ID"])
def report(step): open(os.environ["JAXSPEED_PROGRESS_FILE"], "w").write(str(step))
"""


def words(code, *options, processes=3, command=()):
    program = command or [sys.executable, "-S", "-c", HEAD + code]
    count = [] if "--hostfile" in options else ["--processes", str(processes)]
    return [*LAUNCH, *count, *map(str, options), "--", *program]


def launch(code, *options, processes=3, command=()):
    """In this process, which is sooner."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        returned = main(words(code, *options, processes=processes, command=command)[3:])
    return SimpleNamespace(returncode=returned, stdout=out.getvalue(), stderr=err.getvalue())


def started(code, *options, **more):
    return subprocess.Popen(
        words(code, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def last_line(done):
    return done.stderr.strip().splitlines()[-1]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(*pids):
    """Whether the processes end within 10 s: a signal is delivered later than it is sent."""
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


# -- processes and their output ----------------------------------------------------------------


def test_each_process_has_its_rank_and_its_share_of_the_cores(tmp_path):
    code = "print(rank, os.environ['JAX_NUM_PROCESSES'], os.environ['JAX_COORDINATOR_ADDRESS'], "
    code += "*os.sched_getaffinity(0), flush=True)"
    count = min(len(os.sched_getaffinity(0)), 3)
    done = launch(code, "--all-output", processes=count)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[:3] for line in lines] == [[f"[{r}]", str(r), str(count)] for r in range(count)]
    assert len({line[3] for line in lines}) == 1  # one coordinator
    cores = [core for line in lines for core in line[4:]]
    assert sorted(map(int, cores)) == sorted(os.sched_getaffinity(0))  # each core of one process


def test_each_start_has_a_token_and_a_socket_that_jaxs_own_initialize_takes():
    names = ("JAXSPEED_TOKEN", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS")
    code = f"print(*(os.environ[name] for name in {names}))"
    both = [launch(code, "--all-output", processes=2).stdout for _ in range(2)]
    starts = [{tuple(line.split()[1:]) for line in out.splitlines()} for out in both]
    ((token, address, bind),), ((other_token, *_),) = starts  # the same in both processes
    assert len(token) == 64 and token != other_token
    assert address == bind and address.startswith("unix:/")
    assert not os.path.exists(os.path.dirname(address.removeprefix("unix:")))


def test_more_processes_than_cores_have_one_each():
    count = len(os.sched_getaffinity(0)) + 1
    done = launch("print(*os.sched_getaffinity(0))", "--all-output", processes=count)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == count, done.stderr


def test_without_binding_each_process_has_all_cores():
    done = launch("print(len(os.sched_getaffinity(0)))", "--no-core-binding")
    assert done.stdout.split() == [str(len(os.sched_getaffinity(0)))]


def test_rank_0_is_shown_and_of_the_others_what_matters_once(tmp_path):
    code = """
print("all say this", rank)
print("WARNING  step", rank, "clipped", file=sys.stderr)
if rank == 2: print("error: disk full", file=sys.stderr)
"""
    done = launch(code, "--logs", tmp_path / "logs")
    assert done.stdout == "all say this 0\n"
    assert done.stderr.count("clipped") == 1  # though the numbers differ
    assert "[2] error: disk full" in done.stderr
    for rank in range(3):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert f"all say this {rank}\n" in log and "clipped" in log


def test_standard_output_and_errors_stay_apart():
    done = launch("print('out'); print('err', file=sys.stderr)")
    assert (done.stdout, done.stderr) == ("out\n", "err\n")


def test_rank_0_has_a_terminal_of_the_launchers_size_if_that_has_one(tmp_path):
    code = "if rank == 0: print(sys.stdout.isatty(), os.get_terminal_size().columns)"
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "columns", "77"], stdin=theirs, check=True)
    child = subprocess.Popen(words(code, "--logs", tmp_path), stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while raw := os.read(ours, 4096):
            shown += raw
    except OSError:  # its other end is closed
        pass
    assert child.wait() == 0
    assert b"True 77\r" in shown
    assert (tmp_path / "rank-0.log").read_text() == "True 77\n"


def test_a_log_has_no_control_sequences(tmp_path):
    display = Display(tmp_path)
    display.show(Output(0, "\x1b[?25lstep 1\x1b[0m\rstep", raw=b" "))
    display.show(Output(0, " 2\r\n", raw=b" "))
    assert display.last_lines(0) == ["step 1", "step 2"]
    assert (tmp_path / "rank-0.log").read_text() == "step 1\nstep 2\n"


# -- failures ----------------------------------------------------------------------------------


def test_one_that_fails_ends_all_and_is_named_in_the_last_line(tmp_path):
    code = "if rank == 1:\n print('no such disk'); sys.exit(3)\ntime.sleep(60)"
    begun = time.monotonic()
    done = launch(code, "--logs", tmp_path)
    assert time.monotonic() - begun < 30
    assert done.returncode == ExitCode.DIVERGED
    host = os.uname().nodename
    assert last_line(done).startswith(
        f"jaxspeed launch: rank 1 of 3 on {host} ended with exit code 3 (the loss stayed "
    )
    assert f"last output of rank 1 (all: {tmp_path}/rank-1.log):\n  | no such disk" in done.stderr


def test_one_that_is_killed_is_named_with_the_signal():
    done = launch("if rank == 2: os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert done.returncode == 128 + signal.SIGKILL
    assert re.search(r"rank 2 of 3 on .* was killed by SIGKILL \(out of mem", last_line(done))


def test_one_that_does_not_end_is_killed_after_the_grace():
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\n"
    code += "if rank == 1: time.sleep(1); sys.exit(1)\ntime.sleep(60)"
    done = launch(code, "--grace", 0.5)
    assert done.returncode == 1
    assert ends(int(done.stdout))


@pytest.mark.parametrize("consequence", [5, -signal.SIGABRT])
def test_the_cause_is_named_even_if_a_consequence_is_seen_first(consequence):
    code = "if rank == 0: time.sleep(0.7); sys.exit(1)\n"
    end = "sys.exit(5)" if consequence == 5 else "os.abort()"
    done = launch(f"{code}if rank == 1: {end}\ntime.sleep(60)")
    assert done.returncode == 1
    assert "rank 0 of 3" in last_line(done)


def test_a_process_that_is_stuck_is_named_as_its_peers_name_it():
    """It cannot end by itself: the last line has what another one's watchdog found."""
    fault = "process 2 on h, in step after step 7: no heartbeat for 60 s"
    code = f"if rank == 1: print('jaxspeed: {fault}', file=sys.stderr); sys.exit(5)\n"
    done = launch(code + "os.kill(os.getpid(), signal.SIGSTOP)", "--grace", 0.3)
    assert done.returncode == ExitCode.PEER
    assert f"(another process failed): {fault}, after" in last_line(done)


def test_what_a_failed_process_started_is_ended_too(tmp_path):
    code = "if rank == 0:\n import subprocess\n child = subprocess.Popen(['sleep', '60'])\n"
    code += " print(child.pid, flush=True); sys.exit(1)\ntime.sleep(60)"
    begun = time.monotonic()
    done = launch(code)
    assert time.monotonic() - begun < 30
    assert ends(int(done.stdout))


def test_no_process_outlives_a_launcher_that_is_killed():
    child = started("print(os.getpid(), flush=True); time.sleep(60)", "--all-output")
    pids = [int(child.stdout.readline().split()[1]) for _ in range(3)]
    assert all(map(is_alive, pids))
    child.kill()
    child.communicate()
    assert ends(*pids)


@pytest.mark.parametrize("name", ["trian", "nothing.py", "/no/such/program"])
def test_a_program_that_is_not_there_is_named_before_anything_starts(name, capsys):
    words = ["launch", "--processes", "2", "--max-restarts", "3", "--", name, "configs/tiny.yaml"]
    assert main(words) == ExitCode.CONFIG
    assert f"found no {name}; a COMMAND is train, eval" in capsys.readouterr().err


def test_a_program_that_another_host_does_not_have_is_named(tmp_path):
    done = launch_far(tmp_path, 'exec sh -c "$3"', 2, command=["no-such-program"])
    assert done.returncode == 1
    assert "no-such-program: No such file" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--print"], "--print: needs --on slurm or mpi"),
        (["--nodes", "2"], "--nodes: needs --on slurm or mpi"),
        (["--on", "slurm", "--hostfile", "x"], "--hostfile: not used with --on slurm"),
        (["--on", "ray", "--all-output"], "--all-output: not used with --on ray"),
        (["--on", "mpi", "--image", "x"], "--image: not used with --on mpi"),
        (["--include", "a"], "--include and --exclude need --hostfile"),
    ],
)
def test_an_option_that_would_not_count_is_named(words, said, capsys):
    assert main(["launch", "--processes", "2", *words, "--", "true"]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--processes", "2"],
        ["--processes", "0", "--", "true"],
        ["--processes", "1", "--max-restarts", "-1", "--", "true"],
    ],
)
def test_a_mistake_is_a_message_and_exit_code_2(given):
    done = subprocess.run([*LAUNCH, *given], capture_output=True, text=True)
    assert done.returncode == ExitCode.CONFIG
    assert "error:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (4, "ended with exit code 4 (its watchdog found it stuck)"),
        (75, "ended with exit code 75 (asked to stop, and the state is saved)"),
        (143, "ended with exit code 143 (stopped by SIGTERM)"),
        (77, "ended with exit code 77"),
        (-11, "was killed by SIGSEGV"),
    ],
)
def test_exit_codes_in_prose(code, said):
    assert how_it_ended(code) == said


# -- other hosts, which a shell stands for; with a real sshd: tests/system/test_clusters.py -----


def far(folder, ssh, slots):
    """Options for a host `far`, whose ssh is a shell script that is given the command as $3."""
    (folder / "hosts").write_text(f"far slots={slots}\n")
    (folder / "ssh").write_text(f"#!/bin/sh\n{ssh}\n")
    (folder / "ssh").chmod(0o755)
    return ("--hostfile", folder / "hosts", "--ssh", folder / "ssh")


def launch_far(folder, ssh, slots, *options, command=()):
    return launch("print(rank)", *far(folder, ssh, slots), *options, command=command)


def test_processes_of_another_host(tmp_path):
    done = launch_far(tmp_path, 'exec sh -c "$3"', 3, "--all-output")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[1] 1", "[2] 2"]


def test_a_host_that_has_fewer_gpus_than_slots_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    done = launch_far(tmp_path, 'exec sh -c "$3"', 4, "--max-restarts", 2)
    assert done.returncode == ExitCode.CONFIG
    assert f"  | error: {os.uname().nodename}: the hostfile's slot 3, but 2 GPUs" in done.stderr
    assert "rank 0 of 4 on far ended with exit code 2" in last_line(done)


def test_a_host_without_the_same_python_is_no_lost_connection(tmp_path):
    done = launch_far(tmp_path, "echo exec: python: not found >&2; exit 127", 2)
    assert done.returncode == 127
    assert "  | exec: python: not found\n" in done.stderr
    assert "rank 0 of 2 on far ended with exit code 127, after" in last_line(done)


def test_a_process_knows_the_command_that_started_it():
    code = "from jaxspeed.cli.common import program; print(program())"
    words = ["--processes", "2", "--grace", "7", "--", sys.executable, "-c", code]
    done = subprocess.run([*LAUNCH, *words], capture_output=True, text=True, check=True)
    expected = ["python", "-m", "jaxspeed", "launch", "--processes", "2", "--grace", "7", "--"]
    assert done.stdout == f"{expected}\n"


# -- signals -----------------------------------------------------------------------------------

SAVES = """
def stop(number, frame): print("saving", flush=True); time.sleep(0.3); sys.exit(75)
signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_is_passed_on_and_waited_for(number):
    child = started(SAVES, "--all-output", "--max-restarts", "2")
    for _ in range(3):
        assert "ready" in child.stdout.readline()
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == ExitCode.PREEMPTED
    assert out.count("saving") == 3
    assert err.splitlines()[-1].endswith(f"stopped by {number.name}; the state is saved")


def test_a_process_that_was_asked_itself_leaves_the_others_time_to_end():
    """All stop at the same step; a second signal would end them before they have saved."""
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
    done = launch(code + "time.sleep(0 if rank == 1 else 1); sys.exit(75)", "--max-restarts", 2)
    assert done.returncode == ExitCode.PREEMPTED
    assert last_line(done) == "jaxspeed launch: stopped by SIGTERM; the state is saved"


def test_a_third_request_kills():
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)\n"
    child = started(code + "time.sleep(60)", "--all-output")
    for _ in range(3):
        child.stdout.readline()
    for _ in range(3):
        child.terminate()
        time.sleep(0.3)
    child.communicate(timeout=30)
    assert child.returncode == 128 + signal.SIGKILL


IGNORES = """
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, "SIGTERM, another host"])
def test_processes_that_do_not_react_to_a_request_to_stop_are_killed_after_the_grace(
    number, tmp_path
):
    host = ()
    if not isinstance(number, signal.Signals):
        number, host = signal.SIGTERM, far(tmp_path, 'exec sh -c "$3"', 3)
    code = f"{IGNORES}if rank == 2: signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
    code += "print(os.getpid(), flush=True); time.sleep(60)"
    child = started(code, "--all-output", "--grace", "0.5", "--max-restarts", "2", *host)
    pids = [int(child.stdout.readline().split()[1]) for _ in range(3)]
    began = time.monotonic()
    child.send_signal(number)
    _, err = child.communicate(timeout=30)
    assert time.monotonic() - began < 10 and ends(*pids)
    assert child.returncode == 128 + number
    ranks = "0, 1" if number == signal.SIGTERM else "0, 1, 2"
    last = f"jaxspeed launch: stopped by {number.name}; killed after 0.5 s (--grace): rank {ranks}"
    assert err.splitlines()[-1] == last


def test_a_run_that_saves_before_it_ends_is_waited_for_beyond_the_grace():
    """As `jaxspeed.run.signals` reports it; afterwards the grace counts again."""
    code = f"""{IGNORES}
sys.path.insert(0, {str(Path.cwd())!r})
from jaxspeed.launch.variables import report_stops
report_stops(True)
print("ready", flush=True)
time.sleep(2)
print("saved", flush=True)
report_stops(False)
time.sleep(60)
"""
    child = started(code, "--all-output", "--grace", "0.3")
    for _ in range(3):
        assert "ready" in child.stdout.readline()
    child.terminate()
    out, err = child.communicate(timeout=30)
    assert out.count("saved") == 3 and "killed after 0.3 s" in err.splitlines()[-1]


def test_other_signals_are_the_processes_own_business():
    code = "signal.signal(signal.SIGUSR1, lambda *_: (print('noted', flush=True), sys.exit(0)))\n"
    child = started(code + "print('ready', flush=True); time.sleep(60)", "--all-output")
    for _ in range(3):
        child.stdout.readline()
    child.send_signal(signal.SIGUSR1)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and out.count("noted") == 3


# -- restarts ----------------------------------------------------------------------------------


def test_a_failed_run_starts_again_until_it_succeeds(tmp_path):
    code = f"""
count = len(open({str(tmp_path / "starts")!r}, "a+").read()) if rank else 0
if rank == 0:
    open({str(tmp_path / "starts")!r}, "a").write("x")
    starts = len(open({str(tmp_path / "starts")!r}).read())
    print("start", starts, flush=True)
    sys.exit(starts < 3)
"""
    done = launch(code, "--max-restarts", 5)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "start 1\nstart 2\nstart 3\n"
    assert "restart 2 of at most 5 in 2 s, from the start" in done.stderr


def test_restarts_are_counted():
    done = launch("sys.exit(rank == 1)", "--max-restarts", 2)
    assert done.returncode == 1
    assert "not restarted: 2 restarts are done" in last_line(done)


def test_restarts_without_a_newer_checkpoint_end_sooner():
    done = launch(
        "sys.exit(1)", "--max-restarts", 9, "--max-restarts-without-progress", 1, processes=1
    )
    assert "no newer checkpoint in 2 starts" in last_line(done)


def test_a_newer_checkpoint_is_progress():
    """Each start saves a step more: all restarts are used, without back-off."""
    code = "path = os.environ['JAXSPEED_PROGRESS_FILE']\n"
    code += "report(int(open(path).read()) + 1 if os.path.exists(path) else 1); sys.exit(1)"
    options = ("--max-restarts", 3, "--max-restarts-without-progress", 1)
    done = launch(code, *options, processes=1)
    assert "not restarted: 3 restarts are done" in last_line(done)
    assert "restart 3 of at most 3 in 1 s, from step 3" in done.stderr


@pytest.mark.parametrize("code", [ExitCode.CONFIG, ExitCode.DIVERGED])
def test_what_would_fail_again_is_not_restarted(code):
    done = launch(f"sys.exit({int(code)})", "--max-restarts", 3)
    assert done.returncode == code and "restart 1" not in done.stderr


def test_a_launcher_may_be_stopped_between_two_starts():
    child = started("sys.exit(1)", "--max-restarts", "9")
    while "restart 2" not in child.stderr.readline():
        pass
    child.terminate()
    _, err = child.communicate(timeout=30)
    assert child.returncode == 1 and "asked to stop before the restart" in err


# -- devices -----------------------------------------------------------------------------------


def job(**given):
    return HostJob(("true",), 2, given.pop("count", 2), "localhost:1", **given)


def test_gpus_are_divided_by_local_rank():
    eight = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "JAX_PLATFORMS": ""}
    found = [process_environment(job(environment=eight), rank) for rank in range(2)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["4,5", "6,7"]
    found = [process_environment(job(environment=eight, devices=1), rank) for rank in range(2)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["4", "5"]


def test_too_few_gpus_are_an_error(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    words = ["launch", "--processes", "2", "--devices-per-process", "2", "--", "true"]
    assert main(words) == ExitCode.CONFIG
    assert "2 processes with 2 devices each, but 3 GPUs" in capsys.readouterr().err


def test_simulated_devices_are_for_hosts_without_gpus():
    flags = {"XLA_FLAGS": "--a --xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    found = process_environment(job(environment=flags, devices=3, first=4, count=6), 1)
    assert (found["JAX_NUM_CPU_DEVICES"], found["XLA_FLAGS"]) == ("3", "--a")
    assert (found["JAX_PROCESS_ID"], found["JAX_NUM_PROCESSES"]) == ("5", "6")


def test_the_launcher_imports_no_jax():
    code = "import sys; from jaxspeed.cli import main; sys.argv[1:] = ['launch', '--processes', "
    code += "'1', '--', 'true']; code = main(); assert 'jax' not in sys.modules; sys.exit(code)"
    subprocess.run([sys.executable, "-c", code], check=True)
