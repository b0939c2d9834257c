"""Trip counts of a compiled program's loops, and the number of runs of each instruction.

XLA's cost analysis counts the body of a loop once, whatever its trip count (seen on CPU with jax
0.11.2 and 0.12.0.1, on TPU with 0.12.0), so each instruction is multiplied by the loops around it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxspeed.hlo.parser import Computation, Instruction, Module

_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COPIES = {"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done"}
_CALLS = {
    "while": ("condition", "body"),
    "fusion": ("calls",),
    "call": ("to_apply",),
    "async-start": ("calls",),
    # The taken branch is unknown: each counts as taken.
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}
# Path parts that may appear between a named scope and the loop of the scan inside of it.
_WRAPPERS = r"(?:(?:shard_map|closed_call|eval_jaxpr|core_call|pjit|jit\([^/]*\))/)*"


@dataclass(frozen=True)
class Loop:
    """A `while` around an instruction; `trips` is None if the program does not determine it."""

    instruction: Instruction
    computation: Computation  # the one that contains the `while`
    trips: int | None


@dataclass(frozen=True)
class Site:
    """An instruction at one place of execution, with the loops around it."""

    instruction: Instruction
    computation: Computation
    loops: tuple[Loop, ...]  # outermost first
    fusion: Instruction | None  # the fusion that it is inside of: its result may not reach memory

    @property
    def runs(self) -> int:
        """The product of the trip counts around it; a loop of unknown length counts once."""
        product = 1
        for loop in self.loops:
            product *= 1 if loop.trips is None else loop.trips
        return product


def is_loop_of(instruction: Instruction, scope: str) -> bool:
    """Whether this is the `while` of a scan that was called under `jax.named_scope(scope)`."""
    if instruction.opcode != "while":
        return False
    path = rf"(?:^|/){re.escape(scope)}/{_WRAPPERS}while$"
    return re.search(path, instruction.op_name) is not None


def walk(module: Module) -> Iterator[Site]:
    """Every instruction, once per call site of its computation."""
    yield from _walk(module, module.entry, (), None, ())


# The calls that lead to a computation, outermost first: (caller, call instruction).
_Frames = tuple[tuple[Computation, Instruction], ...]


def _walk(
    module: Module,
    computation: Computation,
    loops: tuple[Loop, ...],
    fusion: Instruction | None,
    frames: _Frames,
) -> Iterator[Site]:
    for instruction in computation.instructions.values():
        yield Site(instruction, computation, loops, fusion)
        inside, around = fusion, loops
        if instruction.opcode == "while":
            around = (
                *loops,
                Loop(
                    instruction, computation, _trip_count(module, computation, instruction, frames)
                ),
            )
        elif instruction.opcode == "fusion":
            inside = instruction
        for key in _CALLS.get(instruction.opcode, ()):
            for name in instruction.called(key):
                called = (*frames, (computation, instruction))
                yield from _walk(module, module.computations[name], around, inside, called)


def _trip_count(
    module: Module, computation: Computation, loop: Instruction, frames: _Frames
) -> int | None:
    """The trip count: XLA's annotation (CPU, GPU), or, as TPU drops it, the loop's arithmetic.

    `for i = start; i < bound; i += step` runs ceil((bound - start) / step) times.
    """
    if match := _TRIP_COUNT.search(loop.attributes):
        return int(match.group(1))
    condition = module.computations[loop.called("condition")[0]]
    body = module.computations[loop.called("body")[0]]
    compare = _inlined(module, condition, condition.root)
    if compare is None or compare[0].opcode != "compare":
        return None
    instruction, sides = compare
    direction = instruction.attribute("direction")
    if _counter(module, condition, body, sides[0]) is None:  # the bound may be on the left
        sides, direction = sides[::-1], _MIRRORED.get(direction or "")
    index = _counter(module, condition, body, sides[0])
    if index is None:
        return None
    start = _element(module, computation, computation.operands(loop)[0], index, frames)
    step = _step(module, body, index)
    bound = _scalar(module, condition, sides[1], (*frames, (computation, loop)))
    if start is None or bound is None or not step:
        return None
    up = step > 0
    if direction not in (("LT", "LE") if up else ("GT", "GE")):
        return None
    if direction in ("LE", "GE"):
        bound += 1 if up else -1
    return max(0, -(-(bound - start) // step))


def _counter(
    module: Module, condition: Computation, body: Computation, value: Instruction
) -> int | None:
    """The index of `value` in the loop's tuple, if the body changes it."""
    index = _tuple_index(module, condition, value)
    return None if index is None or is_invariant(module, body, index) else index


def _scalar(
    module: Module, computation: Computation, value: Instruction, frames: _Frames
) -> int | None:
    """The constant that a value is, searched in the callers too."""
    value = _origin(module, computation, value)
    if value.opcode == "constant":
        return _constant(module, computation, value)
    if value.opcode == "get-tuple-element":
        source = computation.operands(value)[0]
        return _element(module, computation, source, _index(value), frames)
    if value.opcode == "parameter" and frames and frames[-1][1].opcode == "call":
        caller, call = frames[-1]
        return _scalar(module, caller, caller.operands(call)[int(value.arguments)], frames[:-1])
    return None


def _element(
    module: Module, computation: Computation, source: Instruction, index: int, frames: _Frames
) -> int | None:
    """The constant that element `index` of the tuple `source` is."""
    if source.opcode == "tuple":
        return _scalar(module, computation, computation.operands(source)[index], frames)
    if source.opcode != "parameter" or not frames:
        return None
    caller, call = frames[-1]
    if call.opcode == "while":
        body = module.computations[call.called("body")[0]]
        if not is_invariant(module, body, index):
            return None
    elif call.opcode != "call":
        return None
    passed = caller.operands(call)[int(source.arguments)]
    return _element(module, caller, passed, index, frames[:-1])


def _step(module: Module, body: Computation, index: int) -> int | None:
    """The increment of element `index` in the loop's body."""
    if body.root.opcode != "tuple":
        return None
    value = _origin(module, body, body.instructions[body.root.operands[index]])
    add = _inlined(module, body, value)
    if add is None or add[0].opcode not in ("add", "subtract"):
        return None
    instruction, operands = add
    sign = 1 if instruction.opcode == "add" else -1
    for changed, by in (operands, operands[::-1]):
        if (
            _tuple_index(module, body, changed) == index
            and (step := _constant(module, body, by)) is not None
        ):
            return sign * step
    return None


def is_invariant(module: Module, body: Computation, index: int) -> bool:
    """Whether a loop's body leaves element `index` of its tuple unchanged."""
    if body.root.opcode != "tuple":
        return False
    return _tuple_index(module, body, body.instructions[body.root.operands[index]]) == index


def _inlined(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[Instruction, tuple[Instruction, ...]] | None:
    """A two-operand instruction with its operands; of a one-instruction fusion, the outer operands.

    XLA:CPU wraps the compare and the add of a loop into separate fusions.
    """
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called("calls")[0]]
        outside = computation.operands(instruction)
        operands = []
        for operand in inner.operands(inner.root):
            if operand.opcode == "parameter":
                operand = outside[int(operand.arguments)]
            operands.append(operand)
        instruction = inner.root
    else:
        operands = computation.operands(instruction)
    return (instruction, tuple(operands)) if len(operands) == 2 else None


def _origin(module: Module, computation: Computation, instruction: Instruction) -> Instruction:
    """The origin of a value: through copies, and through loops that leave it unchanged."""
    while instruction.name in computation.instructions:  # otherwise it belongs to a fusion
        operands = computation.operands(instruction)
        if instruction.opcode in _COPIES and len(operands) == 1:
            instruction = operands[0]
            continue
        if instruction.opcode != "get-tuple-element" or operands[0].opcode != "while":
            break
        loop, index = operands[0], _index(instruction)
        initial = computation.operands(loop)[0]
        body = module.computations[loop.called("body")[0]]
        if initial.opcode != "tuple" or not is_invariant(module, body, index):
            break
        instruction = computation.operands(initial)[index]
    return instruction


def _index(instruction: Instruction) -> int:
    return int(instruction.attribute("index") or 0)


def _constant(module: Module, computation: Computation, instruction: Instruction) -> int | None:
    instruction = _origin(module, computation, instruction)
    value = instruction.arguments.strip()
    if instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", value):
        return None
    return int(value)


def _tuple_index(module: Module, computation: Computation, instruction: Instruction) -> int | None:
    """i, if this is element i of the computation's only (tuple) parameter."""
    instruction = _origin(module, computation, instruction)
    if instruction.opcode != "get-tuple-element":
        return None
    source = computation.instructions[instruction.operands[0]]
    return _index(instruction) if source.opcode == "parameter" else None
