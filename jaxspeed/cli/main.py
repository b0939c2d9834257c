"""`jaxspeed COMMAND`: argument parsing, errors and exit codes.

Exit codes: 0; 1 for a failed check or run; 2 for a user error, which prints one message and no
traceback; 128 + n if signal n ended a run (its state is saved).
"""

import argparse
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
from jaxspeed.errors import CheckpointError, JaxspeedError, OutOfMemoryError, RunError

COMMANDS = (train, evaluate, sample, plan, check, config, checkpoint, data, report, launch)
FAILED, MISTAKE, INTERRUPTED = 1, 2, 130


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
    given = parser().parse_args(arguments)
    errors = Console(stderr=True, soft_wrap=True)
    logger = logging.getLogger("jaxspeed")
    handler = RichHandler(console=errors, show_path=False, show_time=False, markup=False)
    logger.addHandler(handler)
    logger.propagate = False  # a library may have added a handler to the root logger
    try:
        return int(given.run(given) or 0)
    except (RunError, CheckpointError, OutOfMemoryError) as error:
        _say(errors, error)
        return FAILED
    except JaxspeedError as error:
        _say(errors, error)
        return MISTAKE
    except KeyboardInterrupt:
        errors.print("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has exited, for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def _say(errors: Console, error: Exception) -> None:
    errors.print("error:", style="bold red", end=" ")
    errors.print(str(error), markup=False, highlight=False)
