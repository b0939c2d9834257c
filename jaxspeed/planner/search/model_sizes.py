"""Sizes of a model that the analytic cost model needs, from the traced loss of one sample."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.axes import AXES, sharding_axes
from jaxspeed.jaxpr.flops import count_all, equation_flops, nbytes, program_flops
from jaxspeed.jaxpr.primitives import RAGGED_PRODUCTS
from jaxspeed.jaxpr.traverse import is_var
from jaxspeed.placement.rows import ROLES
from jaxspeed.planner.search.candidate import NONE, remat_json
from jaxspeed.remat.budget import RematCosts, UnitResiduals
from jaxspeed.remat.resolve import ATTENTION
from jaxspeed.remat.unit_jaxprs import UnitJaxpr, unit_jaxprs
from jaxspeed.train.program import Program


@dataclass(frozen=True)
class SavedBytes:
    """Bytes saved by all units for one sample, and FLOPs recomputed."""

    bytes: int
    recomputed: float


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, for one sample.

    Attributes:
      parameters, in_units: number of parameters, and of those inside of units.
      sharded: {axis: number of parameters}, of the axes that shard dims of parameters and store
        the state of the others, such as those of experts.
      compute_bytes: per parameter, as layers read it.
      state_bytes: per parameter, of master and moments.
      grad_bytes: per parameter, of the gradient.
      units: number of consecutive units.
      forward: FLOPs of the loss.
      unit_inputs: bytes of the inputs of all units.
      expert_rows: bytes of the rows that all mixtures send to their experts.
      saved: by `parallel.remat` as JSON; "none" saves all residuals.
    """

    parameters: int
    in_units: int
    sharded: Mapping[str, int]
    compute_bytes: float
    state_bytes: float
    grad_bytes: float
    units: int
    forward: float
    unit_inputs: int
    expert_rows: float
    saved: Mapping[str, SavedBytes]

    def saved_by(self, remat: str) -> SavedBytes:
        """Bytes saved under a policy; of an unknown one, as if it saved only units' inputs."""
        return self.saved.get(remat) or SavedBytes(self.unit_inputs, self.forward)


def sizes_of(program: Program, sample: Any) -> ModelSizes:
    """The sizes of a program on one device, with a batch of one sample."""
    sizes: ModelSizes = program.in_mesh(_sizes)(program, sample)
    return sizes


def _sizes(program: Program, sample: Any) -> ModelSizes:
    traced_loss, table = program.traced_loss, program.table
    batch = jax.eval_shape(traced_loss.cast, program.complete(sample))
    first = jnp.asarray(0)
    traced = traced_loss.trace((program.model.variables, batch, first, first), train=True)
    jaxpr = traced.closed.jaxpr
    unit_programs = tuple(unit_jaxprs(jaxpr, traced.batch, traced.units))
    costs = RematCosts(tuple(map(UnitResiduals.of, unit_programs)))
    stored = {role: total for role, (total, _) in table.bytes_by_role().items()}
    param, master, grad, opt = (stored.get(role, 0) for role in ROLES)
    parameters = sum(int(np.prod(row.leaf.shape)) for row in table)
    in_units = sum(unit.times * _weights(unit) for unit in unit_programs)
    return ModelSizes(
        parameters,
        min(in_units, parameters),
        _sharded(program),
        param / parameters,
        (master + opt) / parameters,
        grad / parameters,
        sum(unit.times for unit in unit_programs),
        float(program_flops(jaxpr, count_all)),
        costs.input_bytes,
        sum(unit.times * _expert_rows(unit) for unit in unit_programs),
        dict(_by_policy(costs)),
    )


def _sharded(program: Program) -> dict[str, int]:
    axis_of = sharding_axes()
    sharded: dict[str, int] = {}
    for row in program.table:
        for axis in {axis_of.get(name or "") for name in row.leaf.names}:
            if axis is not None and AXES[axis].stores:
                sharded[axis] = sharded.get(axis, 0) + int(np.prod(row.leaf.shape))
    return sharded


def _expert_rows(unit: UnitJaxpr) -> float:
    """Bytes of the rows of a unit's grouped products, each as wide as what enters the unit."""

    def rows(eqn: Any) -> int:
        is_product = eqn.primitive.name in RAGGED_PRODUCTS
        return math.prod(eqn.invars[0].aval.shape[:-1]) if is_product else 0

    products = program_flops(unit.jaxpr, lambda eqn: rows(eqn) > 0)
    if not products:
        return 0.0
    pairs = zip(unit.jaxpr.invars, unit.is_activation, strict=True)
    widest = max((v.aval for v, moves in pairs if moves), key=nbytes)
    row = widest.shape[-1] * widest.dtype.itemsize
    return program_flops(unit.jaxpr, rows) / products * row


def _weights(unit: UnitJaxpr) -> int:
    """Elements of the arrays that a unit reads and that are no activations."""
    pairs = zip(unit.jaxpr.invars, unit.is_activation, strict=True)
    real = (
        v.aval
        for v, is_activation in pairs
        if not is_activation and jnp.issubdtype(v.aval.dtype, jnp.floating)
    )
    return sum(int(np.prod(aval.shape)) for aval in real if len(aval.shape) > 0)


def _by_policy(costs: RematCosts) -> Iterable[tuple[str, SavedBytes]]:
    inputs = costs.input_bytes
    everything = sum(u.times * _bytes(u.residuals - u.inputs) for u in costs.units)
    yield NONE, SavedBytes(inputs + everything, 0.0)
    yield remat_json("full"), SavedBytes(inputs, costs.recomputed_flops(frozenset()))
    for n in (2, 4):
        yield (
            remat_json({"every_n": n}),
            SavedBytes(inputs // n, costs.recomputed_flops(frozenset())),
        )
    if ATTENTION in costs.names:
        saved = inputs + costs.bytes[ATTENTION]
        yield (
            remat_json("attention"),
            SavedBytes(saved, costs.recomputed_flops(frozenset([ATTENTION]))),
        )
    matmuls = [(u, set(_matmul_results(u.jaxpr))) for u in costs.units]
    size = sum(u.times * _bytes(results) for u, results in matmuls)
    # Recomputed are attention and elementwise operations.
    recomputed = sum(u.times * _other_flops(u, results) for u, results in matmuls)
    yield remat_json("dots"), SavedBytes(inputs + size, recomputed)


def _matmul_results(jaxpr: Any) -> Iterable[Any]:
    """Results of matmuls without batch dims, which `dots` saves."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][1][0]:
            yield from eqn.outvars


def _other_flops(unit: UnitResiduals, results: set[Any]) -> float:
    """FLOPs of the equations that compute none of `results`."""
    others = (eqn for eqn in unit.jaxpr.eqns if not set(eqn.outvars) & results)
    return float(sum(equation_flops(eqn, count_all) for eqn in others))


def _bytes(variables: Iterable[Any]) -> int:
    return sum(nbytes(v.aval) for v in variables if is_var(v))
