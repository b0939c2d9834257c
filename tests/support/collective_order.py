"""Whether data orders the collectives of a program, as XLA:CPU needs it once it has loaded one.

A program that XLA:CPU compiles runs its collectives in order. In one that is loaded, from the
compilation cache or a file, only those of one computation are in order: each loop, call and branch
has an order of its own (`ThunkSequenceSerDesProtobuf` of jaxlib 0.10.2). All collectives that JAX
places by hand have one channel (`COLLECTIVE_CHANNEL_ID`), so two that run at once mix messages.
"""

from itertools import chain

from jaxspeed.hlo.parser import Instruction, Module, parse

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
CALLED = (
    "body",
    "condition",
    "to_apply",
    "branch_computations",
    "true_computation",
    "false_computation",
)


def unordered_collectives(text: str) -> list[tuple[str, str]]:
    """Pairs of instructions with collectives of one channel that may run at once when loaded."""
    module = parse(text)
    found: list[tuple[str, str]] = []
    for computation in module.computations.values():
        earlier: list[tuple[Instruction, set[str]]] = []
        before: dict[str, set[str]] = {}  # the earlier ones that an instruction depends on
        for one in computation.instructions.values():
            known = set().union(*(before[name] for name in one.operands))
            before[one.name] = known
            channels = _channels(module, one)
            if not channels:
                continue
            for other, of_other in earlier:
                together = _is_one(one) and _is_one(other)  # in order: of one computation
                if channels & of_other and not together and other.name not in known:
                    found.append((other.name, one.name))
            earlier.append((one, channels))
            before[one.name] = known | {one.name}
    return found


def _is_one(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES


def _channels(module: Module, instruction: Instruction) -> set[str]:
    """The channels of a collective, or of those that a loop, call or branch runs."""
    if _is_one(instruction):
        return {instruction.attribute("channel_id") or ""}
    names = chain.from_iterable(instruction.called(key) for key in CALLED)
    inner = chain.from_iterable(module.computations[n].instructions.values() for n in names)
    return set().union(*(_channels(module, one) for one in inner))
