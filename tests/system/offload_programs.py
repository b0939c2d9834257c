"""What steps compile to that offload to host memory: their bytes, and their host transfers."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxspeed.hlo.parser import Shape, parse
from jaxspeed.hlo.trip_counts import Site, walk
from jaxspeed.planner.time import host_transfers
from jaxspeed.planner.trace import read_step
from tests.system.measured import compile_step
from tests.system.pipeline_programs import pipeline_program

Figures = dict[str, int]


def bytes_of(devices: Sequence[jax.Device], cases: dict[str, dict[str, Any]]) -> dict[str, Figures]:
    """{name: bytes of a device of `pipeline_program(**case)`, in its own memory and in the host's}.

    `count` of a case is the number of devices.
    """
    return {name: _figures(devices, **case) for name, case in cases.items()}


def _figures(devices: Sequence[jax.Device], count: int = 1, **case: Any) -> Figures:
    program, batch = pipeline_program(devices[:count], **case)
    memory = compile_step(program, batch).memory_analysis()
    assert memory is not None
    in_host = program.table.host_bytes_by_role()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "host_argument_bytes": memory.host_argument_size_in_bytes,
        "host_temp_bytes": memory.host_temp_size_in_bytes,
        "host_alias_bytes": memory.host_alias_size_in_bytes,
        "state_in_host": sum(in_host.values()),
        "state_on_device": sum(own for _, own in program.table.bytes_by_role().values()),
    }


IN_HOST = 5  # XLA's memory space


def transfers_of(
    devices: Sequence[jax.Device], count: int, **case: Any
) -> dict[str, dict[str, int]]:
    """{"traced" or "compiled": {"to host" or "from host": bytes}} of `pipeline_program(**case)`."""
    program, batch = pipeline_program(devices[:count], **case)
    found = host_transfers(read_step(program, batch))
    traced = {"to host": found.to_host, "from host": found.to_device}
    text = compile_step(program, batch).as_text()
    assert text is not None
    compiled = dict.fromkeys(traced, 0)
    for site in walk(parse(text)):
        if sent := _sent(site):
            kind, array = sent
            compiled[kind] += array.bytes * site.runs
    return {
        "traced": {kind: sum(each.values()) for kind, each in traced.items()},
        "compiled": compiled,
    }


def _sent(site: Site) -> tuple[str, Shape] | None:
    """What an instruction moves from one memory to the other: all of an array, or a slice."""
    arrays = site.instruction.arrays
    in_host = [array.memory == IN_HOST for array in arrays]
    match site.instruction.opcode:
        case "copy-start":  # (to, from, ...)
            if in_host[0] != in_host[1]:
                return "to host" if in_host[0] else "from host", arrays[0]
        case "dynamic-slice-start":  # (of, indices, slice, ...)
            if in_host[0]:
                return "from host", max(
                    (a for a, there in zip(arrays, in_host, strict=True) if not there),
                    key=lambda array: array.bytes,
                )
        case "dynamic-update-slice-start":  # (of, update, indices, of, ...)
            if in_host[0]:
                return "to host", arrays[1]
    return None
