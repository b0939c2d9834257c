"""Peak memory from buffer lifetimes, loop by loop, as a compiler's buffer assignment.

Loop carries and donated arguments are updated in place.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import jax
import jax.numpy as jnp

from jaxspeed.jaxpr.primitives import LOOPS, PRODUCTS, SCATTERS
from jaxspeed.jaxpr.traverse import consts_and_carry
from jaxspeed.planner.memory.donation import DonatedScope
from jaxspeed.planner.memory.heap import Interval, heap_bytes
from jaxspeed.planner.memory.on_chip import NO_USE, ChipUse, joint, place_on_chip
from jaxspeed.planner.memory.op_order import Lifetime
from jaxspeed.planner.trace.materialization import MATERIALIZED, MOVES, OUT, scattered
from jaxspeed.planner.trace.tiles import Sizes
from jaxspeed.planner.trace.trace_ir import Op, Scope, Value

# Of cuBLAS, as XLA:GPU allocates it: from Hopper on, and before.
WORKSPACE, SMALL_WORKSPACE = 32 << 20, 4 << 20


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
    """Peak of one memory.

    Attributes:
      arrays: those alive.
      chip: use of on-chip memory, beside these.
      buffers: all of the scope and of its loops, by position of `length`, of device memory.
    """

    bytes: int = 0
    arrays: tuple[LiveArray, ...] = ()
    chip: ChipUse = NO_USE
    buffers: tuple[Interval, ...] = ()
    length: int = 0


NOTHING = Peak()


def peaks(scope: Scope, sizes: Sizes, donated: Sequence[Value | None] = ()) -> tuple[Peak, Peak]:
    """The peaks of (device memory, host memory) while a program runs, without its inputs.

    `donated[i]` is the input into whose buffer output i is written.
    """
    device, host = _Liveness(scope, sizes, donated, 0, {}).peaks(0)
    for size in (heap_bytes(device.buffers) - device.bytes, device.chip.tables):
        if size > 0:
            arrays = (*device.arrays, _unknown(size))
            device = replace(device, bytes=device.bytes + size, arrays=arrays)
    return device, host


def _unknown(size: int) -> LiveArray:
    """Bytes of the heap that are no operation's result."""
    return LiveArray(Value(jax.ShapeDtypeStruct((size,), jnp.uint8)), size, None, 0, saved=False)


class _Liveness(DonatedScope):
    """A scope with the lifetime of each of its buffers."""

    def peaks(self, chip_held: int) -> tuple[Peak, Peak]:
        """The peaks of (device memory, host memory).

        Args:
          chip_held: bytes of on-chip memory that the arrays of outer loops take.
        """
        self.analyze()
        ops, end = self.scope.ops, len(self.scope.ops)
        in_place, stacked = self.written_in_place()
        late = self.written_last()
        free = in_place - late.keys()
        times = self.times(free)
        lifetimes = self._lifetimes(times, free, stacked, late)
        lifetimes = self.not_in_idle_arguments(lifetimes, times, late)
        order = sorted(range(end), key=times.__getitem__)
        insides = [self._inside(ops[i]) for i in order]
        uses = [device.chip for device, _ in insides]
        chip, rest, less = place_on_chip(self, times, uses, lifetimes, chip_held)
        if any(less):
            insides = [
                self._inside(ops[i], held_inside) if held_inside else inside
                for i, held_inside, inside in zip(order, less, insides, strict=True)
            ]
            uses = [device.chip for device, _ in insides]
            chip, rest, _ = place_on_chip(self, times, uses, lifetimes, chip_held)
        lifetimes = rest
        lifetimes += self._partial_sums(times)
        starts: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for n, lifetime in enumerate(lifetimes):
            starts.setdefault(lifetime.first, []).append(n)
            ends.setdefault(lifetime.last, []).append(n)
        last_of = {lifetime.value: lifetime.last for lifetime in lifetimes}
        best = [0, 0]
        at_peak: list[tuple[list[LiveArray], Peak, set[Value]]] = [([], NOTHING, set())] * 2
        alive: set[int] = set()
        now = [0, 0]
        taken: set[Lifetime] = set()  # whose buffer a result takes
        for i in range(end + len(late) + 1):
            for n in starts.get(i, ()):
                alive.add(n)
                now[lifetimes[n].value.host] += lifetimes[n].bytes
            op = ops[order[i]] if i < end else None
            inner = insides[i] if op else (NOTHING, NOTHING)
            reused = self._reused(op, i, last_of) if op else set()
            taken.update(lifetimes[n] for n in ends.get(i, ()) if lifetimes[n].value in reused)
            for host in (0, 1):
                credit = sum(self.sizes.of(v) for v in reused if v.host == host)
                total = now[host] + inner[host].bytes - credit
                if total > best[host]:
                    best[host] = total
                    here = (lifetimes[n] for n in alive if lifetimes[n].value.host == host)
                    held = [self._live_array(lifetime) for lifetime in here]
                    at_peak[host] = (held, inner[host], reused)
            for n in ends.get(i, ()):
                alive.discard(n)
                now[lifetimes[n].value.host] -= lifetimes[n].bytes
        device_and_host = []
        for host in (0, 1):
            held, within, reused = at_peak[host]
            mine = tuple(h for h in held if h.value not in reused)
            device_and_host.append(Peak(best[host], mine + within.arrays))
        buffers, length = self._buffers([device for device, _ in insides], lifetimes, taken)
        on_device, on_host = device_and_host
        return replace(on_device, chip=chip, buffers=buffers, length=length), on_host

    def _lifetimes(
        self,
        times: Sequence[int],
        free: Collection[Value],
        stacked: Collection[Value],
        late: Mapping[Value, int],
    ) -> list[Lifetime]:
        """The buffers of the scope's own operations, and those of copies."""
        end = len(self.scope.ops)
        lifetimes: list[Lifetime] = []
        # In the order of the program: buffers of one size are placed in the order of this list.
        for value in [v for v in self.producers if v in self.materialized and v not in free]:
            by = self.readers[value]
            is_output = OUT in by and value not in stacked
            last = end if is_output else max(times[i] for i in by - {OUT})
            first = 0 if self._is_fetched_early(value) else times[self.producers[value]]
            last = max(last + late.get(value, 0), self._sent_by(value, times))
            lifetimes.append(Lifetime(first, last, value, self.sizes.of(value)))
        lifetimes += self._zeros(times)
        lifetimes += self.rounded(times)
        lifetimes += self.transposed(times)
        lifetimes += self._workspaces(times)
        gathered = (v for v in self.scope.ins if v in late)
        lifetimes += [Lifetime(end, end + late[v], v, self.sizes.of(v)) for v in gathered]
        return lifetimes

    def _buffers(
        self, insides: Sequence[Peak], lifetimes: Iterable[Lifetime], taken: Collection[Lifetime]
    ) -> tuple[tuple[Interval, ...], int]:
        """All buffers in device memory, those of loops at the positions of one trip."""
        arrays = [lifetime for lifetime in lifetimes if not lifetime.value.host]
        end = max([len(insides), *(lifetime.last + 1 for lifetime in arrays)])
        lengths = [max(inside.length, 1) for inside in insides] + [1] * (end - len(insides))
        starts = [0, *accumulate(lengths)]
        buffers = [
            (
                starts[lifetime.first],
                starts[lifetime.last + 1 - (lifetime in taken)] - 1,
                lifetime.bytes,
            )
            for lifetime in arrays
        ]
        for start, inside in zip(starts, insides, strict=False):
            buffers += [(start + first, start + last, size) for first, last, size in inside.buffers]
        return tuple(buffers), starts[-1]

    def _partial_sums(self, times: Sequence[int]) -> Iterator[Lifetime]:
        """A device's product before it is summed with others', of which it retains a shard."""
        for i, op in enumerate(self.scope.ops):
            if op.outs and op.outs[0] in self.materialized and (axes := scattered(op)):
                partial = op.outs[0].of_shape(op.outs[0].shape)
                partial.spec = [
                    tuple(axis for axis in dim if axis not in axes) for dim in op.outs[0].spec
                ]
                yield Lifetime(times[i], times[i], partial, self.sizes.of(partial))

    def _workspaces(self, times: Sequence[int]) -> Iterator[Lifetime]:
        """XLA:GPU's workspace of a matmul while it runs."""
        if not self.sizes.library:
            return
        chip = self.sizes.chip
        capability = chip.capability if chip else None
        size = WORKSPACE if capability is None or capability >= (9, 0) else SMALL_WORKSPACE
        workspace = Value(jax.ShapeDtypeStruct((size,), jnp.uint8))
        for i, op in enumerate(self.scope.ops):
            if op.name in PRODUCTS and op.outs[0] in self.materialized:
                yield Lifetime(times[i], times[i], workspace, size)

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

    def _sent_by(self, value: Value, times: Sequence[int]) -> int:
        """The time when XLA:TPU has sent an array to host memory.

        At the latest time: before something is fetched that the host computed of it. So it waits
        as long as there is memory; with less (`xla_tpu_max_hbm_size_mib`) it is sent earlier.
        """
        if not self.sizes.tiled or value.host:
            return 0
        sent = [0]
        for op in (self.scope.ops[i] for i in self.readers[value] if i != OUT):
            for v, out in zip(op.ins, op.outs) if op.name == "device_put" else ():
                if v is not None and self.root(v) is value and out.host:
                    sent.append(self._fetched_at(out, times))
        return max(sent)

    def _fetched_at(self, value: Value, times: Sequence[int]) -> int:
        """Time of the first fetch of a host-memory array, or of what the host computes of it."""
        positions = [len(times)]
        for i in self.readers.get(self.root(value), set()) - {OUT}:
            outs = self.scope.ops[i].outs
            on_host = outs and all(out.host for out in outs)
            positions += [self._fetched_at(out, times) for out in outs] if on_host else [times[i]]
        return min(positions)

    def _live_array(self, lifetime: Lifetime) -> LiveArray:
        value, size = lifetime.value, lifetime.bytes
        if value not in self.producers:
            return LiveArray(value, size, None, self.depth, saved=False)
        producer = self.scope.ops[self.producers[value]]
        readers = [self.scope.ops[i] for i in self.readers[value] if i != OUT]
        saved = not producer.backward and any(op.backward for op in readers)
        return LiveArray(value, size, producer, self.depth, saved)

    def _inside(self, op: Op, chip_held: int = 0) -> tuple[Peak, Peak]:
        if not op.bodies:
            return NOTHING, NOTHING
        largest = [NOTHING, NOTHING]
        uses: list[ChipUse] = []
        buffers: list[Interval] = []
        length = 0
        for body in op.bodies:
            places: list[Value | None] = []
            if op.name in LOOPS:
                consts, carry = consts_and_carry(op)
                places = [*body.ins[consts : consts + carry]]
            if op.name == "scan":
                self.pass_origins(op.ins[:consts], body.ins)
            scope = _Liveness(body, self.sizes, places, self.depth + 1, self.origins)
            device, host = scope.peaks(chip_held)
            uses.append(device.chip)
            buffers += [(first + length, last + length, n) for first, last, n in device.buffers]
            length += device.length
            pairs = zip(largest, (device, host), strict=True)
            largest = [max(pair, key=lambda peak: peak.bytes) for pair in pairs]
        device = replace(largest[0], chip=joint(uses), buffers=tuple(buffers), length=length)
        return device, largest[1]

    def _zeros(self, times: Sequence[int]) -> Iterator[Lifetime]:
        """What loops write slice by slice, before they run.

        Up to jax 0.11, XLA:GPU initializes all these buffers when the program begins.
        """
        if not self.sizes.library or self.depth or jax.__version_info__ >= (0, 12):
            return
        for i, op in enumerate(self.scope.ops):
            if op.name == "scan" and times[i]:
                _, carry = consts_and_carry(op)
                for out in op.outs[carry:]:
                    if out in self.materialized:
                        yield Lifetime(0, times[i] - 1, out, self.sizes.of(out))

    def _reused(self, op: Op, i: int, last_of: Mapping[Value, int]) -> set[Value]:
        """Operands whose last use this is, and whose buffer a result reuses."""
        reused: set[Value] = set()
        if op.name == "scan":
            consts, carry = consts_and_carry(op)
            pairs = list(zip(op.ins[consts : consts + carry], op.outs, strict=False))
        elif op.name in ("while", "dynamic_update_slice", *SCATTERS):
            pairs = list(zip(op.ins[-len(op.outs) :] if op.name == "while" else op.ins, op.outs))
        elif op.name in MATERIALIZED or op.name in MOVES:
            return reused
        else:
            pairs = [(v, out) for out in op.outs for v in self.sources.get(out, ())]
        for v, out in pairs:
            if v is None or out not in self.materialized or out not in last_of:
                continue
            r = self.root(v)
            ends_here = r not in reused and last_of.get(r) == i
            if ends_here and r.host == out.host and self.sizes.of(r) == self.sizes.of(out):
                reused.add(r)
                if not op.bodies:
                    break
        return reused
