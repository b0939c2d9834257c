"""A region of equations that compute attention, as one `attention_call`.

The operands are arranged as `ops.attention` takes them; the program of the call is the model's own
equations, so that no number changes. If these are a softmax of scaled, capped and masked scores
(`softmax_forms`), and the mask is proved to be one that kernels take (`mask_forms`), the call says
so; its masks then follow from segment ids. Otherwise the call has the arrays that its equations
read as operands, and says which of their dims belong to the queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.jaxpr.dim_blocks import MixedDim, on_indices
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.primitives import ATTENTION, CONTROL, RANDOM, RESHAPES
from jaxspeed.jaxpr.rewriter import Atom
from jaxspeed.jaxpr.slicing import renamed, sub_jaxpr
from jaxspeed.jaxpr.traverse import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, is_var, shape_of
from jaxspeed.ops.attention_call import AttentionForm, Blind, attention_call
from jaxspeed.ops.mask import Mask
from jaxspeed.sequence_parallel.attention_region import (
    ACROSS,
    POINTWISE,
    Atoms,
    Dim,
    Dims,
    NotAttention,
    Region,
)
from jaxspeed.sequence_parallel.index_expressions import (
    TRUE,
    Const,
    Element,
    Expression,
    TwoValued,
    both,
    conjuncts,
    depends,
    evaluate_expression,
    leaves,
    negated,
    with_dims,
)
from jaxspeed.sequence_parallel.mask_forms import MaskForm, mask_form
from jaxspeed.sequence_parallel.softmax_forms import Exponentials, softmax_form
from jaxspeed.tensor_parallel.dim_propagation import relations_of


@dataclass(frozen=True)
class LowProducts:
    """Automatic mixed precision of the products in an attention's own program."""

    dtype: Any
    lowers: Callable[[JaxprEqn], bool]  # whether a product's operands are cast
    rewrite: Callable[[ClosedJaxpr], ClosedJaxpr]


class _Array:
    """The arrangement of an operand's dims as groups of atoms: those of `ops.attention`."""

    def __init__(
        self, shape: Sequence[int], dims: Dims, groups: Sequence[Sequence[int]], atoms: Atoms
    ) -> None:
        order = [a for dim in dims for a in dim or ()]
        wanted = [a for group in groups for a in group]
        if len({*order}) != len(order) or not {*order} <= {*wanted} or None in dims:
            raise NotAttention("dims that belong neither to queries nor to keys", reported=False)
        self.shape, self.sizes = tuple(shape), [atoms.sizes[a] for a in order]
        have = [a for a in wanted if a in order]
        self.order = [order.index(a) for a in have]
        self.missing = [i for i, a in enumerate(wanted) if a not in order]
        self.full = [atoms.sizes[a] for a in wanted]
        self.grouped = [math.prod(atoms.sizes[a] for a in group) for group in groups]

    def arranged(self, x: jax.Array) -> jax.Array:
        x = lax.transpose(_reshaped(x, self.sizes), self.order)
        if self.missing:
            x = jnp.broadcast_to(lax.expand_dims(x, self.missing), self.full)
        return _reshaped(x, self.grouped)

    def restored(self, x: jax.Array) -> jax.Array:
        x = _reshaped(x, self.full)
        for d in reversed(self.missing):
            x = lax.index_in_dim(x, 0, d, keepdims=False)
        back = [self.order.index(i) for i in range(len(self.order))]
        return _reshaped(lax.transpose(x, back), self.shape)


def _reshaped(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return x if x.shape == tuple(shape) else lax.reshape(x, tuple(shape))


class RecognizedAttention:
    """The call that replaces a region."""

    def __init__(
        self, region: Region, known: Callable[[Any], Expression], low: LowProducts | None
    ) -> None:
        self.region, self.level, self.atoms = region, region.level, region.atoms
        self.known = known
        assert region.second is not None and region.values is not None
        self.members = sorted(region.members)
        self.products = [self.level.eqns[region.first], self.level.eqns[region.second]]
        self.out: Atom = region.out
        self.body: list[JaxprEqn] = []  # before the members
        self.names: dict[Any, Any] = {}
        number = 0 if region.keys_first else 1
        pairs = list(zip(self.products[0].invars, (region.lhs, region.rhs), strict=True))
        (keys, key_dims), (queries, query_dims) = pairs[number], pairs[1 - number]
        values, value_dims = region.values
        k_source, k_dims, k_chain = self._before_repeats(keys, key_dims)
        v_source, v_dims, v_chain = self._before_repeats(values, value_dims)
        self.sources: list[Atom] = [queries, k_source, v_source]
        firsts = list(self.products[0].invars)
        self.inputs = [Var(v.aval) for v in self.sources]
        firsts[1 - number] = self.inputs[0]
        firsts[number] = self._copied(k_chain, self.inputs[1])
        seconds = list(self.products[1].invars)
        seconds[1 if region.values_first is False else 0] = self._copied(v_chain, self.inputs[2])
        self._replaced = {region.first: firsts, region.second: seconds}
        of_q, of_k, of_v = map(self._now, (query_dims, k_dims, v_dims))
        self._arrange(of_q, of_k, of_v, self._contracted(number))
        self._dtypes(low)

    # -- dims --------------------------------------------------------------------------------------

    def _now(self, dims: Dims) -> Dims:
        return tuple(map(self.atoms.of, dims))

    def _contracted(self, number: int) -> set[int]:
        sums = self.products[0].params["dimension_numbers"][0]
        dims = (self.region.lhs, self.region.rhs)[number]
        return {a for d in sums[number] for a in self.atoms.of(dims[d]) or ()}

    def _arrange(self, q: Dims, k: Dims, v: Dims, contracted: set[int]) -> None:
        atoms, sizes = self.atoms, self.atoms.sizes
        key_atoms = {a for atom in self.region.key_atoms for a in atoms.of((atom,)) or ()}
        features = [a for dim in self.region.features for a in atoms.of(dim) or ()]
        in_q, in_k, in_v = ([a for dim in dims for a in dim or ()] for dims in (q, k, v))
        keys = [a for a in in_k if a in key_atoms]
        shared = [
            a
            for a in dict.fromkeys([*in_k, *in_v])
            if a not in key_atoms and a not in contracted and a not in features
        ]
        query_atoms = [a for a in in_q if a not in contracted and a not in shared]
        if not keys or not query_atoms or (not shared and len(query_atoms) > 1):
            raise NotAttention("all samples share the keys", reported=False)
        count = math.prod(sizes[a] for a in keys)
        position = next(
            (a for a in query_atoms if sizes[a] == count), max(query_atoms, key=sizes.__getitem__)
        )
        before = [a for a in in_k[: in_k.index(keys[0])] if a in shared]
        batch = shared[:1] if len(shared) > 1 or before else []
        batch += [a for a in shared[1:-1] if a in before]
        heads = [a for a in shared if a not in batch]
        groups = [a for a in query_atoms if a != position]
        inner = [a for a in in_q if a in contracted]
        self.batch, self.position, self.keys = batch, position, keys
        of_queries = (batch, [position], [*heads, *groups])
        of_keys = (batch, keys, heads)
        out_dims = self._now(self.region.dims[self.out])
        shapes = [shape_of(x) for x in self.sources]
        self.arrays = [
            _Array(shapes[0], q, (*of_queries, inner), atoms),
            _Array(shapes[1], k, (*of_keys, inner), atoms),
            _Array(shapes[2], v, (*of_keys, features), atoms),
        ]
        self.result = _Array(shape_of(self.out), out_dims, (*of_queries, features), atoms)
        if self.result.missing:
            raise NotAttention("the result lacks a dim of the queries", reported=False)

    def _before_repeats(self, atom: Any, dims: Dims) -> tuple[Any, Dims, list[JaxprEqn]]:
        """An operand before its heads are repeated, and the equations that repeat them."""
        at, chain = atom, []
        now = dims
        while (eqn := self.level.producer(at)) is not None and len(eqn.invars) == 1:
            name, before = eqn.primitive.name, eqn.invars[0]
            chain.append(eqn)
            if name == "broadcast_in_dim" and shape_of(before) and is_var(before):
                places = [int(d) for d in eqn.params["broadcast_dimensions"]]
                shape = shape_of(eqn.outvars[0])
                kept = [shape[p] == n for p, n in zip(places, shape_of(before), strict=True)]
                added = math.prod(shape) != math.prod(shape_of(before))
                now = tuple(now[p] if same else () for p, same in zip(places, kept, strict=True))
                if added:
                    return before, now, chain[::-1]
            elif name == "transpose":
                order = [int(d) for d in eqn.params["permutation"]]
                now = tuple(now[order.index(i)] for i in range(len(order)))
            elif (name in RESHAPES or name == "squeeze") and is_var(before):
                try:
                    now = self.atoms.regrouped(shape_of(at), now, shape_of(before))
                except NotAttention:
                    break
            else:
                break
            at = before
        return atom, dims, []

    def _copied(self, chain: Sequence[JaxprEqn], source: Var) -> Var:
        for eqn in chain:
            out = Var(eqn.outvars[0].aval)
            self.body.append(eqn.replace(invars=[source], outvars=[out]))
            source = out
        return source

    # -- types -------------------------------------------------------------------------------------

    def _dtypes(self, low: LowProducts | None) -> None:
        """The dtype of the call's operands and result, that of its own equations or exact casts."""
        dtypes = [v.aval.dtype for v in self.sources]
        common = reduce(jnp.promote_types, dtypes)
        reader = self._only_reader()
        if self.out.aval.dtype != common and reader is not None:
            eqn = self.level.eqns[reader]
            if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == common:
                self.members.append(reader)
                self.out = eqn.outvars[0]
        self.low = None
        if low is not None and common == jnp.float32 and all(map(low.lowers, self.products)):
            self.low, common = low, low.dtype
        else:
            common = jnp.promote_types(common, self.out.aval.dtype)
        self.dtype = common

    def _only_reader(self) -> int | None:
        readers = self.level.readers.get(self.out, [])
        is_result = any(v is self.out for v in self.level.results)
        return readers[0] if len(readers) == 1 and not is_result else None

    # -- operands from outside ---------------------------------------------------------------------

    def _sides(self) -> dict[Atom, Dims]:
        return {v: self._now(dims) for v, dims in self.region.sides.items()}

    def equations(self) -> list[JaxprEqn]:
        """The equations that stand for the region's."""
        return self._by_kernel() or self._by_rows()

    def _by_kernel(self) -> list[JaxprEqn] | None:
        sides = self._sides()
        eqns = [self.level.eqns[m] for m in self.members]
        exponentials = softmax_form(eqns, self.out, lambda x: self._expression(x, sides))
        if exponentials is None or len(self.keys) != 1:
            return None
        if self.arrays[2].grouped[3] > self.arrays[0].grouped[3]:
            return None
        scores, (key,) = exponentials.of, self.keys
        condition: Expression = TRUE
        for score_mask in scores.masks:
            condition = both(condition, score_mask.visible)
        mask = mask_form(condition, self.batch, self.position, key, self.atoms.sizes)
        if mask is None:
            return None
        blind: Blind | None = _blind(exponentials) if mask.may_be_blind else "undefined"
        if blind is None:
            return None
        form = AttentionForm(scores.scale, mask.mask, scores.soft_cap, mask.segments, blind=blind)
        kept = (len(self.body), dict(self.names))
        rebuilt = self._rebuilt(mask, condition, sides)
        if rebuilt is None:
            self.body, self.names = self.body[: kept[0]], kept[1]
            return None
        ids = dict.fromkeys(
            leaf.variable
            for e in (*(mask.equal or ()), mask.queries, mask.keys)
            for leaf in leaves(e)
        )
        variables = [v for v in ids if is_var(v)]

        def operands(*values: Any) -> list[Any]:
            if not mask.segments:
                return []
            value_of = dict(zip(variables, values, strict=True))
            places = (self.position, key)
            return [
                *mask.ids(
                    self.batch,
                    places,
                    self.atoms.sizes,
                    lambda v: value_of[v] if is_var(v) else v.val,
                )
            ]

        return self._written(form, variables, operands, rebuilt)

    def _expression(self, atom: Any, sides: Mapping[Atom, Dims]) -> Expression:
        """The expression of an operand by the atoms of its dims."""
        e = self.known(atom)
        if not depends(e):
            return e
        dims = sides.get(atom, ())

        def atom_of(d: Any) -> Any:
            dim = dims[d] if d < len(dims) else None
            return dim[0] if dim is not None and len(dim) == 1 else ("?", d)

        if any(not isinstance(atom_of(d), int) for d in depends(e)):
            return Element(atom, ("?",))
        return with_dims(e, atom_of)

    def _rebuilt(
        self, mask: MaskForm, condition: Expression, sides: Mapping[Atom, Dims]
    ) -> tuple[list[Atom], Callable[..., list[Any]]] | None:
        """The operands from outside, computed from indices and segment ids alone.

        Returns variables, and a function from the ids to their values.
        """
        rebuilt: dict[Atom, Expression] = {}
        key = self.keys[0]
        fake = [
            jax.ShapeDtypeStruct([self.atoms.sizes[a] for a in (*self.batch, p)], jnp.int32)
            for p in (self.position, key)
        ]
        q_ids, k_ids = (
            Element(Var(jax.core.ShapedArray(x.shape, x.dtype)), (*self.batch, p))
            for x, p in zip(fake, (self.position, key), strict=True)
        )
        for v in sides:
            closed = self._closed(v)
            if closed is not None:
                self.body += closed
                continue
            e = self._expression(v, sides)
            by_ids = _substituted(
                e,
                conjuncts(condition),
                lambda c: mask.by_ids(c, (q_ids, k_ids), self.position, key),
            )
            if by_ids is None or not depends(by_ids) <= {a for dim in sides[v] for a in dim or ()}:
                return None
            rebuilt[v] = by_ids

        def values_of(ids: Sequence[Any]) -> list[Any]:
            by_leaf: dict[Any, Any] = {}
            for leaf, x, like in zip((q_ids, k_ids), ids, fake, strict=False):
                by_leaf[leaf.variable] = x.reshape(like.shape)
            values = []
            for v, e in rebuilt.items():
                dims = [a for dim in sides[v] for a in dim or ()]
                x = evaluate_expression(e, dims, self.atoms.sizes, by_leaf.__getitem__)
                shape = [n if dim else 1 for n, dim in zip(shape_of(v), sides[v], strict=True)]
                full = [self.atoms.sizes[a] for a in dims]
                x = jnp.broadcast_to(jnp.asarray(x, v.aval.dtype), full).reshape(shape)
                values.append(jnp.broadcast_to(x, shape_of(v)))
            return values

        return list(rebuilt), values_of

    def _closed(self, v: Atom) -> list[JaxprEqn] | None:
        """The equations that compute a value from nothing, if there are such."""
        todo, needed = [v], set[int]()
        while todo:
            position = self.level.producers.get(todo.pop())
            if position is None or len(needed) > 64:
                return None
            if position in needed:
                continue
            eqn = self.level.eqns[position]
            if eqn.effects or eqn.primitive.name in (*RANDOM, *CONTROL):
                return None
            needed.add(position)
            todo += [x for x in eqn.invars if is_var(x)]
        there = {out for eqn in self.body for out in eqn.outvars}
        eqns = [self.level.eqns[p] for p in sorted(needed)]
        return [eqn for eqn in eqns if not there & {*eqn.outvars}]

    def _by_rows(self) -> list[JaxprEqn]:
        """The call of what only its own equations describe."""
        sides = self._sides()
        self.others: dict[Any, tuple[Atom, int | None, Any, Any]] = {}
        self._sunk: dict[Any, Any] = {}
        for v, dims in sides.items():
            self.names[v] = self._sink(v, dims)
        sunk_operands = list(self.others.items())
        variables = list(dict.fromkeys(v for (v, _), x in sunk_operands if x[2] is not None))

        def operands(*values: Any) -> list[Any]:
            value_of = dict(zip(variables, values, strict=True))
            return [
                jnp.arange(shape_of(x[0])[x[3]], dtype=x[0].aval.dtype)
                if x[2] is None
                else _reshaped(value_of[v], x[2])
                for (v, _), x in sunk_operands
            ]

        def restored(others: Sequence[Any]) -> list[Any]:
            return [
                lax.broadcast_in_dim(y, shape_of(x[0]), (x[3],))
                if x[2] is None
                else _reshaped(y, shape_of(x[0]))
                for (_, x), y in zip(sunk_operands, others, strict=True)
            ]

        rows = tuple(x[1] for _, x in sunk_operands)
        form = AttentionForm(1.0, Mask(False, None), rows=rows)
        eqns = self._written(
            form, variables, operands, ([x[0] for _, x in sunk_operands], restored)
        )
        (call,) = (eqn for eqn in eqns if eqn.primitive.name == ATTENTION)
        try:
            on_indices(call.params["jaxpr"], (1, None, None, *rows))
        except MixedDim as problem:
            raise NotAttention(ACROSS.format(problem)) from None
        return eqns

    def _sink(self, atom: Any, dims: Dims) -> Any:
        """An operand as the body has it: computed there if queries and keys meet in it."""
        if not is_var(atom):
            return atom
        dims = self._now(dims)
        if (atom, dims) not in self._sunk:
            self._sunk[atom, dims] = self._computed(atom, dims) or self._operand(atom, dims)
        return self._sunk[atom, dims]

    def _operand(self, v: Atom, dims: Dims, iota: int | None = None) -> Atom:
        inner = Var(v.aval)
        if iota is not None:
            self.others[v, dims] = inner, 0, None, iota
            return inner
        shape: list[int] = []
        row = None
        for n, dim in zip(shape_of(v), dims, strict=True):
            if dim is not None and self.position in dim:
                row = len(shape) + dim.index(self.position)
                shape += [self.atoms.sizes[a] for a in dim]
            else:
                shape.append(n)
        self.others[v, dims] = inner, row, tuple(shape), None
        return inner

    def _computed(self, v: Atom, dims: Dims) -> Atom | None:
        eqn = self.level.producer(v)
        has = {a for dim in dims for a in dim or ()}
        if eqn is None or self.position not in has or not has & {*self.keys}:
            return None
        name = eqn.primitive.name
        if len(eqn.outvars) != 1 or eqn.effects or name in RANDOM:
            return None
        if name == "iota":
            along = dims[eqn.params["dimension"]]
            if along == (self.position,):
                return self._operand(v, dims, eqn.params["dimension"])
            if along is not None and self.position in along:
                return None
            operand_dims: list[Dims] | None = []
        else:
            try:
                operand_dims = self._operand_dims(eqn, dims)
            except NotAttention:
                operand_dims = None
        if operand_dims is None:
            return None
        operands = [self._sink(x, d) for x, d in zip(eqn.invars, operand_dims, strict=True)]
        out = Var(v.aval)
        self.body.append(eqn.replace(invars=operands, outvars=[out]))
        return out

    def _operand_dims(self, eqn: JaxprEqn, dims: Dims) -> list[Dims] | None:
        """The dims of an equation's operands, if each row of its result is of one row of those."""
        name, shape = eqn.primitive.name, shape_of(eqn.outvars[0])
        shapes = [shape_of(x) for x in eqn.invars]
        if name in POINTWISE:
            return [tuple(d if n != 1 else () for d, n in zip(dims, old)) for old in shapes]
        if name == "transpose":
            order = [int(d) for d in eqn.params["permutation"]]
            return [tuple(dims[order.index(i)] for i in range(len(order)))]
        if name == "broadcast_in_dim" and len(shapes) == 1:
            places = [int(d) for d in eqn.params["broadcast_dimensions"]]
            sizes = zip(places, shapes[0], strict=True)
            return [tuple(dims[p] if shape[p] == n else () for p, n in sizes)]
        if (name in RESHAPES and eqn.params.get("dimensions") is None) or name == "squeeze":
            return [self.atoms.regrouped(shape, dims, shapes[0])]
        if name not in _SUNK or (relations := relations_of(eqn)) is None:
            return None
        by_factor: dict[Any, Dim] = {
            f: dim for f, dim in zip(relations.results[0], dims, strict=True) if f is not None
        }
        known = {f for factors in relations.operands for f in factors}
        for f, dim in zip(relations.results[0], dims, strict=True):
            if self.position in (dim or ()) and (
                f is None or f in relations.mixed or f not in known
            ):
                return None
        return [
            tuple(
                by_factor[f] if f in by_factor else self.atoms.new(n)
                for f, n in zip(factors, old, strict=True)
            )
            for factors, old in zip(relations.operands, shapes, strict=True)
        ]

    # -- writing -----------------------------------------------------------------------------------

    def _written(
        self,
        form: AttentionForm,
        variables: Sequence[Atom],
        operands: Callable[..., list[Any]],
        inside: tuple[list[Atom], Callable[..., list[Any]]],
    ) -> list[JaxprEqn]:
        """The equations of a call with this form.

        `operands` gives its further operands from the values of `variables`, and `inside` the
        variables that the body's equations read, with their values from these operands.
        """
        more, values_of = inside
        eqns = [*self.body]
        for m in self.members:
            eqn = self.level.eqns[m]
            invars = self._replaced.get(m) or renamed(eqn.invars, self.names)
            if m in self._replaced:
                invars = renamed(invars, self.names)
            eqns.append(eqn.replace(invars=invars))
        stacks = [self.level.eqns[m].source_info.name_stack for m in self.members]
        prefix = _common([tuple(stack.stack) for stack in stacks])
        eqns = [_within(eqn, prefix) for eqn in eqns]
        inner = _program(eqns, [*self.inputs, *more], [self.out])
        run = as_function(inner)
        sources = self.sources

        def body(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
            arrays = [
                array.restored(x).astype(source.aval.dtype)
                for array, x, source in zip(self.arrays, (q, k, v), sources, strict=True)
            ]
            (out,) = run(*arrays, *values_of(others))
            return self.result.arranged(out).astype(self.dtype)

        if self.low is not None:
            body = _by(self.low.rewrite, body)

        def call(*args: jax.Array) -> jax.Array:
            arrays = [
                array.arranged(x).astype(self.dtype)
                for array, x in zip(self.arrays, args[:3], strict=True)
            ]
            out = attention_call(form, body, *arrays, *operands(*args[3:]))
            return self.result.restored(out.astype(self.out.aval.dtype))

        like = self.products[1]
        info = like.source_info
        at = info.replace(name_stack=type(info.name_stack)(prefix))
        return _spliced(call, [*self.sources, *variables], self.out, at)


# In fp32 the sum with a score of less than 32 is this number.
_ABSORBS = -1e9
_SUNK = ("gather", "dot_general", "reduce_sum", "reduce_max", "reduce_min", "reduce_or",
         "reduce_and", "concatenate")  # fmt: skip


def _blind(exponentials: Exponentials) -> Blind | None:
    """What a query that sees no key gets by the model's own code; None if no kernel gives that.

    Scores to which less is added than `_ABSORBS` still differ: its softmax is not uniform.
    """
    masks = exponentials.of.masks
    fills = {m.fill for m in masks}
    if fills == {-math.inf} or not exponentials.shifted:
        return "nan"
    added = any(m.added for m in masks)
    same_fill = len(masks) == 1 if added else len(fills) == 1
    absorbs = not added or max(fills) <= _ABSORBS
    return "mean" if same_fill and absorbs and -math.inf not in fills else None


def _substituted(
    e: Expression, visible: Sequence[Expression], new: Callable[[Expression], Expression]
) -> Expression | None:
    """An operand with its condition, which are some of `visible` or their negation, by ids."""
    if isinstance(e, Const):
        return e
    condition = e.condition if isinstance(e, TwoValued) else e
    if all(conjunct in visible for conjunct in conjuncts(condition)):
        by_ids = new(condition)
    elif all(conjunct in visible for conjunct in conjuncts(negated(condition))):
        by_ids = negated(new(negated(condition)))
    else:
        return None
    return TwoValued(by_ids, e.if_true, e.if_false) if isinstance(e, TwoValued) else by_ids


def _common(stacks: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The scopes that all equations are in."""
    first, *others = stacks
    length = min(len(stack) for stack in (first, *others))
    count = next((i for i in range(length) if any(o[i] != first[i] for o in others)), length)
    return first[:count]


def _within(eqn: JaxprEqn, prefix: tuple[Any, ...]) -> JaxprEqn:
    info = eqn.source_info
    stack = tuple(info.name_stack.stack)
    left = stack[len(prefix) :] if stack[: len(prefix)] == prefix else ()
    return eqn.replace(source_info=info.replace(name_stack=type(info.name_stack)(left)))


def _program(eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outs: Sequence[Any]) -> Jaxpr:
    base = jax.make_jaxpr(lambda: ())().jaxpr
    return sub_jaxpr(base, eqns, inputs, outs)


def _by(
    rewrite: Callable[[ClosedJaxpr], ClosedJaxpr], function: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    def run(*args: jax.Array) -> jax.Array:
        rewritten = rewrite(jax.make_jaxpr(function)(*args))
        (out,) = as_function(rewritten.jaxpr, rewritten.consts)(*args)
        return out

    return run


def _spliced(
    function: Callable[..., Any], operands: Sequence[Any], out: Any, info: Any
) -> list[JaxprEqn]:
    """The equations of a function of variables of the program, whose result is `out`."""
    shapes = [jax.ShapeDtypeStruct(shape_of(v), v.aval.dtype) for v in operands]
    closed = jax.make_jaxpr(function)(*shapes)
    names: dict[Any, Any] = dict(zip(closed.jaxpr.invars, operands, strict=True))
    names |= {
        v: Literal(x, v.aval) for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)
    }
    names[closed.jaxpr.outvars[0]] = out
    return [
        eqn.replace(
            invars=renamed(eqn.invars, names),
            outvars=[names.get(v, v) for v in eqn.outvars],
            source_info=info,
        )
        for eqn in closed.jaxpr.eqns
    ]
