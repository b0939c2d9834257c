"""Common arguments and output of the commands."""

import argparse
import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspeed.errors import ConfigError
from jaxspeed.launch.variables import LAUNCHER

if TYPE_CHECKING:
    from rich.console import Console

    from jaxspeed.config import Config

IMPORTS = "importing JAX, starting devices"
CONFIGS = "a YAML or JSON file, a run's folder, or a name of `jaxspeed config --list`"
INTERRUPTED = 130  # by Ctrl-C, as shells have it


def command(
    commands: Any,
    name: str,
    what: str,
    example: str,
    *,
    config: bool = True,
    devices: bool = True,
) -> argparse.ArgumentParser:
    """A command's parser, with --json and, if it reads a config, --set, --output and --devices."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=textwrap.fill(f"{what[0].upper()}{what[1:]}.", _HELP_WIDTH),
        epilog=_wrapped(f"example: {example}"),
        formatter_class=Help,
    )
    if config:
        parser.add_argument("config", metavar="CONFIG", help=CONFIGS)
        add_overrides(parser)
        if devices:
            add_output(parser)
            parser.add_argument(
                "--devices",
                metavar="WHICH",
                help="cpu, gpu or tpu, or simulated ones: cpu:8 (overrides run.devices; by default "
                "those that JAX finds)",
            )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


class Help(argparse.RawDescriptionHelpFormatter):
    """A help with each option's default, in parentheses if its sentence does not have it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        is_value = bool(action.option_strings) and action.nargs != 0
        has_default = is_value and default not in (None, "", [], argparse.SUPPRESS)
        if not has_default or f"({default})" in text or "default" in text:
            return text
        return f"{text} (%(default)s)"


def config_or_run(parser: argparse.ArgumentParser) -> argparse.Action:
    """The argument CONFIG of a command's parser."""
    return next(action for action in parser._actions if action.dest == "config")


_HELP_WIDTH = 78


def _wrapped(command: str) -> str:
    """A command on lines of a help's width, which a shell reads as one."""
    lines = textwrap.wrap(command, _HELP_WIDTH - 2, break_on_hyphens=False, break_long_words=False)
    return " \\\n    ".join(lines)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        metavar="a.b=c",
        action="append",
        default=[],
        dest="overrides",
        help="override a key of the config file; may be repeated",
    )
    parser.add_argument(
        "--auto",
        metavar="hf|a.b=c",
        action="append",
        default=None,
        help='value of a key that is "auto", or hf: what Hugging Face\'s Trainer has by default, '
        "its optimizer and schedule too; may be repeated",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="unknown keys are errors also where DeepSpeed ignores them",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="the run's folder (overrides run.output; by default runs/ and the config's name)",
    )


def overrides_of(args: argparse.Namespace) -> list[str]:
    devices = [f"run.devices={args.devices}"] if getattr(args, "devices", None) else []
    folder = getattr(args, "output", None)
    output = [f"run.output={json.dumps(folder)}"] if folder else []
    return [*args.overrides, *output, *devices]


def hidden_size(tree: Mapping[str, Any]) -> int | None:
    """The hidden size of the family that a config names; imports JAX only where it is asked for."""
    from jaxspeed.user_models.config_model import hidden_size_of

    return hidden_size_of()(tree)


def loaded(args: argparse.Namespace, more: Iterable[str] = ()) -> "Config":
    """The command's config with its overrides."""
    from jaxspeed.config import load_config

    overrides = [*overrides_of(args), *more]
    options: dict[str, Any] = {"auto": args.auto, "strict": args.strict}
    config = load_config(args.config, overrides, hidden_size=hidden_size, **options)
    if getattr(args, "ema", False) and not (config.optimizer and config.optimizer.ema_decay):
        raise ConfigError("--ema: needs the config of a run that has optimizer.ema_decay")
    if getattr(args, "verb", None) is None:  # `data` needs no model
        refuse_python_model(args.config, config)
    return config


def refuse_python_model(folder: str, config: "Config") -> None:
    """Raise ConfigError for the folder of a run that no config describes entirely."""
    from jaxspeed.config.parse import PASSED

    if passed := config.given.get(PASSED):
        arguments = ", ".join(f"{name}=..." for name in passed)
        raise ConfigError(
            f"{folder}: a run of jaxspeed.run.train({arguments}), which Python passed and no "
            "config names. Continue it there, or read it with evaluate_run, sample_run or chat_run "
            f"of jaxspeed.run and source_of({json.dumps(folder)}, {arguments})"
        )


def out(stderr: bool = False) -> "Console":
    """The console of a command.

    A pipe is wide enough not to break tables, unless COLUMNS says how wide, and may close early.
    """
    from rich.console import Console

    class Out(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # `main` exits with 0

    console = Out(stderr=stderr)
    has_width = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if has_width else Out(stderr=stderr, width=120)


def shown(what: str) -> AbstractContextManager[None]:
    """Show, on a terminal, that a command other than train does this now."""
    from jaxspeed.metrics.start_lines import start_lines

    console = out(stderr=True)
    return start_lines(console if console.is_terminal else None)(what)


def refuse_unwritable(option: str, path: str) -> None:
    """Raise ConfigError if a file cannot be written there, before minutes of work for it."""
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {path}: no file can be written there")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """--tag and --ema: what of a run's checkpoints is read."""
    parser.add_argument("--tag", help="which checkpoint; the newest intact one by default")
    parser.add_argument(
        "--ema", action="store_true", help="the moving average of the weights (optimizer.ema_decay)"
    )


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()


def program() -> list[str]:
    """The program as it was called, so that a printed command can be run as it is."""
    if launcher := os.environ.get(LAUNCHER):
        return shlex.split(launcher)
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return ["python", "-m", "jaxspeed"]
    if called.name == "jaxspeed" and shutil.which("jaxspeed") is None:  # the venv is not activated
        return [str(called)]
    return ["jaxspeed"]
