"""`jaxspeed check CONFIG`: compare the sharded step with the same step on one device."""

import argparse
from dataclasses import asdict
from typing import Any

from jaxspeed.cli.common import IMPORTS, command, loaded, out, print_json, shown


def add(commands: Any) -> None:
    parser = command(
        commands,
        "check",
        "compare a step on the mesh with the same step on one device; exit code 1 if they differ",
        "jaxspeed check configs/llama3_8b.yaml --devices cpu:8 --layers 2",
    )
    parser.add_argument(
        "--layers",
        type=int,
        help="check a model with this many layers, if the full one is too large; by default all",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = loaded(args)
    with shown(IMPORTS):
        from jaxspeed.run import check_run, source_of

        source = source_of(config, name=args.config)
    with shown("checking"):
        report = check_run(source, layers=args.layers)
    if args.json:
        print_json({"ok": report.ok, "gradient": report.gradient, **asdict(report)})
    else:
        out().print(report)
    return 0 if report.ok else 1
