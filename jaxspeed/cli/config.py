"""`jaxspeed config CONFIG`: the verdict on each key of a config; the JSON Schema."""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from jaxspeed.cli.common import (
    command,
    config_or_run,
    hidden_size,
    out,
    overrides_of,
    print_json,
    refuse_unwritable,
)

# In the order in which they are shown: what needs the user first.
STYLES = {
    "refused": "bold red",
    "approximated": "yellow",
    "ignored": "yellow",
    "honoured": "green",
    "harmless": "dim",
}


def add(commands: Any) -> None:
    parser = command(
        commands,
        "config",
        "show the verdict on each key of a config; exit code 2 if one is refused",
        "jaxspeed config ds_config.json --auto hf --set zero_optimization.stage=3",
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of configs instead"
    )
    parser.add_argument(
        "--list", action="store_true", help="list the configs that jaxspeed has, by name"
    )
    parser.add_argument(
        "--fix", metavar="OUT", help="write the config with the errors fixed that have one answer"
    )
    config_or_run(parser).nargs = "?"
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from jaxspeed.config import Config, examine, fix_config
    from jaxspeed.config.explain import explain, still_needed
    from jaxspeed.config.parse import LAST_COMMA, shipped_configs
    from jaxspeed.config.problems import config_error

    if args.schema:
        print_json(Config.json_schema())
        return 0
    if args.list:
        configs = {file.stem: _subject(file) for file in shipped_configs()}
        if args.json:
            print_json(configs)
            return 0
        for name, subject in configs.items():
            out().print(f"{name:<18}{subject}", highlight=False, markup=False, soft_wrap=True)
        return 0
    if args.config is None:
        args.parser.error("CONFIG is missing (or --schema or --list)")
    options: dict[str, Any] = {
        "auto": args.auto,
        "strict": args.strict,
        "hidden_size": hidden_size,
    }
    examined = examine(args.config, overrides_of(args), **options)
    if not examined.is_read:
        raise config_error(examined.problems, examined.origin)
    fixed: list[Any] = []
    if args.fix:
        refuse_unwritable("--fix", args.fix)
        commas = [problem for problem in examined.problems if problem.found == LAST_COMMA]
        tree, fixed = fix_config(examined.given, **options)
        fixed = [*commas, *fixed]
        _write(Path(args.fix), tree)
        examined = examine(tree, **options)
    rows = explain(examined)
    if args.json:
        print_json([row._asdict() for row in rows])
        for line in _changes(fixed):
            print(f"fixed: {line}", file=sys.stderr)
    else:
        _show(rows, examined, fixed, args.fix)
        if needs := still_needed(examined):
            lines = "".join(f"\n  {line}" for line in needs)
            out().print(f"jaxspeed.initialize still needs:{lines}", markup=False, highlight=False)
    return 2 if examined.problems else 0


def _subject(file: Path) -> str:
    """The first sentence of the comment with which a config begins."""
    if file.suffix == ".json":
        return "keys of DeepSpeed, in JSON"
    comment = re.sub(r"\n# ?", " ", file.read_text(encoding="utf-8").partition("\nrun:")[0])
    return re.split(r"[.:](?: |$)", comment.removeprefix("# "))[0]


def _show(rows: list[Any], examined: Any, fixed: list[Any], path: str | None) -> None:
    """Print the keys by verdict, what was filled in and from where, and what was fixed."""
    from rich.markup import escape
    from rich.table import Table

    from jaxspeed.config.verdicts import shortened

    console = out()
    counts = Counter(row.verdict for row in rows)
    console.print(
        f"{len(rows)} keys: "
        + ", ".join(f"[{style}]{counts[name]} {name}[/]" for name, style in STYLES.items())
    )
    # The key's line holds no more than it and its value, so that 80 columns do not break a key.
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for verdict, style in STYLES.items():
        for row in rows:
            if row.verdict == verdict:
                key = f"[bold]{escape(row.key)}[/]: {escape(shortened(str(row.value), 40))}"
                table.add_row(f"[{style}]{verdict}[/]", f"{key}\n{escape(row.sentence)}")
    console.print(table, highlight=False)
    for title, lines in (
        ("filled in", [f"{k}: {f.value}, from {f.source}" for k, f in examined.filled.items()
                       if f.value is not None]),
        (f"fixed, in {path}", _changes(fixed)),
        ("left, since no single answer fixes it", examined.problems if path else ()),
    ):  # fmt: skip
        if lines:
            console.print(f"{title}:")
        for line in lines:
            console.print(f"  {escape(str(line))}", highlight=False)
    if examined.advice:
        console.print(examined.advice, markup=False, highlight=False)


def _changes(fixed: list[Any]) -> list[str]:
    """Each problem that was fixed, with what the file has instead."""
    from jaxspeed.config.suggestions import REMOVE
    from jaxspeed.config.verdicts import shown

    lines = []
    for problem in fixed:
        written = [
            f"{key}: {'removed' if new is REMOVE else shown(new)}"
            for key, new in problem.fix.items()
            if new is not REMOVE or key != problem.path  # that one is moved
        ]
        lines.append(f"{problem} -> {', '.join(written) or 'removed'}")
    return lines


def _write(path: Path, tree: dict[str, Any]) -> None:
    """Write a config as JSON, or as YAML by the name of the file."""
    if path.suffix.lower() in (".yaml", ".yml"):
        import yaml

        text = yaml.safe_dump(tree, sort_keys=False)
    else:
        text = json.dumps(tree, indent=2) + "\n"
    path.write_text(text, encoding="utf-8")
