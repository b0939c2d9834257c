"""`jaxspeed plan CONFIG`: memory, step time and communication of a config, for any devices."""

import argparse
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxspeed.cli.common import (
    CONFIGS,
    add_output,
    add_overrides,
    command,
    loaded,
    out,
    print_json,
    refuse_unwritable,
)
from jaxspeed.errors import ConfigError
from jaxspeed.planner import SEARCH_SECONDS
from jaxspeed.planner.compile import PATIENCE

FAILED = 1


def add(commands: Any) -> None:
    parser = command(
        commands,
        "plan",
        "plan a config without training: bytes per device, step time, the pipeline's schedule, "
        "and the compiled step",
        "jaxspeed plan configs/llama3_8b.yaml --target v5p:2x2x2 --compile",
        config=False,
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help=CONFIGS)
    add_overrides(parser)
    add_output(parser)
    parser.add_argument(
        "--target",
        metavar="TARGET",
        help="absent devices to plan for: v5p:4x4x8, 2x v5e:16x16, h100:64, a100-40g:1, cpu:8; by "
        "default those here",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the step; by default only without a target. A target of TPUs needs "
        "jaxspeed[tpu], of GPUs jaxspeed[cuda], but no device or driver",
    )
    parser.add_argument(
        "--keep",
        metavar="FILE",
        help="with --compile for a target: save the compiled step; a run with "
        "run.executable=FILE starts without compilation",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="also write the plan as a self-contained HTML page"
    )
    parser.add_argument(
        "--patience",
        metavar="SECONDS",
        type=float,
        default=PATIENCE,
        help="time limit of a compilation for a target (%(default)g)",
    )
    parser.add_argument(
        "--tokens",
        metavar="N",
        help="tokens of the run, like 300B or 1.5T, for its device-hours; by default run.steps",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="search for the fastest config on the target: other meshes, stages, schedules, "
        "recompute, offload and micro-batches, at the same batch size. With --compile the best "
        "are compiled for proof",
    )
    parser.add_argument(
        "--search-seconds",
        metavar="SECONDS",
        type=float,
        default=SEARCH_SECONDS,
        help="time limit of the search's estimates (%(default)g)",
    )
    parser.add_argument(
        "--write", metavar="FILE", help="write the config that --search finds, as YAML or JSON"
    )
    parser.add_argument(
        "--disk",
        metavar="SPEED",
        help="for state on a disk (offload_optimizer.nvme_path): its speed, like 5GB/s, or a "
        "folder on it, which is measured",
    )
    parser.add_argument("--targets", action="store_true", help="list the known chips")
    parser.add_argument("--hardware", metavar="FILE", help="a YAML file with further chips")
    parser.add_argument(
        "--devices",
        metavar="WHICH",
        help="without a target: a number of simulated devices on this CPU, or cpu, gpu or tpu "
        "(overrides run.devices)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.targets:
        return _list_targets(args)
    if args.config is None:
        raise ConfigError(
            "plan needs a CONFIG: a YAML or JSON file, or a run's folder; or --targets"
        )
    if args.target and args.devices:
        raise ConfigError("--target and --devices: give only one; a target determines its devices")
    if not args.patience > 0:
        raise ConfigError(f"--patience {args.patience:g}: must be more than 0 (seconds)")
    if args.keep and not (args.target and args.compile):
        raise ConfigError("--keep needs --target and --compile: it saves the compiled step")
    for option in ("keep", "html"):
        if getattr(args, option):
            refuse_unwritable(f"--{option}", getattr(args, option))
    tokens = tokens_of(args.tokens) if args.tokens is not None else None
    if tokens and not args.target:
        raise ConfigError("--tokens needs a --target: device-hours depend on the chip")
    if args.search and not args.target:
        raise ConfigError("--search needs a --target")
    rate = None
    if args.disk is not None:
        from jaxspeed.disk.measure import disk_rate, measure_disk

        rate = disk_rate(args.disk)
    if args.write is not None:
        from jaxspeed.planner.search.result import refuse_path

        refuse_path(args.write, args.search)
    if args.target is not None:
        doing = "compiling" if args.compile else "planning"
        config = loaded(args)
        from jaxspeed.hardware.known_chips import chips_of
        from jaxspeed.hardware.targets import target_of

        target_of(args.target, chips_of(args.hardware))  # its errors come before JAX's import
        from jaxspeed.planner.api import plan

        # Shown only on a terminal.
        with out(stderr=True).status(f"{doing} for {args.target}") as status:
            planned = plan(
                config,
                args.target,
                compile=bool(args.compile),
                hardware=args.hardware,
                patience=args.patience,
                tokens=tokens,
                keep=args.keep,
                search=args.search,
                search_seconds=args.search_seconds,
                write=args.write,
                progress=status.update,
            )
    else:
        if args.devices and args.devices.isdecimal():
            args.devices = f"cpu:{args.devices}"
        config = loaded(args)
        from jaxspeed.planner.make_plan import plan_run
        from jaxspeed.run import source_of

        source = source_of(config, name=args.config)
        planned = plan_run(source, compiling=args.compile is not False)
    if args.disk is not None:
        if planned.program.update.tier is None:
            raise ConfigError(
                "--disk: the config has no state on a disk (offload_optimizer.device)"
            )
        planned = replace(planned, disk_rate=rate or measure_disk(args.disk).both)
    if args.html:
        Path(args.html).write_text(planned.html(), "utf-8")
    if args.json:
        print_json(planned.figures())
    else:
        out().print(planned)
    if planned.search and not planned.search.winner:
        return FAILED
    return FAILED if planned.fits is False else 0


def tokens_of(written: str) -> float:
    """`15T`, `300B`, `1e9`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMBT]?)\s*", written, re.IGNORECASE)
    scale = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    tokens = float(match[1]) * scale[match[2].upper()] if match else 0.0
    if not 0 < tokens < 1e18:
        raise ConfigError(f"--tokens {written}: needs a number of tokens, like 300B or 1.5T")
    return tokens


def _list_targets(args: argparse.Namespace) -> int:
    from jaxspeed.hardware.known_chips import chips_of, speeds_table

    chips = chips_of(args.hardware)
    if args.json:
        print_json(
            {name: {**asdict(chip), "compiles": chip.compiles} for name, chip in chips.items()}
        )
    else:
        out().print(speeds_table(chips))
    return 0
