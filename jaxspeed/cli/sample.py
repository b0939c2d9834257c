"""`jaxspeed sample CONFIG`: generate text from a checkpoint."""

import argparse
import json
import sys
from typing import Any

from jaxspeed.cli.common import command, loaded, print_json


def add(commands: Any) -> None:
    parser = command(
        commands,
        "sample",
        "generate text from a run's checkpoint",
        "jaxspeed sample configs/tiny.yaml --prompt 'import ' --tokens 100",
    )
    parser.add_argument("--prompt", help="start of the text (overrides run.sample_prompt)")
    parser.add_argument("--tokens", type=int, help="number of tokens (overrides run.sample_tokens)")
    parser.add_argument("--temperature", type=float, help="0 always takes the most likely token")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--tag", help="which checkpoint; the newest intact one by default")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    for name, value in (
        ("sample_prompt", given.prompt),
        ("sample_tokens", given.tokens),
        ("sample_temperature", given.temperature),
    ):
        if value is not None:
            given.overrides.append(f"run.{name}={json.dumps(value)}")
    config = loaded(given)
    from jaxspeed.checkpoint.process_agreement import is_first
    from jaxspeed.run import sample_run, source_of

    parts = sample_run(source_of(config, name=given.config), given.tag, seed=given.seed)
    if not is_first():  # each process computes the same text
        "".join(parts)
        return 0
    if given.json:
        print_json({"text": "".join(parts)})
        return 0
    for part in parts:
        sys.stdout.write(part)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
