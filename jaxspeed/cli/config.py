"""`jaxspeed config CONFIG`: the verdict on each key of a config; the JSON Schema."""

import argparse
from collections import Counter
from typing import Any

from rich.table import Table

from jaxspeed.cli.common import command, out, overrides_of, print_json
from jaxspeed.config import Config, explain_config
from jaxspeed.config.verdicts import shortened

STYLES = {"honoured": "green", "harmless": "dim", "approximated": "yellow", "refused": "bold red"}


def add(commands: Any) -> None:
    parser = command(
        commands,
        "config",
        "show the verdict on each key of a config; exit code 2 if one is refused",
        "jaxspeed config ds_config.json --set zero_optimization.stage=3",
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of configs instead"
    )
    config = next(action for action in parser._actions if action.dest == "config")
    config.nargs = "?"
    parser.set_defaults(run=run, parser=parser)


def run(given: argparse.Namespace) -> int:
    if given.schema:
        print_json(Config.json_schema())
        return 0
    if given.config is None:
        given.parser.error("CONFIG is missing (or --schema)")
    rows = explain_config(given.config, overrides_of(given))
    refused = any(row.verdict == "refused" for row in rows)
    if given.json:
        print_json([row._asdict() for row in rows])
    else:
        table = Table(box=None)
        for name in ("key", "value", "verdict", ""):
            table.add_column(name, overflow="fold")
        for row in rows:
            style = STYLES[row.verdict]
            table.add_row(row.key, _value(row.value), f"[{style}]{row.verdict}[/]", row.sentence)
        console = out()
        console.print(table)
        counts = Counter[str](row.verdict for row in rows)
        console.print(", ".join(f"{counts[verdict]} {verdict}" for verdict in STYLES))
    return 2 if refused else 0


def _value(value: Any) -> str:
    return shortened(str(value), 40)
