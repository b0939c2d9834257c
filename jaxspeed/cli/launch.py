"""`jaxspeed launch ... -- train CONFIG`: a command in many processes."""

import argparse
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxspeed.errors import ConfigError
from jaxspeed.launch.binding import has_gpus
from jaxspeed.launch.local_group import HostJob, LocalGroup
from jaxspeed.launch.output import Display
from jaxspeed.launch.supervisor import Restarts, supervise

# Commands of jaxspeed whose processes join each other.
JOINING = ("train", "eval", "sample", "check")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "launch",
        help="run a command in many processes",
        description="Run a command in many processes: on this host, on those of a hostfile, or by "
        "a scheduler.",
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
        type=float,
        default=10.0,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL for the others when one fails (10)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
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
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    if given.processes is None:
        raise ConfigError("launch: needs --processes N")
    devices = given.devices_per_process
    simulated = None if devices is None or has_gpus(os.environ) else devices * given.processes
    command = command_of(given.words, simulated)
    display = Display(given.logs, given.all_output)
    restarts = Restarts(given.max_restarts, given.max_restarts_without_progress, given.grace)
    job = HostJob(
        command,
        processes=given.processes,
        count=given.processes,
        coordinator="",
        devices=devices,
        bind=not given.no_core_binding,
        terminal=sys.stdout.isatty() and not given.all_output,
    )

    def start(events: Any, progress: str) -> LocalGroup:
        return LocalGroup(replace(job, coordinator=free_address()), events, progress)

    try:
        return supervise(start, given.processes, display, restarts)
    finally:
        display.close()


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


def free_address() -> str:
    """An address of this host alone where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value}; needs at least 1")
    return value
