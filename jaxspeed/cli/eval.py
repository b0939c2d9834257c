"""`jaxspeed eval CONFIG`: the held-out loss of a checkpoint."""

import argparse
from typing import Any

from jaxspeed.cli.common import command, loaded, out, print_json


def add(commands: Any) -> None:
    parser = command(
        commands,
        "eval",
        "compute the held-out loss of a run's checkpoint",
        "jaxspeed eval configs/tiny.yaml --tag step-00000100",
    )
    parser.add_argument("--tag", help="which checkpoint; the newest intact one by default")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    config = loaded(given)
    from jaxspeed.checkpoint.process_agreement import is_first
    from jaxspeed.run import evaluate_run, source_of

    found = evaluate_run(source_of(config, name=given.config), given.tag)
    if not is_first():
        return 0
    if given.json:
        print_json(found)
        return 0
    console = out()
    console.print(
        f"held-out loss {found['eval_loss']:.4f} over {found['eval_weight']:,.0f} targets, "
        f"at step {found['step']} ({found['checkpoint']})",
        highlight=False,
    )
    return 0
