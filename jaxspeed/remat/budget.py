"""Memory budget: which named activations to save, offload or rematerialize.

The cost of a choice is what the backward pass does because of it: the operations that make again
what the derivative reads, and for what waits in host memory the operations that could be done
while it travels. With few names every choice is looked at; with many, the best of many starts is
improved name by name.
"""

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.jaxpr.evaluate import as_function, evaluate
from jaxspeed.jaxpr.flops import equation_flops, nbytes, of_all
from jaxspeed.jaxpr.traverse import is_var
from jaxspeed.remat.unit_jaxprs import Member

EXHAUSTIVE = 12  # names: the 2^12 sets of them take a second
STARTS = 60
Choice = tuple[frozenset[str], frozenset[str]]  # saved, moved


@dataclass(frozen=True)
class Unit:
    """One unit's forward pass, with all that its derivative could keep."""

    jaxpr: Any
    residuals: frozenset[Any]  # what the backward pass reads
    inputs: frozenset[Any]
    times: int
    input_bytes: int  # of the activations that it is handed

    @classmethod
    def of(cls, member: Member) -> "Unit":
        fn = as_function(member.program)
        args = [_shape(v.aval) for v in member.program.invars]
        active = [
            i
            for i, (x, on) in enumerate(zip(args, member.active, strict=True))
            if on and jnp.issubdtype(x.dtype, jnp.inexact)
        ]

        def forward(*args: Any) -> Any:
            def of_active(*moving: Any) -> Any:
                full = list(args)
                for i, x in zip(active, moving, strict=True):
                    full[i] = x
                outs = fn(*full)
                real = [o for o in outs if jnp.issubdtype(o.dtype, jnp.inexact)]
                return real, [o for o in outs if not jnp.issubdtype(o.dtype, jnp.inexact)]

            outs, pullback, rest = jax.vjp(of_active, *(args[i] for i in active), has_aux=True)
            return (outs, rest), jax.tree.leaves(pullback)

        closed, shape = jax.make_jaxpr(forward, return_shape=True)(*args)
        flat = jax.make_jaxpr(lambda *a: evaluate(closed.jaxpr, closed.consts, a))(*args).jaxpr
        kept = flat.outvars[len(jax.tree.leaves(shape[0])) :]
        handed = zip(member.program.invars, member.own, strict=True)
        size = sum(nbytes(v.aval) for v, own in handed if own and len(v.aval.shape) > 1)
        known = frozenset([*flat.invars, *flat.constvars])
        residuals = frozenset(v for v in kept if is_var(v))
        return cls(flat, residuals, known, member.times, size)

    @cached_property
    def named(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name == "name":
                found.setdefault(eqn.params["name"], []).append(eqn.outvars[0])
        return found

    @cached_property
    def _maker(self) -> dict[Any, int]:
        return {v: i for i, eqn in enumerate(self.jaxpr.eqns) for v in eqn.outvars}

    @cached_property
    def _flops(self) -> list[int]:
        return [equation_flops(eqn, of_all) for eqn in self.jaxpr.eqns]

    def made_again(self, kept: Iterable[str]) -> int:
        """Flops of the operations that the backward pass repeats if only these are kept."""
        known = set(self.inputs) | {v for name in kept for v in self.named.get(name, ())}
        waiting, again = [v for v in self.residuals if v not in known], set()
        while waiting:
            number = self._maker[waiting.pop()]
            if number not in again:
                again.add(number)
                eqn = self.jaxpr.eqns[number]
                waiting += [v for v in eqn.invars if is_var(v) and v not in known]
        return self.times * sum(self._flops[number] for number in again)


@dataclass(frozen=True)
class Costs:
    """What choices cost over all units, a device.

    Attributes:
      ways: into how many parts devices share an activation.
      flops_per_byte: what a device computes while one byte travels to its host or back.
    """

    units: tuple[Unit, ...]
    ways: int = 1
    flops_per_byte: float = 0.0

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for unit in self.units for name in unit.named))

    @cached_property
    def bytes(self) -> Mapping[str, int]:
        """Of each name."""
        found = dict.fromkeys(self.names, 0)
        for unit in self.units:
            for name, variables in unit.named.items():
                found[name] += unit.times * sum(nbytes(v.aval) for v in variables) // self.ways
        return found

    @cached_property
    def input_bytes(self) -> int:
        """Of what units are handed, which is kept in any case."""
        return sum(unit.times * unit.input_bytes for unit in self.units) // self.ways

    @cached_property
    def _again(self) -> dict[frozenset[str], int]:
        return {}

    def again(self, kept: frozenset[str]) -> int:
        """What the backward pass does a second time if only these names are kept, a device."""
        if kept not in self._again:
            self._again[kept] = sum(unit.made_again(kept) for unit in self.units) // self.ways
        return self._again[kept]

    def flops(self, choice: Choice) -> float:
        """What the backward pass does because of a choice, a device."""
        moved = sum(self.bytes[name] for name in choice[1])
        return self.again(choice[0] | choice[1]) + self.flops_to_move(moved)

    def flops_to_move(self, size: int) -> float:
        """What a device computes while so many bytes travel to its host and back."""
        return 2 * size * self.flops_per_byte

    def held(self, choice: Choice) -> int:
        """Bytes that a choice keeps on the device, beside what units are handed."""
        return sum(self.bytes[name] for name in choice[0])


def choose(costs: Costs, room: int, seed: int = 0) -> Choice:
    """The cheapest choice that keeps at most `room` bytes on the device."""
    if len(costs.names) <= EXHAUSTIVE:
        return _best_of_all(costs, room)
    generator = random.Random(seed)
    starts = [(frozenset[str](), frozenset[str]()), *_greedy(costs, room)]
    starts += [random_choice(costs, room, generator) for _ in range(STARTS)]
    return min((_improved(costs, room, c) for c in starts), key=lambda c: _order(costs, c))


def random_choice(costs: Costs, room: int, generator: random.Random) -> Choice:
    """One that fits: in a random order, each name that still has room is kept, by chance."""
    saved: set[str] = set()
    for name in generator.sample(costs.names, len(costs.names)):
        wanted = frozenset(saved | {name}), frozenset[str]()
        if generator.random() < 0.7 and costs.held(wanted) <= room:
            saved.add(name)
    return frozenset(saved), frozenset()


def _order(costs: Costs, choice: Choice) -> tuple[float, int, list[str]]:
    return costs.flops(choice), costs.held(choice), sorted(choice[0])


def _best_of_all(costs: Costs, room: int) -> Choice:
    """Of every set that could be kept, with as little of it moved as fits."""
    best: Choice = frozenset(), frozenset()
    for size in range(len(costs.names) + 1):
        for kept in map(frozenset, itertools.combinations(costs.names, size)):
            whole: Choice = kept, frozenset()
            excess = max(0, costs.held(whole) - room)
            if costs.flops(whole) + costs.flops_to_move(excess) > costs.flops(best):
                continue  # even if no more had to move than what is too much
            halves = _halves(kept) if excess else [whole]
            fitting = _fitting(costs, room, [*halves, best])
            best = min(fitting, key=lambda c: _order(costs, c))
    return best


def _halves(kept: frozenset[str]) -> Iterable[Choice]:
    for size in range(len(kept) + 1):
        for moved in map(frozenset, itertools.combinations(kept, size)):
            yield kept - moved, moved


def _fitting(costs: Costs, room: int, choices: Iterable[Choice]) -> Iterable[Choice]:
    return (choice for choice in choices if costs.held(choice) <= room)


def _greedy(costs: Costs, room: int) -> list[Choice]:
    """Name by name, whatever saves most for its bytes."""
    saved: frozenset[str] = frozenset()
    steps = [(saved, frozenset[str]())]
    while True:
        base = costs.flops((saved, frozenset()))

        def worth(name: str, saved: frozenset[str] = saved, base: float = base) -> float:
            gain = base - costs.flops((saved | {name}, frozenset()))
            return gain / max(costs.bytes[name], 1)

        left = [
            name
            for name in costs.names
            if name not in saved and costs.held((saved | {name}, frozenset())) <= room
        ]
        if not left:
            return steps
        saved = saved | {max(left, key=worth)}
        steps.append((saved, frozenset()))


def _improved(costs: Costs, room: int, choice: Choice) -> Choice:
    """No other place of one name, and no exchange of two, is cheaper."""
    while True:
        near = _fitting(costs, room, _neighbours(costs.names, choice))
        best = min(near, key=lambda c: _order(costs, c), default=choice)
        if _order(costs, best) >= _order(costs, choice):
            return choice
        choice = best


def _neighbours(names: Sequence[str], choice: Choice) -> Iterable[Choice]:
    def placed(changes: Mapping[str, int]) -> Choice:
        def at(where: int) -> frozenset[str]:
            rest = (name for name in choice[where - 1] if name not in changes)
            return frozenset([*rest, *(n for n, place in changes.items() if place == where)])

        return at(1), at(2)

    for name in names:
        yield from (placed({name: place}) for place in (0, 1, 2))
    for out in choice[0]:
        yield from (placed({out: 0, name: 1}) for name in names if name not in choice[0])


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
