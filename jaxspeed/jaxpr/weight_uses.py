"""Uses of weights in a traced program: which equation reads which weight, and beside what.

What is computed from weights and constants alone (a cast, a transpose, a sum of two) stands for
these weights; the equation that reads it beside other values uses them.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspeed.jaxpr.primitives import GROUPED_PRODUCT
from jaxspeed.jaxpr.rewriter import Atom, Rewriter, Rewriting
from jaxspeed.jaxpr.traverse import Jaxpr, JaxprEqn, Var, product_of, transparent_bodies

Weights = frozenset[Any]  # their names
Origin = Weights | None  # None: it depends on more than weights and constants


def joint_origin(origins: Iterable[Origin]) -> Origin:
    """The origin of a value that is computed from all of these."""
    found: Weights = frozenset()
    for origin in origins:
        if origin is None:
            return None
        found |= origin
    return found


class ByWeight(Rewriter[Origin]):
    """A rewriter of programs that knows the weights of each value; by itself it changes nothing."""

    def constant(self, atom: Atom) -> Origin:
        return frozenset()

    def unknown(self, atom: Atom) -> Origin:
        return None

    def derived(self, states: Sequence[Origin], out: Var) -> Origin:
        return joint_origin(states)


class _Reading(ByWeight):
    """Also through functions with a custom derivative."""

    def enter(self, program: Rewriting[Origin], eqn: JaxprEqn) -> bool:
        return bool(transparent_bodies(eqn))

    def custom_derivative(self, program: Rewriting[Origin], eqn: JaxprEqn) -> list[Origin]:
        return self.nested(program, eqn)


class _ReadingFlat(ByWeight):
    """Of a call all results are computed from all operands."""

    enters = ()


def origins(jaxpr: Jaxpr, names: Mapping[Var, Hashable]) -> Rewriting[Origin]:
    """The weights of each value of a program and of its inner programs; `names` of its inputs."""
    return _Reading().write(jaxpr, _of_inputs(jaxpr, names))


def _of_inputs(jaxpr: Jaxpr, names: Mapping[Var, Hashable]) -> list[Origin]:
    return [frozenset([names[v]]) if v in names else None for v in jaxpr.invars]


@dataclass(frozen=True)
class WeightUse:
    """An equation that reads weights beside other values.

    Attributes:
      position: of the equation; their number for a result of the program.
      weights: that it reads, or from which alone what it reads is computed.
      beside: the other variables that it reads.
      is_product: whether it is a matmul, a convolution or a grouped product.
    """

    position: int
    weights: Weights
    beside: tuple[Any, ...]
    is_product: bool


def weight_uses(
    jaxpr: Jaxpr, names: Mapping[Var, Hashable]
) -> tuple[list[WeightUse], dict[int, Weights]]:
    """The uses of weights by a program's own equations, calls and loops as a single one.

    Also the weights of each equation, by position, that is computed from them alone.
    """
    program = _ReadingFlat().write(jaxpr, _of_inputs(jaxpr, names))
    uses, derived = [], {}
    for position, eqn in enumerate(jaxpr.eqns):
        found = [program.state(v) for v in eqn.invars]
        weights = joint_origin(x for x in found if x is not None) or frozenset()
        beside = tuple(v for v, x in zip(eqn.invars, found, strict=True) if x is None)
        if weights and not beside:
            derived[position] = weights
        elif weights:
            is_product = product_of(eqn) is not None or eqn.primitive.name == GROUPED_PRODUCT
            uses.append(WeightUse(position, weights, beside, is_product))
    results = [program.state(v) for v in jaxpr.outvars]
    uses += [WeightUse(len(jaxpr.eqns), x, (), False) for x in results if x]
    return uses, derived
