"""Memory budget: which named activations to save, offload or rematerialize.

The cost of a choice is the extra work of the backward pass: the FLOPs that it recomputes, and for
offloaded bytes the FLOPs that the device could do during their transfer. With few names every
choice is tried; with many, local search improves many starts name by name and the best result wins.
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
from jaxspeed.jaxpr.flops import count_all, equation_flops, nbytes
from jaxspeed.jaxpr.traverse import is_var
from jaxspeed.remat.unit_jaxprs import UnitJaxpr

EXHAUSTIVE = 12  # names: trying all 2^12 sets takes a second
STARTS = 60
Choice = tuple[frozenset[str], frozenset[str]]  # saved, offloaded


@dataclass(frozen=True)
class ActivationShards:
    """The number of shards of activations.

    Attributes:
      samples: over the axes that shard samples.
      positions: over those that shard sequences, of arrays with a dim of one of the `lengths`.
    """

    samples: int = 1
    positions: int = 1
    lengths: frozenset[int] = frozenset()

    def bytes_of(self, variables: Iterable[Any]) -> int:
        """Bytes per device."""
        return sum(nbytes(v.aval) // self._shards(v.aval.shape) for v in variables)

    def _shards(self, shape: Sequence[int]) -> int:
        is_sequence = not self.lengths.isdisjoint(shape[1:])
        return self.samples * (self.positions if is_sequence else 1)


@dataclass(frozen=True)
class UnitResiduals:
    """One unit's forward pass, with every residual that its derivative could save."""

    jaxpr: Any
    residuals: frozenset[Any]  # variables that the backward pass reads
    inputs: frozenset[Any]
    times: int
    activations: tuple[Any, ...]  # the unit's inputs that are saved

    @classmethod
    def of(cls, unit: UnitJaxpr) -> "UnitResiduals":
        fn = as_function(unit.jaxpr)
        args = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in unit.jaxpr.invars]
        active = [
            i
            for i, (x, on) in enumerate(zip(args, unit.active, strict=True))
            if on and jnp.issubdtype(x.dtype, jnp.inexact)
        ]

        def forward(*args: Any) -> Any:
            def of_active(*moving: Any) -> Any:
                full = list(args)
                for i, x in zip(active, moving, strict=True):
                    full[i] = x
                outs = fn(*full)
                real = [jnp.issubdtype(jnp.result_type(o), jnp.inexact) for o in outs]
                pairs = list(zip(outs, real, strict=True))
                return [o for o, d in pairs if d], [o for o, d in pairs if not d]

            outs, pullback, rest = jax.vjp(of_active, *(args[i] for i in active), has_aux=True)
            return (outs, rest), jax.tree.leaves(pullback)

        closed, shape = jax.make_jaxpr(forward, return_shape=True)(*args)
        flat = jax.make_jaxpr(lambda *a: evaluate(closed.jaxpr, closed.consts, a))(*args).jaxpr
        saved = flat.outvars[len(jax.tree.leaves(shape[0])) :]
        inputs = zip(unit.jaxpr.invars, unit.is_activation, strict=True)
        activations = tuple(v for v, on in inputs if on and len(v.aval.shape) > 1)
        known = frozenset([*flat.invars, *flat.constvars])
        residuals = frozenset(v for v in saved if is_var(v))
        return cls(flat, residuals, known, unit.times, activations)

    @cached_property
    def named(self) -> dict[str, list[Any]]:
        variables: dict[str, list[Any]] = {}
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name == "name":
                variables.setdefault(eqn.params["name"], []).append(eqn.outvars[0])
        return variables

    @cached_property
    def _producer(self) -> dict[Any, int]:
        return {v: i for i, eqn in enumerate(self.jaxpr.eqns) for v in eqn.outvars}

    @cached_property
    def _flops(self) -> list[int]:
        return [equation_flops(eqn, count_all) for eqn in self.jaxpr.eqns]

    def recomputed_flops(self, saved: Iterable[str]) -> int:
        """FLOPs that the backward pass recomputes if only these names are saved."""
        known = set(self.inputs) | {v for name in saved for v in self.named.get(name, ())}
        needed, recomputed = [v for v in self.residuals if v not in known], set()
        while needed:
            number = self._producer[needed.pop()]
            if number not in recomputed:
                recomputed.add(number)
                eqn = self.jaxpr.eqns[number]
                needed += [v for v in eqn.invars if is_var(v) and v not in known]
        return self.times * sum(self._flops[number] for number in recomputed)


@dataclass(frozen=True)
class RematCosts:
    """Bytes and FLOPs of choices, summed over all units, per device.

    Attributes:
      shards: of activations.
      flops_per_byte: FLOPs of a device during the transfer of one byte to its host or back.
    """

    units: tuple[UnitResiduals, ...]
    shards: ActivationShards = ActivationShards()
    flops_per_byte: float = 0.0

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for unit in self.units for name in unit.named))

    @cached_property
    def bytes(self) -> Mapping[str, int]:
        """Bytes of each name."""
        sizes = dict.fromkeys(self.names, 0)
        for unit in self.units:
            for name, variables in unit.named.items():
                sizes[name] += unit.times * self.shards.bytes_of(variables)
        return sizes

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of the units' inputs, which are always saved."""
        return sum(unit.times * self.shards.bytes_of(unit.activations) for unit in self.units)

    @cached_property
    def _recomputed(self) -> dict[frozenset[str], int]:
        return {}

    def recomputed_flops(self, saved: frozenset[str]) -> int:
        """FLOPs that the backward pass recomputes if only these names are saved."""
        if saved not in self._recomputed:
            total = sum(unit.recomputed_flops(saved) for unit in self.units)
            self._recomputed[saved] = total // (self.shards.samples * self.shards.positions)
        return self._recomputed[saved]

    def flops(self, choice: Choice) -> float:
        """The cost of a choice: recomputed FLOPs and those of its host transfers."""
        offloaded = sum(self.bytes[name] for name in choice[1])
        return self.recomputed_flops(choice[0] | choice[1]) + self.transfer_flops(offloaded)

    def transfer_flops(self, size: int) -> float:
        """FLOPs of a device during the transfer of `size` bytes to its host and back."""
        return 2 * size * self.flops_per_byte

    def device_bytes(self, choice: Choice) -> int:
        """Bytes that a choice saves in device memory, without the units' inputs."""
        return sum(self.bytes[name] for name in choice[0])


def cheapest(costs: RematCosts, room: int, seed: int = 0) -> Choice:
    """The cheapest choice that saves at most `room` bytes in device memory."""
    if len(costs.names) <= EXHAUSTIVE:
        return _best_of_all(costs, room)
    generator = random.Random(seed)
    starts = [(frozenset[str](), frozenset[str]()), *_greedy(costs, room)]
    starts += [random_choice(costs, room, generator) for _ in range(STARTS)]
    return min((_improved(costs, room, c) for c in starts), key=lambda c: _order(costs, c))


def random_choice(costs: RematCosts, room: int, generator: random.Random) -> Choice:
    """A random choice that fits: names in random order, saved at random while there is room."""
    saved: set[str] = set()
    for name in generator.sample(costs.names, len(costs.names)):
        wanted = frozenset(saved | {name}), frozenset[str]()
        if generator.random() < 0.7 and costs.device_bytes(wanted) <= room:
            saved.add(name)
    return frozenset(saved), frozenset()


def _order(costs: RematCosts, choice: Choice) -> tuple[float, int, list[str]]:
    return costs.flops(choice), costs.device_bytes(choice), sorted(choice[0])


def _best_of_all(costs: RematCosts, room: int) -> Choice:
    """The best of all sets of saved names, each with as little of it offloaded as fits."""
    best: Choice = frozenset(), frozenset()
    for size in range(len(costs.names) + 1):
        for names in map(frozenset, itertools.combinations(costs.names, size)):
            on_device: Choice = names, frozenset()
            excess = max(0, costs.device_bytes(on_device) - room)
            if costs.flops(on_device) + costs.transfer_flops(excess) > costs.flops(best):
                continue  # even if only the excess had to be offloaded
            splits = _splits(names) if excess else [on_device]
            fitting = _fitting(costs, room, [*splits, best])
            best = min(fitting, key=lambda c: _order(costs, c))
    return best


def _splits(names: frozenset[str]) -> Iterable[Choice]:
    for size in range(len(names) + 1):
        for offloaded in map(frozenset, itertools.combinations(names, size)):
            yield names - offloaded, offloaded


def _fitting(costs: RematCosts, room: int, choices: Iterable[Choice]) -> Iterable[Choice]:
    return (choice for choice in choices if costs.device_bytes(choice) <= room)


def _greedy(costs: RematCosts, room: int) -> list[Choice]:
    """Choices that grow by the name that spares the most FLOPs per byte."""
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
            if name not in saved and costs.device_bytes((saved | {name}, frozenset())) <= room
        ]
        if not left:
            return steps
        saved = saved | {max(left, key=worth)}
        steps.append((saved, frozenset()))


def _improved(costs: RematCosts, room: int, choice: Choice) -> Choice:
    """A local optimum: moving one name, or swapping two, makes nothing cheaper."""
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
