"""The repeated blocks of a traced loss: where they are in it, and what one of them computes.

Either one scan walks along stacked parameters (`scanned`), or blocks with parameters of their own
follow each other, all of one kind (`listed`). Both become the same: a body, applied `layers` times.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jaxspeed.errors import ModelError
from jaxspeed.parallel.pipeline.opened import read_by
from jaxspeed.placement.units.choose import survey
from jaxspeed.placement.units.jaxprs import is_var, open_jaxpr, part
from jaxspeed.placement.units.slicing import consts_and_carry
from jaxspeed.placement.units.tags import calls_in

CASTS = ("convert_element_type", "copy")
HINT = "jaxspeed.unit marks a function as a block"


@dataclass(frozen=True)
class Weights:
    """A parameter of the blocks: its name in the stack, and casts between it and the blocks."""

    name: str
    casts: tuple[Any, ...] = ()

    def cast(self, x: Any) -> Any:
        for eqn in self.casts:
            x = eqn.primitive.bind(x, **eqn.params)
        return x


@dataclass(frozen=True)
class Rows:
    """What each block reads of its own that is no parameter: one array a layer, or one of all."""

    atoms: tuple[Any, ...]


@dataclass(frozen=True)
class Blocks:
    """`body(shared, carry, per layer) -> carry`, with what its inputs are in the program."""

    layers: int
    body: Any  # a jaxpr without constants
    shared: tuple[Any, ...]  # the program's variables that every block reads
    carry: tuple[Any, ...]  # ... that the first block starts from
    results: tuple[Any, ...]  # ... that the last block gives
    per_layer: tuple[Weights | Rows, ...]
    others: tuple[Any, ...]  # the equations of the program that are no block's
    unroll: int = 1


def scanned(jaxpr: Any, stack: Mapping[Any, str]) -> Blocks:
    """The blocks of a program that scans along the stacked parameters `stack`."""
    stacked, casts = _casts_of(jaxpr, stack)
    readers = [e for e in jaxpr.eqns if any(is_var(v) and v in stacked for v in e.invars)]
    scan = _the_scan([e for e in readers if e not in casts], stacked, stack)
    num_consts, num_carry = consts_and_carry(scan)
    body, consts = open_jaxpr(scan.params["jaxpr"])
    assert not len(consts), "constants of a scan are arguments of it"
    first_xs = num_consts + num_carry
    others = tuple(e for e in jaxpr.eqns if e is not scan and e not in casts)
    read = {v for e in others for v in e.invars if is_var(v)}
    read |= {v for v in jaxpr.outvars if is_var(v)}
    if read & set(scan.outvars[num_carry:]):
        raise ModelError(
            "the loss reads something that every block hands out beside its activations (a loss of "
            "its own, new statistics): a pipeline passes on only what travels with them; let the "
            "scan carry it"
        )
    return Blocks(
        scan.params["length"],
        body.replace(outvars=body.outvars[:num_carry]),
        tuple(scan.invars[:num_consts]),
        tuple(scan.invars[num_consts:first_xs]),
        tuple(scan.outvars[:num_carry]),
        tuple(
            Weights(*stacked[v]) if is_var(v) and v in stacked else Rows((v,))
            for v in scan.invars[first_xs:]
        ),
        others,
        min(int(scan.params["unroll"]), scan.params["length"]),
    )


def _casts_of(jaxpr: Any, stack: Mapping[Any, str]) -> tuple[dict[Any, Any], list[Any]]:
    """{variable: (a parameter's name, casts)} of stacked parameters and their casts, and those."""
    found: dict[Any, Any] = {v: (name, ()) for v, name in stack.items()}
    casts = []
    for eqn in jaxpr.eqns:
        v = eqn.invars[0] if len(eqn.invars) == 1 else None
        if eqn.primitive.name in CASTS and v is not None and is_var(v) and v in found:
            name, before = found[v]
            found[eqn.outvars[0]] = (name, (*before, eqn))
            casts.append(eqn)
    return found, casts


def _the_scan(eqns: Sequence[Any], stacked: Mapping[Any, Any], stack: Mapping[Any, str]) -> Any:
    """The one equation that reads the stack, if it is a scan along it."""
    names = ", ".join(list(stack.values())[:3])
    if not eqns:
        raise ModelError(f"mesh.pipe: the loss does not read the stacked blocks ({names}, ...)")
    for eqn in eqns:
        if eqn.primitive.name != "scan":
            name = next(stacked[v][0] for v in eqn.invars if is_var(v) and v in stacked)
            raise ModelError(
                "mesh.pipe cuts stacked blocks where one scan walks along them, and the stacked "
                f"{name} is read by a {eqn.primitive.name} outside of a scan; keep the blocks as a "
                "list, or scan"
            )
    if len(eqns) > 1:
        raise ModelError(
            f"mesh.pipe: the stacked blocks ({names}, ...) are walked along {len(eqns)} times; a "
            "pipeline goes through them once"
        )
    (scan,) = eqns
    first_xs = sum(consts_and_carry(scan))
    if any(is_var(v) and v in stacked for v in scan.invars[:first_xs]):
        raise ModelError(
            "mesh.pipe: each block reads the weights of all blocks, so they cannot be cut apart"
        )
    if scan.params["reverse"]:
        raise ModelError(
            "mesh.pipe: the scan walks from the last layer to the first; turn it round"
        )
    return scan


@dataclass(frozen=True)
class _Member:
    """One block of a list: its equations, and what they read and give that others have."""

    eqns: list[Any]
    reads: list[Any]
    makes: list[Any]

    def program(self, jaxpr: Any, gives: Sequence[int]) -> Any:
        return part(jaxpr, self.eqns, self.reads, [self.makes[i] for i in gives])


def listed(jaxpr: Any, stack: Mapping[str, Sequence[Any]]) -> Blocks:
    """The blocks of a program in which blocks with parameters of their own follow each other.

    `stack` has for each parameter of a block the variables of all layers.
    """
    members = _members(jaxpr, stack)
    inside = {id(e) for m in members for e in m.eqns}
    others = tuple(e for e in jaxpr.eqns if id(e) not in inside)
    gives = _handed_on(members)
    bodies = [m.program(jaxpr, gives) for m in members]
    texts = [_text(b) for b in bodies]
    for i, text in enumerate(texts):
        if text != texts[0] or len(members[i].reads) != len(members[0].reads):
            raise ModelError(
                f"mesh.pipe: block {i} of {len(members)} computes something else than block 0, and "
                "all stages run one program. Blocks of one class with equal settings can be cut; "
                "blocks that differ by turns can be made one block that holds a turn"
            )
    _refuse_other_readers(jaxpr, others, members, gives)
    kinds = _kinds(stack, members, gives)
    first = members[0].reads
    carried = sorted((kind, place) for place, kind in kinds.items() if isinstance(kind, int))
    if [number for number, _ in carried] != list(range(len(gives))):
        raise ModelError("mesh.pipe: a block reads something that the block before does not give")
    shared = [place for place, kind in kinds.items() if kind is None]
    carry = [place for _, place in carried]
    own = {place: kind for place, kind in kinds.items() if isinstance(kind, (Weights, Rows))}
    order = [*shared, *carry, *own]
    return Blocks(
        len(members),
        bodies[0].replace(invars=[bodies[0].invars[place] for place in order]),
        tuple(first[place] for place in shared),
        tuple(first[place] for place in carry),
        tuple(members[-1].makes[i] for i in gives),
        tuple(own.values()),
        others,
    )


def _kinds(
    stack: Mapping[str, Sequence[Any]], members: Sequence[_Member], gives: Sequence[int]
) -> dict[int, Weights | Rows | int | None]:
    """What each input of a block is: its own, a number of what it is handed, None: all blocks'."""
    layer_of = {v: (name, i) for name, vs in stack.items() for i, v in enumerate(vs)}
    handed = [{m.makes[i]: n for n, i in enumerate(gives)} for m in members]
    inside = {v for m in members for v in m.makes}
    kinds: dict[int, Weights | Rows | int | None] = {}
    for place, first in enumerate(members[0].reads):
        atoms = tuple(m.reads[place] for m in members)
        number = handed[0].get(atoms[1])
        if first in layer_of:
            name = layer_of[first][0]
            if [layer_of.get(v) for v in atoms] != [(name, i) for i in range(len(atoms))]:
                raise ModelError(f"mesh.pipe: the blocks do not all read their {name} alike")
            kinds[place] = Weights(name)
        elif number is not None and all(
            given.get(v) == number for given, v in zip(handed, atoms[1:])
        ):
            kinds[place] = number
        elif all(v is first for v in atoms):
            kinds[place] = None
        elif inside & set(atoms):
            raise ModelError(
                "mesh.pipe: a block reads what an earlier one than the block before it makes"
            )
        else:
            kinds[place] = Rows(atoms)
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
    made = [v for e in eqns for v in e.outvars]
    inside = set(made)
    reads = dict.fromkeys(v for e in eqns for v in e.invars if is_var(v) and v not in inside)
    return _Member(eqns, list(reads), made)


def _handed_on(members: Sequence[_Member]) -> list[int]:
    """Which of the values that a block makes the next one reads, by their place; for all alike."""
    found = []
    for member, after in pairwise(members):
        read = set(after.reads)
        found.append([i for i, v in enumerate(member.makes) if v in read])
    if not found[0]:
        raise ModelError(
            "mesh.pipe: block 1 reads nothing that block 0 makes. Blocks have to follow each other "
            "in the order of their list, and what happens between two of them has to be a part of "
            f"a block ({HINT})"
        )
    if any(f != found[0] for f in found) or found[0][-1] >= len(members[-1].makes):
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


def _text(jaxpr: Any) -> str:
    """A program in letters, equal for equal computations."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr))
