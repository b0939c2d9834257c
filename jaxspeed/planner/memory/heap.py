"""The heap of a compiled program: offsets of buffers, and the holes between them.

XLA:GPU and XLA:CPU assign offsets as `GlobalDecreasingSizeBestFitHeap` (in
xla/service/heap_simulator): the largest buffers first, or those that live longest, each in the
smallest hole that is free all the time; of the two orders the one that needs less. XLA:TPU assigns
them in the order of execution; to repeat that brings no more drawn configs within a tenth.
"""

from collections.abc import Callable, Iterable, Sequence

Interval = tuple[int, int, int]  # (first position, last, bytes)
NEGLECTED = 500  # buffers that are smaller than the heap by this factor fill its holes


def heap_bytes(intervals: Iterable[Interval]) -> int:
    """Bytes of the heap."""
    occupied = [
        interval for interval in intervals if interval[2] > 0 and interval[0] <= interval[1]
    ]
    large = max((size for *_, size in occupied), default=0)
    occupied = [interval for interval in occupied if interval[2] * NEGLECTED > large]
    by_size = _assigned(occupied, lambda interval: (-interval[2], interval[0] - interval[1]))
    by_time = _assigned(occupied, lambda interval: (interval[0] - interval[1], -interval[2]))
    return min(by_size, by_time)


def _assigned(intervals: list[Interval], order: Callable[[Interval], tuple[int, ...]]) -> int:
    placed: list[tuple[int, int, int, int]] = []  # (offset, end, first, last), by offset
    top = 0
    for first, last, size in sorted(intervals, key=order):
        at = _best_fit(size, [(lo, hi) for lo, hi, a, b in placed if a <= last and b >= first])
        placed.append((at, at + size, first, last))
        placed.sort()
        top = max(top, at + size)
    return top


def _best_fit(size: int, taken: Sequence[tuple[int, int]]) -> int:
    """The offset of the smallest hole between these, by offset, else the end."""
    best, hole, free = None, 0, 0
    for offset, end in taken:
        gap = offset - free
        if gap >= size and (best is None or gap < hole):
            best, hole = free, gap
        free = max(free, end)
    return free if best is None else best
