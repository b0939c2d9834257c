"""Uses of weights in a traced program: which equation reads which weight, and beside what.

What is computed from weights and constants alone (a cast, a transpose, a sum of two) stands for
these weights; the equation that reads it beside other values uses them.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxspeed.jaxpr.frames import ForwardAnalysis, Frame
from jaxspeed.jaxpr.primitives import GROUPED_PRODUCT
from jaxspeed.jaxpr.traverse import Jaxpr, Var, is_var, product_of

Weights = frozenset[Any]  # their names
Origin = Weights | None  # None: it depends on more than weights and constants
Kind = Literal["product", "convolution", "lookup"]


@dataclass(frozen=True)
class WeightDims:
    """What the dims of a weight are to the equations that read it.

    Each tuple has dims in the order in which the factors have them. For a convolution the window
    is among the inputs; for a lookup the inputs are the dims that are indexed.
    """

    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: Kind


Uses = Mapping[str, Sequence[WeightDims]]  # of weights by path, in a traced loss


def joint_origin(origins: Iterable[Origin]) -> Origin:
    """The origin of a value that is computed from all of these."""
    weights: Weights = frozenset()
    for origin in origins:
        if origin is None:
            return None
        weights |= origin
    return weights


class Origins(ForwardAnalysis[Origin]):
    """The weights of each value of a program and of its inner programs."""

    def constant(self, atom: Any) -> Origin:
        return frozenset()

    def operation(self, frame: Frame, position: int, operands: Sequence[Origin]) -> list[Origin]:
        return [joint_origin(operands)] * len(frame.jaxpr.eqns[position].outvars)

    def inputs(self, frame: Frame, operands: Sequence[Origin]) -> list[Origin]:
        """Of what a loop carries nothing is known."""
        carried = range(frame.body.num_consts, frame.body.first_xs)
        body_operands = operands[frame.body.first :]
        return [None if i in carried else origin for i, origin in enumerate(body_operands)]

    def joined(self, states: Sequence[Origin]) -> Origin:
        return joint_origin(states)


def of_inputs(jaxpr: Jaxpr, names: Mapping[Var, Hashable]) -> list[Origin]:
    """The origins of a program's inputs, by the `names` of those that are weights."""
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
    known: dict[Any, Origin] = dict.fromkeys(jaxpr.constvars, frozenset())
    known.update(zip(jaxpr.invars, of_inputs(jaxpr, names), strict=True))

    def origin(atom: Any) -> Origin:
        return known.get(atom) if is_var(atom) else frozenset()

    uses, derived = [], {}
    for position, eqn in enumerate(jaxpr.eqns):
        origins = [origin(v) for v in eqn.invars]
        known.update(dict.fromkeys(eqn.outvars, joint_origin(origins)))
        weights = joint_origin(x for x in origins if x is not None) or frozenset()
        beside = tuple(v for v, x in zip(eqn.invars, origins, strict=True) if x is None)
        if weights and not beside:
            derived[position] = weights
        elif weights:
            is_product = product_of(eqn) is not None or eqn.primitive.name == GROUPED_PRODUCT
            uses.append(WeightUse(position, weights, beside, is_product))
    results = map(origin, jaxpr.outvars)
    uses += [WeightUse(len(jaxpr.eqns), x, (), False) for x in results if x]
    return uses, derived
