"""`jaxspeed data show|tokenize|verify`: print the config's data, write and verify token files."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspeed.cli.common import command, loaded, out, print_json

if TYPE_CHECKING:
    from jaxspeed.data import Tokenizer
    from jaxspeed.data.shown_samples import ShownData


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "data",
        help="show, prepare and verify data",
        description="Show, prepare and verify data.",
        epilog="example: jaxspeed data show config.yaml",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verb = command(
        verbs,
        "show",
        "print documents with what the loss does not count dimmed, and the sums of all",
        "jaxspeed data show config.yaml -n 2",
        devices=False,
    )
    verb.add_argument(
        "-n", type=_natural, default=3, metavar="N", help="documents of each source; 3 by default"
    )
    verb.add_argument("--output", metavar="DIR", help="a run's folder, whose tokenizer is used")
    verb.set_defaults(run=_show)
    verb = command(
        verbs,
        "tokenize",
        "write the config's data as memory-mapped tokens, for source `tokens`",
        "jaxspeed data tokenize config.yaml tokens/ --set data.tokenizer=bpe",
        devices=False,
    )
    verb.add_argument("out", metavar="OUT", help="the folder to write to")
    verb.add_argument("--output", metavar="DIR", help="a run's folder, whose tokenizer is used")
    verb.set_defaults(run=_tokenize)
    verb = command(
        verbs,
        "verify",
        "compare all tokens of token folders with their digests; exit code 1 if one differs",
        "jaxspeed data verify tokens/",
        config=False,
    )
    verb.add_argument("folders", metavar="DIR", nargs="+", help="a folder that tokenize wrote")
    verb.set_defaults(run=_verify)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return int(text)


def _show(args: argparse.Namespace) -> int:
    config = loaded(args)
    from jaxspeed.data.model_limits import limits_of_run
    from jaxspeed.data.shown_samples import as_json, show_data
    from jaxspeed.interop.pretrained import data_section

    limits = limits_of_run(config)
    shown = show_data(data_section(config), limits, _tokenizer(args), args.n)
    if args.json:
        print_json(as_json(shown))
    else:
        _print_samples(shown)
    return 0


def _tokenizer(args: argparse.Namespace) -> "Tokenizer | None":
    """The tokenizer of the run that --output, or CONFIG, names."""
    from jaxspeed.data import read_tokenizer
    from jaxspeed.data.tokenizer import tokenizer_file

    run = Path(args.config)
    is_run = run.is_dir() and tokenizer_file(run) is not None
    return read_tokenizer(args.output or run) if args.output or is_run else None


def _print_samples(shown: "ShownData") -> None:
    """Documents with the masked part dimmed, or between marks where there is no style."""
    from rich.table import Table
    from rich.text import Text

    from jaxspeed.data.complete_documents import DocumentCounts
    from jaxspeed.data.prompts import PromptCounts
    from jaxspeed.data.shown_samples import harmless

    console = out()
    plain = not console.is_terminal or console.no_color
    if plain and any(sample.trained for sample in shown.samples):
        console.print("what the loss counts is between {+ and +}", markup=False)
    number, is_of_prompts = 0, isinstance(shown.total, PromptCounts)
    for sample in shown.samples:
        number += sample.side != "rejected"  # which is that of the pair before
        named = f"{number}, {sample.side}" if sample.side else number
        counts = f"{sample.tokens:,} tokens"
        counts += f", {sample.trained:,} trained" * (not is_of_prompts)
        console.print(f"--- {named}: {counts} ---", markup=False, highlight=False)
        text = Text()
        for piece in sample.pieces:
            if plain:
                text.append(
                    f"{{+{harmless(piece.text)}+}}" if piece.trained else harmless(piece.text)
                )
            else:
                text.append(harmless(piece.text), style="" if piece.trained else "dim")
        console.print(text, highlight=False)
        for name, value in sample.columns.items():
            console.print(f"{harmless(name)}: {value}", markup=False, highlight=False)
    if not isinstance(shown.total, DocumentCounts):
        for name, pair_counts in shown.counts.items():
            console.print(f"{harmless(name)}: {pair_counts}", markup=False, highlight=False)
        if shown.seq_len is not None:
            most = shown.seq_len + (not is_of_prompts)
            size = f"a prompt with a completion has at most {most:,} tokens (data.seq_len"
            console.print(
                f"{size}{'' if is_of_prompts else ' + 1'})", markup=False, highlight=False
            )
        return
    table = Table(box=None)
    table.add_column("")
    names = [n for n in vars(DocumentCounts()) if n != "images" or shown.total.images]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    rows = [*shown.counts.items()]
    if len(rows) > 1:
        rows.append(("all", shown.total))
    for name, source_counts in rows:
        table.add_row(Text(harmless(name)), *(f"{getattr(source_counts, n):,}" for n in names))
    console.print(table, highlight=False)
    if shown.seq_len is not None:
        size = f"a sample holds {shown.seq_len + 1:,} tokens"
        console.print(f"{size} (data.seq_len + 1)", markup=False, highlight=False)


def _tokenize(args: argparse.Namespace) -> int:
    config = loaded(args)
    from jaxspeed.data import tokenize
    from jaxspeed.data.model_limits import limits_of_run
    from jaxspeed.errors import DataError
    from jaxspeed.interop.pretrained import data_section

    limits = limits_of_run(config)
    if limits.prompts is not None:
        raise DataError("data tokenize: prompts are read with their columns, and not written")
    summary = tokenize(
        data_section(config),
        args.out,
        tokenizer=_tokenizer(args),
        vocab_size=limits.vocab_size,
        pairs=limits.pairs,
    )
    if args.json:
        print_json(asdict(summary))
    else:
        out().print(str(summary), highlight=False, soft_wrap=True)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from jaxspeed.data import token_store
    from jaxspeed.errors import DataError

    problems: dict[str, str] = {}
    for folder in args.folders:
        try:
            token_store.verify(Path(folder).expanduser())
            problems[folder] = ""
        except DataError as error:
            problems[folder] = str(error)
    if args.json:
        print_json(problems)
    else:
        for folder, problem in problems.items():
            shown = problem or f"{folder}: intact"
            out().print(shown, highlight=False, markup=False, soft_wrap=True)
    return 1 if any(problems.values()) else 0
