"""`jaxspeed eval CONFIG`: the loss of a checkpoint, or its scores on tasks of lm-eval."""

import argparse
import json
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
    "tokens": ("tokens", ","),
}
_NO_METRICS = ("step", "checkpoint", "ema", "eval_weight", "unigram_entropy", "files")


def add(commands: Any) -> None:
    parser = command(
        commands,
        "eval",
        "compute the loss of a run's checkpoint, on files or on held-out samples, or its scores on "
        "tasks of lm-eval",
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
        help="in place of the loss: tasks of lm-eval, by name or as YAML files, separated by "
        "commas; they may run code",
    )
    add_checkpoint(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    tasks = [*filter(None, (args.tasks or "").split(","))]
    if args.tasks is not None:
        if args.data or not tasks:
            raise ConfigError("--tasks: names of tasks or YAML files, and no --data beside them")
        from jaxspeed.config.before_start import refuse_missing_tasks

        refuse_missing_tasks("--tasks", tasks)
    if tasks or args.data:
        args.config = config_of_folder(args.config)
    config = loaded(args)
    with shown(IMPORTS):
        from jaxspeed.checkpoint.process_agreement import is_first
        from jaxspeed.run import evaluate_run, evaluate_run_on_tasks, source_of

        source = source_of(config, name=str(args.config))
    with shown("evaluating"):
        if tasks:
            figures = evaluate_run_on_tasks(source, tasks, args.tag, ema=args.ema)
        else:
            figures = evaluate_run(source, args.tag, data=args.data, ema=args.ema)
    if not is_first():
        return 0
    if args.json:
        print_json(figures)
    elif tasks:
        show_scores(figures)
    else:
        show(figures)
    return 0


def config_of_folder(name: str) -> Any:
    """A config for a Hugging Face folder of a model or of an adapter, or else the name."""
    model, adapter = Path(name) / "config.json", Path(name) / "adapter_config.json"
    if adapter.is_file():
        try:
            base = json.loads(adapter.read_text())["base_model_name_or_path"]
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{adapter} names no base_model_name_or_path: {error!r}") from None
        read = {"model": {"pretrained": base}, "lora": {"adapter": name}}
    elif model.is_file():
        read = {"model": {"pretrained": name}}
    else:
        return name
    optimizer = {"type": "SGD", "params": {"lr": 1.0}}  # without state; never used
    more = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "run": {"output": name}}
    return read | more


def show_scores(figures: dict[str, Any]) -> None:
    """Print a row for each metric of each task."""
    from rich.markup import escape
    from rich.table import Table

    console = out()
    console.print(weights_of(figures), highlight=False)
    table = Table(box=None)
    for title in ("task", "metric", "score", "standard error"):
        table.add_column(title, justify="right" if title in ("score", "standard error") else "left")
    for task, scores in figures["tasks"].items():
        for name, value in scores.items():
            metric, comma, choice = name.partition(",")
            if not metric.endswith("_stderr"):
                error = scores.get(f"{metric}_stderr{comma}{choice}")
                text = "-" if error is None else f"{error:.4f}"
                table.add_row(escape(task), escape(name), f"{value:.4f}", text)
    console.print(table, highlight=False)


def weights_of(figures: dict[str, Any]) -> str:
    """What is evaluated, as a line."""
    average = "moving average of the weights, " if figures["ema"] else ""
    return f"{average}step {figures['step']} ({figures['checkpoint'] or 'no checkpoint'})"


def show(figures: dict[str, Any]) -> None:
    """Print a row for each file, and one for all."""
    from rich.markup import escape
    from rich.table import Table

    console = out()
    console.print(weights_of(figures), highlight=False)
    columns = [name for name in COLUMNS if name in figures]
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
    console.print(table, highlight=False)
    others = {n: x for n, x in figures.items() if n not in (*COLUMNS, *_NO_METRICS)}
    if others:
        table = Table(box=None, show_header=False)
        for name, value in others.items():
            table.add_row(escape(name), f"{value:.6g}")
        console.print(table, highlight=False)
