"""Check that a traced step offloads and rematerializes what its config sets, and at what cost.

A policy that silently has no effect is the worst outcome: the program runs, but saves no memory. So
the traced step is analyzed before it is compiled.
"""

import logging
from collections.abc import Iterator
from typing import Any

import jax

from jaxspeed.errors import JaxspeedError
from jaxspeed.jaxpr.traverse import contains
from jaxspeed.offload.transfer_report import (
    ACTIVATIONS,
    GRADIENTS,
    HOST_UPDATE,
    HostTransfers,
    TransferReport,
)
from jaxspeed.placement.codec import parts_of
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.planner.time import device_flops, host_transfers
from jaxspeed.planner.trace import Step, read_step
from jaxspeed.planner.trace.trace_ir import all_ops
from jaxspeed.train.program import Program

log = logging.getLogger("jaxspeed")
NO_REMAT = "parallel.remat: remat had no effect on the backward pass"


def asks(program: Program) -> bool:
    """Whether the config sets any offload or rematerialization."""
    return bool(program.config.recompute or program.table.host_bytes_by_role())


def transfer_of(program: Program, batch: Any) -> TransferReport | None:
    """The host transfers of a step; None if its config sets no offload and no remat.

    JAX caches the trace, so the step is not traced a second time.

    Args:
      batch: arrays or their shapes, of a global batch.

    Raises:
      JaxspeedError: something that the config sets is missing from the step.
    """
    if not asks(program):
        return None
    recompute = program.config.recompute
    offloads = recompute.on_host or recompute.offload or recompute.budget is not None
    if offloads or program.table.host_bytes_by_role():
        return transfer_in(read_step(program, batch))
    first = program.phases[len(program.array_phases)]
    traced = first.trace(program.values(program.complete(batch)))
    recomputed = any(contains(eqn, _recomputes) for eqn in traced.jaxpr.eqns)
    if not recomputed and program.recomputes(batch):
        raise JaxspeedError(_bug("the traced step", [NO_REMAT]))
    return None


def _recomputes(eqn: Any) -> bool:
    return bool(eqn.params.get("differentiated"))


def transfer_in(step: Step) -> TransferReport | None:
    """As `transfer_of`, of a step that was read."""
    program = step.program
    if not asks(program):
        return None
    transfers = host_transfers(step)
    idle = list(_idle(step, transfers))
    if idle:
        raise JaxspeedError(_bug("the traced step", idle))
    if not transfers.bytes:
        return None
    flops = sum(device_flops(phase.scope, phase.mesh) for phase in step.phases)
    return TransferReport(transfers, program.mesh.devices.flat[0].device_kind, flops)


def check_moves(program: Program, batch: Any) -> None:
    """Before the first step: check its host transfers, and warn if they are slow."""
    transfer = transfer_of(program, batch)
    if transfer and transfer.is_known and transfer.warning:
        log.warning("%s (%s)", transfer.warning, transfer)


def check_host_bytes(program: Program, argument_bytes: int, temp_bytes: int) -> None:
    """Check that the compiler placed offloaded arrays in host memory, if it distinguishes that.

    Raises:
      JaxspeedError: it did not.
    """
    if program.mesh.devices.flat[0].platform == "cpu":
        return
    roles = program.table.host_bytes_by_role()
    wanted = sum(size for role, size in roles.items() if role != "grad")
    recompute = program.config.recompute
    idle = []
    if argument_bytes < 0.99 * wanted:
        idle.append(f"{wanted} bytes of state, of which only {argument_bytes} are")
    if (recompute.on_host or recompute.offload) and not temp_bytes:
        idle.append("saved activations, of which none are")
    if idle:
        raise JaxspeedError(_bug("the compiled step: not in host memory", idle))


def _bug(where: str, idle: list[str]) -> str:
    return (
        f"{where}: " + "; ".join(idle) + ". The config sets this and was accepted, so this is a "
        "bug in jaxspeed: please report it with the config"
    )


def _on_host_cores(program: Program) -> bool:
    """Whether offloaded state is updated by the host's cores."""
    return bool(program.update.streamed and program.update.streamed.cores.of_host)


def _idle(step: Step, transfers: HostTransfers) -> Iterator[str]:
    """Offloads and remats that the config sets and the step lacks."""
    program, recompute = step.program, step.program.config.recompute
    rows = [row for row in program.table if not row.leaf.trainable]
    frozen = {
        name
        for row in rows
        for name in parts_of(f"params/{row.path}", program.table.stored(row, row.source).arrays)
    }
    read = {path for phase in step.phases for path in phase.state_read()}
    for path, leaf in jax.tree_util.tree_flatten_with_path(program.state)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not in_host(leaf.sharding) or name in frozen:
            continue  # the loss may not read frozen parameters
        by_host = transfers.by_host.get(name)
        stored = transfers.stored | dict.fromkeys(transfers.written, 1)
        # A parameter that the loss does not read is made of its master alone.
        unread = name.startswith("params/") and name not in read
        moves = [("to", transfers.fetched)]
        if not program.update.tier:  # else the programs of buckets write it
            moves.append(("from", stored))
        for direction, moved in moves:
            if not moved.get(name) and not by_host and not (direction == "to" and unread):
                yield f"{name} is offloaded, but is never copied {direction} the device"
        if _on_host_cores(program) and name.startswith("opt/") and not by_host:
            yield f"{name} should be updated by the host's cores, and is not"
    offloaded = any(row.grad and in_host(row.grad) for row in program.table)
    handed = HOST_UPDATE if _on_host_cores(program) else GRADIENTS  # the update reads them there
    if offloaded and not (transfers.to_host.get(GRADIENTS) or transfers.to_host.get(handed)):
        yield "gradients should be offloaded to host memory, but none is"
    if not program.recomputes(step.batch):
        return
    if recompute.on_host or recompute.offload:
        key = "cpu_checkpointing" if recompute.on_host else 'parallel.remat {"offload": [...]}'
        for direction, moved in (("to", transfers.to_host), ("from", transfers.to_device)):
            # In a pipeline an activation may have the shape of a gradient.
            if not (moved.get(ACTIVATIONS) or (program.pipeline and moved.get(GRADIENTS))):
                yield f"{key}: no activation is copied {direction} host memory"
    ops = (op for phase in step.phases for op in all_ops(phase.operations))
    if recompute and not any(op.rematerialized for op in ops):
        yield NO_REMAT
