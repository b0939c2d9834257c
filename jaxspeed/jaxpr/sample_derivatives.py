"""Derivatives of a model's own, for `sample_independence`: their programs and what they have to be.

A derivative by a rule for tangents (`custom_jvp`) is linear in them. If no tangent of a sample's
value depends on another sample, neither does a gradient in its transpose. One by a rule for
gradients (`custom_vjp`) has to be linear in these besides: the gradient of a part's mean is another
multiple of that of the part's sum than the gradient of the entire batch's mean.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.errors import LIBRARIES
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.sample_rules import shape_of
from jaxspeed.jaxpr.sample_values import SampleKind, SampleValue
from jaxspeed.jaxpr.slicing import free_variables, sub_jaxpr
from jaxspeed.jaxpr.traverse import ClosedJaxpr, JaxprEqn, Var, called, open_jaxpr

# The degree of the gradient that arrives: the unknown factor is a power of n that nothing else has.
ARRIVING = 1 << 16


def is_by_tangents(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "custom_jvp_call"


def is_real(v: Any) -> bool:
    """Whether a variable has a gradient."""
    return bool(jnp.issubdtype(v.aval.dtype, jnp.inexact))


def active(eqn: JaxprEqn) -> list[Var]:
    """The variables for which a function returns gradients."""
    return [v for v in free_variables([eqn]) if is_real(v)]


def name_of(eqn: JaxprEqn) -> str:
    return str(open_jaxpr(called(eqn))[0].debug_info.func_name)


def is_of_library(eqn: JaxprEqn) -> bool:
    """Whether a function is jaxspeed's own, or that of a package that is installed."""
    place = open_jaxpr(called(eqn))[0].debug_info.func_filename
    return place is not None and place.startswith(LIBRARIES)


def derivative(eqn: JaxprEqn) -> ClosedJaxpr:
    """(operands, tangents) -> (results, tangents), or the same of gradients.

    Operands are the variables that the equation reads; tangents and gradients those of the real.
    """
    inputs, outputs = free_variables([eqn]), list(eqn.outvars)
    call = as_function(sub_jaxpr(open_jaxpr(called(eqn))[0], [eqn], inputs, outputs))

    def complete(variables: list[Any], some: Any) -> list[Any]:
        """(Co)tangents of all of these: of integers, those without a value."""
        left = iter(some)
        return [
            next(left) if is_real(v) else np.zeros(shape_of(v), jax.dtypes.float0)
            for v in variables
        ]

    def by_tangents(args: Any, tangents: Any) -> list[Any]:
        outs, made = jax.jvp(call, args, complete(inputs, tangents))
        return [*outs, *(t for t, v in zip(made, outputs, strict=True) if is_real(v))]

    def by_gradients(args: Any, gradients: Any) -> list[Any]:
        outs, pull = jax.vjp(call, *args)
        made = pull(complete(outputs, gradients))
        return [*outs, *(g for g, v in zip(made, inputs, strict=True) if is_real(v))]

    def shapes(variables: list[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]

    if is_by_tangents(eqn):
        return jax.make_jaxpr(by_tangents)(shapes(inputs), shapes(active(eqn)))
    return jax.make_jaxpr(by_gradients)(shapes(inputs), shapes([*filter(is_real, outputs)]))


class Derivatives:
    """Programs of derivatives, traced once: a loop's body is read several times."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[JaxprEqn, ClosedJaxpr]] = {}

    def of(self, eqn: JaxprEqn) -> ClosedJaxpr:
        if id(eqn) not in self._found:
            self._found[id(eqn)] = eqn, derivative(eqn)
        return self._found[id(eqn)][1]


def arriving(x: SampleValue, v: Any, twin: Any) -> SampleValue:
    """The gradient for a result from which a loss is computed that is a sum over samples."""
    degree = ARRIVING - x.degree
    if x.kind is SampleKind.SUM:
        return SampleValue(SampleKind.FREE, None, degree, frozenset(range(len(shape_of(v)))))
    grown = [d for d, n in enumerate(shape_of(twin)) if n != shape_of(v)[d]]
    if x.kind is SampleKind.FREE and not grown:
        return SampleValue(SampleKind.SUM, None, degree)
    # One value for all samples is repeated: each has a gradient for it.
    dim = x.dim if x.kind is SampleKind.SAMPLES else grown[0]
    return SampleValue(SampleKind.SAMPLES, dim, degree)


def unlike_tangent(new: SampleValue, value: SampleValue) -> str | None:
    """Why the tangent of a result is not by sample like the result."""
    if new.kind is SampleKind.MIXED:
        return new.why
    if new.zero:
        return None
    if new.degree != value.degree:
        return "it computes with the number of samples"
    if value.kind is SampleKind.SAMPLES:
        return _unlike_samples(new, value)
    is_like = new.kind is value.kind and new.varies <= value.varies | value.drawn
    return None if is_like else "it mixes samples"


def unlike_gradient(new: SampleValue, value: SampleValue) -> str | None:
    """Why the gradient for an operand is not that of a sum over samples."""
    if new.kind is SampleKind.MIXED:
        return new.why
    if new.zero:
        return None
    if new.degree != ARRIVING - value.degree:
        return (
            "it is no multiple of the gradient that arrives, or computes with the number of samples"
        )
    if value.kind is SampleKind.SAMPLES:
        return _unlike_samples(new, value)
    if value.kind is SampleKind.SUM:
        return None if new.kind is SampleKind.FREE else "it mixes samples"
    repeated = new.kind is SampleKind.SAMPLES and new.dim not in value.varies | value.drawn
    return None if repeated or new.kind is SampleKind.SUM else "it is no sum over samples"


def _unlike_samples(new: SampleValue, value: SampleValue) -> str | None:
    own = new.kind is SampleKind.SAMPLES and new.dim == value.dim
    same_for_all = new.kind is SampleKind.FREE and value.dim not in new.varies
    return None if own or same_for_all else "it mixes samples"
