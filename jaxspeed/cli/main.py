"""`jaxspeed COMMAND`: argument parsing, errors and exit codes.

Exit codes are those of `errors.ExitCode`, and 130 after Ctrl-C. An error that jaxspeed raises
prints one message and no traceback.
"""

import argparse
import atexit
import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxspeed.cli.common import INTERRUPTED, Help
from jaxspeed.errors import JaxspeedError, exit_code
from jaxspeed.near_words import did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS = (  # each has a module of its name
    *("init", "train", "eval", "sample", "plan", "check", "config"),
    *("checkpoint", "data", "report", "launch"),
)


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """The argument parser of one command, or, where there is no such command, of all."""
    top = Parser(
        prog="jaxspeed",
        description="Train Flax models whose state does not fit one device.",
        epilog="example: jaxspeed train configs/tiny.yaml",
        formatter_class=Help,
    )
    top.add_argument("--version", action=_Version, help="show the version and exit")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in [command] if command in COMMANDS else COMMANDS:
        importlib.import_module(f"jaxspeed.cli.{name}").add(commands)
    return top


class Parser(argparse.ArgumentParser):
    """A parser that suggests what a mistyped command or option means."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = self._chosen(parsed)
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            hints = [_meant(option, parser._option_string_actions) for option in options]
            if any(word.endswith(",") for word in args or ()):
                hints.append("Write no blank after a comma")
            text = f"unrecognized arguments: {' '.join(unknown)}"
            parser.error(". ".join([text, *filter(None, hints)]))
        return parsed

    def _chosen(self, parsed: argparse.Namespace) -> argparse.ArgumentParser:
        """The parser of the command, and of its verb, that were parsed."""
        parser: argparse.ArgumentParser = self
        while below := [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]:
            parser = below[0].choices[getattr(parsed, below[0].dest)]
        return parser

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if hint := did_you_mean(str(value), map(str, action.choices or ())):
                raise argparse.ArgumentError(action, f"{error.message}. {hint}") from None
            raise


def _meant(option: str, known: Iterable[str]) -> str:
    """Suggest what is a typo, or is in its name: --seq-len for --max-seq-length."""
    inside = [x for x in known if len(x) > 5 and x.strip("-") in option.replace("_", "-")]
    return did_you_mean(option, known) or did_you_mean(max(inside, key=len, default=""), inside)


class _Version(argparse.Action):
    def __init__(self, **how: Any) -> None:
        super().__init__(nargs=0, **how)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version  # 20 ms, which other commands need not take

        print(f"jaxspeed {version('jaxspeed')}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Python's last collections walk all of JAX's objects, 0.6 s, to free what the exit frees.
    atexit.register(gc.freeze)
    words = sys.argv[1:] if arguments is None else arguments
    args = parser(words[0] if words else None).parse_args(words)
    try:
        if arguments is None and "at_start" in args:  # this process is the command's own
            args.at_start(args)  # may restart it: rich, which takes long to import, comes later
        with _log_shown():
            return int(args.run(args) or 0)
    except JaxspeedError as error:
        errors = _errors()
        errors.print("error:", style="bold red", end=" ")
        errors.print(str(error), markup=False, highlight=False)
        _end_others(error)
        return exit_code(error)
    except KeyboardInterrupt:
        _errors().print("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has exited, for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextmanager
def _log_shown() -> Iterator[None]:
    """Show jaxspeed's log messages meanwhile."""
    from rich.logging import RichHandler

    logger = logging.getLogger("jaxspeed")
    handler = RichHandler(console=_errors(), show_path=False, show_time=False, markup=False)
    logger.addHandler(handler)
    logger.propagate = False  # a library may have added a handler to the root logger
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def _errors() -> "Console":
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True)


def _end_others(error: JaxspeedError) -> None:
    """End the run's other processes, if this is one of several."""
    if "jaxspeed.run.watchdog" in sys.modules:  # some commands do not import JAX
        sys.modules["jaxspeed.run.watchdog"].end_all(error)
