"""What the tests compile for a TPU topology, all in one child process."""

import dataclasses
from typing import Any

import jax

from jaxspeed.hlo import report
from tests.hlo import hlo_programs


def compile_all(devices: list[jax.Device]) -> dict[str, Any]:
    """{name: HLO text}, and the report of a program that keeps its argument on the host."""
    mixed = hlo_programs.mesh_of(devices, data=4, tensor=2)
    data = hlo_programs.mesh_of(devices, data=8)
    return {
        "zero2": hlo_programs.zero2(mixed, layers=4, micro_batches=3, width=1024),
        "zero3_units": hlo_programs.zero3_units(data, layers=6, width=2048),
        "reduced_once": hlo_programs.reduced_once(mixed, leaves=6, micro_batches=4, width=512),
        "reduced_once_padded": hlo_programs.reduced_once(
            mixed, leaves=2, micro_batches=4, width=4096
        ),
        "products": hlo_programs.products(data),
        "offloaded": dataclasses.asdict(report(hlo_programs.offloaded(data), data)),
    }
