"""Repeated blocks in a list, each with separate parameters: one body found by merging them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax

from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.merge_programs import Atoms, DifferentProgram, merge_programs
from jaxspeed.jaxpr.module_scopes import calls_in
from jaxspeed.jaxpr.slicing import free_variables, read_by, sub_jaxpr
from jaxspeed.jaxpr.traverse import is_var
from jaxspeed.pipeline.repeated_blocks import BlockInputs, BlockWeights, RepeatedBlocks
from jaxspeed.zero3.find_units import traced_calls

HINT = "jaxspeed.unit marks a function as a block"


@dataclass(frozen=True)
class _Member:
    """One block of a list: its equations, and the variables that they read and compute."""

    eqns: list[Any]
    reads: list[Any]
    outputs: list[Any]


def unrolled_blocks(jaxpr: Any, stack: Mapping[str, Sequence[Any]]) -> RepeatedBlocks:
    """The consecutive blocks of a jaxpr, whose parameters are not stacked.

    `stack` has for each parameter of a block the variables of all layers.
    """
    members = _with_what_follows(jaxpr, _members(jaxpr, stack))
    inside = {id(e) for m in members for e in m.eqns}
    others = [e for e in jaxpr.eqns if id(e) not in inside]
    body, reads = _merged_body(jaxpr, members, next(iter(stack)))
    carried_out = _carried_outputs(members)
    _refuse_other_readers(jaxpr, others, members, carried_out)
    kinds = _input_kinds(stack, members, carried_out, reads)
    carried = sorted((kind, place) for place, kind in enumerate(kinds) if isinstance(kind, int))
    if [number for number, _ in carried] != list(range(len(carried_out))):
        raise ModelError(
            "mesh.pipe: the first block has two inputs where the others read one output of the "
            "block before; let each block return both"
        )
    shared = [place for place, kind in enumerate(kinds) if kind is None]
    carry = [place for _, place in carried]
    layer_kinds = {
        place: kind
        for place, kind in enumerate(kinds)
        if isinstance(kind, (BlockWeights, BlockInputs))
    }
    numbers: list[Any] = []
    first = [_as_variable(reads[place][0], numbers) for place in carry]
    per_layer = [
        BlockInputs(tuple(_as_variable(v, numbers) for v in kind.atoms))
        if isinstance(kind, BlockInputs)
        else kind
        for kind in layer_kinds.values()
    ]
    return RepeatedBlocks(
        len(members),
        body.replace(
            invars=[body.invars[place] for place in [*shared, *carry, *layer_kinds]],
            outvars=[body.outvars[i] for i in carried_out],
        ),
        tuple(reads[place][0] for place in shared),
        tuple(first),
        tuple(members[-1].outputs[i] for i in carried_out),
        tuple(per_layer),
        (*numbers, *others),
    )


def _merged_body(jaxpr: Any, members: Sequence[_Member], name: str) -> tuple[Any, list[Atoms]]:
    """(the merged jaxpr of the blocks, with all their outputs; the atoms for its inputs)."""
    try:
        return merge_programs([sub_jaxpr(jaxpr, m.eqns, m.reads, m.outputs) for m in members])
    except DifferentProgram as different:
        raise ModelError(
            f"mesh.pipe: block {different.number} of {len(members)} computes something else than "
            f"block 0 ({name}, ...), and all stages run one program. Blocks of one class with "
            "equal settings can be split into stages; blocks that alternate can be grouped into "
            "one block per period"
        ) from None


def _as_variable(atom: Any, numbers: list[Any]) -> Any:
    """The atom; for a literal, a variable set by an equation that is added to `numbers`."""
    if is_var(atom):
        return atom
    shape = jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    (copy,) = jax.make_jaxpr(jax.lax.copy_p.bind)(shape).jaxpr.eqns
    numbers.append(copy.replace(invars=[atom]))
    return copy.outvars[0]


def _input_kinds(
    stack: Mapping[str, Sequence[Any]],
    members: Sequence[_Member],
    carried_out: Sequence[int],
    reads: Sequence[Atoms],
) -> list[BlockWeights | BlockInputs | int | None]:
    """Class of each block input: per-layer, the index of a carried value, or None (shared)."""
    layer_of = {v: (name, i) for name, vs in stack.items() for i, v in enumerate(vs)}
    carried_in = [{m.outputs[i]: n for n, i in enumerate(carried_out)} for m in members]
    inside = {v for m in members for v in m.outputs}
    kinds: list[BlockWeights | BlockInputs | int | None] = []
    for atoms in reads:
        layers = [layer_of.get(v) if is_var(v) else None for v in atoms]
        numbers = {
            carried.get(v) if is_var(v) else None
            for carried, v in zip(carried_in, atoms[1:], strict=False)
        }
        if any(layers):
            name = next(of_layer[0] for of_layer in layers if of_layer)
            if layers != [(name, i) for i in range(len(atoms))]:
                raise ModelError(
                    f"mesh.pipe: the blocks do not all read their {name} in the same way"
                )
            kinds.append(BlockWeights(name))
        elif len(numbers) == 1 and None not in numbers:
            kinds.append(numbers.pop())
        elif all(v is atoms[0] for v in atoms):
            kinds.append(None)
        elif inside & {v for v in atoms if is_var(v)}:
            raise ModelError(
                "mesh.pipe: a block reads an output of an earlier block than the one before it"
            )
        else:
            kinds.append(BlockInputs(atoms))
    return kinds


def _members(jaxpr: Any, stack: Mapping[str, Sequence[Any]]) -> list[_Member]:
    """The blocks' equations, found by module calls and by the parameters that they read."""
    layer_of = {v: i for vs in stack.values() for i, v in enumerate(vs)}
    layers = len(next(iter(stack.values())))
    outermost: dict[int, tuple[int, int]] = {}  # layer -> (depth, serial) of its call
    calls = traced_calls(jaxpr, layer_of)
    traces = Counter(seen.call.serial for seen in calls)  # a shared one is inside of the blocks
    for seen in calls:
        layers_read = {layer_of[v] for v in seen.reads}
        if len(layers_read) == 1 and traces[seen.call.serial] == 1:
            (layer,) = layers_read
            call = (len(seen.chain), seen.call.serial)
            outermost[layer] = min(outermost.get(layer, call), call)
    layer_of_call = {serial: layer for layer, (_, serial) in outermost.items()}
    eqns: dict[int, list[Any]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        serials = (c.serial for c in calls_in(str(eqn.source_info.name_stack)))
        of_eqn = {layer_of_call[serial] for serial in serials if serial in layer_of_call}
        of_eqn |= {layer_of[v] for v in eqn.invars if is_var(v) and v in layer_of}
        if len(of_eqn) > 1:
            raise ModelError(
                f"mesh.pipe: a {eqn.primitive.name} reads the parameters of several blocks at once"
            )
        if of_eqn:
            eqns[of_eqn.pop()].append(eqn)
    missing = [i for i in range(layers) if i not in eqns]
    if missing:
        raise ModelError(f"mesh.pipe: the loss does not read block {missing[0]} of {layers}")
    return [_member(eqns[i]) for i in range(layers)]


def _member(eqns: list[Any]) -> _Member:
    return _Member(eqns, free_variables(eqns), [v for e in eqns for v in e.outvars])


def _with_what_follows(jaxpr: Any, members: list[_Member]) -> list[_Member]:
    """Each block with the computation between it and the next: `x = tanh(layer(x))`.

    The last block takes the same computation. Where it is followed by another one, or where a block
    would then read a later one's output, the blocks stay as they are.
    """
    inside = {id(e) for m in members for e in m.eqns}
    others = [e for e in jaxpr.eqns if id(e) not in inside]
    between = [_path_of(others, member.outputs, after.reads) for member, after in pairwise(members)]
    if not any(between):
        return members
    after_all = _path_of(others, members[-1].outputs, read_by(jaxpr))
    between.append(after_all[: len(between[0])])
    names = [[e.primitive.name for e in eqns] for eqns in between]
    if any(operations != names[0] for operations in names):
        return members
    extended = [_member([*m.eqns, *eqns]) for m, eqns in zip(members, between, strict=True)]
    later: set[Any] = set()
    for member in reversed(extended):
        if later & set(member.reads):
            return members
        later.update(member.outputs)
    return extended


def _path_of(eqns: Sequence[Any], outputs: Iterable[Any], reads: Iterable[Any]) -> list[Any]:
    """The equations that depend on `outputs` and on which `reads` depend."""
    known = set(outputs)
    dependent = []
    for eqn in eqns:
        if any(is_var(v) and v in known for v in eqn.invars):
            dependent.append(eqn)
            known.update(eqn.outvars)
    needed = {v for v in reads if is_var(v)}
    path = []
    for eqn in reversed(dependent):
        if needed & set(eqn.outvars):
            path.append(eqn)
            needed |= {v for v in eqn.invars if is_var(v)}
    return path[::-1]


def _carried_outputs(members: Sequence[_Member]) -> list[int]:
    """Indices of a block's outputs that the next block reads, the same for all blocks."""
    indices = []
    for number, (member, after) in enumerate(pairwise(members)):
        read = set(after.reads)
        indices.append([i for i, v in enumerate(member.outputs) if v in read])
        if indices[-1]:
            continue
        if set(member.reads) & set(after.outputs):
            raise ModelError(
                f"mesh.pipe: block {number} reads an output of block {number + 1}. Blocks have to "
                "run in the order of their list; reverse the list"
            )
        raise ModelError(
            f"mesh.pipe: block {number + 1} reads no output of block {number}. Blocks have to run "
            "in the order of their list, and computation between two of them has to be part of a "
            f"block ({HINT})"
        )
    if any(f != indices[0] for f in indices):
        raise ModelError("mesh.pipe: the blocks do not all pass the same outputs to the next block")
    return indices[0]


def _refuse_other_readers(
    jaxpr: Any, others: Sequence[Any], members: Sequence[_Member], carried_out: Sequence[int]
) -> None:
    """Refuse readers of a block's outputs other than the next block, except for the last's."""
    read = read_by(jaxpr.replace(eqns=list(others)))
    for number, member in enumerate(members):
        last = number == len(members) - 1
        internal = {v for i, v in enumerate(member.outputs) if not (last and i in carried_out)}
        later = {v for m in members[number + 2 :] for v in m.reads}
        if internal & (read | later):
            raise ModelError(
                f"mesh.pipe: an output of block {number} is read outside of the next block; a "
                "pipeline sends outputs only from each block to the next"
            )
