"""What a user should know of a program before its first step: what was inferred, what is idle."""

import logging
import math
import os
import re
from collections.abc import Sequence

import jax

from jaxspeed.offload import GPU_LIMIT, pinned_limit
from jaxspeed.placement.rows import Row
from jaxspeed.placement.show import bytes_text
from jaxspeed.placement.stacks import Stack
from jaxspeed.placement.table import PlacementTable
from jaxspeed.tensor_parallel import dims_cut_over
from jaxspeed.train.program import Program

log = logging.getLogger("jaxspeed")

WORTH_TELLING = 0.1  # a share of the parameters' bytes


def tell(program: Program) -> None:
    """What a user should know of a program before its first step."""
    if program.config.dump_state:
        log.info("config: %s\n%s", program.config.given, program.table)
    for note in program.model.notes(program.objective.compute_dtype):
        log.warning("%s", note)
    _tell_of_clipping(program)
    if program.proposal is not None:
        log.info("mesh.tensor: what is cut was inferred from the loss\n%s", program.proposal)
    ways = program.mesh.shape["tensor"]
    if ways > 1 and not dims_cut_over("tensor", {r.path: r.read.spec for r in program.table}):
        log.warning(
            "mesh.tensor is %d, and no parameter is cut over it: every one of these devices does "
            "the same work",
            ways,
        )
    _tell_of_the_pool(program)
    if program.pipeline:
        _tell_of_the_outside(program.table)
        own = program.pipeline.layout
        room = own.stages * own.chunks * own.rows
        if own.padded:
            log.warning(
                "mesh.pipe: %d layers in chunks of %d: %d of %d are padding, and a step takes %.2f "
                "of the time that it would if the layers divided evenly",
                own.layers,
                own.rows,
                room - own.layers,
                room,
                room / own.layers,
            )


def _tell_of_clipping(program: Program) -> None:
    """Which norm gradients are clipped to, where the config leaves it to the default."""
    if clips_by_default(program):
        log.info(
            "gradient_clipping: gradients are clipped to a global norm of %g, DeepSpeed's default; "
            "set gradient_clipping to another norm, or to 0 for none",
            program.optimizer.clipping,
        )


def clips_by_default(program: Program) -> bool:
    """Whether gradients are clipped though the config says nothing of it."""
    said = "gradient_clipping" in program.config.model_fields_set
    return program.optimizer.clipping > 0 and not said


def _tell_of_the_pool(program: Program) -> None:
    """Where more is to wait in host memory than the backend pins."""
    first, index = program.mesh.devices.flat[0], jax.process_index()
    here = sum(device.process_index == index for device in program.mesh.devices.flat)
    need = here * sum(program.table.host_bytes_by_role().values())
    limit = pinned_limit(first.platform, os.environ)
    if limit is not None and need > limit:
        log.warning(
            "offload: %s wait in host memory, %d devices of this process together, and JAX pins "
            "%s: set the environment variable %s to %d or more before it starts",
            bytes_text(need),
            here,
            bytes_text(limit),
            GPU_LIMIT,
            -(-need // 2**30) + 1,
        )


def _tell_of_the_outside(table: PlacementTable) -> None:
    """Which parameters every stage of a pipeline holds and computes with, if they are many."""
    assert table.stack is not None

    def size(row: Row) -> int:
        return math.prod(row.leaf.shape) * row.leaf.dtype.itemsize

    whole = [r for r in table if r.path not in table.stack.paths and "pipe" not in _axes(r)]
    total, outside = sum(map(size, table)), sum(map(size, whole))
    if outside < WORTH_TELLING * total:
        return
    largest = sorted(whole, key=size, reverse=True)
    log.warning(
        "mesh.pipe: %.0f%% of the parameters are no part of the %d blocks that the stages share "
        "(%s), and every stage holds them: %s, ... %s",
        100 * outside / total,
        table.stack.layers,
        _ends(next(iter(table.stack.leaves.values()))),
        ", ".join(row.path for row in largest[:3]),
        _way_out(largest, table.stack),
    )


def _ends(paths: Sequence[str]) -> str:
    """The first and the last block, of the paths of one parameter in each."""
    if len(paths) == 1:
        return paths[0]
    first, last = (path.split("/") for path in (paths[0], paths[-1]))
    number = next(i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b)
    return " to ".join("/".join(path[: number + 1]) for path in (first, last))


def _way_out(largest: Sequence[Row], stack: Stack) -> str:
    """What can be done about the largest of the parameters that every stage holds."""

    def of_any_member(path: str) -> str:
        return re.sub(r"\d+/", "*/", path)

    first = largest[0]
    kinds = [(of_any_member(row.path), row.leaf.shape) for row in largest]
    if kinds[0][0] in map(of_any_member, stack.paths):
        return (
            "They are in the same list: the stages share its longest run of like blocks, which a "
            "layer of another kind ends; take that out of the list, or make it a part of each block"
        )
    if kinds.count(kinds[0]) > 1:
        return "They repeat too, and the stages share one list alone: parallel.units names which"
    return (
        "Where one is a vocabulary, name its dim: "
        f'parallel.logical_axes {{"{first.path}": ["vocab", ...]}}'
    )


def _axes(row: Row) -> set[str]:
    """The axes that cut what layers read of a parameter."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in row.read.spec)
    return {axis for entry in entries for axis in entry if axis}
