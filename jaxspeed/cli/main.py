"""`jaxspeed COMMAND`: argument parsing, errors and exit codes.

Exit codes: 0; 1 for a failed check or run; 2 for a user error, which prints one message and no
traceback; 128 + n if signal n ended a run (its state is saved).
"""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.logging import RichHandler

from jaxspeed.errors import CheckpointError, JaxspeedError, OutOfMemoryError, RunError

# Each command and its file in this folder. Only that of the given command is imported: most import
# JAX, which takes seconds.
COMMANDS = {
    "train": "train",
    "eval": "evaluate",
    "sample": "sample",
    "plan": "plan",
    "check": "check",
    "config": "config",
    "checkpoint": "checkpoint",
    "data": "data",
    "report": "report",
    "launch": "launch",
}
FAILED, MISTAKE, INTERRUPTED = 1, 2, 130


def parser(given: str | None = None) -> argparse.ArgumentParser:
    """The argument parser of one command, or of all."""
    top = argparse.ArgumentParser(
        prog="jaxspeed",
        description="Train Flax models whose state does not fit one device.",
        epilog="example: jaxspeed train configs/tiny.yaml",
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in [given] if given in COMMANDS else COMMANDS:
        importlib.import_module(f"jaxspeed.cli.{COMMANDS[name]}").add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    given = parser(words[0] if words else None).parse_args(words)
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
