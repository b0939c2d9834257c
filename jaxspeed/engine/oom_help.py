"""Out-of-memory (OOM) report: stored bytes by role, and the config changes that free most."""

from dataclasses import replace

import jax

from jaxspeed.errors import OutOfMemoryError
from jaxspeed.placement.precision import precision_of
from jaxspeed.placement.rows import Offload
from jaxspeed.placement.show import bytes_text
from jaxspeed.placement.table import PlacementTable, build_table
from jaxspeed.train.build import offload_of
from jaxspeed.train.program import Program


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of the runtime or compiler means out of memory."""
    text = str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) and (
        "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    )


def device_limit(program: Program) -> int | None:
    """Memory of one device in bytes, if the backend reports it.

    Of one of this process: those of others report nothing.
    """
    local_devices = (
        device for device in program.devices if device.process_index == jax.process_index()
    )
    try:
        stats = next(local_devices, program.devices[0]).memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None
    return stats.get("bytes_limit")


def explain_out_of_memory(program: Program, error: BaseException) -> OutOfMemoryError:
    """The error to raise instead of the runtime's."""
    table = program.table
    roles = table.bytes_by_role()
    limit = device_limit(program)
    state = sum(per_device for _, per_device in roles.values())
    has = f"of {bytes_text(limit)}" if limit else "(device memory size unknown)"
    lines = [
        f"a device ran out of memory. The placement table stores {bytes_text(state)} per device "
        f"{has} at ZeRO stage {table.stage}:"
    ]
    lines += [f"  {role:<8}{bytes_text(per):>10}" for role, (_, per) in roles.items()]
    lines += [
        f"  {name}: {bytes_text(stored_bytes(frozen.table))}"
        for name, frozen in program.frozen.items()
    ]
    lines.append("the rest is activations, gathered parameters and temporary values.")
    lines += remedies(program)
    lines.append("the runtime reported: " + str(error).strip().splitlines()[0])
    return OutOfMemoryError("\n".join(lines))


def remedies(program: Program) -> list[str]:
    """Config changes that free memory, most first, a line each."""
    changes = sorted(_remedies(program), reverse=True)
    return ["what would free most:", *(f"  - {text}" for _, text in changes)]


def _remedies(program: Program) -> list[tuple[int, str]]:
    """(bytes per device that a change frees, the change); 0 where that is unknown."""
    table, config = program.table, program.config
    changes = []
    for stage in range(table.stage + 1, 4):
        saved = stored_bytes(table) - stored_bytes(_otherwise(program, stage=stage))
        if saved > 0:
            changes.append(
                (saved, f"zero_optimization.stage: {stage} frees {bytes_text(saved)} per device")
            )
    if more := program.freed_by_more(stored_bytes(table)):
        changes.append(more)
        return changes + _of_activations(program)
    current = offload_of(config.zero_optimization)
    for key, offload in (
        ("offload_optimizer", replace(current, optimizer=1.0)),
        ("offload_param", replace(current, param=True)),
    ):
        saved = stored_bytes(table) - stored_bytes(_otherwise(program, offload=offload))
        if saved > 0:
            what = f"zero_optimization.{key}.device: cpu"
            changes.append((saved, f"{what} frees {bytes_text(saved)} per device"))
    if program.devices[0].platform == "cpu":  # whose memory is the host's
        on_disk = _otherwise(program, offload=replace(current, optimizer=1.0, disk=True))
        if (saved := _in_memory(table) - _in_memory(on_disk)) > 0:
            what = "zero_optimization.offload_optimizer.device: nvme, with nvme_path,"
            changes.append((saved, f"{what} frees {bytes_text(saved)} per device"))
    changes += _of_activations(program)
    if not changes:
        changes.append((0, f"more devices than the current {program.ranks} data ranks"))
    return changes


def _of_activations(program: Program) -> list[tuple[int, str]]:
    """Changes that free activation memory, by an unknown amount."""
    config, changes = program.config, []
    if not config.recompute:
        changes.append((0, "parallel.remat: full saves only the input of each layer"))
    if program.batch.micro > 1:
        changes.append(
            (
                0,
                f"gradient_accumulation_steps: {program.batch.accumulation * 2} halves the "
                f"activations of a micro-batch ({program.batch.micro} samples per device now)",
            )
        )
    if config.compute_dtype == "fp32":
        changes.append((0, "bf16.enabled: true halves the activations"))
    return changes


def stored_bytes(table: PlacementTable) -> int:
    """Bytes that the table stores on one device."""
    return sum(per_device for _, per_device in table.bytes_by_role().values())


def _in_memory(table: PlacementTable) -> int:
    """Bytes that the table stores on one device and for it in host memory."""
    return stored_bytes(table) + sum(table.host_bytes_by_role().values())


def _otherwise(
    program: Program, stage: int | None = None, offload: Offload | None = None
) -> PlacementTable:
    """The table of the same leaves and optimizer state at another stage or offload."""
    zero = program.config.zero_optimization
    table = build_table(
        [row.leaf for row in program.table],
        program.mesh,
        stage=program.table.stage if stage is None else stage,
        precision=precision_of(program.config),
        persistence_threshold=zero.stage3_param_persistence_threshold,
        stack=program.table.stack,
        offload=offload or offload_of(zero),
        codecs=program.table.codecs,
    )
    if not offload:  # state in host memory has no owners
        table = table.with_owners(stack.asked for stack in program.table.owned)
    return table.with_state(program.layout.over(table).places, program.table.extra)
