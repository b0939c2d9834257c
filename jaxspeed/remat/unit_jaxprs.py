"""The units of a traced program, each as a jaxpr of its own."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxspeed.jaxpr.slicing import dependents, free_variables, sub_jaxpr
from jaxspeed.jaxpr.traverse import equations, is_real, is_var, sliceable_bodies
from jaxspeed.zero3 import Units
from jaxspeed.zero3.segments import EvalContext, split_at_units


@dataclass(frozen=True)
class UnitJaxpr:
    """One unit, or the one that a scan runs many times."""

    jaxpr: Any  # its inputs are all variables that the unit reads
    times: int
    is_activation: tuple[bool, ...]  # which inputs depend on the batch and are not loop-invariant
    active: tuple[bool, ...]  # which inputs may have a gradient; rotary angles have none

    @property
    def differentiated(self) -> bool:
        """Whether it has a backward pass: frozen layers below all trained ones have none."""
        return any(self.active)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of its activations (`checkpoint_name`)."""
        named = (e for e in equations(self.jaxpr.eqns) if e.primitive.name == "name")
        return tuple(dict.fromkeys(eqn.params["name"] for eqn in named))


def unit_jaxprs(
    jaxpr: Any, batch: Iterable[Any], units: Units, trained: Iterable[Any] | None = None
) -> Iterator[UnitJaxpr]:
    """Every unit of a program.

    `batch` are the program's input variables that are neither parameters nor constants, `trained`
    those that have gradients; None for all real ones.
    """
    real = filter(is_real, jaxpr.invars) if trained is None else trained
    yield from _units(jaxpr, batch, real, units, 1)


def _units(
    jaxpr: Any, batch: Iterable[Any], real: Iterable[Any], units: Units, times: int
) -> Iterator[UnitJaxpr]:
    """`real` are the inputs that may have a gradient."""
    moving, active = dependents(jaxpr, batch), dependents(jaxpr, real)
    for segment in split_at_units(jaxpr, EvalContext(units), {}):
        if segment.nested:
            yield from _inside(segment.eqns[0], moving, active, units, times)
        elif segment.units:
            inputs = free_variables(segment.eqns)
            unit = sub_jaxpr(jaxpr, segment.eqns, inputs, segment.outputs)
            is_activation = tuple(v in moving for v in inputs)
            yield UnitJaxpr(unit, times, is_activation, tuple(v in active for v in inputs))


def _inside(
    eqn: Any, moving: set[Any], active: set[Any], units: Units, times: int
) -> Iterator[UnitJaxpr]:
    for body in sliceable_bodies(eqn):
        pairs = list(zip(body.jaxpr.invars, body.operands, strict=True))
        real = [iv for iv, v in pairs if is_var(v) and v in active]
        inner = [iv for iv, v in pairs[body.num_consts :] if is_var(v) and v in moving]
        yield from _units(body.jaxpr, inner, real, units, times * body.trips)
