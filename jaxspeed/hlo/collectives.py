"""Every collective of a compiled program: kind, mesh axis, bytes, how often it runs, and where."""

from collections.abc import Iterator

from jax.sharding import AbstractMesh, Mesh

from jaxspeed.communication import COLLECTIVES, Communication
from jaxspeed.errors import PlacementError
from jaxspeed.hlo.parser import Instruction, Module, parse
from jaxspeed.hlo.replica_groups import Groups, axes_of, replica_groups, source_target_pairs
from jaxspeed.hlo.trip_counts import Site, is_loop_of, walk

ACCUMULATION_SCOPE = "micro_batches"  # the named scope around the step's loop over micro-batches
_VIEWS = {"get-tuple-element", "bitcast", "reshape", "copy", "convert"}


def collectives(
    program: str | Module, mesh: Mesh | AbstractMesh, scope: str = ACCUMULATION_SCOPE
) -> list[Communication]:
    """The collectives of `compiled.as_text()`, which was compiled for `mesh`, in its order.

    A reduce-scatter that XLA:TPU fused into its all-reduce is one. An asynchronous collective
    counts once, at its start. One in a branch counts as if the branch were taken; one in a loop
    of unknown length counts once (`unknown_loops` names those). Groups of one
    device communicate nothing and are left out.
    """
    module = parse(program)
    if module.devices not in (1, mesh.size):
        raise PlacementError(
            f"the program was compiled for {module.devices} devices, the mesh has {mesh.size}"
        )
    return [collective for _, collective in collectives_by_site(module, mesh, scope)]


def collectives_by_site(
    module: Module, mesh: Mesh | AbstractMesh, scope: str = ACCUMULATION_SCOPE
) -> Iterator[tuple[Site, Communication]]:
    """The collectives of a program, each with its place."""
    for site in walk(module):
        collective = _collective(site, module.devices, mesh, scope)
        if collective is not None:
            yield site, collective


def unknown_loops(program: str | Module) -> tuple[str, ...]:
    """The op_name of each loop whose trip count is not known; it counts as one run."""
    loops = (loop for site in walk(parse(program)) for loop in site.loops if loop.trips is None)
    return tuple(dict.fromkeys(loop.instruction.op_name or loop.instruction.name for loop in loops))


def _collective(
    site: Site, devices: int, mesh: Mesh | AbstractMesh, scope: str
) -> Communication | None:
    instruction = site.instruction
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES or _continues(site):
        return None
    groups = _groups(instruction, kind, devices)
    if not groups:
        return None
    operands = _inputs(site)
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # behind it the buffer that is written, offsets and sizes
    payload = [operand for value in operands for operand in value.arrays]
    if kind == "all-reduce" and _is_scattered(site):
        kind = "reduce-scatter"
    size = len(groups) if kind == "collective-permute" else len(groups[0])
    copies = size if kind == "all-gather" else 1
    return Communication(
        kind=kind,
        axes=axes_of(groups, mesh),
        bytes=copies * sum(array.bytes for array in payload),
        elements=copies * sum(array.elements for array in payload),
        dtype="+".join(sorted({array.dtype for array in payload})),
        # XLA:CPU hands an all-to-all one operand for each device of the group.
        leaves=1 if kind == "all-to-all" else len(payload),
        group_size=size,
        runs=site.runs,
        source="hlo",
        in_accumulation=any(is_loop_of(loop.instruction, scope) for loop in site.loops),
        site=instruction.op_name or (site.fusion.op_name if site.fusion else ""),
    )


def _groups(instruction: Instruction, kind: str, devices: int) -> Groups:
    """The groups that communicate; for a permute, its pairs of two devices."""
    if kind == "collective-permute":
        pairs = source_target_pairs(instruction.attribute("source_target_pairs") or "{}")
        return tuple(pair for pair in pairs if pair[0] != pair[1])
    groups = replica_groups(instruction.attribute("replica_groups") or "{}", devices)
    return tuple(group for group in groups if len(group) > 1)


def _continues(site: Site) -> bool:
    """Whether this is the continuation of an asynchronous collective that was counted before.

    XLA:TPU spreads one over a chain of fusions, compute that it overlaps with among them, and
    repeats the instruction in each. The first feeds a custom call, AsyncCollectiveStart.
    """
    if site.fusion is None or "async_collective_fusion_config" not in site.instruction.attributes:
        return False
    users = site.computation.users[site.instruction.name]
    return not any('"AsyncCollectiveStart"' in user.attributes for user in users)


def _is_scattered(site: Site) -> bool:
    """Whether each device keeps only a slice of this all-reduce, inside one fusion with it.

    That is XLA:TPU's reduce-scatter, a fusion that it calls `all-reduce-scatter`.
    """
    return site.fusion is not None and all(
        user.opcode == "dynamic-slice" for user in _readers(site, site.instruction)
    )


def _readers(site: Site, instruction: Instruction) -> Iterator[Instruction]:
    """The instructions that read this one, through views of it; itself, if nothing does."""
    users = site.computation.users[instruction.name]
    if not users:
        yield instruction
    for user in users:
        if user.opcode in _VIEWS:
            yield from _readers(site, user)
        else:
            yield user


def _inputs(site: Site) -> list[Instruction]:
    """The operands, without the rows that XLA:TPU pads a fused reduce-scatter with.

    (It moves the shards that the padding displaced by a small collective-permute afterwards, which
    is reported as the permute that it is.)
    """
    inputs = site.computation.operands(site.instruction)
    while site.fusion is not None and any(value.opcode == "pad" for value in inputs):
        inputs = [
            site.computation.operands(value)[0] if value.opcode == "pad" else value
            for value in inputs
        ]
    return inputs
