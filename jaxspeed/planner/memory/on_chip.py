"""Arrays that XLA:TPU places in on-chip memory (VMEM, on v4 CMEM) in place of device memory.

Its memory space assignment (xla/service/memory_space_assignment) looks at each array between one
use and the next. It stays on chip if there is room, and if the time in between is not long compared
with that of a copy: else the room is better used for others, and it is copied to device memory.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxspeed.hardware.known_chips import Chip

# `max_overlap_to_mem_size_async_copy_ratio`, XLA's default.
MAX_COPIES = 10.0


class OnChip:
    """The on-chip memory while a scope runs.

    Args:
      seconds: of each operation in order of execution, of all trips of a loop.
      inside: bytes that each operation's inner loops use.
      loops: whether it is a loop.
    """

    def __init__(
        self, chip: Chip, seconds: Sequence[float], inside: Sequence[int], loops: Sequence[bool]
    ) -> None:
        self.chip, self.loops = chip, (*loops, False)
        self.room = np.full(len(self.loops), chip.on_chip, dtype=np.int64)
        self.room[:-1] -= np.array(inside, dtype=np.int64)
        self.clock = np.cumsum((0.0, *seconds, 0.0))

    @property
    def used(self) -> int:
        """The most bytes that are in use at a time."""
        return int(self.chip.on_chip - self.room.min())

    def place(
        self, first: int, last: int, uses: Iterable[int], size: int
    ) -> tuple[int, int] | None:
        """Place an array; returns its first and last position in device memory, None: in none."""
        longest = MAX_COPIES * size / self.chip.bandwidth
        points = sorted({first, last, *(i for i in uses if first < i < last)})
        away, there = [], -1
        for start, end in zip(points, points[1:] or points, strict=False):
            since, until = start + (not self.loops[start]), end + self.loops[end]
            short = self.clock[until] - self.clock[since] <= longest
            room = self.room[start + (there == start) : end + 1]
            if short and size <= room.min():
                room -= size
                there = end
            else:
                away.append((start, end))
        return (away[0][0], away[-1][1]) if away else None
