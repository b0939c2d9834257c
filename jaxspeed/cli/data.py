"""`jaxspeed data tokenize CONFIG OUT`."""

import argparse
from typing import Any

from jaxspeed.cli.common import command, loaded, out, print_json
from jaxspeed.data import tokenize


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "data",
        help="prepare data",
        description="Prepare data.",
        epilog="example: jaxspeed data tokenize config.yaml tokens/",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verb = command(
        verbs,
        "tokenize",
        "write the config's data as memory-mapped tokens, which source `tokens` reads",
        "jaxspeed data tokenize config.yaml tokens/ --set data.tokenizer=bpe",
    )
    verb.add_argument("out", metavar="OUT", help="the folder to write to")
    verb.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    summary = tokenize(loaded(given).data, given.out)
    if given.json:
        print_json(summary if isinstance(summary, dict) else vars(summary))
    else:
        out().print(summary)
    return 0
