"""`jaxspeed COMMAND`: argument parsing, errors and exit codes.

Exit codes are those of `errors.ExitCode`, and 130 after Ctrl-C. An error that jaxspeed raises
prints one message and no traceback.
"""

import argparse
import atexit
import gc
import logging
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.logging import RichHandler

from jaxspeed.cli import (
    check,
    checkpoint,
    config,
    data,
    evaluate,
    launch,
    plan,
    report,
    sample,
    train,
)
from jaxspeed.cli.common import INTERRUPTED
from jaxspeed.errors import JaxspeedError, exit_code

COMMANDS = (train, evaluate, sample, plan, check, config, checkpoint, data, report, launch)


def parser() -> argparse.ArgumentParser:
    """The argument parser of all commands."""
    top = argparse.ArgumentParser(
        prog="jaxspeed",
        description="Train Flax models whose state does not fit one device.",
        epilog="example: jaxspeed train configs/tiny.yaml",
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Python's last collections walk all of JAX's objects, 0.6 s, to free what the exit frees.
    atexit.register(gc.freeze)
    given = parser().parse_args(arguments)
    errors = Console(stderr=True, soft_wrap=True)
    logger = logging.getLogger("jaxspeed")
    handler = RichHandler(console=errors, show_path=False, show_time=False, markup=False)
    logger.addHandler(handler)
    logger.propagate = False  # a library may have added a handler to the root logger
    try:
        if arguments is None and "at_start" in given:  # this process is the command's own
            given.at_start(given)
        return int(given.run(given) or 0)
    except JaxspeedError as error:
        _say(errors, error)
        _end_others(error)
        return exit_code(error)
    except KeyboardInterrupt:
        errors.print("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has exited, for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def _end_others(error: JaxspeedError) -> None:
    """End the run's other processes, if this is one of several."""
    if "jaxspeed.run.watchdog" in sys.modules:  # some commands do not import JAX
        sys.modules["jaxspeed.run.watchdog"].end_all(error)


def _say(errors: Console, error: Exception) -> None:
    errors.print("error:", style="bold red", end=" ")
    errors.print(str(error), markup=False, highlight=False)
