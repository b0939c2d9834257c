"""`jaxspeed sample CONFIG`."""

import argparse
import json
import sys
from typing import Any

from jaxspeed.cli.common import command, loaded, print_json
from jaxspeed.run import sample_run, source_of


def add(commands: Any) -> None:
    parser = command(
        commands,
        "sample",
        "text from a run's checkpoint",
        "jaxspeed sample configs/tiny.yaml --prompt 'import ' --tokens 100",
    )
    parser.add_argument("--prompt", help="what the text begins with (over run.sample_prompt)")
    parser.add_argument("--tokens", type=int, help="how many (over run.sample_tokens)")
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--tag", help="which checkpoint; the newest sound one by default")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    for name, value in (
        ("sample_prompt", given.prompt),
        ("sample_tokens", given.tokens),
        ("sample_temperature", given.temperature),
    ):
        if value is not None:
            given.overrides.append(f"run.{name}={json.dumps(value)}")
    source = source_of(loaded(given), name=given.config)
    pieces = sample_run(source, given.tag, seed=given.seed)
    if given.json:
        print_json({"text": "".join(pieces)})
        return 0
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
