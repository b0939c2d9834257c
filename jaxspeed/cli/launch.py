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

from jaxspeed.cli.common import Help, program
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
        formatter_class=Help,
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
    options = {
        flag: how for scheduler in SCHEDULERS.values() for flag, how in scheduler.options.items()
    }
    for flag, how in options.items():
        cluster.add_argument(flag, **how)
    parser.set_defaults(run=run, default_of=parser.get_default)


def run(args: argparse.Namespace) -> int:
    readers = {on: scheduler.names for on, scheduler in SCHEDULERS.items()}
    read = _HERE if args.on is None else readers[args.on]
    for name in sorted(_HERE.union(*readers.values())):
        value = getattr(args, name)
        if value == args.default_of(name):
            continue
        # Where an option's value is --, argparse of Python 3.12 gives an empty list.
        if value == [] or (isinstance(value, list) and [] in value):
            raise ConfigError("launch: -- is no value of an option")
        if name not in read:
            option = f"--{name.replace('_', '-')}"
            if args.on is None:
                where = " or ".join(on for on, names in readers.items() if name in names)
                raise ConfigError(f"{option}: needs --on {where}")
            raise ConfigError(f"{option}: not used with --on {args.on}")
    return _supervise(args) if args.on is None else _submit(args)


def _submit(args: argparse.Namespace) -> int:
    """Print or submit the job of a scheduler."""
    if args.processes is None:
        raise ConfigError(f"--on {args.on}: needs --processes N, of all hosts")
    scheduler = SCHEDULERS[args.on]
    job = ClusterJob(
        command_of(args.words, None),
        args.processes,
        args.nodes,
        args.devices_per_process,
        name=args.name,
        folder=os.getcwd(),
        logs=os.path.abspath(args.logs or "logs"),
        cache=os.path.abspath(args.cache),
        save_seconds=args.save_seconds,
        max_restarts=args.max_restarts,
        options=tuple(args.option),
    )
    text = scheduler.script(job, args)
    if args.print:
        sys.stdout.write(text)
        return 0
    if shutil.which(scheduler.program) is None:
        raise ConfigError(f"{scheduler.program} is not installed here; --print shows the job")
    return submit(scheduler.command(job, args), text)


def _supervise(args: argparse.Namespace) -> int:
    hosts = _hosts(args)
    count = sum(job.processes for job in hosts.values())
    ranks = [host for host, job in hosts.items() for _ in range(job.processes)]
    display = Display(args.logs, args.all_output)
    restarts = Restarts(args.max_restarts, args.max_restarts_without_progress, args.grace)

    def start(events: Any, progress: str) -> LocalGroup | RemoteGroup:
        address = _coordinator(args.coordinator, list(hosts), Path(progress).parent)
        token = secrets.token_hex(32)
        jobs = {host: replace(job, coordinator=address, token=token) for host, job in hosts.items()}
        (first, job), *others = jobs.items()
        if is_here(first) and not others:
            return LocalGroup(job, events, progress)
        return RemoteGroup(jobs, events, args.ssh)

    try:
        return supervise(start, count, display, restarts, lambda rank: ranks[rank])
    finally:
        display.close()


def _hosts(args: argparse.Namespace) -> dict[str, HostJob]:
    """What each host starts; without a hostfile, this one alone."""
    devices, here = args.devices_per_process, socket.gethostname()
    if args.hostfile:
        if args.processes is not None:
            raise ConfigError("--processes: with --hostfile it is the number of slots")
        slots = selected(read_hostfile(args.hostfile), args.include, args.exclude)
        if uneven := [host for host, of in slots.items() if len(of) % (devices or 1)]:
            raise ConfigError(
                f"--devices-per-process {devices}: {uneven[0]} has {len(slots[uneven[0]])} slots"
            )
        processes = {host: len(of) // (devices or 1) for host, of in slots.items()}
        simulated = None if devices is None else sum(map(len, slots.values()))
    else:
        if args.include or args.exclude:
            raise ConfigError("--include and --exclude need --hostfile")
        if args.processes is None:
            raise ConfigError("launch: needs --processes N, or --hostfile FILE, before --")
        _check_program(command_of(args.words, None))
        slots, processes = {}, {here: args.processes}
        simulated = None if devices is None else args.processes * devices
    if has_gpus(os.environ):
        simulated = None
    command, firsts = command_of(args.words, simulated), 0
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
            bind=not args.no_core_binding,
            terminal=not args.hostfile and sys.stdout.isatty() and not args.all_output,
            environment={
                **_launcher(args.words),
                **(exported_environment() if args.hostfile else {}),
            },
            folder=os.getcwd(),
        )
        firsts += number
    return jobs


def _coordinator(stated: str | None, hosts: list[str], folder: Path) -> str:
    """Where rank 0 listens: on one host, a socket; elsewhere a port that is seldom in use."""
    if stated is not None:
        checked_host(stated, "--coordinator")
    if stated and ":" in stated:
        return stated
    if stated is None and len(hosts) == 1 and is_here(hosts[0]):
        return f"unix:{folder}/coordinator"
    return f"{stated or coordinator_host(hosts)}:{random.randrange(20000, 30000)}"


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
