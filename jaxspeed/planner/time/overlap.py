"""Schedule of a scope's operations and collectives: which communication overlaps with compute.

The schedule is one that a compiler's scheduler may choose: an operation starts once its operands
are available, and a collective overlaps with operations that do not depend on it. Operations are
issued in program order, and ready ones overtake those that wait. Trips of a loop do not overlap,
but for transfers that the compiler starts a trip ahead.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from jaxspeed.planner.trace.trace_ir import Scope, Value

UNITS = "units"


@dataclass
class TimedTask:
    """An occupation of `UNITS` (compute) or of a link."""

    on: str
    seconds: float


@dataclass
class ScopeTiming:
    """Timing of a scope.

    Attributes:
      seconds: from start to end.
      waited: {index of an operation: seconds that the units were idle for its communication}.
    """

    seconds: float = 0.0
    waited: dict[int, float] = field(default_factory=dict)


def schedule_scope(
    scope: Scope,
    tasks: Sequence[Sequence[TimedTask]],
    ahead: Mapping[int, Sequence[TimedTask]] = MappingProxyType({}),
) -> ScopeTiming:
    """Schedule a scope.

    Args:
      tasks: the consecutive tasks of each operation.
      ahead: {index of an operation: its tasks for the next trip}, which have no operands here.
    """
    owners = [*range(len(scope.ops)), *ahead]
    tasks = [*tasks, *ahead.values()]
    readers: dict[Value, list[int]] = defaultdict(list)
    for i, op in enumerate(scope.ops):
        for v in set(op.values):
            readers[v].append(i)
    outputs = {v for op in scope.ops for v in op.outs}
    missing = [len({v for v in op.values if v in outputs}) for op in scope.ops] + [0] * len(ahead)
    queues: dict[str, list[int]] = defaultdict(list)
    stage = [0] * len(tasks)  # which of its tasks is next
    running: list[tuple[float, int, str]] = []  # (end, operation, on)
    busy: set[str] = set()
    spans: list[tuple[float, float, int, bool]] = []  # of communications; whether one is awaited
    awaited = [any(readers.get(out) for out in op.outs) for op in scope.ops] + [False] * len(ahead)
    idle: list[tuple[float, float]] = []
    now = units_free = 0.0

    def ready(i: int) -> None:
        done: list[int] = [i]
        while done:
            j = done.pop()
            if stage[j] < len(tasks[j]):
                heapq.heappush(queues[tasks[j][stage[j]].on], j)
                continue
            for out in scope.ops[j].outs if j < len(scope.ops) else ():
                for reader in readers.get(out, ()):
                    missing[reader] -= 1
                    if missing[reader] == 0:
                        done.append(reader)

    for i, count in enumerate(missing):
        if count == 0:
            ready(i)
    while True:
        for on, queue in queues.items():
            if queue and on not in busy:
                i = heapq.heappop(queue)
                seconds = tasks[i][stage[i]].seconds
                if on == UNITS:
                    if now > units_free:
                        idle.append((units_free, now))
                    units_free = now + seconds
                else:
                    spans.append((now, now + seconds, owners[i], awaited[i]))
                busy.add(on)
                heapq.heappush(running, (now + seconds, i, on))
        if not running:
            break
        now, i, on = heapq.heappop(running)
        busy.discard(on)
        stage[i] += 1
        ready(i)
    if now > units_free:
        idle.append((units_free, now))
    return ScopeTiming(now, _waited(idle, spans))


def _waited(
    idle: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float, int, bool]]
) -> dict[int, float]:
    """Divide each idle interval among the communications that run in it, awaited ones first."""
    waited: dict[int, float] = defaultdict(float)
    for start, end in idle:
        over = [
            (max(a, start), min(b, end), i, awaited)
            for a, b, i, awaited in spans
            if a < end and b > start
        ]
        times = sorted({t for a, b, *_ in over for t in (a, b)})
        for left, right in itertools.pairwise(times):
            running = [(i, awaited) for a, b, i, awaited in over if a <= left and b >= right]
            at = [i for i, awaited in running if awaited] or [i for i, _ in running]
            for i in at:
                waited[i] += (right - left) / len(at)
    return dict(waited)
