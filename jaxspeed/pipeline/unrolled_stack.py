"""Consecutive blocks of one kind, each with parameters of its own."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax

from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.module_scopes import calls_in
from jaxspeed.jaxpr.slicing import part, read_by, read_from_outside
from jaxspeed.jaxpr.traverse import is_var
from jaxspeed.pipeline.merge_blocks import Atoms, Unlike, one_of
from jaxspeed.pipeline.repeated_blocks import Blocks, Rows, Weights
from jaxspeed.zero3.find_units import survey

HINT = "jaxspeed.unit marks a function as a block"


@dataclass(frozen=True)
class _Member:
    """One block of a list: its equations, and what they read and give that others have."""

    eqns: list[Any]
    reads: list[Any]
    makes: list[Any]


def listed(jaxpr: Any, stack: Mapping[str, Sequence[Any]]) -> Blocks:
    """The blocks of a program in which blocks with parameters of their own follow each other.

    `stack` has for each parameter of a block the variables of all layers.
    """
    members = _members(jaxpr, stack)
    inside = {id(e) for m in members for e in m.eqns}
    others = [e for e in jaxpr.eqns if id(e) not in inside]
    body, reads = _one_body(jaxpr, members)
    gives = _handed_on(members)
    _refuse_other_readers(jaxpr, others, members, gives)
    kinds = _kinds(stack, members, gives, reads)
    carried = sorted((kind, place) for place, kind in enumerate(kinds) if isinstance(kind, int))
    if [number for number, _ in carried] != list(range(len(gives))):
        raise ModelError(
            "mesh.pipe: the first block is given two things where the others are given one; hand "
            "on both"
        )
    shared = [place for place, kind in enumerate(kinds) if kind is None]
    carry = [place for _, place in carried]
    own = {place: kind for place, kind in enumerate(kinds) if isinstance(kind, (Weights, Rows))}
    numbers: list[Any] = []
    first = [_as_variable(reads[place][0], numbers) for place in carry]
    per_layer = [
        Rows(tuple(_as_variable(v, numbers) for v in kind.atoms))
        if isinstance(kind, Rows)
        else kind
        for kind in own.values()
    ]
    return Blocks(
        len(members),
        body.replace(
            invars=[body.invars[place] for place in [*shared, *carry, *own]],
            outvars=[body.outvars[i] for i in gives],
        ),
        tuple(reads[place][0] for place in shared),
        tuple(first),
        tuple(members[-1].makes[i] for i in gives),
        tuple(per_layer),
        (*numbers, *others),
    )


def _one_body(jaxpr: Any, members: Sequence[_Member]) -> tuple[Any, list[Atoms]]:
    """What each block computes, all that it makes, and what the blocks have for its inputs."""
    try:
        return one_of([part(jaxpr, m.eqns, m.reads, m.makes) for m in members])
    except Unlike as unlike:
        raise ModelError(
            f"mesh.pipe: block {unlike.number} of {len(members)} computes something else than "
            "block 0, and all stages run one program. Blocks of one class with equal settings can "
            "be cut; blocks that differ by turns can be made one block that holds a turn"
        ) from None


def _as_variable(atom: Any, numbers: list[Any]) -> Any:
    """The atom, or a variable that an equation, added to `numbers`, gives a literal's value."""
    if is_var(atom):
        return atom
    shape = jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    (copy,) = jax.make_jaxpr(jax.lax.copy_p.bind)(shape).jaxpr.eqns
    numbers.append(copy.replace(invars=[atom]))
    return copy.outvars[0]


def _kinds(
    stack: Mapping[str, Sequence[Any]],
    members: Sequence[_Member],
    gives: Sequence[int],
    reads: Sequence[Atoms],
) -> list[Weights | Rows | int | None]:
    """What each input of a block is: its own, a number of what it is handed, None: all blocks'."""
    layer_of = {v: (name, i) for name, vs in stack.items() for i, v in enumerate(vs)}
    handed = [{m.makes[i]: n for n, i in enumerate(gives)} for m in members]
    inside = {v for m in members for v in m.makes}
    kinds: list[Weights | Rows | int | None] = []
    for atoms in reads:
        layers = [layer_of.get(v) if is_var(v) else None for v in atoms]
        numbers = {
            given.get(v) if is_var(v) else None for given, v in zip(handed, atoms[1:], strict=False)
        }
        if any(layers):
            name = next(of_layer[0] for of_layer in layers if of_layer)
            if layers != [(name, i) for i in range(len(atoms))]:
                raise ModelError(f"mesh.pipe: the blocks do not all read their {name} alike")
            kinds.append(Weights(name))
        elif len(numbers) == 1 and None not in numbers:
            kinds.append(numbers.pop())
        elif all(v is atoms[0] for v in atoms):
            kinds.append(None)
        elif inside & {v for v in atoms if is_var(v)}:
            raise ModelError(
                "mesh.pipe: a block reads what an earlier one than the block before it makes"
            )
        else:
            kinds.append(Rows(atoms))
    return kinds


def _members(jaxpr: Any, stack: Mapping[str, Sequence[Any]]) -> list[_Member]:
    """The blocks' equations, by the names of their calls and by whose parameters they read."""
    layer_of = {v: i for vs in stack.values() for i, v in enumerate(vs)}
    layers = len(next(iter(stack.values())))
    outermost: dict[int, tuple[int, int]] = {}  # layer -> (depth, serial) of its call
    for serial, seen in survey(jaxpr, layer_of).items():
        layers_read = {layer_of[v] for v in seen.reads}
        if len(layers_read) == 1:
            (layer,) = layers_read
            call = (len(seen.chain), serial)
            outermost[layer] = min(outermost.get(layer, call), call)
    layer_of_call = {serial: layer for layer, (_, serial) in outermost.items()}
    eqns: dict[int, list[Any]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        calls = (c.serial for c in calls_in(str(eqn.source_info.name_stack)))
        of_eqn = {layer_of_call[serial] for serial in calls if serial in layer_of_call}
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
    return _Member(eqns, read_from_outside(eqns), [v for e in eqns for v in e.outvars])


def _handed_on(members: Sequence[_Member]) -> list[int]:
    """Which of the values that a block makes the next one reads, by their place; for all alike."""
    found = []
    for number, (member, after) in enumerate(pairwise(members)):
        read = set(after.reads)
        found.append([i for i, v in enumerate(member.makes) if v in read])
        if found[-1]:
            continue
        if set(member.reads) & set(after.makes):
            raise ModelError(
                f"mesh.pipe: block {number} reads what block {number + 1} makes. Blocks have to "
                "follow each other in the order of their list; turn the list round"
            )
        raise ModelError(
            f"mesh.pipe: block {number + 1} reads nothing that block {number} makes. Blocks have "
            "to follow each other in the order of their list, and what happens between two of "
            f"them has to be a part of a block ({HINT})"
        )
    if any(f != found[0] for f in found):
        raise ModelError("mesh.pipe: the blocks do not all hand on the same")
    return found[0]


def _refuse_other_readers(
    jaxpr: Any, others: Sequence[Any], members: Sequence[_Member], gives: Sequence[int]
) -> None:
    """Nothing but the next block may read what a block makes; of the last, what it hands on."""
    read = read_by(jaxpr.replace(eqns=list(others)))
    for number, member in enumerate(members):
        last = number == len(members) - 1
        own = {v for i, v in enumerate(member.makes) if not (last and i in gives)}
        later = {v for m in members[number + 2 :] for v in m.reads}
        if own & (read | later):
            raise ModelError(
                f"mesh.pipe: something that block {number} makes is read elsewhere than by the "
                "next block; a pipeline passes on only what goes from block to block"
            )
