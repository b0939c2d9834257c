"""`jaxspeed data tokenize CONFIG OUT`: write the config's data as token files."""

import argparse
from dataclasses import asdict
from typing import Any

from jaxspeed.cli.common import command, loaded, out, print_json


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
        "write the config's data as memory-mapped tokens, for source `tokens`",
        "jaxspeed data tokenize config.yaml tokens/ --set data.tokenizer=bpe",
        devices=False,
    )
    verb.add_argument("out", metavar="OUT", help="the folder to write to")
    verb.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    config = loaded(given)
    from jaxspeed.data import limits_of, tokenize
    from jaxspeed.interop.pretrained import data_section
    from jaxspeed.objective.config_model import family_sizes

    sizes = family_sizes(config)
    summary = tokenize(data_section(config), given.out, vocab_size=limits_of(sizes).vocab_size)
    if given.json:
        print_json(asdict(summary))
    else:
        out().print(str(summary), highlight=False, soft_wrap=True)
    return 0
