"""A run as a job of SLURM, Open MPI or Ray: the complete script, and its submission."""

import json
import re
import shlex
import signal
import subprocess
import sys
import zlib
from dataclasses import asdict, dataclass
from urllib.parse import quote

from jaxspeed.errors import ConfigError, ExitCode
from jaxspeed.launch.agent import encoded_job
from jaxspeed.launch.hostfile import read_hostfile
from jaxspeed.launch.local_group import HostJob
from jaxspeed.launch.supervisor import STOPS, Restarts
from jaxspeed.launch.variables import COORDINATOR, TOKEN

# Restarted at once, and without being counted: the state is saved.
_AGAIN = int(ExitCode.PREEMPTED)
# Never restarted: the same again would fail again.
_FINAL = f"{int(ExitCode.SUCCESS)}|{int(ExitCode.CONFIG)}|{int(ExitCode.DIVERGED)}"

_RAY_DRIVER = "jaxspeed.launch.ray.driver"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Made by the script where it runs: what is submitted, and what `ps` shows, does not have it.
_NEW_TOKEN = f"""\
{TOKEN}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export {TOKEN}"""
# Seconds for the other processes of a SLURM job after the first has ended.
_WAIT = 120


@dataclass(frozen=True)
class ClusterJob:
    """A run that a scheduler starts.

    Attributes:
      command: the program of each process and its arguments.
      processes: number of processes, on `nodes` hosts.
      devices: accelerators of each process; None: it simulates them, or takes what it finds.
      folder: where it runs.
      logs: the folder of the ranks' output.
      cache: the compilation cache, which all hosts share.
      save_seconds: time for the last checkpoint before the end of a job.
      max_restarts: after failures; preemptions are not counted.
      options: of the scheduler, as its command line takes them.
    """

    command: tuple[str, ...]
    processes: int
    nodes: int = 1
    devices: int | None = None
    name: str = "jaxspeed"
    folder: str = "."
    logs: str = "logs"
    cache: str = "cache"
    save_seconds: int = 300
    max_restarts: int = 0
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name {self.name!r}: at most 64 of A-Z, a-z, 0-9, '.', '_' and '-', the first a "
                "letter or digit"
            )
        # A line break would end a directive of SLURM, and the rest would be a command.
        for word in (self.folder, self.logs, self.cache, *self.options):
            if not word.isprintable():
                raise ConfigError(f"{word!r}: has a character that no script can hold")
        if self.processes % self.nodes:
            raise ConfigError(
                f"--processes {self.processes} are not divisible by --nodes {self.nodes}"
            )

    @property
    def per_node(self) -> int:
        return self.processes // self.nodes


def slurm_script(job: ClusterJob) -> str:
    """A batch script that requeues itself after a preemption, and after failures if allowed."""
    gpus = [f"--gpus-per-node={job.per_node * job.devices}"] if job.devices else []
    directives = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks={job.processes}",
        f"--ntasks-per-node={job.per_node}",
        *gpus,
        f"--chdir={job.folder}",
        f"--output={job.logs}/job-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=TERM@{job.save_seconds}",
        *job.options,
    ]
    lines = "\n".join(f"#SBATCH {shlex.quote(directive)}" for directive in directives)
    return f"""\
#!/bin/bash
{lines}

# {job.save_seconds} seconds before the time limit the processes are asked to save and end. The
# script itself must outlive that; a handler, unlike an ignored signal, is not inherited.
trap : TERM
mkdir -p {_quoted(f"{job.logs}/ranks", job.cache)}
export JAX_COMPILATION_CACHE_DIR={_quoted(job.cache)}
{_NEW_TOKEN}

# When one process fails the others end by themselves, or {_WAIT} seconds later.
srun --wait={_WAIT} --label --open-mode=append \\
  --output={_quoted(f"{job.logs}/ranks/rank-%t.log")} \\
  {_quoted(*job.command)}
code=$?

tail -n 20 {_quoted(f"{job.logs}/ranks")}/rank-*.log
again() {{ # but not after scancel
  if [ "$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")" = COMPLETING ]; then return; fi
  echo "$1; queued again"
  scontrol requeue "$SLURM_JOB_ID"
}}
# A line for each; what SLURM counts are preemptions, too.
failures={_quoted(f"{job.logs}/failures")}-$SLURM_JOB_ID
case $code in
  {_FINAL}) ;;
  {_AGAIN}) again saved ;;
  *) echo "exit code $code" >> "$failures"
     failed=$(wc -l < "$failures")
     if [ "$failed" -le {job.max_restarts} ]; then
       again "exit code $code; restart $failed of at most {job.max_restarts}"
     fi ;;
esac
echo {_quoted(job.name)}": exit code $code, starts before this one ${{SLURM_RESTART_COUNT:-0}}"
exit "$code"
"""


def mpi_script(job: ClusterJob, hostfile: str | None = None) -> str:
    """A script around Open MPI's mpirun, which starts a failed run again if allowed.

    A hostfile of Open MPI has DeepSpeed's form. Its first host is the coordinator; without one
    JAX, or `environment.py`, finds the coordinator.
    """
    exported = ["-x", "JAX_COMPILATION_CACHE_DIR", "-x", TOKEN]
    hosts: list[str] = []
    if hostfile is not None:
        port = 20000 + zlib.crc32(job.name.encode()) % 10000
        exported += ["-x", f"{COORDINATOR}={next(iter(read_hostfile(hostfile)))}:{port}"]
        hosts = ["--hostfile", hostfile]
    words = [
        *("-n", str(job.processes), "--map-by", f"ppr:{job.per_node}:node", "--bind-to", "none"),
        *hosts,
        *exported,
        *("--tag-output", "--output-filename", f"{job.logs}/ranks"),
        *job.options,
    ]
    return f"""\
#!/bin/bash
cd {_quoted(job.folder)} || exit {int(ExitCode.CONFIG)}
mkdir -p {_quoted(job.logs, job.cache)}
export JAX_COMPILATION_CACHE_DIR={_quoted(job.cache)}
{_NEW_TOKEN}

restarts=0 stopped=
# mpirun would end the processes a second after SIGTERM or Ctrl-C, so it has a session of its own.
# SIGUSR1 it passes on, and waits; a run saves and ends.
trap 'stopped=1; kill -USR1 $run 2>/dev/null' TERM INT
while :; do
  # In the background: bash runs no handler while it waits for a command.
  setsid mpirun {_quoted(*words)} \\
    {_quoted(*job.command)} &
  run=$!
  wait $run
  while kill -0 $run 2>/dev/null; do wait $run; done # a signal ends a wait, not the run
  wait $run # its exit code, known since it ended
  code=$?
  case $code in {_FINAL}|{_AGAIN}) break ;; esac
  if [ -n "$stopped" ] || [ $restarts -ge {job.max_restarts} ]; then break; fi
  restarts=$((restarts + 1))
  echo "exit code $code; restart $restarts of at most {job.max_restarts}"
  sleep $((restarts < 6 ? 1 << (restarts - 1) : 60))
done
echo {_quoted(job.name)}": exit code $code, restarts so far $restarts"
exit "$code"
"""


def ray_script(job: ClusterJob, restarts: Restarts) -> str:
    """A script that submits a Ray job, whose driver starts and supervises the processes.

    They run in this folder, which all hosts see, or in one that `--working-dir` uploads. Ray joins
    the driver's arguments to a line of a shell, and does not quote `$` and the like in them.
    """
    uploads = any("working-dir" in option for option in job.options)
    processes = HostJob(
        *(job.command, 1, job.processes, ""),
        devices=job.devices,
        bind=False,
        folder=None if uploads else job.folder,
    )
    argument = {"job": encoded_job(processes), "restarts": asdict(restarts), "logs": job.logs}
    environment = {
        "JAX_COMPILATION_CACHE_DIR": job.cache,
        "RAY_JOB_STOP_WAIT_TIME_S": str(job.save_seconds),  # between SIGTERM and SIGKILL
    }
    words = [
        *("--runtime-env-json", json.dumps({"env_vars": environment})),
        *job.options,
    ]
    driver = [sys.executable, "-m", _RAY_DRIVER]
    return f"""\
#!/bin/bash
# The cluster takes a token, from RAY_AUTH_TOKEN or ~/.ray/auth_token.
export RAY_AUTH_MODE="${{RAY_AUTH_MODE:-token}}"
exec ray job submit {_quoted(*words)} \\
  -- {_quoted(*driver, quote(json.dumps(argument)))}
"""


def submit(program: list[str], text: str) -> int:
    """Hand a script or manifest to a program's standard input; its exit code."""
    process = subprocess.Popen(program, stdin=subprocess.PIPE, text=True, start_new_session=True)
    # A stop comes from here alone, once; as SIGTERM also for Ctrl-C, since a shell that was started
    # with SIGINT ignored, as in the background, cannot trap it.
    pass_on = lambda *_: process.terminate()  # noqa: E731
    before = {number: signal.signal(number, pass_on) for number in STOPS}
    try:
        process.communicate(text)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = process.returncode
    return code if code >= 0 else 128 - code


def _quoted(*words: str) -> str:
    return shlex.join(words)
