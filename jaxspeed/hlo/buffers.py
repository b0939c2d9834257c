"""Buffers of a compiled program: the carry of its accumulation loop, its largest arrays."""

from dataclasses import dataclass

from jaxspeed.hlo.collectives import ACCUMULATION_SCOPE
from jaxspeed.hlo.parser import Shape, parse
from jaxspeed.hlo.trip_counts import is_invariant, is_loop_of, walk

_NAMES_ONLY = {"tuple", "get-tuple-element", "bitcast", "while", "conditional", "opt-barrier"}


@dataclass(frozen=True)
class Buffer:
    """The result of an instruction of the compiled program, on one device."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    opcode: str
    op_name: str


def loop_carry_shapes(
    hlo_text: str, scope: str = ACCUMULATION_SCOPE
) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, per-device shape) of the loop-variant carry of the loop under `scope`.

    It contains the gradient accumulators, the loop counter and the stacked results, but not loop
    invariants (weights, the batch). Empty if there is no such loop: XLA unrolls a loop of one
    iteration.
    """
    return [(array.dtype, array.dims) for array in _carry(hlo_text, scope)]


def loop_carry_bytes(hlo_text: str, scope: str = ACCUMULATION_SCOPE) -> int:
    """Bytes per device of `loop_carry_shapes`."""
    return sum(array.bytes for array in _carry(hlo_text, scope))


def largest_buffers(hlo_text: str, count: int = 10) -> list[Buffer]:
    """The largest arrays of all instructions, arguments included, without duplicates."""
    buffers: dict[Buffer, None] = {}
    for site in walk(parse(hlo_text)):
        if site.fusion is None and site.instruction.opcode not in _NAMES_ONLY:
            for array in site.instruction.arrays:
                opcode, op_name = site.instruction.opcode, site.instruction.op_name
                buffers[Buffer(array.dtype, array.dims, array.bytes, opcode, op_name)] = None
    return sorted(buffers, key=lambda buffer: -buffer.bytes)[:count]


def _carry(hlo_text: str, scope: str) -> list[Shape]:
    module = parse(hlo_text)
    carried: list[Shape] = []
    for site in walk(module):
        loop = site.instruction
        if not is_loop_of(loop, scope):
            continue
        body = module.computations[loop.called("body")[0]]
        assert isinstance(loop.shape, tuple)
        carried += [
            part
            for index, part in enumerate(loop.shape)
            if isinstance(part, Shape) and not is_invariant(module, body, index)
        ]
    return carried
