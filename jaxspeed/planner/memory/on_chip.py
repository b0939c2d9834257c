"""Arrays that XLA:TPU places in on-chip memory (VMEM, on v4 CMEM) in place of device memory.

Its memory space assignment (xla/service/memory_space_assignment) looks at each array between one
use and the next. An array stays on the chip that computed it if there is room and the next use is
near; else it is copied to device memory. An array in device memory is copied to the chip ahead of a
use, if there is room. What comes from host memory, or goes there, is in device memory.

Each copy is a tuple, and each tuple has a table in device memory that shares its place with no
other array: 25 of 58 MB of temporaries in a step of 8 unrolled blocks (libtpu 0.0.52).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from jaxspeed.hardware.known_chips import Chip
from jaxspeed.jaxpr.primitives import SCATTERS, SLICES
from jaxspeed.planner.memory.op_order import Lifetime, OrderedScope
from jaxspeed.planner.trace.materialization import OUT
from jaxspeed.planner.trace.op_cost import works
from jaxspeed.planner.trace.trace_ir import Op, Value

# Options of libtpu 0.0.52, in the compilation environment that it dumps:
MAX_COPIES = 8.0  # an array waits on the chip as long as so many copies of all its memory take
OVERLAPS = (2.0, 1.0)  # a copy starts before its use by so many times what it takes
TRIPS = 5  # that are assumed of each loop
# From its buffer assignments:
TABLE = 16 << 10  # bytes of a tuple's table
SLICED, SLICE_TUPLES = 2 << 20, 8  # arrays from this size on are copied in slices, with more tuples

_INDEXED = {*SCATTERS, "gather", "dynamic_slice", "dynamic_update_slice"}  # read parts of the first


@dataclass(frozen=True)
class ChipUse:
    """The use of on-chip memory by a scope.

    Attributes:
      bytes: the most that are in use at a time.
      largest: bytes of the largest array that is there.
      seconds: of one run of the scope.
      tuples: of its copies and transfers.
      waits: {input or output: the longest time that it waits in the scope for a use, or the end}.
    """

    bytes: int = 0
    largest: int = 0
    seconds: float = 0.0
    tuples: int = 0
    waits: Mapping[Value, float] = field(default_factory=dict)

    @property
    def tables(self) -> int:
        """Bytes of device memory."""
        return self.tuples * TABLE


NO_USE = ChipUse()


def joint(uses: Sequence[ChipUse]) -> ChipUse:
    """The use by an operation whose bodies are these, of which one runs at a time."""
    return ChipUse(
        max((use.bytes for use in uses), default=0),
        max((use.largest for use in uses), default=0),
        max((use.seconds for use in uses), default=0.0),
        sum(use.tuples for use in uses),
        {value: wait for use in uses for value, wait in use.waits.items()},
    )


class OnChip:
    """The on-chip memory while a scope runs.

    The largest arrays come first, whether of this scope or of the loops in it.

    Args:
      seconds: of each operation in order of execution.
      inner: the use by each operation's loops.
      held: bytes that the enclosing scopes' arrays take.
    """

    def __init__(
        self, chip: Chip, seconds: Sequence[float], inner: Sequence[ChipUse], held: int
    ) -> None:
        self.chip, self.tuples, self.largest = chip, 0, 0
        self.inner = [*inner, NO_USE]
        self.taken = np.full(len(self.inner), held, dtype=np.int64)
        self.clock = np.cumsum((0.0, *seconds, 0.0))

    @property
    def used(self) -> int:
        """The most bytes that are in use at a time."""
        inside = np.array([use.bytes for use in self.inner])
        return min(int((self.taken + inside).max()), self.chip.on_chip)

    def place(
        self,
        first: int,
        last: int,
        uses: Iterable[int],
        size: int,
        waits: Callable[[int], float] = lambda i: 0.0,
        computed: bool = True,
    ) -> tuple[int, int] | None:
        """Place an array; returns its first and last position in device memory, None: in none.

        Args:
          waits: how long it waits for a use inside of the loop at a position.
          computed: whether it is computed at the first position; otherwise it is an argument.
        """
        longest = MAX_COPIES * self.chip.on_chip / self.chip.bandwidth
        read = {*uses}
        points = sorted({first, last, *(i for i in read if first < i < last)})
        away: list[tuple[int, int]] = []
        here, held = computed, False  # on the chip; its place at the start is taken
        for start, end in pairwise(points) if len(points) > 1 else [(first, first)]:
            between = self.clock[max(end, start + 1)] - self.clock[start + 1]
            near = max(between, waits(start), waits(end)) <= longest
            if here and near and self._take(start + held, end, size):
                held = True
                continue
            self.tuples += held and not away  # else it is in device memory already
            away.append((start, end))
            here = held = end in read and self._fetch(start, end, size)
        return (away[0][0], away[-1][1]) if away else None

    def _take(self, first: int, last: int, size: int) -> bool:
        """Take the room for an array from one position to another, if there is."""
        taken = self.taken[first : last + 1]
        inner = self.inner[first : last + 1]
        inside = np.array([use.bytes if use.largest >= size else 0 for use in inner])
        if (taken + inside).max(initial=0) + size > self.chip.on_chip:
            return False
        taken += size
        self.largest = max(self.largest, size)
        return True

    def _fetch(self, start: int, end: int, size: int) -> bool:
        """Copy an array to the chip between two positions, if there is room for it."""
        took = size / self.chip.bandwidth
        for overlap in OVERLAPS:
            begin = np.searchsorted(self.clock, self.clock[end] - overlap * took, side="right") - 1
            begin = max(int(begin), start)
            if self.clock[end] - self.clock[begin] >= took and self._take(begin, end, size):
                self.tuples += SLICE_TUPLES if size >= SLICED else 1
                return True
        return False


def place_on_chip(
    scope: OrderedScope,
    times: Sequence[int],
    inner: Sequence[ChipUse],
    lifetimes: Sequence[Lifetime],
    held: int,
) -> tuple[ChipUse, list[Lifetime], list[int]]:
    """The use of on-chip memory, the lifetimes of arrays in other memory, and `held` for loops.

    For an operation whose loops used more than is left it has the bytes that are taken, else 0.

    Args:
      times: the position of each operation in the order of execution.
      inner: the use of each operation's bodies, in this order.
      held: bytes of on-chip memory that the enclosing scopes' arrays take.
    """
    chip, ops = scope.sizes.chip, scope.scope.ops
    if chip is None or scope.sizes.library:
        return NO_USE, [*lifetimes], []
    tuples = sum(use.tuples for use in inner) + sum(_tuples(scope, op) for op in ops)
    if not chip.on_chip:
        return ChipUse(tuples=tuples), [*lifetimes], []
    op_works = works(scope, scope.sizes, chip)
    order = sorted(range(len(ops)), key=times.__getitem__)
    looped = [use.seconds * (TRIPS if ops[i].trips > 1 else 1) for i, use in zip(order, inner)]
    seconds = [op_works[i].seconds + in_loop for i, in_loop in zip(order, looped)]
    memory = OnChip(chip, seconds, inner, held)

    def waits(value: Value) -> Callable[[int], float]:
        def inside(position: int) -> float:
            if position >= len(order):  # after the last operation
                return 0.0
            loop_waits = inner[position].waits
            return max(
                (loop_waits.get(v, 0.0) for v in _within(scope, ops[order[position]], value)),
                default=0.0,
            )

        return inside

    rest: list[Lifetime] = []
    arguments = _arguments(scope, times)
    for lifetime in sorted([*lifetimes, *arguments.values()], key=lambda lifetime: -lifetime.bytes):
        value = lifetime.value
        by = scope.readers.get(value, set()) - {OUT}
        if lifetime is arguments.get(value):
            read = [times[i] for i in by if _reads_all(scope, i, value)]
            memory.place(0, lifetime.last, read, lifetime.bytes, computed=False)
        elif value.host or _is_transferred(scope, value):
            rest.append(lifetime)
        elif away := memory.place(
            lifetime.first, lifetime.last, [times[i] for i in by], lifetime.bytes, waits(value)
        ):
            rest.append(Lifetime(*away, value, lifetime.bytes))
    use = ChipUse(
        memory.used - held,
        max([memory.largest, *(use.largest for use in inner)]),
        float(sum(seconds)),
        tuples + memory.tuples,
        dict(_waits(scope, times, memory.clock)),
    )
    around = zip(inner, map(int, memory.taken), strict=False)
    return use, rest, [n if within.bytes + n > chip.on_chip else 0 for within, n in around]


def _arguments(scope: OrderedScope, times: Sequence[int]) -> dict[Value, Lifetime]:
    """The inputs of a scope that its operations read in full, until the last one does."""
    arguments = {}
    for value, by in scope.readers.items():
        if value not in scope.producers and not value.host and value.shape:
            read = [times[i] for i in by if _reads_all(scope, i, value)]
            if read:
                arguments[value] = Lifetime(0, max(read), value, scope.sizes.of(value))
    return arguments


def _reads_all(scope: OrderedScope, i: int, value: Value) -> bool:
    """Whether an operation reads all of an array itself: no loop does, whose bodies read it."""
    if i == OUT:
        return False
    op = scope.scope.ops[i]
    if op.bodies or op.name in ("device_put", "ppermute"):
        return False
    base = op.ins[0] if op.name in _INDEXED else None
    return base is None or scope.root(base) is not value


def _is_transferred(scope: OrderedScope, value: Value) -> bool:
    """Whether it comes from host memory, or goes there."""
    ops = scope.scope.ops
    by = [ops[i] for i in scope.readers.get(value, ()) if i != OUT]
    producer = ops[scope.producers[value]] if value in scope.producers else None
    sent = any(op.name == "device_put" and any(out.host for out in op.outs) for op in by)
    return sent or (producer is not None and producer.name == "device_put")


def _tuples(scope: OrderedScope, op: Op) -> int:
    """Tuples of a message to another device, or of transfers from or to host memory."""
    if op.name != "device_put":
        return op.name == "ppermute"
    moved = [(v, out) for v, out in zip(op.ins, op.outs, strict=True) if v and v.host != out.host]
    return sum(1 + _is_part(scope, v if v.host else out) for v, out in moved)


def _is_part(scope: OrderedScope, value: Value) -> bool:
    """Whether an array in host memory is a slice of one, or is written into one."""
    producer = scope.producers.get(scope.root(value))
    around = [
        i for i in (producer, *scope.readers.get(scope.root(value), ())) if i not in (None, OUT)
    ]
    return any(scope.scope.ops[i].name in SLICES for i in around)


def _within(scope: OrderedScope, op: Op, value: Value) -> Iterator[Value]:
    """The inputs and outputs of a loop's bodies that are this array."""
    for body in op.bodies:
        operands = op.ins[len(op.ins) - len(body.ins) :]
        yield from (
            b for v, b in zip(operands, body.ins) if v is not None and scope.root(v) is value
        )
        yield from (b for v, b in zip(op.outs, body.outs) if v is value and b is not None)


def _waits(
    scope: OrderedScope, times: Sequence[int], clock: np.ndarray
) -> Iterator[tuple[Value, float]]:
    end = float(clock[-1])
    for value in scope.scope.ins:
        by = scope.readers.get(scope.root(value), ())
        points = [0.0, *sorted(float(clock[times[i]]) for i in by if i != OUT), end]
        yield value, max(b - a for a, b in pairwise(points))
    for out in scope.scope.outs:
        if out is not None and (producer := scope.producers.get(scope.root(out))) is not None:
            yield out, max(float(clock[times[producer]]), end - float(clock[times[producer]]))
