"""`jaxspeed checkpoint list|show|verify|export DIR`."""

import argparse
import datetime
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from jaxspeed.checkpoint import Checkpointer, show, verify
from jaxspeed.cli.common import command, out, print_json
from jaxspeed.errors import CheckpointError
from jaxspeed.placement.show import bytes_text


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="look at a run's checkpoints, verify them, take the weights out",
        description="Look at a run's checkpoints, verify them, take the weights out.",
        epilog="example: jaxspeed checkpoint export runs/tiny weights/",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, what, example, function in (
        ("list", "the checkpoints of a run", "jaxspeed checkpoint list runs/tiny", _list),
        ("show", "what one holds", "jaxspeed checkpoint show runs/tiny", _show),
        (
            "verify",
            "every file against its checksum; exit code 1 where one differs",
            "jaxspeed checkpoint verify runs/tiny",
            _verify,
        ),
        (
            "export",
            "the weights as safetensors, one tensor at a time",
            "jaxspeed checkpoint export runs/tiny weights/ --dtype bf16",
            _export,
        ),
    ):
        verb = command(verbs, name, what, example, config=False)
        verb.add_argument("folder", metavar="DIR", help="a run's folder, or its checkpoints/")
        if name == "export":
            verb.add_argument("out", metavar="OUT", help="the folder to write to")
            verb.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="as stored if left")
        if name != "list":
            verb.add_argument("--tag", help="which one; the newest by default")
        verb.set_defaults(run=function)


def _folder(given: argparse.Namespace) -> Path:
    jax.config.update("jax_platforms", "cpu")  # these commands read files; no accelerator is taken
    folder = Path(given.folder)
    inside = folder / "checkpoints"
    folder = inside if inside.is_dir() else folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    return folder


def _list(given: argparse.Namespace) -> int:
    found = Checkpointer(_folder(given)).list()
    if given.json:
        print_json([_as_dict(info) for info in found])
        return 0
    table = Table(box=None)
    for name in ("tag", "step", "size", "written"):
        table.add_column(name, justify="left" if name == "tag" else "right")
    for info in found:
        when = datetime.datetime.fromtimestamp(info.time).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(info.tag, str(info.step), bytes_text(info.bytes), when)
    out().print(table if found else "no checkpoints")
    return 0


def _show(given: argparse.Namespace) -> int:
    info = show(_folder(given), given.tag)
    if given.json:
        print_json(_as_dict(info))
    else:
        out().print(info)
    return 0


def _verify(given: argparse.Namespace) -> int:
    folder = _folder(given)
    tags = [given.tag] if given.tag else [info.tag for info in Checkpointer(folder).list()]
    problems = {tag: verify(folder, tag) for tag in tags}
    if given.json:
        print_json(problems)
    else:
        console = out()
        for tag, found in problems.items():
            console.print(f"{tag}: {'; '.join(found) or 'sound'}", highlight=False, markup=False)
        if not problems:
            console.print("no checkpoints")
    return 1 if any(problems.values()) else 0


def _export(given: argparse.Namespace) -> int:
    from jaxspeed.checkpoint import export

    summary = export(_folder(given), given.out, tag=given.tag, dtype=given.dtype)
    if given.json:
        print_json(_as_dict(summary))
    else:
        out().print(summary)
    return 0


def _as_dict(info: Any) -> Any:
    return info._asdict() if hasattr(info, "_asdict") else vars(info)
