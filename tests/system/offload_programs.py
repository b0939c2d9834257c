"""What a step compiles to whose optimizer's state waits in host memory: its bytes."""

from collections.abc import Sequence
from typing import Any

import jax

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
