"""Recognition of attention in a model's own code: its equations become one `attention_call`.

The search is anchored at exponentials. From the product of queries and keys that an exponential is
computed from, the equations up to the product with the values are collected (`attention_region`).
The operands are arranged as `ops.attention` takes them; the program of the call is the model's own
equations, so that no number changes. If these are a softmax of scaled, capped and masked scores
(`softmax_forms`), and the mask is proved to be one that kernels take (`mask_forms`), the call says
so; its masks then follow from segment ids. Otherwise the call has the arrays that its equations
read as operands, and says which of their dims belong to the queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.jaxpr.dim_blocks import MixedDim, on_indices
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.primitives import (
    ATTENTION,
    CHECKPOINTS,
    CONTROL,
    CUSTOM_DERIVATIVE,
    INLINED,
    LOOPS,
    RANDOM,
    RESHAPES,
)
from jaxspeed.jaxpr.rewriter import Atom
from jaxspeed.jaxpr.sample_rules import place
from jaxspeed.jaxpr.slicing import read_by, renamed, sub_jaxpr
from jaxspeed.jaxpr.traverse import (
    Body,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    called,
    contains,
    is_marked,
    is_var,
    open_jaxpr,
    with_functions,
    with_jaxpr,
)
from jaxspeed.ops.attention_call import AttentionForm, Blind, attention_call
from jaxspeed.ops.mask import Mask
from jaxspeed.sequence_parallel.attention_region import (
    ACROSS,
    POINTWISE,
    Atoms,
    Dim,
    Dims,
    Level,
    NotAttention,
    Region,
    candidates,
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
    expression_of,
    known_value,
    leaves,
    negated,
    of_atom,
    with_dims,
    with_leaves,
)
from jaxspeed.sequence_parallel.mask_forms import MaskForm, mask_form
from jaxspeed.sequence_parallel.softmax_forms import Exponentials, softmax_form
from jaxspeed.tensor_parallel.dim_propagation import relations_of, shape_of

EXPONENTIALS = ("exp", "exp2")


@dataclass(frozen=True)
class LeftAlone:
    """Attention that is not recognized."""

    reason: str
    where: str  # the line of the user's code, as `place` writes it


@dataclass(frozen=True)
class LowProducts:
    """Automatic mixed precision of the products in an attention's own program."""

    dtype: Any
    lowers: Callable[[JaxprEqn], bool]  # whether a product's operands are cast
    rewrite: Callable[[ClosedJaxpr], ClosedJaxpr]


def with_attention_calls(
    closed: ClosedJaxpr, low: LowProducts | None = None
) -> tuple[Jaxpr, tuple[LeftAlone, ...]]:
    """A program with its attention as calls; and what looks like attention but is left alone."""
    search = _Search(low)
    expressions = {
        v: e
        for v, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        if (e := known_value(value)) is not None
    }
    made = search.rewritten(closed.jaxpr, expressions)
    return made, tuple(dict.fromkeys(search.left_alone))


@dataclass
class _Search:
    low: LowProducts | None
    left_alone: list[LeftAlone] = field(default_factory=list)

    def rewritten(self, jaxpr: Jaxpr, expressions: dict[Atom, Expression]) -> Jaxpr:
        """A program with its attention as calls; the same object if it has none."""
        if not any(contains(eqn, _is_anchor) for eqn in jaxpr.eqns):
            return jaxpr
        flat = _Flat(jaxpr)
        level = Level(flat.eqns, flat.results)
        known = _Known(level, expressions)
        changed: set[int] = set()
        for position, eqn in enumerate(level.eqns):
            name = eqn.primitive.name
            if name in (*LOOPS, *CHECKPOINTS) and contains(eqn, _is_anchor):
                new = self._entered(eqn, known)
                if new is not eqn:
                    level.eqns[position] = new
                    changed.add(position)
            elif name == "cond":
                self._note_branches(eqn)
        found: dict[int, tuple[set[int], list[JaxprEqn]]] = {}
        taken: set[int] = set()
        tried: set[int] = set()
        for anchor, eqn in enumerate(level.eqns):
            inside = eqn.primitive.name in CUSTOM_DERIVATIVE and contains(eqn, _is_anchor)
            if not (_is_anchor(eqn) or inside) or anchor in taken:
                continue
            self._from_anchor(level, known, anchor, found, taken, tried)
        if not changed and not found:
            return jaxpr
        return flat.assembled(level, changed, found)

    def _from_anchor(
        self,
        level: Level,
        known: _Known,
        anchor: int,
        found: dict[int, tuple[set[int], list[JaxprEqn]]],
        taken: set[int],
        tried: set[int],
    ) -> None:
        for first in candidates(level, anchor):
            if first in tried:
                continue
            tried.add(first)
            region = Region(level, Atoms(), first)
            try:
                region.grow()
                if anchor not in region.members or not region.summed:
                    continue
                call = _Call(region, known, self.low)
                eqns = call.equations()
            except NotAttention as problem:
                if problem.reported:
                    self.left_alone.append(LeftAlone(problem.reason, place(level.eqns[anchor])))
                continue
            found[call.members[-1]] = {*call.members}, eqns
            taken |= {*call.members}
            return

    def _note_branches(self, eqn: JaxprEqn) -> None:
        """Attention in a branch communicates only on the devices that take it: not rewritten."""
        for body in bodies(eqn):
            inner = _Search(self.low)
            if inner.rewritten(body.jaxpr, {}) is not body.jaxpr:
                self.left_alone.append(LeftAlone("in a branch of a conditional", place(eqn)))
                return

    def _entered(self, eqn: JaxprEqn, known: _Known) -> JaxprEqn:
        """A loop or a checkpoint with its program rewritten.

        What masks depend on outside becomes an operand, where the rewritten program reads it.
        """
        (body,) = bodies(eqn)
        expressions, outer = _of_inputs(eqn, body, known)
        constants = zip(body.jaxpr.constvars, body.consts, strict=False)
        expressions.update((v, e) for v, x in constants if (e := known_value(x)) is not None)
        made = self.rewritten(body.jaxpr, expressions)
        if made is body.jaxpr:
            return eqn
        read = read_by(made)
        more = {inner: v for v, inner in outer.items() if inner in read}
        made = made.replace(invars=[*made.invars, *more])
        if not more:
            return with_functions(eqn, lambda held: with_jaxpr(held, made))
        if eqn.primitive.name in CHECKPOINTS:
            with_more = eqn.replace(invars=[*eqn.invars, *more.values()])
            return with_functions(with_more, lambda held: with_jaxpr(held, made))
        return _scan(eqn, body, made, list(more.values()))


def _is_anchor(eqn: Any) -> bool:
    return eqn.primitive.name in EXPONENTIALS


def _of_inputs(
    eqn: JaxprEqn, body: Body, known: _Known
) -> tuple[dict[Atom, Expression], dict[Atom, Var]]:
    """What is known of the inputs of an inner program.

    Returns expressions, and for the arrays outside that they depend on the variables inside.
    """
    found: dict[Atom, Expression] = {}
    outer: dict[Atom, Var] = {}
    name = eqn.primitive.name
    walked = body.num_consts + body.num_carry
    kept = range(body.num_consts) if name in LOOPS else range(len(body.operands))
    inside = {body.operands[i]: body.jaxpr.invars[i] for i in kept if is_var(body.operands[i])}

    def within(v: Atom) -> Atom:
        if not is_var(v):
            return v
        return inside.get(v) or outer.setdefault(v, Var(v.aval))

    for i, (v, given) in enumerate(zip(body.jaxpr.invars, body.operands, strict=True)):
        e = known(given)
        if i in kept and not isinstance(e, Element) and (name != "while" or not leaves(e)):
            found[v] = with_leaves(e, within)
        elif name == "scan" and i >= walked and not leaves(e) and 0 not in depends(e):
            found[v] = with_dims(e, lambda d: d - 1)
    return found, outer


def _scan(eqn: JaxprEqn, body: Body, jaxpr: Jaxpr, more: Sequence[Atom]) -> JaxprEqn:
    """A scan of a program with more constants, its last inputs."""
    run, count = as_function(jaxpr, body.consts), body.num_carry

    def scan(*args: Any) -> list[Any]:
        given, added = args[: len(eqn.invars)], args[len(eqn.invars) :]
        consts, left = given[: body.num_consts], given[body.num_consts :]

        def step(carry: Any, slices: Any) -> tuple[Any, Any]:
            outs = run(*consts, *carry, *slices, *added)
            return outs[:count], outs[count:]

        params = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        carry, stacked = lax.scan(step, list(left[:count]), list(left[count:]), **params)
        return [*carry, *stacked]

    operands = [*eqn.invars, *more]
    shapes = [
        jax.ShapeDtypeStruct(shape_of(v), v.aval.dtype, weak_type=v.aval.weak_type)
        for v in operands
    ]
    closed = jax.make_jaxpr(scan)(*shapes)
    (made,) = closed.jaxpr.eqns
    names = dict(zip(closed.jaxpr.invars, operands, strict=True))
    return made.replace(
        invars=renamed(made.invars, names), outvars=eqn.outvars, source_info=eqn.source_info
    )


# -- programs with their calls inlined -------------------------------------------------------------


class _Flat:
    """A program with all calls inlined, and where each equation was before."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.eqns: list[JaxprEqn] = []
        self.origins: list[int] = []  # the position of the equation in the program
        self._names: dict[Any, Any] = {}
        for position, eqn in enumerate(jaxpr.eqns):
            self._write(eqn, self._names, position, None)
        self.results = renamed(jaxpr.outvars, self._names)

    def _write(self, eqn: JaxprEqn, names: dict[Any, Any], position: int, outer: Any) -> None:
        invars = renamed(eqn.invars, names)
        if outer is not None:
            info = eqn.source_info
            eqn = eqn.replace(source_info=info.replace(name_stack=outer + info.name_stack))
        if eqn.primitive.name in INLINED and not is_marked(eqn) and bodies(eqn):
            inner, consts = open_jaxpr(called(eqn))
            within: dict[Any, Any] = dict(zip(inner.invars, invars, strict=True))
            within.update(
                (v, Literal(x, v.aval)) for v, x in zip(inner.constvars, consts, strict=True)
            )
            for each in inner.eqns:
                self._write(each, within, position, eqn.source_info.name_stack)
            results = zip(eqn.outvars, renamed(inner.outvars, within), strict=True)
            names.update((v, atom) for v, atom in results)
            return
        outvars = eqn.outvars
        if names is not self._names:
            outvars = [type(v)(v.aval) for v in outvars]
            names.update(zip(eqn.outvars, outvars, strict=True))
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars))
        self.origins.append(position)

    def assembled(
        self,
        level: Level,
        changed: set[int],
        found: Mapping[int, tuple[set[int], list[JaxprEqn]]],
    ) -> Jaxpr:
        """The program with calls in place of regions; other calls than those with a region stay."""
        members = {m for each, _ in found.values() for m in each}
        opened = {self.origins[p] for p in {*changed, *members}}
        results = {v for v in self._names.values() if is_var(v)}
        new = [*(eqns for _, eqns in found.values()), [level.eqns[p] for p in changed]]
        for eqns in new:  # they may read values within other calls
            for v in (v for eqn in eqns for v in eqn.invars if is_var(v)):
                if v in level.producers and v not in results:
                    opened.add(self.origins[level.producers[v]])
        kept: dict[Any, Any] = {}  # what stands for the results of calls that stay
        for v, name in self._names.items():
            position = level.producers.get(name) if is_var(name) else None
            if position is not None and self.origins[position] not in opened:
                kept.setdefault(name, v)

        def with_names(eqn: JaxprEqn) -> JaxprEqn:
            invars = renamed(renamed(eqn.invars, self._names), kept)
            same = all(a is b for a, b in zip(invars, eqn.invars, strict=True))
            return eqn if same else eqn.replace(invars=invars)

        written: list[JaxprEqn] = []
        by_origin: dict[int, list[int]] = {}
        for p, origin in enumerate(self.origins):
            by_origin.setdefault(origin, []).append(p)
        for origin, eqn in enumerate(self.jaxpr.eqns):
            if origin not in opened:
                written.append(with_names(eqn))
                continue
            for p in by_origin[origin]:
                if p in found:
                    written += map(with_names, found[p][1])
                elif p not in members:
                    written.append(with_names(level.eqns[p]))
        outvars = renamed(renamed(self.jaxpr.outvars, self._names), kept)
        return self.jaxpr.replace(eqns=written, outvars=outvars)


class _Known:
    """The expressions of the variables of a program."""

    def __init__(self, level: Level, given: dict[Atom, Expression]) -> None:
        self._found = given
        for eqn in level.eqns:
            if len(eqn.outvars) == 1:
                e = expression_of(eqn, [self(v) for v in eqn.invars])
                if e is not None:
                    self._found[eqn.outvars[0]] = e

    def __call__(self, atom: Any) -> Expression:
        found = self._found.get(atom) if is_var(atom) else None
        return of_atom(atom) if found is None else found


# -- one attention ---------------------------------------------------------------------------------


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


class _Call:
    """The call that replaces a region."""

    def __init__(self, region: Region, known: _Known, low: LowProducts | None) -> None:
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
        own = [a for a in in_q if a not in contracted and a not in shared]
        if not keys or not own or (not shared and len(own) > 1):
            raise NotAttention("all samples share the keys", reported=False)
        count = math.prod(sizes[a] for a in keys)
        position = next((a for a in own if sizes[a] == count), max(own, key=sizes.__getitem__))
        before = [a for a in in_k[: in_k.index(keys[0])] if a in shared]
        batch = shared[:1] if len(shared) > 1 or before else []
        batch += [a for a in shared[1:-1] if a in before]
        heads = [a for a in shared if a not in batch]
        groups = [a for a in own if a != position]
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
        found = softmax_form(eqns, self.out, lambda x: self._expression(x, sides))
        if found is None or len(self.keys) != 1:
            return None
        if self.arrays[2].grouped[3] > self.arrays[0].grouped[3]:
            return None
        scores, (key,) = found.of, self.keys
        condition: Expression = TRUE
        for each in scores.masks:
            condition = both(condition, each.visible)
        mask = mask_form(condition, self.batch, self.position, key, self.atoms.sizes)
        if mask is None:
            return None
        blind: Blind | None = _blind(found) if mask.may_be_blind else "undefined"
        if blind is None:
            return None
        form = AttentionForm(scores.scale, mask.mask, scores.soft_cap, mask.segments, blind=blind)
        kept = (len(self.body), dict(self.names))
        made = self._rebuilt(mask, condition, sides)
        if made is None:
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

        return self._written(form, variables, operands, made)

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
            made = _substituted(
                e,
                conjuncts(condition),
                lambda c: mask.by_ids(c, (q_ids, k_ids), self.position, key),
            )
            if made is None or not depends(made) <= {a for dim in sides[v] for a in dim or ()}:
                return None
            rebuilt[v] = made

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
        given = list(self.others.items())
        variables = list(dict.fromkeys(v for (v, _), x in given if x[2] is not None))

        def operands(*values: Any) -> list[Any]:
            value_of = dict(zip(variables, values, strict=True))
            return [
                jnp.arange(shape_of(x[0])[x[3]], dtype=x[0].aval.dtype)
                if x[2] is None
                else _reshaped(value_of[v], x[2])
                for (v, _), x in given
            ]

        def restored(others: Sequence[Any]) -> list[Any]:
            return [
                lax.broadcast_in_dim(y, shape_of(x[0]), (x[3],))
                if x[2] is None
                else _reshaped(y, shape_of(x[0]))
                for (_, x), y in zip(given, others, strict=True)
            ]

        rows = tuple(x[1] for _, x in given)
        form = AttentionForm(1.0, Mask(False, None), rows=rows)
        made = self._written(form, variables, operands, ([x[0] for _, x in given], restored))
        (call,) = (eqn for eqn in made if eqn.primitive.name == ATTENTION)
        try:
            on_indices(call.params["jaxpr"], (1, None, None, *rows))
        except MixedDim as problem:
            raise NotAttention(ACROSS.format(problem)) from None
        return made

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
            given: list[Dims] | None = []
        else:
            try:
                given = self._operand_dims(eqn, dims)
            except NotAttention:
                given = None
        if given is None:
            return None
        operands = [self._sink(x, d) for x, d in zip(eqn.invars, given, strict=True)]
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
        if name not in _SUNK or (found := relations_of(eqn)) is None:
            return None
        by_factor: dict[Any, Dim] = {
            f: dim for f, dim in zip(found.results[0], dims, strict=True) if f is not None
        }
        known = {f for factors in found.operands for f in factors}
        for f, dim in zip(found.results[0], dims, strict=True):
            if self.position in (dim or ()) and (f is None or f in found.mixed or f not in known):
                return None
        return [
            tuple(
                by_factor[f] if f in by_factor else self.atoms.new(n)
                for f, n in zip(factors, old, strict=True)
            )
            for factors, old in zip(found.operands, shapes, strict=True)
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
        prefix = _common([tuple(each.stack) for each in stacks])
        eqns = [_within(eqn, prefix) for eqn in eqns]
        inner = _program(eqns, [*self.inputs, *more], [self.out])
        run = as_function(inner)
        sources = self.sources

        def body(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
            given = [
                array.restored(x).astype(source.aval.dtype)
                for array, x, source in zip(self.arrays, (q, k, v), sources, strict=True)
            ]
            (out,) = run(*given, *values_of(others))
            return self.result.arranged(out).astype(self.dtype)

        if self.low is not None:
            body = _by(self.low.rewrite, body)

        def call(*args: jax.Array) -> jax.Array:
            given = [
                array.arranged(x).astype(self.dtype)
                for array, x in zip(self.arrays, args[:3], strict=True)
            ]
            out = attention_call(form, body, *given, *operands(*args[3:]))
            return self.result.restored(out.astype(self.out.aval.dtype))

        like = self.products[1]
        info = like.source_info
        at = info.replace(name_stack=type(info.name_stack)(prefix))
        return _spliced(call, [*self.sources, *variables], self.out, at)


_SUNK = ("gather", "dot_general", "reduce_sum", "reduce_max", "reduce_min", "reduce_or",
         "reduce_and", "concatenate")  # fmt: skip


def _blind(found: Exponentials) -> Blind | None:
    """What a query that sees no key gets by the model's own code; None if no kernel gives that."""
    masks = found.of.masks
    fills = {m.fill for m in masks}
    if fills == {-math.inf} or not found.shifted:
        return "nan"
    one = len(masks) == 1 or (len(fills) == 1 and not any(m.added for m in masks))
    return "mean" if one and -math.inf not in fills else None


def _substituted(
    e: Expression, visible: Sequence[Expression], new: Callable[[Expression], Expression]
) -> Expression | None:
    """An operand with its condition, which are some of `visible` or their negation, by ids."""
    if isinstance(e, Const):
        return e
    condition = e.condition if isinstance(e, TwoValued) else e
    if all(each in visible for each in conjuncts(condition)):
        made = new(condition)
    elif all(each in visible for each in conjuncts(negated(condition))):
        made = negated(new(negated(condition)))
    else:
        return None
    return TwoValued(made, e.if_true, e.if_false) if isinstance(e, TwoValued) else made


def _common(stacks: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The scopes that all equations are in."""
    first, *others = stacks
    length = min(len(each) for each in (first, *others))
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
        made = rewrite(jax.make_jaxpr(function)(*args))
        (out,) = as_function(made.jaxpr, made.consts)(*args)
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
