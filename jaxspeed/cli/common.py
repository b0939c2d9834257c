"""What commands share: their arguments, and how they print."""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxspeed.config import Config, load_config
from jaxspeed.errors import ConfigError


def command(
    commands: Any,
    name: str,
    what: str,
    example: str,
    *,
    config: bool = True,
    devices: bool = True,
) -> argparse.ArgumentParser:
    """A command's parser, with --json, and where it reads a config, --set and --devices."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if config:
        parser.add_argument("config", metavar="CONFIG", help="a YAML or JSON file")
        add_overrides(parser)
        if devices:
            parser.add_argument(
                "--devices",
                metavar="WHICH",
                help="cpu, gpu or tpu, or simulated ones: cpu:8 (over run.devices)",
            )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        metavar="a.b=c",
        action="append",
        default=[],
        dest="overrides",
        help="a key of the config, over what the file says; may be repeated",
    )


def overrides_of(given: argparse.Namespace) -> list[str]:
    devices = [f"run.devices={given.devices}"] if getattr(given, "devices", None) else []
    return [*given.overrides, *devices]


def loaded(given: argparse.Namespace, more: Iterable[str] = ()) -> Config:
    """The config that a command was given, with its overrides."""
    return load_config(given.config, [*overrides_of(given), *more])


class Out(Console):
    """A console whose reader may end before it does."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # which `main` takes for a good end


def out(stderr: bool = False) -> Console:
    """Where a command prints: wide enough not to break tables when it is a pipe."""
    console = Out(stderr=stderr)
    return console if console.is_terminal else Out(stderr=stderr, width=120)


def refuse_unwritable(option: str, path: str) -> None:
    """ConfigError unless a file can be written there: before minutes are spent on what goes in."""
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {path}: no file can be written there")


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()
