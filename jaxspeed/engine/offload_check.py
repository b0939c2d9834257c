"""Whether a step moves and makes again what its config says, and what that costs.

A policy that silently does nothing is the worst outcome: the program runs, and the memory that it
was to save is not saved. So the traced step is read before it is compiled.
"""

import logging
from collections.abc import Iterator
from typing import Any

import jax

from jaxspeed.errors import JaxspeedError
from jaxspeed.offload.host_transfers import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Argument,
    HostTransfers,
    transfers_in,
)
from jaxspeed.offload.transfer_report import TransferReport
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.placement.mesh import DATA_AXES
from jaxspeed.train.program import Program

log = logging.getLogger("jaxspeed")


def asks(program: Program) -> bool:
    """Whether anything is to wait in host memory or to be made again."""
    return bool(program.config.recompute or program.table.host_bytes_by_role())


def transfer_of(program: Program, traced: Any) -> TransferReport | None:
    """What a traced step moves; None where its config asks for nothing to wait or be made again.

    Raises:
      JaxspeedError: where something that the config asks for is not in the step.
    """
    if not asks(program):
        return None
    found = _transfers(program, traced)
    idle = list(_idle(program, found))
    if idle:
        raise JaxspeedError(_fault("the traced step", idle))
    if not found.bytes:
        return None
    return TransferReport(found, program.mesh.devices.flat[0].device_kind, found.flops)


def check_moves(program: Program, state: Any, batch: Any) -> None:
    """Before the first step: whether it moves what it should, and a warning where that is slow.

    JAX keeps what it traced, so that the step is not traced a second time.
    """
    if not asks(program):
        return
    transfer = transfer_of(program, program.step.trace(state, batch))
    if transfer and transfer.is_known and transfer.warning:
        log.warning("%s (%s)", transfer.warning, transfer)


def check_host_bytes(program: Program, argument_bytes: int, temp_bytes: int) -> None:
    """Whether a compiler that tells host memory apart put there what should wait there.

    Raises:
      JaxspeedError: where it did not.
    """
    if program.mesh.devices.flat[0].platform == "cpu":
        return
    roles = program.table.host_bytes_by_role()
    wanted = sum(size for role, size in roles.items() if role != "grad")
    recompute = program.config.recompute
    idle = []
    if argument_bytes < 0.99 * wanted:
        idle.append(f"{wanted} bytes of state, of which {argument_bytes} are there")
    if (recompute.on_host or recompute.offload) and not temp_bytes:
        idle.append("saved activations, of which none are there")
    if idle:
        raise JaxspeedError(_fault("the compiled step: in host memory should wait", idle))


def _fault(where: str, idle: list[str]) -> str:
    return (
        f"{where}: " + "; ".join(idle) + ". The config asks for it, and nothing was refused, so "
        "this is a fault of jaxspeed: please report it with the config"
    )


def _transfers(program: Program, traced: Any) -> HostTransfers:
    def argument(path: Any, leaf: Any) -> Argument | None:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        kind = PARAMETERS if name.startswith("params/") else OPTIMIZER
        return Argument(name, kind, leaf.sharding) if in_host(leaf.sharding) else None

    state = jax.tree_util.tree_flatten_with_path(program.state)[0]
    arguments = [argument(path, leaf) for path, leaf in state]
    rest = len(traced.jaxpr.jaxpr.invars) - len(arguments)
    return transfers_in(
        traced.jaxpr,
        [*arguments, *[None] * rest],
        list(_gradient_shapes(program)),
        DATA_AXES,
        dict(program.mesh.shape),
    )


def _gradient_shapes(program: Program) -> Iterator[tuple[int, ...]]:
    """Of gradients that the stages of a pipeline send to host memory: whole, and of one layer."""
    for row in program.table if program.pipeline else ():
        if row.grad and (in_host(row.grad) or in_host(row.source)):
            shape = row.shape(row.grad)
            yield shape
            if row.leaf.stacked:
                yield shape[1:]


def _on_host_cores(program: Program) -> bool:
    """Whether what waits in host memory is to be updated there."""
    return bool(program.update.streamed and program.update.streamed.cores.of_host)


def _idle(program: Program, found: HostTransfers) -> Iterator[str]:
    """What the config asks for and a step does not do."""
    recompute = program.config.recompute
    frozen = {row.path for row in program.table if not row.leaf.trainable}
    state = jax.tree_util.tree_flatten_with_path(program.state)[0]
    for path, leaf in state:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not in_host(leaf.sharding) or any(name.endswith(f"/{each}") for each in frozen):
            continue  # the loss need not read what is frozen
        by_host = found.by_host.get(name)
        for way, moved in (("comes to", found.fetched), ("leaves", found.stored)):
            if not moved.get(name) and not by_host:
                yield f"{name} waits in host memory and never {way} the device"
        if _on_host_cores(program) and name.startswith("opt/") and not by_host:
            yield f"{name} should be updated by the host's cores, and is not"
    leaving = any(row.grad and in_host(row.grad) for row in program.table)
    if leaving and not found.to_host.get(GRADIENTS):
        yield "gradients should leave for host memory, and none does"
    if recompute.on_host or recompute.offload:
        words = "cpu_checkpointing" if recompute.on_host else 'parallel.remat {"offload": [...]}'
        for way, moved in (("leaves for", found.to_host), ("comes back from", found.to_device)):
            # In a pipeline an activation may have the shape of a gradient.
            if not (moved.get(ACTIVATIONS) or (program.pipeline and moved.get(GRADIENTS))):
                yield f"{words}: no activation {way} host memory"
    if recompute and not found.regions:
        yield "parallel.remat: nothing is made again in the backward pass"
