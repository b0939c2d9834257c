"""Peak memory from buffer lifetimes, loop by loop, as a compiler's buffer assignment.

Loop carries and donated arguments are updated in place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxspeed.jaxpr.primitives import LOOPS, SCATTERS
from jaxspeed.jaxpr.traverse import consts_and_carry
from jaxspeed.planner.memory.materialization import MATERIALIZED, MOVES, OUT
from jaxspeed.planner.memory.op_order import OrderedScope
from jaxspeed.planner.memory.tiles import Sizes
from jaxspeed.planner.memory.trace_ir import Op, Scope, Value

# XLA:TPU unrolls loops of at most so many trips that stream slices from host memory, to prefetch
# them, and the largest buffers of the trips are alive at once (libtpu 0.0.52; with six trips they
# are not).
UNROLLED_TRIPS = 3


@dataclass(frozen=True)
class LiveArray:
    """One array alive at a peak."""

    value: Value
    bytes: int
    op: Op | None  # its producer
    depth: int  # number of enclosing loops
    saved: bool  # computed in a forward pass and read in a backward pass


@dataclass(frozen=True)
class Peak:
    """Peak of one memory: its bytes and the arrays alive."""

    bytes: int = 0
    arrays: tuple[LiveArray, ...] = ()


def peaks(
    scope: Scope,
    sizes: Sizes,
    donated: Sequence[Value | None] = (),
    depth: int = 0,
    origins: dict[Value, int] | None = None,
) -> tuple[Peak, Peak]:
    """The peaks of (device memory, host memory) while a scope runs, without its inputs.

    `donated[i]` is the input into whose buffer output i is written; `origins` are of outer loops.
    """
    return _Liveness(scope, sizes, donated, depth, {} if origins is None else origins).peaks()


class _Liveness(OrderedScope):
    """A scope with the lifetime of each of its buffers."""

    def peaks(self) -> tuple[Peak, Peak]:
        self.analyze()
        return self._device_and_host()

    def _device_and_host(self) -> tuple[Peak, Peak]:
        ops, end = self.scope.ops, len(self.scope.ops)
        free, stacked = self._written_in_place()
        times = self.times(free)
        copies = self._copies()
        lifetimes: list[tuple[int, int, Value, int]] = []
        for value in self.materialized:
            if value in free:
                continue
            by = self.readers[value]
            is_output = OUT in by and value not in stacked
            last = end if is_output else max(times[i] for i in by - {OUT})
            first = 0 if self._is_fetched_early(value) else times[self.producers[value]]
            lifetimes.append((first, last, value, self.sizes.of(value)))
        lifetimes += [(0, times[i], value, self.sizes.of(value)) for value, i in copies.items()]
        lifetimes += self._zeros(times)
        starts: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for n, (first, last, _, _) in enumerate(lifetimes):
            starts.setdefault(first, []).append(n)
            ends.setdefault(last, []).append(n)
        last_of = {value: last for _, last, value, _ in lifetimes}
        best = [0, 0]
        found: list[tuple[list[LiveArray], Peak, set[Value]]] = [([], Peak(), set())] * 2
        alive: set[int] = set()
        now = [0, 0]
        order = sorted(range(end), key=times.__getitem__)
        for i in range(end + 1):
            for n in starts.get(i, ()):
                alive.add(n)
                now[lifetimes[n][2].host] += lifetimes[n][3]
            op = ops[order[i]] if i < end else None
            inner = self._inside(op) if op else (Peak(), Peak())
            reused = self._reused(op, i, last_of) if op else set()
            for host in (0, 1):
                credit = sum(self.sizes.of(v) for v in reused if v.host == host)
                total = now[host] + inner[host].bytes - credit
                if total > best[host]:
                    best[host] = total
                    here = (lifetimes[n] for n in alive if lifetimes[n][2].host == host)
                    held = [self._live_array(*lifetime) for lifetime in here]
                    found[host] = (held, inner[host], reused)
            for n in ends.get(i, ()):
                alive.discard(n)
                now[lifetimes[n][2].host] -= lifetimes[n][3]
        made = []
        for host in (0, 1):
            held, within, reused = found[host]
            mine = tuple(h for h in held if h.value not in reused)
            made.append(Peak(best[host], mine + within.arrays))
        return made[0], made[1]

    def _is_fetched_early(self, value: Value) -> bool:
        """Whether XLA:TPU fetches it from host memory when the step begins.

        So it does with arguments that no loop slices: nothing delays their copies (seen in buffer
        assignments of libtpu 0.0.52).
        """
        op = self.scope.ops[self.producers[value]]
        if self.depth or self.sizes.library or op.name != "device_put" or value.host:
            return False
        source = op.ins[op.outs.index(value)]
        return source is not None and source.host and self.root(source) not in self.producers

    def _live_array(self, first: int, last: int, value: Value, size: int) -> LiveArray:
        if value not in self.producers:
            return LiveArray(value, size, None, self.depth, saved=False)
        producer = self.scope.ops[self.producers[value]]
        readers = [self.scope.ops[i] for i in self.readers[value] if i != OUT]
        saved = not producer.backward and any(op.backward for op in readers)
        return LiveArray(value, size, producer, self.depth, saved)

    def _inside(self, op: Op) -> tuple[Peak, Peak]:
        found = [Peak(), Peak()]
        for body in op.bodies:
            places: list[Value | None] = []
            times = 1
            if op.name in LOOPS:
                consts, carry = consts_and_carry(op)
                places = [*body.ins[consts : consts + carry]]
            if op.name == "scan":
                self.pass_origins(op.ins[:consts], body.ins)
                parts = op.ins[consts + carry :]
                streams = self.sizes.tiled and any(v is not None and v.host for v in parts)
                times = op.trips if streams and op.trips <= UNROLLED_TRIPS else 1
            inner = peaks(body, self.sizes, places, self.depth + 1, self.origins)
            for host, peak in enumerate(inner):
                largest = sorted(peak.arrays, key=lambda array: array.bytes)[-1:] * (times - 1)
                size = peak.bytes + sum(array.bytes for array in largest)
                if size > found[host].bytes:
                    found[host] = Peak(size, (*peak.arrays, *largest))
        return found[0], found[1]

    def _zeros(self, times: Sequence[int]) -> Iterator[tuple[int, int, Value, int]]:
        """Zero-initialized buffers of loops of one trip (a pipeline's last), until the loop runs.

        XLA:GPU unrolls such a loop, and initializes all buffers that are written slice by slice
        when the program begins.
        """
        for i, op in enumerate(self.scope.ops):
            if self.sizes.library and op.name == "scan" and op.trips == 1 and times[i]:
                for held in self._inside(op)[0].arrays:
                    if held.op and held.op.bodies and held.value.shape:
                        yield 0, times[i] - 1, held.value, held.bytes

    def _copies(self) -> dict[Value, int]:
        """Arguments that XLA:TPU copies when the step begins, with their last reader.

        It copies an argument whose buffer receives a gathered value, or is written slice by slice
        by a loop after others read it (seen in buffer assignments of libtpu 0.0.52).
        """
        found: dict[Value, int] = {}

        def add(place: Value | None, writer: int) -> None:
            if place is None or place in self.producers or place.host:
                return
            by = self.readers.get(place, set()) - {OUT, writer}
            if by and (writer == OUT or any(self.scope.ops[j].bodies for j in by)):
                found[place] = max(by)

        if self.depth or self.sizes.library:
            return found
        for i, op in enumerate(self.scope.ops):
            if op.name == "scan":
                consts, carry = consts_and_carry(op)
                for v, result in zip(op.ins[consts : consts + carry], op.outs, strict=False):
                    # A loop that carries a shard of an argument has a buffer of its own.
                    if v is not None and self.sizes.of(result) == self.sizes.of(self.root(v)):
                        add(self.root(v), i)
        for out, place in zip(self.scope.outs, self.donated, strict=False):
            if out is not None and place is not None and self.sizes.of(out) < self.sizes.of(place):
                add(place, OUT)
        return found

    def _written_in_place(self) -> tuple[set[Value], set[Value]]:
        """Outputs written directly into their final buffer, and other outputs that a loop stacks.

        The latter are copied into their final buffer.
        """
        free: set[Value] = set()
        stacked: set[Value] = set()
        if not (self.donated or self.depth):
            return free, stacked
        for i, out in enumerate(self.scope.outs):
            if out is None:
                continue
            r = self.root(out)
            if r not in self.materialized:
                continue
            place = self.donated[i] if i < len(self.donated) else None
            if place is None:  # a slice of a loop's stacked output
                if self.depth:
                    (free if self.readers[r] == {OUT} else stacked).add(r)
                continue
            read_last = max(self.readers.get(place, {0}) - {OUT}, default=0)
            if read_last <= self.producers[r]:
                free.add(r)
        carried = {self.root(v) for v, at in zip(self.scope.outs, self.donated) if v and at}
        return free, stacked - carried

    def _reused(self, op: Op, i: int, last_of: Mapping[Value, int]) -> set[Value]:
        """Operands whose last use this is, and whose buffer a result reuses."""
        found: set[Value] = set()
        if op.name == "scan":
            consts, carry = consts_and_carry(op)
            pairs = list(zip(op.ins[consts : consts + carry], op.outs, strict=False))
        elif op.name in ("while", "dynamic_update_slice", *SCATTERS):
            pairs = list(zip(op.ins[-len(op.outs) :] if op.name == "while" else op.ins, op.outs))
        elif op.name in MATERIALIZED or op.name in MOVES:
            return found
        else:
            pairs = [(v, out) for out in op.outs for v in self.sources.get(out, ())]
        for v, out in pairs:
            if v is None or out not in self.materialized or out not in last_of:
                continue
            r = self.root(v)
            ends_here = r not in found and last_of.get(r) == i
            if ends_here and r.host == out.host and self.sizes.of(r) == self.sizes.of(out):
                found.add(r)
                if not op.bodies:
                    break
        return found
