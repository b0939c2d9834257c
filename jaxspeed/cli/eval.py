"""`jaxspeed eval CONFIG`: the loss of a checkpoint on files, or on held-out samples."""

import argparse
from typing import Any

from jaxspeed.cli.common import add_checkpoint, command, loaded, out, print_json

# The columns of the table, and their formats.
COLUMNS = {
    "eval_loss": ("loss", ".4f"),
    "perplexity": ("perplexity", ".6g"),
    "bits_per_byte": ("bits per byte", ".4f"),
    "accuracy": ("accuracy", ".2%"),
    "tokens": ("tokens", ","),
}


def add(commands: Any) -> None:
    parser = command(
        commands,
        "eval",
        "compute the loss of a run's checkpoint, on files or on held-out samples",
        "jaxspeed eval configs/tiny.yaml --data notes.txt",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        action="append",
        default=[],
        help="a file, a folder or a glob, all of which is read, in place of the config's "
        "data.eval or held-out samples; may be repeated",
    )
    add_checkpoint(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    config = loaded(given)
    from jaxspeed.checkpoint.process_agreement import is_first
    from jaxspeed.run import evaluate_run, source_of

    source = source_of(config, name=given.config)
    found = evaluate_run(source, given.tag, data=given.data, ema=given.ema)
    if not is_first():
        return 0
    if given.json:
        print_json(found)
    else:
        show(found)
    return 0


def show(found: dict[str, Any]) -> None:
    """Print a row for each file, and one for all."""
    from rich.markup import escape
    from rich.table import Table

    console = out()
    weights = "moving average of the weights, " if found["ema"] else ""
    checkpoint = found["checkpoint"] or "no checkpoint"
    console.print(f"{weights}step {found['step']} ({checkpoint})", highlight=False)
    columns = [name for name in COLUMNS if name in found]
    table = Table(box=None)
    table.add_column("")
    for name in columns:
        table.add_column(COLUMNS[name][0], justify="right", no_wrap=True)
    rows = [(each["file"], each) for each in found["files"]]
    if len(rows) != 1:
        rows.append(("all" if rows else "held out", found))
    for title, row in rows:
        cells = ("-" if row.get(n) is None else format(row[n], COLUMNS[n][1]) for n in columns)
        table.add_row(escape(title), *cells)
    console.print(table, highlight=False)
