"""`jaxspeed eval CONFIG`: the loss of a checkpoint, or its scores on tasks of lm-eval."""

import argparse
from pathlib import Path
from typing import Any

from jaxspeed.cli.common import IMPORTS, add_checkpoint, command, loaded, out, print_json, shown
from jaxspeed.errors import ConfigError

# The columns of the table, and their formats.
COLUMNS = {
    "eval_loss": ("loss", ".4f"),
    "perplexity": ("perplexity", ".6g"),
    "bits_per_byte": ("bits per byte", ".4f"),
    "accuracy": ("accuracy", ".2%"),
    "reward": ("reward", ".4f"),
    "tokens": ("tokens", ","),
}
_NO_METRICS = ("step", "checkpoint", "ema", "eval_weight", "unigram_entropy", "files")


def add(commands: Any) -> None:
    parser = command(
        commands,
        "eval",
        "compute a checkpoint's loss on files or on held-out samples, or its scores on tasks",
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
    parser.add_argument(
        "--tasks",
        metavar="NAMES",
        help="in place of the loss: tasks of lm-eval, or YAML files, separated by commas; they may "
        "run code",
    )
    parser.add_argument(
        "--limit", metavar="N", type=float, help="examples of each task, or a share below 1"
    )
    parser.add_argument(
        "--num-fewshot", metavar="N", type=int, help="solved examples before each of a task's"
    )
    add_checkpoint(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    tasks = [*filter(None, (args.tasks or "").split(","))]
    both = {"limit": args.limit, "num_fewshot": args.num_fewshot}
    options = {name: value for name, value in both.items() if value is not None}
    if options and (args.tasks is None or min(options.values()) < 0 or args.limit == 0):
        raise ConfigError("--limit, --num-fewshot: need --tasks, and a number of examples")
    if args.tasks is not None:
        from jaxspeed.config.before_start import refuse_missing_tasks

        if args.data or not tasks:
            raise ConfigError("--tasks: needs names or YAML files, without --data")
        refuse_missing_tasks("--tasks", tasks)
    if tasks or args.data:
        args.config = config_of_folder(args.config)
    config = loaded(args)
    with shown(IMPORTS):
        from jaxspeed.checkpoint.process_agreement import is_first
        from jaxspeed.run import evaluate_run, source_of

        source = source_of(config, name=str(args.config))
    with shown("evaluating"):
        figures = evaluate_run(
            source, args.tag, data=args.data, ema=args.ema, tasks=tasks, **options
        )
    if not is_first():
        return 0
    if args.json:
        print_json(figures)
    else:
        show(figures)
    return 0


def config_of_folder(name: str) -> Any:
    """A config for a Hugging Face folder of a model or of an adapter, or else the name."""
    name = str(Path(name))
    if (Path(name) / "adapter_config.json").is_file():
        from jaxspeed.interop.peft_config import read_config

        base = read_config(Path(name))["base_model_name_or_path"]
        sections: dict[str, Any] = {"model": {"pretrained": base}, "lora": {"adapter": name}}
    elif (Path(name) / "config.json").is_file():
        sections = {"model": {"pretrained": name}}
    else:
        return name
    unused = {"type": "SGD", "params": {"lr": 1.0}}  # without state
    more = {"train_micro_batch_size_per_gpu": 1, "optimizer": unused, "run": {"output": name}}
    return sections | more


def show(figures: dict[str, Any]) -> None:
    """Print a row for each file, and one for all."""
    from rich.markup import escape
    from rich.table import Table

    console = out()
    weights = "moving average of the weights, " if figures["ema"] else ""
    checkpoint = figures["checkpoint"] or "no checkpoint"
    console.print(f"{weights}step {figures['step']} ({checkpoint})", highlight=False)
    columns = [name for name in COLUMNS if name in figures]
    if "reward" in figures:
        columns.remove("eval_loss")
    table = Table(box=None)
    table.add_column("")
    for name in columns:
        table.add_column(COLUMNS[name][0], justify="right", no_wrap=True)
    rows = [(file_figures["file"], file_figures) for file_figures in figures["files"]]
    if len(rows) != 1:
        rows.append(("all" if rows else "held out", figures))
    for title, row in rows:
        cells = ("-" if row.get(n) is None else format(row[n], COLUMNS[n][1]) for n in columns)
        table.add_row(escape(title), *cells)
    if columns:
        console.print(table, highlight=False)
    others = {n: x for n, x in figures.items() if n not in (*COLUMNS, *_NO_METRICS)}
    if others:
        table = Table(box=None, show_header=False)
        for name, value in others.items():
            table.add_row(escape(name), f"{value:.6g}")
        console.print(table, highlight=False)
