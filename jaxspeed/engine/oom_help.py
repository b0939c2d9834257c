"""Why a device ran out of memory, told from the placement table, and what would free most."""

from dataclasses import replace

import jax

from jaxspeed.errors import OutOfMemoryError
from jaxspeed.objective.precision import precision_of
from jaxspeed.placement.rows import Offload
from jaxspeed.placement.show import bytes_text
from jaxspeed.placement.table import PlacementTable, build_table
from jaxspeed.train.build import offload_of
from jaxspeed.train.program import Program


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of the runtime or compiler says that memory is exhausted."""
    text = str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) and (
        "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    )


def device_limit(program: Program) -> int | None:
    """The bytes that one device has, where it tells."""
    try:
        stats = program.mesh.devices.flat[0].memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None
    return stats.get("bytes_limit")


def explain_out_of_memory(program: Program, error: BaseException) -> OutOfMemoryError:
    """The error to raise in place of the runtime's own."""
    table = program.table
    roles = table.bytes_by_role()
    limit = device_limit(program)
    state = sum(per_device for _, per_device in roles.values())
    has = f"of {bytes_text(limit)}" if limit else "(the device does not tell its size)"
    lines = [
        f"a device ran out of memory. The placement table stores {bytes_text(state)} a device "
        f"{has} at ZeRO stage {table.stage}:"
    ]
    lines += [f"  {role:<8}{bytes_text(per):>10}" for role, (_, per) in roles.items()]
    lines.append("the rest is activations, gathered parameters and temporary values.")
    lines += remedies(program)
    lines.append("the runtime said: " + str(error).strip().splitlines()[0])
    return OutOfMemoryError("\n".join(lines))


def remedies(program: Program) -> list[str]:
    """What would free most, a line each."""
    found = sorted(_remedies(program), reverse=True)
    return ["what would free most:", *(f"  - {text}" for _, text in found)]


def _remedies(program: Program) -> list[tuple[int, str]]:
    """(bytes a device that a change frees, what to change), as far as the table knows."""
    table, config = program.table, program.config
    found = []
    for stage in range(table.stage + 1, 4):
        saved = stored_bytes(table) - stored_bytes(_otherwise(program, stage=stage))
        if saved > 0:
            found.append(
                (saved, f"zero_optimization.stage: {stage} frees {bytes_text(saved)} a device")
            )
    if program.serving:
        kept = stored_bytes(table) * program.mesh.size // (program.mesh.size + 1)
        saved = stored_bytes(table) - kept
        found.append((saved, f"one more of parallel.servers frees {bytes_text(saved)} a server"))
        return found + _of_activations(program)
    now = offload_of(config)
    for key, offload in (
        ("offload_optimizer", replace(now, optimizer=1.0)),
        ("offload_param", replace(now, param=True)),
    ):
        saved = stored_bytes(table) - stored_bytes(_otherwise(program, offload=offload))
        if saved > 0:
            what = f"zero_optimization.{key}.device: cpu"
            found.append((saved, f"{what} frees {bytes_text(saved)} a device"))
    found += _of_activations(program)
    if not found:
        found.append((0, f"more devices than the {program.ranks} data ranks of now"))
    return found


def _of_activations(program: Program) -> list[tuple[int, str]]:
    """What would free activations, by how much is not known."""
    config, found = program.config, []
    if not config.recompute:
        found.append((0, "parallel.remat: full keeps of activations the input of each layer alone"))
    if program.batch.micro > 1:
        found.append(
            (
                0,
                f"gradient_accumulation_steps: {program.batch.accumulation * 2} halves the "
                f"activations of a micro-batch ({program.batch.micro} samples a device now)",
            )
        )
    if config.compute_dtype == "fp32":
        found.append((0, "bf16.enabled: true halves the activations"))
    return found


def stored_bytes(table: PlacementTable) -> int:
    """What the table stores on one device."""
    return sum(per_device for _, per_device in table.bytes_by_role().values())


def _otherwise(
    program: Program, stage: int | None = None, offload: Offload | None = None
) -> PlacementTable:
    """The same leaves stored in another way, with as much optimizer state a parameter as now."""
    zero = program.config.zero_optimization
    table = build_table(
        [row.leaf for row in program.table],
        program.mesh,
        stage=program.table.stage if stage is None else stage,
        precision=precision_of(program.config),
        persistence_threshold=zero.stage3_param_persistence_threshold,
        stack=program.table.stack,
        offload=offload or offload_of(program.config),
    )
    return table.with_state(program.layout.over(table).places, program.table.extra)
