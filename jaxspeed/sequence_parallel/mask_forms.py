"""What kernels take as a mask, proved equal to the conditions under which a model's queries see.

The conditions are expressions of the dims of the samples, of the queries and of the keys: bands of
the difference of positions become a `Mask`; an equality of ids, and conditions on queries alone and
on keys alone become ids of segments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.ops.mask import Mask
from jaxspeed.sequence_parallel.index_expressions import (
    TRUE,
    Affine,
    AtLeastZero,
    Const,
    Element,
    Expression,
    Operation,
    both,
    conjuncts,
    depends,
    evaluate_expression,
    with_dims,
)

# The ids of hidden keys and of queries that see none: the two lowest int32, which no model has.
HIDDEN_KEY = -(2**31)
BLIND_QUERY = HIDDEN_KEY + 1


@dataclass(frozen=True)
class MaskForm:
    """Query i sees key j where all of this is true.

    Attributes:
      mask: the static part.
      equal: the ids of queries and keys that have to be equal, if any.
      queries, keys: conditions on one of them.
      may_be_blind: whether it is not proved that each query sees a key.
    """

    mask: Mask
    equal: tuple[Expression, Expression] | None
    queries: Expression
    keys: Expression
    may_be_blind: bool

    @property
    def segments(self) -> bool:
        return self.equal is not None or self.queries != TRUE or self.keys != TRUE

    def ids(
        self,
        batch: Sequence[Any],
        positions: tuple[Any, Any],
        sizes: Mapping[Any, int],
        value_of: Callable[[Any], Any],
    ) -> tuple[jax.Array, jax.Array]:
        """The segment ids of queries and keys, [batch, seq] each."""
        equal = self.equal or (Const(1), Const(1))
        sides = zip(
            equal, (self.queries, self.keys), positions, (BLIND_QUERY, HIDDEN_KEY), strict=True
        )
        segment_ids = []
        for ids, seen, position, hidden in sides:
            dims = (*batch, position)
            shape = [sizes[dim] for dim in dims]
            value, visible = (evaluate_expression(e, dims, sizes, value_of) for e in (ids, seen))
            value = jnp.where(visible, jnp.asarray(value).astype(jnp.int32), jnp.int32(hidden))
            segment_ids.append(jnp.broadcast_to(value, shape).reshape(-1, sizes[position]))
        return segment_ids[0], segment_ids[1]

    def by_ids(
        self, condition: Expression, of: tuple[Element, Element], q: Any, k: Any
    ) -> Expression:
        """One of the conditions, with `of`, the ids of queries and keys, for what is not a band."""
        expression: Expression = TRUE
        for conjunct in conjuncts(condition):
            kind = _kind(conjunct, q, k)
            if kind == "band":
                expression = both(expression, conjunct)
            elif kind == "equal":
                expression = both(expression, Operation("eq", of, 3))
            elif kind == "queries":
                expression = both(expression, Operation("ne", (of[0], Const(BLIND_QUERY)), 3))
            else:
                expression = both(expression, Operation("ne", (of[1], Const(HIDDEN_KEY)), 3))
        return expression


def mask_form(
    condition: Expression, batch: Collection[Any], q: Any, k: Any, sizes: Mapping[Any, int]
) -> MaskForm | None:
    """The form of a condition; None if no kernel takes it."""
    seq, kv_seq = sizes[q], sizes[k]
    least, most = 1 - kv_seq, seq - 1  # of the difference of positions
    low, high = least, most
    equal: tuple[Expression, Expression] | None = None
    queries: Expression = TRUE
    keys: Expression = TRUE
    for conjunct in conjuncts(condition):
        if not depends(conjunct) <= {*batch, q, k}:
            return None
        kind = _kind(conjunct, q, k)
        if kind is None:
            return None
        if kind == "band":
            assert isinstance(conjunct, AtLeastZero)
            factor = dict(conjunct.of.factors)[q]
            if factor > 0:
                low = max(low, -conjunct.of.constant)
            else:
                high = min(high, conjunct.of.constant)
        elif kind == "queries":
            queries = both(queries, conjunct)
        elif kind == "keys":
            keys = both(keys, conjunct)
        else:
            assert isinstance(conjunct, Operation)
            a, b = conjunct.operands
            pair = (a, b) if k in depends(b) else (b, a)
            if equal is not None and equal != pair:
                return None
            if not all(map(_has_int32, pair)):
                return None
            equal = pair
    mask = _band(low, high, least, most)
    if mask is None:
        return None
    if equal is not None:
        here = equal[1] == with_dims(equal[0], lambda dim: k if dim == q else dim)
        sees_one = here and low <= 0 <= high and seq <= kv_seq
    else:
        sees_one = low <= min(high, 0) and seq - 1 - high <= kv_seq - 1
    return MaskForm(mask, equal, queries, keys, not (sees_one and (queries, keys) == (TRUE, TRUE)))


def _kind(condition: Expression, q: Any, k: Any) -> str | None:
    dims = depends(condition)
    if q not in dims:
        return "keys"
    if k not in dims:
        return "queries"
    if isinstance(condition, AtLeastZero):
        factors = dict(condition.of.factors)
        return "band" if factors in ({q: 1, k: -1}, {q: -1, k: 1}) else None
    if isinstance(condition, Operation) and condition.name == "eq":
        a, b = map(depends, condition.operands)
        apart = (q in a) != (k in a) and (q in b) != (k in b)
        return "equal" if apart else None
    return None


def _band(low: int, high: int, least: int, most: int) -> Mask | None:
    """The mask of the differences query - key from `low` to `high`, of those that there are."""
    if low > high:
        return None
    from_below, from_above = low > least, high < most
    if low == 0:
        return Mask(True, high + 1 if from_above else None)
    if not from_below and not from_above:
        return Mask(False, None)
    if -low == high:
        return Mask(False, high + 1)
    if not from_below and high >= -least:
        return Mask(False, high + 1)
    if not from_above and -low >= most:
        return Mask(False, 1 - low)
    return None


def _has_int32(ids: Expression) -> bool:
    """Whether all ids are integers that int32 has."""
    if isinstance(ids, Element):
        dtype = ids.variable.aval.dtype
        is_int = jnp.issubdtype(dtype, jnp.integer)
        return jnp.issubdtype(dtype, jnp.bool_) or (
            is_int and jnp.iinfo(dtype).max <= jnp.iinfo(jnp.int32).max
        )
    if isinstance(ids, Operation):
        return ids.name != "abs" or all(map(_has_int32, ids.operands))
    return isinstance(ids, (Affine, AtLeastZero))
