"""The equations of one attention: from the product of queries and keys to that with the values.

Their dims are followed by *atoms*: the dims of the first product, split where reshapes split them.
The equations are an attention if every element of what is between the products belongs to one
query, if the keys' dim is reduced there, and if the second product contracts it. What else the
equations do (masks, biases, soft caps, sinks) does not matter here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspeed.jaxpr.dim_relations import reshape_groups
from jaxspeed.jaxpr.primitives import (
    CUSTOM_DERIVATIVE,
    ELEMENTWISE,
    IDENTITIES,
    RANDOM,
    RESHAPES,
)
from jaxspeed.jaxpr.traverse import JaxprEqn, bodies, is_var, shape_of

Dim = tuple[int, ...] | None  # the atoms of a dim, outermost first; None: constant along it
Dims = tuple[Dim, ...]

POINTWISE = ELEMENTWISE | IDENTITIES
_DRAWN = (*RESHAPES, "broadcast_in_dim", "shift_right_logical", "bitcast_convert_type")
DROPOUT = "dropout on the probabilities"
ELSEWHERE = "the {} are read elsewhere"
ACROSS = "an operation across positions between the products ({})"


class NotAttention(Exception):
    """Why equations are no attention; `reported` if they look like one to the user."""

    def __init__(self, reason: str, reported: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.reported = reason, reported


class Atoms:
    """The atoms of dims, by number, and what they are split into."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._parts: dict[int, tuple[int, ...]] = {}

    def new(self, size: int) -> Dim:
        """A dim of a new atom; those of size 1 have none."""
        if size == 1:
            return ()
        self.sizes[len(self.sizes)] = size
        return (len(self.sizes) - 1,)

    def of(self, dim: Dim) -> Dim:
        """A dim by the atoms of today."""
        if dim is None or not any(atom in self._parts for atom in dim):
            return dim
        return self.of(tuple(a for atom in dim for a in self._parts.get(atom, (atom,))))

    def size(self, dim: Dim) -> int:
        return math.prod(self.sizes[atom] for atom in dim or ())

    def regrouped(self, old: Sequence[int], dims: Dims, new: Sequence[int]) -> Dims:
        """The dims of an array of shape `old` after a reshape to `new`."""
        regrouped_dims: list[Dim] = [()] * len(new)
        for olds, news in reshape_groups(old, new):
            old_dims = [dims[d] for d in olds]
            if len(olds) == len(news) == 1:
                regrouped_dims[news[0]] = old_dims[0]
                continue
            if None in old_dims:
                if any(old_dims):
                    raise NotAttention("a reshape between the products")
                for d in news:
                    regrouped_dims[d] = None
                continue
            left = [atom for dim in old_dims for atom in self.of(dim) or ()]
            for d in news:
                regrouped_dims[d] = self._taken(left, new[d])
        return tuple(regrouped_dims)

    def _taken(self, left: list[int], size: int) -> Dim:
        """The outermost of the atoms `left` that have this size together; one may be split."""
        taken: list[int] = []
        while size > 1:
            atom = left.pop(0)
            count = self.sizes[atom]
            if size % count == 0:
                taken.append(atom)
                size //= count
            elif count % size == 0:
                outer, inner = self.new(size), self.new(count // size)
                assert outer and inner
                self._parts[atom] = (*outer, *inner)
                taken += outer
                left[:0] = inner
                size = 1
            else:
                raise NotAttention("a reshape between the products")
        return tuple(taken)


@dataclass
class Level:
    """A program with its calls inlined, and what is known of it.

    Attributes:
      eqns: its equations; `results` are those of the program.
      producers, readers: the positions of the equations that compute and that read a variable.
    """

    eqns: list[JaxprEqn]
    results: Sequence[Any]
    producers: dict[Any, int] = field(default_factory=dict)
    readers: dict[Any, list[int]] = field(default_factory=dict)
    drawn: set[Any] = field(default_factory=set)  # random, and nothing but that

    def __post_init__(self) -> None:
        for position, eqn in enumerate(self.eqns):
            read = dict.fromkeys(v for v in eqn.invars if is_var(v))
            for v in read:
                self.readers.setdefault(v, []).append(position)
            self.producers.update((v, position) for v in eqn.outvars)
            name = eqn.primitive.name
            follows = name in POINTWISE or name in _DRAWN
            is_drawn = name in RANDOM or (
                follows and any(v in self.drawn for v in read) and self._are_drawn(read)
            )
            if is_drawn:
                self.drawn.update(eqn.outvars)

    def _are_drawn(self, read: Any) -> bool:
        return all(v in self.drawn or v.aval.size == 1 or self._is_constant(v) for v in read)

    def _is_constant(self, v: Any) -> bool:
        eqn = self.producer(v)
        return eqn is not None and not any(map(is_var, eqn.invars))

    def producer(self, atom: Any) -> JaxprEqn | None:
        position = self.producers.get(atom) if is_var(atom) else None
        return None if position is None else self.eqns[position]


@dataclass
class Region:
    """The equations of an attention.

    Attributes:
      members: their positions, the first product's first.
      dims: of the values that depend on the first product.
      sides: the dims of the operands that do not, except those of the products.
      queries, keys, values: operand and dims, of the products.
      key_atoms: what the second product contracts.
      out: the result.
    """

    level: Level
    atoms: Atoms
    first: int
    members: list[int] = field(default_factory=list)
    dims: dict[Any, Dims] = field(default_factory=dict)
    sides: dict[Any, Dims] = field(default_factory=dict)
    queries: tuple[Any, Dims] | None = None
    keys: tuple[Any, Dims] | None = None
    values: tuple[Any, Dims] | None = None
    key_atoms: frozenset[int] = frozenset()
    keys_first: bool = False
    values_first: bool = False
    second: int | None = None
    out: Any = None
    summed: bool = False
    exponential: bool = False

    # -- growth ------------------------------------------------------------------------------------

    def grow(self) -> None:
        """Add what depends on the first product, until one value is left: the result.

        Raises NotAttention.
        """
        level = self.level
        product = level.eqns[self.first]
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = product.params["dimension_numbers"]
        shapes = [shape_of(v) for v in product.invars]
        self.lhs = tuple(map(self.atoms.new, shapes[0]))
        pairs = dict(zip((*rhs_sum, *rhs_batch), (*lhs_sum, *lhs_batch), strict=True))
        self.rhs = tuple(
            self.lhs[pairs[d]] if d in pairs else self.atoms.new(n) for d, n in enumerate(shapes[1])
        )
        self.lhs_free = [d for d in range(len(shapes[0])) if d not in (*lhs_sum, *lhs_batch)]
        self.rhs_free = [d for d in range(len(shapes[1])) if d not in (*rhs_sum, *rhs_batch)]
        out = (
            *(self.lhs[d] for d in lhs_batch),
            *(self.lhs[d] for d in self.lhs_free),
            *(self.rhs[d] for d in self.rhs_free),
        )
        self.dims[product.outvars[0]] = out
        self.members = [self.first]
        is_batched = bool(lhs_batch)
        left = {product.outvars[0]: self._reads(product.outvars[0])}
        todo = list(level.readers.get(product.outvars[0], ()))
        heapq.heapify(todo)
        seen = {self.first}
        while todo:
            position = heapq.heappop(todo)
            if position in seen:
                continue
            seen.add(position)
            eqn = level.eqns[position]
            try:
                if eqn.effects:
                    raise NotAttention("an operation with an effect between the products")
                outs = self.results(eqn, position)
            except NotAttention as problem:
                after = self.second is not None
                reason = self._read_elsewhere(left) if after else problem.reason
                reported = problem.reported and is_batched and self.exponential and self.summed
                raise NotAttention(reason, reported) from None
            self.members.append(position)
            for v in dict.fromkeys(v for v in eqn.invars if is_var(v)):
                if v in left:
                    left[v] -= 1
            for v, dims in zip(eqn.outvars, outs, strict=True):
                self.dims[v], left[v] = dims, self._reads(v)
                for reader in level.readers.get(v, ()):
                    heapq.heappush(todo, reader)
            live = [v for v, count in left.items() if count > 0]
            if self.second is not None and len(live) == 1 and self._is_result(live[0]):
                self.out = live[0]
                return
        if self.second is not None and self.exponential and is_batched:
            raise NotAttention(self._read_elsewhere(left))
        raise NotAttention("no second product", reported=False)

    def _reads(self, v: Any) -> int:
        level = self.level
        return len(level.readers.get(v, ())) + any(v is out for out in level.results)

    def _is_result(self, v: Any) -> bool:
        assert self.values is not None
        contracted = self.key_atoms
        atoms = {a for dim in self.dims[v] for a in self.atoms.of(dim) or ()}
        features = {a for dim in self.features for a in self.atoms.of(dim) or ()}
        return not atoms & contracted and features <= atoms

    def _read_elsewhere(self, left: dict[Any, int]) -> str:
        live = [v for v, count in left.items() if count > 0 and self._has_keys(self.dims[v])]
        scores = self.level.eqns[self.first].outvars[0] in live
        return ELSEWHERE.format(
            "scores" if scores else "probabilities" if live else "sums of the softmax"
        )

    def _has_keys(self, dims: Dims) -> bool:
        atoms = {a for dim in dims for a in self.atoms.of(dim) or ()}
        free = frozenset(a for d in self.rhs_free for a in self.rhs[d] or ())
        return bool(atoms & self._all(self.key_atoms or free))

    # -- dims of results ---------------------------------------------------------------------------

    def results(self, eqn: JaxprEqn, position: int) -> list[Dims]:
        """The dims of the results of an equation that reads values of the region."""
        name = eqn.primitive.name
        if name in CUSTOM_DERIVATIVE:
            return self._within(eqn, position)
        if len(eqn.outvars) != 1:
            raise NotAttention(ACROSS.format(name))
        if name == "dot_general":
            return [self._product(eqn, position)]
        if name in POINTWISE:
            return [self._pointwise(eqn)]
        if name in ("reduce_max", "reduce_sum"):
            return [self._reduced(eqn)]
        dims = self.dims.get(eqn.invars[0], None)
        shape, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
        if dims is not None:
            if name == "transpose":
                return [tuple(dims[int(d)] for d in eqn.params["permutation"])]
            if (name in RESHAPES and eqn.params.get("dimensions") is None) or name == "squeeze":
                return [self.atoms.regrouped(shape, dims, new)]
            if name == "broadcast_in_dim" and len(eqn.invars) == 1:
                places = [int(d) for d in eqn.params["broadcast_dimensions"]]
                new_dims: list[Dim] = [None if n != 1 else () for n in new]
                for d, place in enumerate(places):
                    if shape[d] == new[place]:
                        new_dims[place] = dims[d]
                return [tuple(new_dims)]
        if name == "concatenate":
            return [self._joined(eqn)]
        if name == "slice" and dims is not None:
            return [self._sliced(eqn, dims)]
        raise NotAttention(ACROSS.format(name))

    def _within(self, eqn: JaxprEqn, position: int) -> list[Dims]:
        """Through a function with a custom derivative: its forward pass."""
        (body,) = bodies(eqn) or (None,)
        if body is None or "vjp" in eqn.primitive.name:
            raise NotAttention("a function with its own gradient between the products")
        inner = body.jaxpr
        for v, operand in zip(inner.invars, body.operands, strict=True):
            if is_var(operand) and operand in self.dims:
                self.dims[v] = self.dims[operand]
        for inner_eqn in inner.eqns:
            if any(is_var(v) and v in self.dims for v in inner_eqn.invars):
                if inner_eqn.primitive.name == "jit":
                    outs = self._within(inner_eqn, position)
                else:
                    outs = self.results(inner_eqn, position)
                self.dims.update(zip(inner_eqn.outvars, outs, strict=True))
        for inner_eqn in inner.eqns:
            for v in inner_eqn.outvars:
                self.sides.pop(v, None)
        for v, operand in zip(inner.invars, body.operands, strict=True):
            dims = self.sides.pop(v, None)
            if dims is not None and is_var(operand):
                self._side(operand, dims)
        return [self.dims[v] for v in inner.outvars]

    def _pointwise(self, eqn: JaxprEqn) -> Dims:
        shape = shape_of(eqn.outvars[0])
        dims: list[Dim] = [None if n != 1 else () for n in shape]
        for v in eqn.invars:
            if not is_var(v) or v not in self.dims or not shape_of(v):
                continue
            for d, dim in enumerate(self.dims[v]):
                dim = self.atoms.of(dim)
                if shape_of(v)[d] == 1 or dim is None:
                    continue
                if dims[d] is None:
                    dims[d] = dim
                elif self.atoms.of(dims[d]) != dim:
                    raise NotAttention("scores and probabilities of different dims are combined")
        for v in eqn.invars:
            if is_var(v) and v not in self.dims and shape_of(v):
                if v in self.level.drawn and self.exponential and self._has_keys(tuple(dims)):
                    raise NotAttention(DROPOUT)
                self._side(v, tuple(m if n != 1 else () for m, n in zip(dims, shape_of(v))))
            elif is_var(v) and v not in self.dims:
                self._side(v, ())
        if eqn.primitive.name in ("exp", "exp2"):
            self.exponential = True
        return tuple(dims)

    def _side(self, v: Any, dims: Dims) -> None:
        known = self.sides.setdefault(v, dims)
        if tuple(map(self.atoms.of, known)) != tuple(map(self.atoms.of, dims)):
            if None in known and len(known) == len(dims):
                self.sides[v] = dims
            elif None not in dims:
                raise NotAttention("one array is added along different dims")

    def _reduced(self, eqn: JaxprEqn) -> Dims:
        dims = self.dims[eqn.invars[0]]
        axes = {int(d) for d in eqn.params["axes"]}
        atoms = frozenset(a for d in axes for a in self.atoms.of(dims[d]) or ())
        constant = any(dims[d] is None for d in axes)
        if constant or (self.second is not None and not self._has_keys(dims)):
            raise NotAttention(ACROSS.format(eqn.primitive.name))
        self._contract_keys(atoms, eqn.primitive.name)
        self.summed = self.summed or (eqn.primitive.name == "reduce_sum" and self.exponential)
        return tuple(dim for d, dim in enumerate(dims) if d not in axes)

    def _contract_keys(self, atoms: frozenset[int], name: str) -> None:
        if not self.key_atoms:
            sides = []
            for dims, free in ((self.lhs, self.lhs_free), (self.rhs, self.rhs_free)):
                sides.append({a for d in free for a in self.atoms.of(dims[d]) or ()})
            if not atoms or not (atoms <= sides[0] or atoms <= sides[1]):
                raise NotAttention(ACROSS.format(name), reported=False)
            self.keys_first = atoms <= sides[0]
            self.key_atoms = atoms
        elif atoms not in (self._all(self.key_atoms), self.extended):
            raise NotAttention(ACROSS.format(name))

    def _all(self, atoms: frozenset[int]) -> frozenset[int]:
        """The atoms of today."""
        return frozenset(a for atom in atoms for a in self.atoms.of((atom,)) or ())

    extended: frozenset[int] = frozenset()
    within_extended: tuple[int, int] = (0, 0)  # the keys' part of the dim with one more column

    def _joined(self, eqn: JaxprEqn) -> Dims:
        """More columns beside those of the keys: sinks."""
        axis = eqn.params["dimension"]
        scores = [v for v in eqn.invars if is_var(v) and v in self.dims]
        if len(scores) != 1 or self.second is not None or self.extended or self.exponential:
            raise NotAttention(ACROSS.format("concatenate"))
        dims = self.dims[scores[0]]
        atoms = frozenset(self.atoms.of(dims[axis]) or ())
        self._contract_keys(atoms, "concatenate")
        start = sum(shape_of(v)[axis] for v in eqn.invars[: eqn.invars.index(scores[0])])
        more = self.atoms.new(shape_of(eqn.outvars[0])[axis])
        assert more is not None
        self.extended = frozenset(more)
        self.within_extended = (start, start + shape_of(scores[0])[axis])
        for v in eqn.invars:
            if is_var(v) and v not in self.dims:
                side: list[Dim] = [m if n != 1 else () for m, n in zip(dims, shape_of(v))]
                side[axis] = None if shape_of(v)[axis] != 1 else ()
                self._side(v, tuple(side))
        return tuple(more if d == axis else dim for d, dim in enumerate(dims))

    def _sliced(self, eqn: JaxprEqn, dims: Dims) -> Dims:
        """The keys' columns of those with sinks."""
        old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
        changed = [d for d in range(len(old)) if old[d] != new[d]]
        if not changed:
            return dims
        (d, *more) = changed
        at = (eqn.params["start_indices"][d], eqn.params["limit_indices"][d])
        is_keys = frozenset(dims[d] or ()) == self.extended and at == self.within_extended
        if more or not is_keys or eqn.params["strides"] not in (None, (1,) * len(old)):
            raise NotAttention(ACROSS.format("slice"))
        keys = tuple(sorted(self.key_atoms))
        if len(keys) != 1:
            raise NotAttention(ACROSS.format("slice"))
        return tuple(keys if i == d else dim for i, dim in enumerate(dims))

    def _product(self, eqn: JaxprEqn, position: int) -> Dims:
        ours = [i for i, v in enumerate(eqn.invars) if is_var(v) and v in self.dims]
        if self.second is not None or len(ours) != 1:
            raise NotAttention(ACROSS.format("a product"))
        (mine,) = ours
        sums, batches = eqn.params["dimension_numbers"]
        dims_of_mine = tuple(map(self.atoms.of, self.dims[eqn.invars[mine]]))
        other = eqn.invars[1 - mine]
        contracted = frozenset(a for d in sums[mine] for a in dims_of_mine[d] or ())
        if None in dims_of_mine or any(dims_of_mine[d] is None for d in sums[mine]):
            raise NotAttention(ACROSS.format("a product"), reported=False)
        keys = self._all(self.key_atoms)
        if not keys or contracted != keys:
            raise NotAttention("a product between those with the keys and with the values")
        pairs = dict(
            zip((*sums[1 - mine], *batches[1 - mine]), (*sums[mine], *batches[mine]), strict=True)
        )
        theirs = tuple(
            dims_of_mine[pairs[d]] if d in pairs else self.atoms.new(n)
            for d, n in enumerate(shape_of(other))
        )
        self.features = [theirs[d] for d in range(len(theirs)) if d not in pairs]
        self.values, self.second, self.values_first = (other, theirs), position, mine == 1
        free = [
            [d for d in range(len(dims)) if d not in (*sums[i], *batches[i])]
            for i, dims in ((mine, dims_of_mine), (1 - mine, theirs))
        ]
        parts = [tuple(dims_of_mine[d] for d in free[0]), tuple(theirs[d] for d in free[1])]
        lhs, rhs = parts if mine == 0 else parts[::-1]
        return (*(dims_of_mine[d] for d in batches[mine]), *lhs, *rhs)

    features: Sequence[Dim] = ()


def candidates(level: Level, anchor: int, limit: int = 200) -> list[int]:
    """The products from which the operand of an exponential may be computed, in order."""
    products: list[int] = []
    todo, seen = [anchor], {anchor}
    while todo and len(seen) < limit:
        eqn = level.eqns[todo.pop(0)]
        for v in eqn.invars:
            position = level.producers.get(v) if is_var(v) else None
            if position is None or position in seen:
                continue
            seen.add(position)
            before = level.eqns[position]
            name = before.primitive.name
            if name == "dot_general":
                products.append(position)
            elif name in POINTWISE or name in _WALKED or name in RESHAPES:
                todo.append(position)
    return sorted(products)


_WALKED = ("transpose", "broadcast_in_dim", "reduce_max", "concatenate", *CUSTOM_DERIVATIVE)
