"""What a step compiles to by what its units keep: bytes, and how often attention's kernel runs."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxspeed.hlo.parser import parse
from jaxspeed.hlo.trip_counts import walk
from jaxspeed.remat.budget import ActivationShards
from jaxspeed.remat.resolve import remat_costs
from jaxspeed.remat.unit_jaxprs import unit_jaxprs
from jaxspeed.train.program import Program
from tests.system.measured import compile_step
from tests.system.pipeline_programs import pipeline_program


def figures_of(
    devices: Sequence[jax.Device], count: int, cases: dict[str, dict[str, Any]], **shared: Any
) -> dict[str, dict[str, Any]]:
    """{name: bytes of a device} of programs on the first `count` devices, all cut over data."""
    mesh = {"data": count}
    return {
        name: _figures(
            *pipeline_program(devices[:count], mesh=mesh, micro_batches=1, **shared, **case)
        )
        for name, case in cases.items()
    }


def _figures(program: Program, batch: Any) -> dict[str, Any]:
    compiled = compile_step(program, batch)
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "host_temp_bytes": memory.host_temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "layer_grad_bytes": _layer_grad_bytes(program),
    }


def _layer_grad_bytes(program: Program) -> int:
    """Of a device's part of the gradients of one layer of the stack.

    They have the dtype of what the loss is differentiated by.
    """
    table = program.table
    rows = [row for row in table if "blocks" in row.path]
    found = 0
    for row in rows:
        assert row.grad is not None
        part = table.sharding(row.grad).shard_shape(row.shape(row.grad))
        found += row.source.dtype.itemsize * math.prod(part[1:])
    return found


def kernel_calls(
    devices: Sequence[jax.Device], cases: dict[str, dict[str, Any]], **shared: Any
) -> dict[str, dict[str, int]]:
    """{name: {kernel: how often it runs in a step}} of programs on one device."""
    found: dict[str, dict[str, int]] = {}
    for name, case in cases.items():
        made = pipeline_program(devices[:1], mesh={"data": 1}, micro_batches=1, **shared, **case)
        text = compile_step(*made).as_text()
        assert text is not None
        found[name] = _kernels(text)
    return found


def _kernels(text: str) -> dict[str, int]:
    counts = {"fwd": 0, "dq": 0, "dkv": 0}
    for site in walk(parse(text)):
        one = site.instruction
        if one.opcode == "custom-call" and one.name.startswith("splash_"):
            kind = next(kind for kind in counts if f"_{kind}" in one.name)
            counts[kind] += math.prod(loop.trips or 0 for loop in site.loops)
    return counts


def budget_figures(
    devices: Sequence[jax.Device], shares: Sequence[float], **shared: Any
) -> dict[str, Any]:
    """Temp bytes of "full" and of budgets at these shares of the way from the least to the most."""
    devices = devices[:1]
    full = {"mesh": {"data": 1}, "micro_batches": 1, **shared}

    def made(remat: Any) -> tuple[Program, Any]:
        return pipeline_program(devices, **full, parallel={"remat": remat})

    program, batch = made("full")
    least, most = _range(program, batch)
    found = {"input_bytes": least, "full": _figures(program, batch)["temp_bytes"], "budgets": []}
    for share in shares:
        budget = int(least + share * (most - least))
        temp = _figures(*made({"budget": budget}))["temp_bytes"]
        found["budgets"].append([budget, temp])
    return found


def _range(program: Program, batch: Any) -> tuple[int, int]:
    """Bytes of what units are handed, and of that with all that they name."""
    objective = program.traced_loss
    number = jax.ShapeDtypeStruct((), "int32")
    rest = ({}, program.abstract_batch(batch), number, number)
    with jax.set_mesh(program.mesh):
        traced = objective.trace(rest, train=True)
    found = tuple(unit_jaxprs(traced.closed.jaxpr, traced.batch, traced.units))
    costs = remat_costs(found, ActivationShards(), devices_kind(program))
    return costs.input_bytes, costs.input_bytes + sum(costs.bytes.values())


def devices_kind(program: Program) -> str:
    return program.mesh.devices.flat[0].device_kind
