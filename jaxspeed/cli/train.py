"""`jaxspeed train CONFIG`."""

import argparse
import json
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from jaxspeed.cli.common import command, loaded, out, print_json
from jaxspeed.run import Trainer, open_run, show_ending, show_opening, source_of


def add(commands: Any) -> None:
    parser = command(
        commands,
        "train",
        "train a model; continue where the run in its folder stopped",
        "jaxspeed train configs/tiny.yaml --devices cpu:8 --set run.steps=100",
    )
    parser.add_argument("--output", metavar="DIR", help="the run's folder (over run.output)")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    console = out(stderr=given.json)
    output = [f"run.output={json.dumps(given.output)}"] if given.output else []
    source = source_of(loaded(given, output), name=given.config)
    trainer = open_run(source, console)
    try:
        show_opening(console, trainer)
        trainer.run()
        result = show_ending(console, trainer, again=_again(given, trainer))
    finally:
        trainer.close()
    if given.json:
        print_json(result)
    if trainer.stopped_by is None:
        return 0
    return 128 + getattr(signal, trainer.stopped_by, signal.SIGTERM)


def _again(given: argparse.Namespace, trainer: Trainer) -> str:
    """The command that continues this run; one that is done goes on when it has more steps."""
    words = [*_program(), "train", given.config]
    for word in ("output", "devices"):
        if getattr(given, word):
            words += [f"--{word}", getattr(given, word)]
    overrides = [one for one in given.overrides if not one.startswith("run.steps=")]
    steps = trainer.steps if trainer.stopped_by else 2 * trainer.steps
    if steps != trainer.config.given["run"]["steps"] or len(overrides) < len(given.overrides):
        overrides.append(f"run.steps={steps}")
    words += [part for one in overrides for part in ("--set", one)]
    return shlex.join(words)


def _program() -> list[str]:
    """How this command was called, so that what is printed can be typed again."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return ["python", "-m", "jaxspeed"]
    if called.name == "jaxspeed" and shutil.which("jaxspeed") is None:  # of a venv not activated
        return [str(called)]
    return ["jaxspeed"]
