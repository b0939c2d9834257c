"""`jaxspeed train CONFIG`: train or resume a run, locally or on Ray."""

import argparse
import gc
import os
import shlex
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspeed.cli.common import (
    IMPORTS,
    INTERRUPTED,
    command,
    config_or_run,
    loaded,
    out,
    print_json,
    program,
)
from jaxspeed.cli.recipe import FLAGS, add_flags, completed, config_text, recipe_of, summary
from jaxspeed.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from jaxspeed.config import Config
    from jaxspeed.run import Source, Trainer

# A setting of glibc 2.35 or newer, read as a process starts: ask for huge pages for large blocks.
HUGE_PAGES = "glibc.malloc.hugetlb=1"
_HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def add(commands: Any) -> None:
    parser = command(
        commands,
        "train",
        "train a model; resume the run in its folder",
        "jaxspeed train --model base --data chat.jsonl --lora 16",
    )
    config_or_run(parser).nargs = "?"
    add_flags(parser)
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
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "-q", "--quiet", action="store_true", help="print warnings and, at the end, the checkpoint"
    )
    amount.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print the placement table and the compiled step also of a run of adapters or of one "
        "device",
    )
    parser.set_defaults(run=run, at_start=restart_with_huge_pages)


def restart_with_huge_pages(_: argparse.Namespace) -> None:
    """Restart this process, once, with the setting of glibc that makes steps on a CPU faster.

    XLA:CPU allocates and frees the temporary arrays of each step: with pages of 4 KB the kernel
    takes up to a fifth of a step to map them. Huge pages are asked for where the kernel gives them
    to those who ask.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if HUGE_PAGES.partition("=")[0] in tunables or "[madvise]" not in _text(_HUGE_PAGES_SETTING):
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, HUGE_PAGES)))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def run(args: argparse.Namespace) -> int:
    # Python's collector pauses until the first step, and does not visit later what was made until
    # then: 300,000 objects, all but 20 of which live as long as the run.
    gc.disable()
    try:
        return _on_ray(args) if args.engine == "ray" else _here(args)
    finally:
        gc.unfreeze()
        gc.enable()


def _here(args: argparse.Namespace) -> int:
    if args.ray_address:
        raise ConfigError("--ray-address: needs --engine ray")
    config = _config(args)
    from jaxspeed.config.before_start import check_start
    from jaxspeed.metrics.start_lines import start_lines

    check_start(config)
    with start_lines(None if args.quiet else out(stderr=args.json))(IMPORTS):
        from jaxspeed.run import source_of

        source = source_of(config, name=str(args.config))
    return _train(args, source)


def _on_ray(args: argparse.Namespace) -> int:
    config = _config(args, ["parallel.data_reduction=parameter_server"])
    from jaxspeed.config.before_start import RAY, check_start

    check_start(config, [RAY])
    from jaxspeed.parameter_server.ray import connected, ray_resources
    from jaxspeed.run import RaySource, source_of

    ray_resources(config)  # before anything starts
    with connected(args.ray_address):
        return _train(args, source_of(config, name=str(args.config), kind=RaySource))


def _config(args: argparse.Namespace, more: Iterable[str] = ()) -> "Config":
    """The config that is named, or that of the flags, which is printed."""
    flags = [flag for flag in FLAGS if getattr(args, flag) is not None]
    if args.config is not None:
        if flags:
            option = flags[0].replace("_", "-")
            raise ConfigError(f"--{option}: with a config its keys are overridden by --set")
        return loaded(args, more)
    if args.model is None or args.data is None:
        lacks = "--data" if args.model else "--model" if flags else "CONFIG"
        raise ConfigError(
            f"{lacks} is missing: train needs a YAML or JSON file, or a run's folder; or --model "
            "FOLDER and --data FILE, for a fine-tune"
        )
    recipe, facts = completed(recipe_of(args))
    import yaml

    args.config = yaml.safe_load(config_text(recipe, facts))
    config = loaded(args, more)
    if not args.quiet:
        out(stderr=args.json).print(summary(recipe), highlight=False, markup=False)
    return config


def _train(args: argparse.Namespace, source: "Source") -> int:
    from jaxspeed.checkpoint.process_agreement import is_first
    from jaxspeed.run import FinalSample, open_run, show_ending, show_opening

    console = out(stderr=args.json)
    console.quiet = args.quiet
    trainer = open_run(source, console)
    try:
        if trainer.completer is None:  # which shows completions meanwhile
            trainer.sample = FinalSample(trainer.engine, trainer.corpus)
        show_opening(console, trainer, args.verbose or None)
        gc.freeze()
        gc.enable()
        trainer.run()
        result = show_ending(console, trainer, again=_again(args, trainer))
    finally:
        trainer.close()
        trainer.engine.close()
    if args.json and is_first():
        print_json(result)
    elif args.quiet and is_first():
        print(result["checkpoint"])
    if trainer.stopped_by is None:
        return 0
    return INTERRUPTED if trainer.stopped_by == signal.SIGINT.name else ExitCode.PREEMPTED


def _again(args: argparse.Namespace, trainer: "Trainer") -> str:
    """The command that resumes this run; for a finished one, with more steps."""
    words = [*program(), "train", str(trainer.folder.path)]
    if args.engine == "ray":
        words += ["--engine", "ray"]
    if args.ray_address:
        words += ["--ray-address", args.ray_address]
    if not trainer.stopped_by:
        words += ["--set", f"run.steps={2 * trainer.steps}"]
    return shlex.join(words)
