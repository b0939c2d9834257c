"""`jaxspeed plan CONFIG`."""

import argparse
from typing import Any

from jaxspeed.cli.common import command, loaded, out, print_json
from jaxspeed.run import plan_run, source_of


def add(commands: Any) -> None:
    parser = command(
        commands,
        "plan",
        "what a config would do, before anything is trained: bytes a device, the pipeline's "
        "schedule, and what its step compiles to",
        "jaxspeed plan configs/llama3_8b.yaml --devices 8 --set mesh.pipe=4 --no-compile",
        devices=False,
    )
    parser.add_argument(
        "--devices",
        metavar="WHICH",
        help="a number of simulated devices on this CPU, or cpu, gpu or tpu (over run.devices)",
    )
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="leave out what the compiler says: for large models it takes minutes",
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    if given.devices and given.devices.isdecimal():
        given.devices = f"cpu:{given.devices}"
    source = source_of(loaded(given), name=given.config)
    plan = plan_run(source, compiling=not given.no_compile)
    if given.json:
        print_json(plan.figures())
    else:
        out().print(plan)
    return 0
