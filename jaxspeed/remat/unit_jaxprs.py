"""The units of a traced program, each as a jaxpr of its own."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from jaxspeed.jaxpr.slicing import made_of, part, read_from_outside
from jaxspeed.jaxpr.traverse import bodies, is_var, sliceable_bodies
from jaxspeed.zero3 import Units
from jaxspeed.zero3.segments import Way, pieces


@dataclass(frozen=True)
class Member:
    """One unit, or the one that a scan runs many times."""

    program: Any  # its inputs are what it reads
    times: int
    own: tuple[bool, ...]  # which inputs are activations that no other unit reads
    active: tuple[bool, ...]  # which inputs could have a gradient; rotary angles, say, have none

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What its activations are called."""
        return tuple(dict.fromkeys(_names(self.program)))


def members(jaxpr: Any, batch: Iterable[Any], units: Units) -> Iterator[Member]:
    """Every unit of a program; `batch` are its variables that are no parameters or constants."""
    yield from _members(jaxpr, batch, filter(_is_real, jaxpr.invars), units, 1)


def _members(
    jaxpr: Any, batch: Iterable[Any], real: Iterable[Any], units: Units, times: int
) -> Iterator[Member]:
    """`real` are the inputs that could have a gradient."""
    moving, active = made_of(jaxpr, batch), made_of(jaxpr, real)
    for piece in pieces(jaxpr, Way(units), {}):
        if piece.nested:
            yield from _inside(piece.eqns[0], moving, active, units, times)
        elif piece.units:
            inputs = read_from_outside(piece.eqns)
            program = part(jaxpr, piece.eqns, inputs, piece.outputs)
            own, real = tuple(v in moving for v in inputs), (v in active for v in inputs)
            yield Member(program, times, own, tuple(real))


def _inside(
    eqn: Any, moving: set[Any], active: set[Any], units: Units, times: int
) -> Iterator[Member]:
    for body in sliceable_bodies(eqn):
        pairs = list(zip(body.jaxpr.invars, body.operands, strict=True))
        real = [iv for iv, v in pairs if is_var(v) and v in active]
        inner = [iv for iv, v in pairs[body.num_consts :] if is_var(v) and v in moving]
        yield from _members(body.jaxpr, inner, real, units, times * body.trips)


def _is_real(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _names(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        for body in bodies(eqn):
            yield from _names(body.jaxpr)
