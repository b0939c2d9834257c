"""`jaxspeed launch ... -- train CONFIG`: a command in many processes."""

import argparse
import math
import os
import random
import secrets
import shlex
import shutil
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxspeed.cli.common import program
from jaxspeed.errors import ConfigError
from jaxspeed.launch.binding import has_gpus
from jaxspeed.launch.hostfile import checked_host, exported_environment, read_hostfile, selected
from jaxspeed.launch.local_group import HostJob, LocalGroup
from jaxspeed.launch.output import Display
from jaxspeed.launch.remote_group import SSH, RemoteGroup, coordinator_host, is_here
from jaxspeed.launch.scheduler_table import SCHEDULERS
from jaxspeed.launch.schedulers import ClusterJob, submit
from jaxspeed.launch.supervisor import Restarts, supervise
from jaxspeed.launch.variables import LAUNCHER

# Commands of jaxspeed whose processes join each other.
JOINING = ("train", "eval", "sample", "check")
# Options of processes that are started from here.
_HERE = {
    "all_output",
    "no_core_binding",
    "logs",
    "devices_per_process",
    "grace",
    "max_restarts_without_progress",
    "hostfile",
    "include",
    "exclude",
    "coordinator",
    "ssh",
}


def _number(text: str, least: int, kind: Any, most: float = math.inf) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}; needs a number") from None
    if not value >= least:
        raise argparse.ArgumentTypeError(f"{text}; needs at least {least}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text}; needs at most {most}")
    return value


_positive = partial(_number, least=1, kind=int, most=1_000_000)
_natural = partial(_number, least=0, kind=int)
_seconds = partial(_number, least=0, kind=float)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "launch",
        help="run a command in many processes",
        description="Run a command in many processes: on this host, on those of a hostfile, or\n"
        "by a scheduler.",
        epilog="example: jaxspeed launch --processes 4 --logs logs -- train configs/tiny.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        metavar="COMMAND",
        nargs=argparse.REMAINDER,
        help=f"after --: {', '.join(JOINING)} with its arguments, a Python file, or a program",
    )
    parser.add_argument("--processes", type=_positive, metavar="N", help="number of processes")
    parser.add_argument(
        "--devices-per-process",
        type=_positive,
        metavar="N",
        help="GPUs of each process, or, on a host without any, simulated devices",
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="write each rank's output to DIR/rank-N.log"
    )
    parser.add_argument(
        "--all-output",
        action="store_true",
        help="show the output of all ranks, each line with its rank; by default that of rank 0, "
        "and warnings and errors of the others",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL, for the others when one fails, and after a "
        "request to stop for all but runs, which save first (10)",
    )
    parser.add_argument(
        "--max-restarts",
        type=_natural,
        default=0,
        metavar="N",
        help="start a failed run again, from its newest checkpoint, at most N times (0)",
    )
    parser.add_argument(
        "--max-restarts-without-progress",
        type=_positive,
        default=3,
        metavar="N",
        help="of these in a row without a newer checkpoint (3)",
    )
    parser.add_argument(
        "--no-core-binding",
        action="store_true",
        help="let each process use all cores instead of its share",
    )
    hosts = parser.add_argument_group("several hosts, over ssh")
    hosts.add_argument(
        "--hostfile", metavar="FILE", help="DeepSpeed's: lines of the form: HOST slots=4"
    )
    hosts.add_argument(
        "--include",
        default="",
        metavar="HOSTS",
        help="of the hostfile only these: HOST[:SLOT[,SLOT ...]], joined by @",
    )
    hosts.add_argument("--exclude", default="", metavar="HOSTS", help="all but these")
    hosts.add_argument(
        "--coordinator",
        metavar="HOST[:PORT]",
        help="address of the first host, as the others reach it",
    )
    hosts.add_argument(
        "--ssh", default=SSH, metavar="COMMAND", help=f"the command before a host ({SSH})"
    )
    cluster = parser.add_argument_group("by a scheduler")
    cluster.add_argument(
        "--on",
        choices=tuple(SCHEDULERS),
        help="submit a job; kubernetes is an Indexed Job",
    )
    cluster.add_argument(
        "--print", action="store_true", help="print the script or manifest instead of submitting it"
    )
    cluster.add_argument(
        "--nodes", type=_positive, default=1, metavar="N", help="hosts of the job (1)"
    )
    cluster.add_argument("--name", default="jaxspeed", help="the job's name (jaxspeed)")
    cluster.add_argument(
        "--cache",
        metavar="DIR",
        default="cache",
        help="compilation cache, on storage that all hosts share (cache)",
    )
    cluster.add_argument(
        "--save-seconds",
        type=_positive,
        default=300,
        metavar="S",
        help="time for the last checkpoint before a job is ended (300)",
    )
    cluster.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="WORD",
        help="an option of sbatch, mpirun, kubectl or ray job submit, like "
        "--option=--partition=gpu; may be repeated",
    )
    own = {flag: how for each in SCHEDULERS.values() for flag, how in each.options.items()}
    for flag, how in own.items():
        cluster.add_argument(flag, **how)
    parser.set_defaults(run=run, default_of=parser.get_default)


def run(given: argparse.Namespace) -> int:
    readers = {on: scheduler.names for on, scheduler in SCHEDULERS.items()}
    read = _HERE if given.on is None else readers[given.on]
    for name in sorted(_HERE.union(*readers.values())):
        value = getattr(given, name)
        if value == given.default_of(name):
            continue
        # Where an option's value is --, argparse of Python 3.12 gives an empty list.
        if value == [] or (isinstance(value, list) and [] in value):
            raise ConfigError("launch: -- is no value of an option")
        if name not in read:
            option = f"--{name.replace('_', '-')}"
            if given.on is None:
                where = " or ".join(on for on, names in readers.items() if name in names)
                raise ConfigError(f"{option}: needs --on {where}")
            raise ConfigError(f"{option}: not used with --on {given.on}")
    return _supervise(given) if given.on is None else _submit(given)


def _submit(given: argparse.Namespace) -> int:
    """Print or submit the job of a scheduler."""
    if given.processes is None:
        raise ConfigError(f"--on {given.on}: needs --processes N, of all hosts")
    scheduler = SCHEDULERS[given.on]
    job = ClusterJob(
        command_of(given.words, None),
        given.processes,
        given.nodes,
        given.devices_per_process,
        name=given.name,
        folder=os.getcwd(),
        logs=os.path.abspath(given.logs or "logs"),
        cache=os.path.abspath(given.cache),
        save_seconds=given.save_seconds,
        max_restarts=given.max_restarts,
        options=tuple(given.option),
    )
    text = scheduler.script(job, given)
    if given.print:
        sys.stdout.write(text)
        return 0
    if shutil.which(scheduler.program) is None:
        raise ConfigError(f"{scheduler.program} is not installed here; --print shows the job")
    return submit(scheduler.command(job, given), text)


def _supervise(given: argparse.Namespace) -> int:
    hosts = _hosts(given)
    count = sum(job.processes for job in hosts.values())
    ranks = [host for host, job in hosts.items() for _ in range(job.processes)]
    display = Display(given.logs, given.all_output)
    restarts = Restarts(given.max_restarts, given.max_restarts_without_progress, given.grace)

    def start(events: Any, progress: str) -> LocalGroup | RemoteGroup:
        address = _coordinator(given.coordinator, list(hosts), Path(progress).parent)
        token = secrets.token_hex(32)
        jobs = {host: replace(job, coordinator=address, token=token) for host, job in hosts.items()}
        (first, job), *others = jobs.items()
        if is_here(first) and not others:
            return LocalGroup(job, events, progress)
        return RemoteGroup(jobs, events, given.ssh)

    try:
        return supervise(start, count, display, restarts, lambda rank: ranks[rank])
    finally:
        display.close()


def _hosts(given: argparse.Namespace) -> dict[str, HostJob]:
    """What each host starts; without a hostfile, this one alone."""
    devices, here = given.devices_per_process, socket.gethostname()
    if given.hostfile:
        if given.processes is not None:
            raise ConfigError("--processes: with --hostfile it is the number of slots")
        slots = selected(read_hostfile(given.hostfile), given.include, given.exclude)
        if uneven := [host for host, of in slots.items() if len(of) % (devices or 1)]:
            raise ConfigError(
                f"--devices-per-process {devices}: {uneven[0]} has {len(slots[uneven[0]])} slots"
            )
        processes = {host: len(of) // (devices or 1) for host, of in slots.items()}
        simulated = None if devices is None else sum(map(len, slots.values()))
    else:
        if given.include or given.exclude:
            raise ConfigError("--include and --exclude need --hostfile")
        if given.processes is None:
            raise ConfigError("launch: needs --processes N, or --hostfile FILE")
        _check_program(command_of(given.words, None))
        slots, processes = {}, {here: given.processes}
        simulated = None if devices is None else given.processes * devices
    if has_gpus(os.environ):
        simulated = None
    command, firsts = command_of(given.words, simulated), 0
    jobs = {}
    for host, number in processes.items():
        jobs[host] = HostJob(
            command,
            processes=number,
            count=sum(processes.values()),
            coordinator="",  # another one for each start
            first=firsts,
            devices=devices,
            slots=slots.get(host),
            bind=not given.no_core_binding,
            terminal=not given.hostfile and sys.stdout.isatty() and not given.all_output,
            environment={
                **_launcher(given.words),
                **(exported_environment() if given.hostfile else {}),
            },
            folder=os.getcwd(),
        )
        firsts += number
    return jobs


def _coordinator(given: str | None, hosts: list[str], folder: Path) -> str:
    """Where rank 0 listens: on one host, a socket; elsewhere a port that is seldom in use."""
    if given is not None:
        checked_host(given, "--coordinator")
    if given and ":" in given:
        return given
    if given is None and len(hosts) == 1 and is_here(hosts[0]):
        return f"unix:{folder}/coordinator"
    return f"{given or coordinator_host(hosts)}:{random.randrange(20000, 30000)}"


def command_of(words: list[str], simulated: int | None) -> tuple[str, ...]:
    """The program of the given words: a command of jaxspeed, a Python file, or any program.

    `simulated` devices in all override the config's.
    """
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise ConfigError(
            "launch: no COMMAND, as in: jaxspeed launch --processes 4 -- train CONFIG"
        )
    if words[0] in JOINING:
        if simulated is not None and "--devices" not in words:
            words = [*words, "--devices", f"cpu:{simulated}"]
        return (sys.executable, "-m", "jaxspeed", *words)
    if words[0].endswith(".py"):
        return (sys.executable, *words)
    return tuple(words)


def _check_program(command: tuple[str, ...]) -> None:
    """Raise ConfigError if this host does not have a command's program or Python file."""
    name = command[1] if command[0] == sys.executable else command[0]
    if name == "-m" or name.startswith("-") or Path(name).is_file() or shutil.which(name):
        return
    raise ConfigError(
        f"launch: found no {name}; a COMMAND is {', '.join(JOINING)}, a Python file, or a program"
    )


def _launcher(words: list[str]) -> dict[str, str]:
    """The variable with this command line up to the command in `words`."""
    *options, separator = sys.argv[1 : len(sys.argv) - len(words)] or [""]
    options += [separator] * (separator != "--")
    return {LAUNCHER: shlex.join([*program(), *options, "--"])}
