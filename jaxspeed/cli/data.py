"""`jaxspeed data tokenize|verify`: write the config's data as token files, verify such files."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxspeed.cli.common import command, loaded, out, print_json


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "data",
        help="prepare and verify data",
        description="Prepare and verify data.",
        epilog="example: jaxspeed data tokenize config.yaml tokens/",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
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


def _tokenize(given: argparse.Namespace) -> int:
    config = loaded(given)
    from jaxspeed.data import limits_of, read_tokenizer, tokenize
    from jaxspeed.interop.pretrained import data_section
    from jaxspeed.user_models.config_model import family_sizes

    sizes = family_sizes(config)
    tokenizer = read_tokenizer(given.output) if given.output else None
    size = limits_of(sizes).vocab_size
    summary = tokenize(data_section(config), given.out, tokenizer=tokenizer, vocab_size=size)
    if given.json:
        print_json(asdict(summary))
    else:
        out().print(str(summary), highlight=False, soft_wrap=True)
    return 0


def _verify(given: argparse.Namespace) -> int:
    from jaxspeed.data import token_store
    from jaxspeed.errors import DataError

    problems: dict[str, str] = {}
    for folder in given.folders:
        try:
            token_store.verify(Path(folder).expanduser())
            problems[folder] = ""
        except DataError as error:
            problems[folder] = str(error)
    if given.json:
        print_json(problems)
    else:
        for folder, problem in problems.items():
            shown = problem or f"{folder}: intact"
            out().print(shown, highlight=False, markup=False, soft_wrap=True)
    return 1 if any(problems.values()) else 0
