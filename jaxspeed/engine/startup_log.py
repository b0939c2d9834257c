"""Startup log: inferred shardings, default clipping, idle axes, padding, pinned host memory."""

import logging
import math
import os
import re
from collections.abc import Sequence

import jax

from jaxspeed.axes import PIPE, TENSOR
from jaxspeed.offload import GPU_LIMIT, pinned_limit
from jaxspeed.placement.rows import Row
from jaxspeed.placement.rules import DATA_NAMES
from jaxspeed.placement.show import bytes_text
from jaxspeed.placement.specs import spec_axes
from jaxspeed.placement.stacks import Stack, UnlikeStages
from jaxspeed.placement.table import PlacementTable
from jaxspeed.tensor_parallel import dims_sharded_over
from jaxspeed.train.program import Program

log = logging.getLogger("jaxspeed")

REPLICATED_SHARE = 0.1  # fraction of the parameters' bytes from which a warning is logged


def log_startup(program: Program) -> None:
    """Log what a user should know of a program before its first step."""
    if program.config.dump_state:
        log.info("config: %s\n%s", program.config.given, program.table)
    for note in program.config.notes:
        log.warning("%s", note)
    for note in program.model.notes(program.traced_loss.compute_dtype):
        log.warning("%s", note)
    for name, frozen in program.frozen.items():
        table = frozen.table
        device = sum(per_device for _, per_device in table.bytes_by_role().values())
        log.info(
            "%s: %s, frozen, %s per device%s",
            name,
            frozen.source.model.weights.folder.path,
            bytes_text(device),
            " and more in host memory" if table.host_bytes_by_role() else "",
        )
    _log_own_axes(program)
    _log_clipping(program)
    if program.proposal is not None:
        log.info("mesh.tensor: the sharding was inferred from the loss\n%s", program.proposal)
    degree = program.mesh.shape[TENSOR]
    if degree > 1 and not dims_sharded_over(TENSOR, {r.path: r.read.spec for r in program.table}):
        log.warning(
            "mesh.tensor is %d, but no parameter is sharded over it: all devices of this axis do "
            "the same work",
            degree,
        )
    _warn_of_pinned_limit(program)
    if program.pipeline:
        _warn_of_replicated(program.table)
        layout = program.pipeline.layout
        slots = layout.stages * layout.chunks * layout.rows
        if layout.padded:
            log.warning(
                "mesh.pipe: %d layers in chunks of %d: %d of %d are padding, and a step takes %.2f "
                "times as long as if the layers divided evenly",
                layout.layers,
                layout.rows,
                slots - layout.layers,
                slots,
                slots / layout.layers,
            )


def _log_own_axes(program: Program) -> None:
    """Note the model's own annotations of parameters that the config replaces."""
    mapping = program.config.parallel.axis_names
    names = {name for leaf in program.model.leaves for name in leaf.names if name}
    ignored = {n for n in names if mapping.get(n, n if n not in DATA_NAMES else "data") == "data"}
    if ignored:
        log.info(
            "the model's own sharding of parameters over %s is ignored: "
            "zero_optimization.stage %d shards them",
            ", ".join(sorted(ignored)),
            program.config.zero_optimization.stage,
        )


def _log_clipping(program: Program) -> None:
    """Log the clipping norm if the config leaves it at the default."""
    if clips_by_default(program):
        log.info(
            "gradient_clipping: gradients are clipped to a global norm of %g, the default of "
            "DeepSpeed 0.19.6 (before mid 2026 it was 0, no clipping); set gradient_clipping to "
            "another norm, or to 0 for none",
            program.optimizer.clipping,
        )


def clips_by_default(program: Program) -> bool:
    """Whether gradients are clipped although the config does not set it."""
    is_set = "gradient_clipping" in program.config.model_fields_set
    return program.optimizer.clipping > 0 and not is_set


def _warn_of_pinned_limit(program: Program) -> None:
    """Log a warning if more state is offloaded than the backend can pin."""
    first, index = program.mesh.devices.flat[0], jax.process_index()
    here = sum(device.process_index == index for device in program.mesh.devices.flat)
    need = here * sum(program.table.host_bytes_by_role().values())
    limit = pinned_limit(first.platform, os.environ)
    if limit is not None and need > limit:
        log.warning(
            "offload: %s are offloaded to host memory by the %d devices of this process, and JAX "
            "pins %s: set the environment variable %s to %d or more before it starts",
            bytes_text(need),
            here,
            bytes_text(limit),
            GPU_LIMIT,
            -(-need // 2**30) + 1,
        )


def _warn_of_replicated(table: PlacementTable) -> None:
    """Log a warning if many parameters are replicated over the pipeline stages."""
    assert table.stack is not None

    def size(row: Row) -> int:
        return math.prod(row.leaf.shape) * row.leaf.dtype.itemsize

    replicated = [
        r for r in table if r.path not in table.stack.paths and PIPE not in spec_axes(r.read.spec)
    ]
    total, outside = sum(map(size, table)), sum(map(size, replicated))
    if outside < REPLICATED_SHARE * total:
        return
    largest = sorted(replicated, key=size, reverse=True)
    log.warning(
        "mesh.pipe: %.0f%% of the parameters are outside of the %d blocks that are split over the "
        "stages (%s), and every stage holds them: %s, ... %s",
        100 * outside / total,
        table.stack.layers,
        _ends(next(iter(table.stack.leaves.values()))),
        ", ".join(row.path for row in largest[:3]),
        _remedy(largest, table.stack),
    )


def _ends(paths: Sequence[str]) -> str:
    """`first to last` block, from the paths of one parameter in each block."""
    if len(paths) == 1:
        return paths[0]
    first, last = (path.split("/") for path in (paths[0], paths[-1]))
    number = next(i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b)
    return " to ".join("/".join(path[: number + 1]) for path in (first, last))


def _remedy(largest: Sequence[Row], stack: Stack) -> str:
    """A remedy for the largest of the parameters that every stage holds."""

    def of_any_member(path: str) -> str:
        return re.sub(r"\d+/", "*/", path)

    if isinstance(stack, UnlikeStages):
        return "More than one stage reads them"
    first = largest[0]
    kinds = [(of_any_member(row.path), row.leaf.shape) for row in largest]
    if kinds[0][0] in map(of_any_member, stack.paths):
        return (
            "They are in the same list: the stages split its longest run of equal blocks, which a "
            "layer of another kind ends; move that out of the list, or make it part of each block"
        )
    if kinds.count(kinds[0]) > 1:
        return "They repeat too, but the stages split only one list: parallel.units selects it"
    if len(first.leaf.shape) != 2:
        return "Only blocks of equal parameters become stages, and these are in no such block"
    return (
        "If one has a vocabulary dim, name it: "
        f'parallel.logical_axes {{"{first.path}": ["vocab", "..."]}}'
    )
