"""What a sketch knows of a model: a few numbers, from one traced loss of one sample."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.jaxpr.flops import equation_flops, nbytes, of_all, program_flops
from jaxspeed.jaxpr.traverse import is_var
from jaxspeed.placement.rows import ROLES
from jaxspeed.planner.search.candidate import NONE, as_word
from jaxspeed.remat.budget import Costs, Unit
from jaxspeed.remat.resolve import ATTENTION
from jaxspeed.remat.unit_jaxprs import members
from jaxspeed.train.program import Program


@dataclass(frozen=True)
class SavedBytes:
    """Of all units, for one sample: bytes kept between their passes, and flops made again."""

    bytes: int
    again: float


@dataclass(frozen=True)
class ModelSizes:
    """Of a model and one sample.

    Attributes:
      parameters: how many, and how many of them are in the units.
      compute_bytes: of a parameter as layers read it.
      state_bytes: of a parameter's master and moments.
      grad_bytes: of its gradient.
      units: that follow each other.
      forward: flops of the loss.
      handed: bytes that all units are handed.
      kept: by the word for it; "none" is all that their derivatives read.
    """

    parameters: int
    in_units: int
    compute_bytes: float
    state_bytes: float
    grad_bytes: float
    units: int
    forward: float
    handed: int
    kept: Mapping[str, SavedBytes]

    def kept_by(self, word: str) -> SavedBytes:
        """What a word keeps; of one that is not known, its inputs alone, and all made again."""
        return self.kept.get(word) or SavedBytes(self.handed, self.forward)


def sizes_of(program: Program, sample: Any) -> ModelSizes:
    """Of a program on one device, and a batch of one sample's shapes."""
    made: ModelSizes = program.in_mesh(_sizes)(program, sample)
    return made


def _sizes(program: Program, sample: Any) -> ModelSizes:
    objective, table = program.objective, program.table
    batch = jax.tree.map(lambda x: jax.eval_shape(objective.cast, x), sample)
    first = jnp.asarray(0)
    traced = objective.trace((program.model.variables, batch, first, first), train=True)
    jaxpr = traced.closed.jaxpr
    found = tuple(members(jaxpr, traced.batch, traced.units))
    costs = Costs(tuple(map(Unit.of, found)))
    stored = {role: whole for role, (whole, _) in table.bytes_by_role().items()}
    param, master, grad, opt = (stored.get(role, 0) for role in ROLES)
    parameters = sum(int(np.prod(row.leaf.shape)) for row in table)
    in_units = sum(each.times * _weights(each) for each in found)
    return ModelSizes(
        parameters,
        min(in_units, parameters),
        param / parameters,
        (master + opt) / parameters,
        grad / parameters,
        sum(each.times for each in found),
        float(program_flops(jaxpr, of_all)),
        costs.input_bytes,
        dict(_by_word(costs)),
    )


def _weights(member: Any) -> int:
    """Elements of what a unit reads that is no activation."""
    pairs = zip(member.program.invars, member.own, strict=True)
    real = (v.aval for v, own in pairs if not own and jnp.issubdtype(v.aval.dtype, jnp.floating))
    return sum(int(np.prod(aval.shape)) for aval in real if len(aval.shape) > 0)


def _by_word(costs: Costs) -> Iterable[tuple[str, SavedBytes]]:
    handed = costs.input_bytes
    everything = sum(u.times * _bytes(u.residuals - u.inputs) for u in costs.units)
    yield NONE, SavedBytes(handed + everything, 0.0)
    yield as_word("full"), SavedBytes(handed, costs.again(frozenset()))
    for n in (2, 4):
        yield as_word({"every_n": n}), SavedBytes(handed // n, costs.again(frozenset()))
    if ATTENTION in costs.names:
        kept = handed + costs.bytes[ATTENTION]
        yield as_word("attention"), SavedBytes(kept, costs.again(frozenset([ATTENTION])))
    products = [(u, set(_products(u.jaxpr))) for u in costs.units]
    size = sum(u.times * _bytes(made) for u, made in products)
    # What is not a product of weights is attention, and operations of one element each.
    yield (
        as_word("dots"),
        SavedBytes(handed + size, sum(u.times * _others(u, made) for u, made in products)),
    )


def _products(jaxpr: Any) -> Iterable[Any]:
    """Results of products without batch dims, which `dots` keeps."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][1][0]:
            yield from eqn.outvars


def _others(unit: Unit, made: set[Any]) -> float:
    """Flops of what gives none of these."""
    others = (eqn for eqn in unit.jaxpr.eqns if not set(eqn.outvars) & made)
    return float(sum(equation_flops(eqn, of_all) for eqn in others))


def _bytes(variables: Iterable[Any]) -> int:
    return sum(nbytes(v.aval) for v in variables if is_var(v))
