"""Collectives of steps on meshes that split a TPU's torus, with the places of their devices."""

from typing import Any

import jax

from jaxspeed.communication import COLLECTIVES
from jaxspeed.hlo.parser import parse
from jaxspeed.hlo.replica_groups import axes_of, replica_groups, source_target_pairs
from jaxspeed.hlo.trip_counts import walk
from tests.system.measured import compile_step
from tests.system.pipeline_programs import pipeline_program

SIZES = {"num_hidden_layers": 8, "hidden_size": 256, "num_attention_heads": 16}


def places(devices: list[jax.Device], mesh: dict[str, int]) -> list[dict[str, Any]]:
    """Of each collective of a step: the axes that its groups span, and where their devices are."""
    program, batch = pipeline_program(devices, sizes=SIZES, mesh=mesh, stage=2, micro_batches=8)
    where = [device.coords for device in program.mesh.devices.flat]
    text = compile_step(program, batch).as_text()
    found = []
    for site in walk(parse(text)):
        kind = site.instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        if kind == "collective-permute":
            of = source_target_pairs(site.instruction.attribute("source_target_pairs") or "{}")
        else:
            of = replica_groups(site.instruction.attribute("replica_groups") or "{}", len(where))
        groups = [group for group in of if len(set(group)) > 1]
        if groups:
            axes = axes_of(groups, program.mesh)
            at = [[where[device] for device in group] for group in groups]
            found.append({"kind": kind, "axes": axes, "groups": at})
    return found
