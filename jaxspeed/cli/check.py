"""`jaxspeed check CONFIG`."""

import argparse
from dataclasses import asdict
from typing import Any

from jaxspeed.cli.common import command, loaded, out, print_json
from jaxspeed.run import check_run, source_of


def add(commands: Any) -> None:
    parser = command(
        commands,
        "check",
        "one step on the mesh against the same step on one device; exit code 1 where they differ",
        "jaxspeed check configs/llama3_8b.yaml --devices cpu:8 --layers 2",
    )
    parser.add_argument(
        "--layers", type=int, help="check the model with so many layers, where it is too large"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    report = check_run(source_of(loaded(given), name=given.config), layers=given.layers)
    if given.json:
        print_json({"ok": report.ok, "gradient": report.gradient, **asdict(report)})
    else:
        out().print(report)
    return 0 if report.ok else 1
