"""A traced program on some indices of one dim, of a program along which no operation mixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.jaxpr.dim_relations import DimRelations, relations, same_place
from jaxspeed.jaxpr.evaluate import run_equation
from jaxspeed.jaxpr.inline_calls import with_all_calls_inlined
from jaxspeed.jaxpr.primitives import ELEMENTWISE, IDENTITIES
from jaxspeed.jaxpr.traverse import ClosedJaxpr, JaxprEqn, is_var

_Dim = tuple[Any, int]  # of a variable, or of a constant by its id
# Parameters with the shape of the result, or with the ends of a slice of the operand.
_SHAPES = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}
_ENDS = {"slice": "limit_indices", "dynamic_slice": "slice_sizes", "gather": "slice_sizes"}


class MixedDim(ValueError):
    """An operation mixes indices of the dim, or is not known."""

    def __init__(self, eqn: JaxprEqn) -> None:
        super().__init__(eqn.primitive.name)
        self.eqn = eqn


def on_indices(closed: ClosedJaxpr, dims: Sequence[int | None]) -> Callable[..., list[jax.Array]]:
    """The program on some indices of a dim.

    Args:
      dims: that dim of each input, or None. All have one size.

    Returns:
      A function of (indices, inputs), of which those with the dim have these indices of it alone.
      It has the results at these indices. Calls are inlined, without their custom derivatives.
    """
    jaxpr = with_all_calls_inlined(closed.jaxpr)
    sizes = {_shape(v)[d] for v, d in zip(jaxpr.invars, dims, strict=True) if d is not None}
    (size,) = sizes
    same = _Classes()
    for eqn in jaxpr.eqns:
        for first, other in _ties(eqn):
            same.tie(first, other)
    indexed_dims = [(v, d) for v, d in zip(jaxpr.invars, dims, strict=True) if d is not None]
    for indexed_dim in indexed_dims[1:]:
        same.tie(indexed_dims[0], indexed_dim)

    def dims_of(atom: Any) -> list[int]:
        every = range(len(_shape(atom)))
        return [d for d in every if same.of((_key(atom), d)) == same.of(indexed_dims[0])]

    for eqn in jaxpr.eqns:
        eqn_relations = _relations(eqn)
        for i, atom in enumerate(eqn.invars):
            for dim in dims_of(atom):
                factor = None if eqn_relations is None else eqn_relations.operands[i][dim]
                if (
                    eqn_relations is None
                    or factor is None
                    or factor in {*eqn_relations.reduced(i), *eqn_relations.mixed}
                ):
                    raise MixedDim(eqn)

    def run(indices: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
        count = indices.shape[0]

        def resized(shape: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
            return tuple(n * count // size if d in at else n for d, n in enumerate(shape))

        def constant(value: Any, at: Sequence[int]) -> Any:
            for dim in at:
                value = jnp.take(jnp.asarray(value), indices, axis=dim)
            return value

        env = dict(zip(jaxpr.invars, inputs, strict=True))
        constants = zip(jaxpr.constvars, closed.consts, strict=True)
        env |= {v: constant(value, dims_of(v)) for v, value in constants}

        def read(atom: Any) -> Any:
            return env[atom] if is_var(atom) else constant(atom.val, dims_of(atom))

        for eqn in jaxpr.eqns:
            name, params = eqn.primitive.name, dict(eqn.params)
            (out, *_), at = eqn.outvars, dims_of(eqn.outvars[0])
            if not at:
                values = run_equation(jaxpr, eqn, env.__getitem__)
                env.update(zip(eqn.outvars, values, strict=True))
                continue
            if name in _SHAPES:
                params[_SHAPES[name]] = resized(_shape(out), at)
            if name in _ENDS:
                shape, of_operand = _shape(eqn.invars[0]), dims_of(eqn.invars[0])
                ends = enumerate(params[_ENDS[name]])
                new = resized(shape, of_operand)
                params[_ENDS[name]] = tuple(new[d] if d in of_operand else n for d, n in ends)
            if name == "iota" and params["dimension"] in at:
                shape, of_dim = params["shape"], (params["dimension"],)
                env[out] = lax.broadcast_in_dim(indices.astype(params["dtype"]), shape, of_dim)
                continue
            values = eqn.primitive.bind(*map(read, eqn.invars), **params)
            values = values if eqn.primitive.multiple_results else [values]
            env.update(zip(eqn.outvars, values, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return run


class _Classes:
    """A union-find over dims of variables."""

    def __init__(self) -> None:
        self._parent: dict[_Dim, _Dim] = {}

    def of(self, dim: _Dim) -> _Dim:
        while (up := self._parent.get(dim, dim)) != dim:
            dim = up
        return dim

    def tie(self, a: _Dim, b: _Dim) -> None:
        a, b = self.of(a), self.of(b)
        if a != b:
            self._parent[b] = a


def _relations(eqn: JaxprEqn) -> DimRelations | None:
    in_shapes, out_shapes = ([_shape(v) for v in atoms] for atoms in (eqn.invars, eqn.outvars))
    name = eqn.primitive.name
    if name in ELEMENTWISE | IDENTITIES:
        return same_place(in_shapes, out_shapes)
    return relations(name, eqn.params, in_shapes, out_shapes)


def _ties(eqn: JaxprEqn) -> Iterator[tuple[_Dim, _Dim]]:
    if (eqn_relations := _relations(eqn)) is None:
        return
    first: dict[int, _Dim] = {}
    factors = (*eqn_relations.operands, *eqn_relations.results)
    for atom, of_dims in zip((*eqn.invars, *eqn.outvars), factors, strict=True):
        for dim, factor in enumerate(of_dims):
            if factor is not None and factor not in eqn_relations.mixed:
                yield first.setdefault(factor, (_key(atom), dim)), (_key(atom), dim)


def _key(atom: Any) -> Any:
    return atom if is_var(atom) else id(atom)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))
