"""`jaxspeed train CONFIG`: train or resume a run, locally or on Ray."""

import argparse
import json
import shlex
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxspeed.cli.common import INTERRUPTED, command, loaded, out, print_json, program
from jaxspeed.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from jaxspeed.config import Config
    from jaxspeed.run import Source, Trainer


def add(commands: Any) -> None:
    parser = command(
        commands,
        "train",
        "train a model; resume the run in its folder",
        "jaxspeed train configs/tiny.yaml --devices cpu:8 --set run.steps=100",
    )
    parser.add_argument("--output", metavar="DIR", help="the run's folder (overrides run.output)")
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: mesh.data workers and parallel.servers servers, each a process on Ray "
        "(sets parallel.data_reduction to parameter_server)",
    )
    parser.add_argument(
        "--ray-address",
        metavar="A",
        help="address of a Ray cluster, like 10.0.0.1:6379; by default a local Ray is started",
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    if given.engine == "ray":
        return _on_ray(given)
    if given.ray_address:
        raise ConfigError("--ray-address: needs --engine ray")
    config = _config(given)
    from jaxspeed.run import source_of

    return _train(given, source_of(config, name=given.config))


def _on_ray(given: argparse.Namespace) -> int:
    config = _config(given, ["parallel.data_reduction=parameter_server"])
    from jaxspeed.parameter_server.ray import connected, ray_resources
    from jaxspeed.run import RaySource, source_of

    ray_resources(config)  # before anything starts
    with connected(given.ray_address):
        return _train(given, source_of(config, name=given.config, kind=RaySource))


def _config(given: argparse.Namespace, more: Sequence[str] = ()) -> "Config":
    output = [f"run.output={json.dumps(given.output)}"] if given.output else []
    return loaded(given, [*output, *more])


def _train(given: argparse.Namespace, source: "Source") -> int:
    from jaxspeed.checkpoint.process_agreement import is_first
    from jaxspeed.run import open_run, show_ending, show_opening

    console = out(stderr=given.json)
    trainer = open_run(source, console)
    try:
        show_opening(console, trainer)
        trainer.run()
        result = show_ending(console, trainer, again=_again(given, trainer))
    finally:
        trainer.close()
        trainer.engine.close()
    if given.json and is_first():
        print_json(result)
    if trainer.stopped_by is None:
        return 0
    return INTERRUPTED if trainer.stopped_by == signal.SIGINT.name else ExitCode.PREEMPTED


def _again(given: argparse.Namespace, trainer: "Trainer") -> str:
    """The command that resumes this run; for a finished one, with more steps."""
    words = [*program(), "train", given.config]
    if given.engine == "ray":
        words += ["--engine", "ray"]
    for word in ("output", "devices", "ray_address"):
        if getattr(given, word):
            words += [f"--{word.replace('_', '-')}", getattr(given, word)]
    overrides = [one for one in given.overrides if not one.startswith("run.steps=")]
    steps = trainer.steps if trainer.stopped_by else 2 * trainer.steps
    if steps != trainer.config.given["run"]["steps"] or len(overrides) < len(given.overrides):
        overrides.append(f"run.steps={steps}")
    words += [part for one in given.auto or () for part in ("--auto", one)]
    words += [part for one in overrides for part in ("--set", one)]
    return shlex.join(words)
