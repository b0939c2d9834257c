"""What is alive at once: a walk over an opened program, loop by loop, as a compiler would place it.

Which values have memory of their own:

- What products, kernels, loops, exchanges and lookups give, and sums over dims.
- What loops keep for a later loop, stacked over their trips.
- Of element-wise results only those that several of these read, unless they are made of a single
  array: a compiler computes the others where they are read, and what products give where their
  result goes on.

A reshape, a transpose or a constraint that changes nothing is another view of its operand. What a
loop hands from trip to trip is updated where it lies, as is an argument that is given up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxspeed.plan.memory.cuts import CONSTRAINT
from jaxspeed.plan.memory.opened import ENTER, LEAVE, PLACED, Op, Scope, Value, consts_and_carry
from jaxspeed.plan.memory.tiles import Sizes

VIEWS = {
    "reshape", "squeeze", "expand_dims", "transpose", "name", "stop_gradient",
    "optimization_barrier", "bitcast_convert_type", "copy", ENTER, LEAVE,
}  # fmt: skip
MOVES = {CONSTRAINT, PLACED, "device_put"}  # views where nothing moves
SUMS = {
    "reduce", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
}  # fmt: skip
PRODUCTS = {"dot_general", "conv_general_dilated"}
WHOLE = {
    *PRODUCTS, *SUMS,
    "scan", "while", "cond", "pallas_call", "gather", "scatter", "scatter-add", "sort", "cumsum",
    "cumlogsumexp", "cummax", "cumprod", "argmax", "argmin", "top_k", "psum", "ppermute",
    "all_gather", "all_to_all", "reduce_scatter", "psum_scatter", "psum2", "psum_invariant",
    "dynamic_update_slice", "random_bits", "threefry2x32", "rng_bit_generator", "compute_on",
}  # fmt: skip
READS_ANYTHING = {*PRODUCTS, *SUMS, "dynamic_update_slice"}  # what they read may be computed there
# Whether a value has memory hangs on what it is made of (before it) and on who reads it (after it):
# found again from what was found, until all know of each other.
ROUNDS = 3
SMALL = 16  # times as large: what is read beside it does not count
OUT = -1  # the reader of what a scope gives


@dataclass(frozen=True)
class Held:
    """One array that is alive at a peak."""

    value: Value
    bytes: int
    op: Op | None  # that made it
    depth: int  # in how many loops
    kept: bool  # made by a forward pass, and read by a backward pass


@dataclass(frozen=True)
class Peak:
    """Of one memory: its bytes, and what they are."""

    bytes: int = 0
    held: tuple[Held, ...] = ()


def peaks(
    scope: Scope,
    sizes: Sizes,
    given_up: Sequence[Value | None] = (),
    depth: int = 0,
    origins: dict[Value, int] | None = None,
) -> tuple[Peak, Peak]:
    """The peaks of (device memory, host memory) while a scope runs, beside what it is given.

    `given_up[i]` is the input in whose place output i is written; `origins` are of outer loops.
    """
    return Walk(scope, sizes, given_up, depth, {} if origins is None else origins).peaks()


@dataclass
class Walk:
    """One scope: which of its values have memory (`settle`), and how much at once (`peaks`)."""

    scope: Scope
    sizes: Sizes
    given_up: Sequence[Value | None]
    depth: int
    origins: dict[Value, int]  # the size of the largest array that a value is made of
    roots: dict[Value, Value] = field(default_factory=dict)
    readers: dict[Value, set[int]] = field(default_factory=dict)  # by root: operations, or OUT
    makers: dict[Value, int] = field(default_factory=dict)
    forced: set[Value] = field(default_factory=set)
    real: set[Value] = field(default_factory=set)  # roots with memory of their own
    sources: dict[Value, set[Value]] = field(default_factory=dict)  # of element-wise results
    of_exp: set[Value] = field(default_factory=set)  # element-wise results made of an exponential

    def root(self, value: Value) -> Value:
        while value in self.roots:
            value = self.roots[value]
        return value

    def peaks(self) -> tuple[Peak, Peak]:
        self.settle()
        return self._device_and_host()

    def settle(self) -> None:
        """Finds which values have memory of their own, and who reads them."""
        ops = self.scope.ops
        for i, op in enumerate(ops):
            for k, out in enumerate(op.outs):
                source = op.ins[k] if k < len(op.ins) else None
                if source is not None and self._is_view(op, source, out):
                    self.roots[out] = source
                else:
                    self.makers[out] = i
        for _ in range(ROUNDS):
            self.sources = self._sources()
            self.readers, self.forced, self.real = {}, set(), set()
            self._sinks()

    def _is_view(self, op: Op, source: Value, out: Value) -> bool:
        if op.name in MOVES:
            same = self.sizes.cut(source) == self.sizes.cut(out) and source.host == out.host
            return same and source.shape == out.shape
        return op.name in VIEWS or (op.name == "convert_element_type" and source.dtype == out.dtype)

    def _is_whole(self, op: Op, out: Value) -> bool:
        """Whether its results have memory of their own, whoever reads them."""
        if op.name in MOVES:
            source = op.ins[op.outs.index(out)]
            finer = source is not None and self.sizes.of(out) < self.sizes.of(source)
            return not finer or (source is not None and source.host != out.host)
        if op.name.startswith("scatter") and op.ins[0] is not None and op.ins[2] is not None:
            # A few numbers among zeros: a comparison of indices, where the result is read.
            into, updates = self.root(op.ins[0]), op.ins[2]
            return not (self._is_spread(into) and SMALL * updates.size <= out.size)
        return op.name in WHOLE

    # -- what is computed where it is read -------------------------------------------------------

    def _sources(self) -> dict[Value, set[Value]]:
        """What an element-wise result is made of, beside what is small against it."""
        found: dict[Value, set[Value]] = {}
        for op in self.scope.ops:
            inside = [self.origins.get(self.root(v), v.size) for v in op.values]
            for out in op.outs:
                if out in self.roots or self._is_whole(op, out):
                    continue
                self.origins[out] = max(inside, default=0)
                of: set[Value] = set()
                for v in op.values:
                    r = self.root(v)
                    if not self._is_spread(r) and SMALL * v.size >= out.size:
                        of |= {r} if r in self.real else found.get(r, {r})
                found[out] = of
                of_same = {self.root(v) for v in op.values if v.size == out.size}
                if op.name == "exp" or of_same & self.of_exp:
                    self.of_exp.add(out)
        return found

    def _is_spread(self, value: Value) -> bool:
        """Made of arrays that are small against it, a mask of positions say, or of nothing.

        A compiler keeps those, and makes it where it is read, also inside of a loop.
        """
        return SMALL * self.origins.get(value, value.size) < value.size

    def _sinks(self) -> None:
        def read(value: Value | None, by: set[int], force: bool = False) -> None:
            if value is not None:
                r = self.root(value)
                self.readers.setdefault(r, set()).update(by)
                if force:
                    self.forced.add(r)

        for v in self.scope.outs:
            read(v, {OUT})
        for i in range(len(self.scope.ops) - 1, -1, -1):
            op = self.scope.ops[i]
            for k, out in enumerate(op.outs):
                if out in self.roots or not self.readers.get(out):
                    continue
                if self._is_whole(op, out):
                    if op.name in PRODUCTS and self._fused_into(out) is not None:
                        for v in op.ins:
                            read(v, self.readers[out])
                        continue
                    self.real.add(out)
                    inputs = [op.ins[k]] if op.name in MOVES else op.ins
                    for v in inputs:
                        made_there = op.bodies and v is not None and self._is_spread(self.root(v))
                        # A product reads its operands again for each block of its result: shares
                        # of a softmax are made once, before it.
                        shares = (
                            op.name in PRODUCTS and v is not None and self.root(v) in self.of_exp
                        )
                        force = shares or op.name not in READS_ANYTHING
                        read(v, set() if made_there else {i}, force)
                    continue
                by = self.readers[out]
                several = len(by) > 1 and len(self.sources[out]) > 1
                if out in self.forced or several or OUT in by:
                    self.real.add(out)
                    by = {i}
                for v in op.values:
                    read(v, by)

    def _fused_into(self, product: Value) -> Op | None:
        """The element-wise operation that a product's result goes into, and nowhere else."""
        by = self.readers[product]
        if len(by) != 1 or OUT in by or product in self.forced:
            return None
        op = self.scope.ops[next(iter(by))]
        return None if any(self._is_whole(op, out) for out in op.outs) else op

    # -- how long it lives -----------------------------------------------------------------------

    def _times(self, free: set[Value]) -> list[int]:
        """When operations run: in their order, but what frees more than it takes, at once.

        Compilers order operations so as to need little memory.
        """
        keys: list[tuple[int, ...]] = []
        ready: dict[Value, tuple[int, ...]] = {}
        for i, op in enumerate(self.scope.ops):
            key: tuple[int, ...] = (i,)
            after = max((ready.get(self.root(v), (-1,)) for v in op.values), default=(-1,))
            mine = [out for out in op.outs if out in self.real]
            if mine and not op.bodies:
                arrays = (out for out in mine if out.shape and out not in free)
                taken = sum(map(self.sizes.of, arrays))
                read = {r for v in op.values for r in self.read_by(v) if r in self.real}
                ending = (r for r in read if OUT not in self.readers[r])
                freed = sum(self.sizes.of(r) for r in ending if max(self.readers[r]) == i)
                if freed >= taken:
                    key = (*after, i)
            keys.append(key)
            for out in op.outs:
                if out not in self.roots:
                    ready[out] = key if mine else after
        times = [0] * len(keys)
        for time, i in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
            times[i] = time
        return times

    def read_by(self, value: Value) -> set[Value]:
        """What has memory behind a value that is computed where it is read."""
        r = self.root(value)
        if r in self.real or r not in self.makers:
            return {r}
        of: set[Value] = set()
        for v in self.scope.ops[self.makers[r]].values:
            of |= self.read_by(v)
        return of

    def _device_and_host(self) -> tuple[Peak, Peak]:
        ops, end = self.scope.ops, len(self.scope.ops)
        free, stacked = self._written_elsewhere()
        times = self._times(free)
        copies = self._copies()
        lives: list[tuple[int, int, Value, int]] = []
        for value in self.real:
            if value in free:
                continue
            by = self.readers[value]
            kept = OUT in by and value not in stacked
            last = end if kept else max(times[i] for i in by - {OUT})
            lives.append((times[self.makers[value]], last, value, self.sizes.of(value)))
        lives += [(0, times[i], value, self.sizes.of(value)) for value, i in copies.items()]
        starts: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for n, (first, last, _, _) in enumerate(lives):
            starts.setdefault(first, []).append(n)
            ends.setdefault(last, []).append(n)
        last_of = {value: last for _, last, value, _ in lives}
        best = [0, 0]
        found: list[tuple[list[Held], Peak, set[Value]]] = [([], Peak(), set())] * 2
        alive: set[int] = set()
        now = [0, 0]
        in_turn = sorted(range(end), key=times.__getitem__)
        for i in range(end + 1):
            for n in starts.get(i, ()):
                alive.add(n)
                now[lives[n][2].host] += lives[n][3]
            op = ops[in_turn[i]] if i < end else None
            inner = self._inside(op) if op else (Peak(), Peak())
            reused = self._reused(op, i, last_of) if op else set()
            for host in (0, 1):
                credit = sum(self.sizes.of(v) for v in reused if v.host == host)
                total = now[host] + inner[host].bytes - credit
                if total > best[host]:
                    best[host] = total
                    held = [self._held(*lives[n]) for n in alive if lives[n][2].host == host]
                    found[host] = (held, inner[host], reused)
            for n in ends.get(i, ()):
                alive.discard(n)
                now[lives[n][2].host] -= lives[n][3]
        made = []
        for host in (0, 1):
            held, within, reused = found[host]
            mine = tuple(h for h in held if h.value not in reused)
            made.append(Peak(best[host], mine + within.held))
        return made[0], made[1]

    def _held(self, first: int, last: int, value: Value, size: int) -> Held:
        if value not in self.makers:
            return Held(value, size, None, self.depth, kept=False)
        made_by = self.scope.ops[self.makers[value]]
        readers = [self.scope.ops[i] for i in self.readers[value] if i != OUT]
        kept = not made_by.backward and any(op.backward for op in readers)
        return Held(value, size, made_by, self.depth, kept)

    def _inside(self, op: Op) -> tuple[Peak, Peak]:
        found = [Peak(), Peak()]
        for body in op.bodies:
            places: list[Value | None] = []
            if op.name == "scan":
                consts, carry = consts_and_carry(op)
                places = [*body.ins[consts : consts + carry]]
                self.hand_origins(op.ins[:consts], body.ins)
            elif op.name == "while":
                places = list(body.ins[op.params["body_nconsts"] :])
            inner = peaks(body, self.sizes, places, self.depth + 1, self.origins)
            for host, peak in enumerate(inner):
                if peak.bytes > found[host].bytes:
                    found[host] = peak
        return found[0], found[1]

    def _copies(self) -> dict[Value, int]:
        """Arguments that are read, and whose next value is no element-wise result: by the last of
        those that read them. What is gathered into an argument's place, or written there piece by
        piece by a loop after others read it, has XLA:TPU copy it when the step begins (seen in
        buffer assignments of libtpu 0.0.52).
        """
        found: dict[Value, int] = {}

        def add(place: Value | None, writer: int) -> None:
            if place is None or place in self.makers or place.host:
                return
            by = self.readers.get(place, set()) - {OUT, writer}
            if by and (writer == OUT or any(self.scope.ops[j].bodies for j in by)):
                found[place] = max(by)

        if self.depth:
            return found
        for i, op in enumerate(self.scope.ops):
            if op.name == "scan":
                consts, carry = consts_and_carry(op)
                for v in op.ins[consts : consts + carry]:
                    add(v and self.root(v), i)
        for out, place in zip(self.scope.outs, self.given_up, strict=False):
            if out is not None and place is not None and self.sizes.of(out) < self.sizes.of(place):
                add(place, OUT)
        return found

    def hand_origins(self, given: Sequence[Value | None], parts: Sequence[Value]) -> None:
        for v, part in zip(given, parts, strict=False):
            if v is not None and self.root(v) in self.origins:
                self.origins[part] = self.origins[self.root(v)]

    def _written_elsewhere(self) -> tuple[set[Value], set[Value]]:
        """Outputs that are written to where they shall lie, and of the others those that a loop
        stacks: copied there once made."""
        free: set[Value] = set()
        stacked: set[Value] = set()
        if not (self.given_up or self.depth):
            return free, stacked
        for i, out in enumerate(self.scope.outs):
            if out is None:
                continue
            r = self.root(out)
            if r not in self.real:
                continue
            place = self.given_up[i] if i < len(self.given_up) else None
            if place is None:  # a part of what a loop stacks
                if self.depth:
                    (free if self.readers[r] == {OUT} else stacked).add(r)
                continue
            read_last = max(self.readers.get(place, {0}) - {OUT}, default=0)
            if read_last <= self.makers[r]:
                free.add(r)
        carried = {self.root(v) for v, at in zip(self.scope.outs, self.given_up) if v and at}
        return free, stacked - carried

    def _reused(self, op: Op, i: int, last_of: Mapping[Value, int]) -> set[Value]:
        """Operands that end here, and in whose place a result is written."""
        found: set[Value] = set()
        if op.name == "scan":
            consts, carry = consts_and_carry(op)
            pairs = list(zip(op.ins[consts : consts + carry], op.outs, strict=False))
        elif op.name in ("while", "dynamic_update_slice", "scatter", "scatter-add"):
            pairs = list(zip(op.ins[-len(op.outs) :] if op.name == "while" else op.ins, op.outs))
        elif op.name in WHOLE or op.name in MOVES:
            return found
        else:
            pairs = [(v, out) for out in op.outs for v in self.sources.get(out, ())]
        for v, out in pairs:
            if v is None or out not in self.real or out not in last_of:
                continue
            r = self.root(v)
            ends_here = r not in found and last_of.get(r) == i
            if ends_here and r.host == out.host and self.sizes.of(r) == self.sizes.of(out):
                found.add(r)
                break
        return found
