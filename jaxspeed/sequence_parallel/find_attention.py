"""Recognition of attention in a model's own code: its equations become one `attention_call`.

The search is anchored at exponentials. From the product of queries and keys that an exponential is
computed from, the equations up to the product with the values are collected (`attention_region`),
and written as a call (`recognized_attention`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxspeed.jaxpr.evaluate import as_function, run_scan
from jaxspeed.jaxpr.primitives import CHECKPOINTS, CUSTOM_DERIVATIVE, INLINED, LOOPS
from jaxspeed.jaxpr.rewriter import Atom
from jaxspeed.jaxpr.sample_rules import place
from jaxspeed.jaxpr.slicing import read_by, renamed
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
    shape_of,
    with_functions,
    with_jaxpr,
)
from jaxspeed.sequence_parallel.attention_region import (
    Atoms,
    Level,
    NotAttention,
    Region,
    candidates,
)
from jaxspeed.sequence_parallel.index_expressions import (
    Element,
    Expression,
    depends,
    leaves,
    with_dims,
    with_leaves,
)
from jaxspeed.sequence_parallel.recognized_attention import LowProducts, RecognizedAttention
from jaxspeed.sequence_parallel.traced_expressions import expression_of, known_value, of_atom

EXPONENTIALS = ("exp", "exp2")


@dataclass(frozen=True)
class LeftAlone:
    """Attention that is not recognized."""

    reason: str
    where: str  # the line of the user's code, as `place` writes it


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
    rewritten = search.rewritten(closed.jaxpr, expressions)
    return rewritten, tuple(dict.fromkeys(search.left_alone))


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
        regions: dict[int, tuple[set[int], list[JaxprEqn]]] = {}
        taken: set[int] = set()
        tried: set[int] = set()
        for anchor, eqn in enumerate(level.eqns):
            inside = eqn.primitive.name in CUSTOM_DERIVATIVE and contains(eqn, _is_anchor)
            if not (_is_anchor(eqn) or inside) or anchor in taken:
                continue
            self._from_anchor(level, known, anchor, regions, taken, tried)
        if not changed and not regions:
            return jaxpr
        return flat.assembled(level, changed, regions)

    def _from_anchor(
        self,
        level: Level,
        known: _Known,
        anchor: int,
        regions: dict[int, tuple[set[int], list[JaxprEqn]]],
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
                call = RecognizedAttention(region, known, self.low)
                eqns = call.equations()
            except NotAttention as problem:
                if problem.reported:
                    self.left_alone.append(LeftAlone(problem.reason, place(level.eqns[anchor])))
                continue
            if taken.intersection(call.members):  # the softmax of what an attention returns
                continue
            regions[call.members[-1]] = {*call.members}, eqns
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
        rewritten = self.rewritten(body.jaxpr, expressions)
        if rewritten is body.jaxpr:
            return eqn
        read = read_by(rewritten)
        more = {inner: v for v, inner in outer.items() if inner in read}
        rewritten = rewritten.replace(invars=[*rewritten.invars, *more])
        if not more:
            return with_functions(eqn, lambda held: with_jaxpr(held, rewritten))
        if eqn.primitive.name in CHECKPOINTS:
            with_more = eqn.replace(invars=[*eqn.invars, *more.values()])
            return with_functions(with_more, lambda held: with_jaxpr(held, rewritten))
        return _scan(eqn, body, rewritten, list(more.values()))


def _is_anchor(eqn: Any) -> bool:
    return eqn.primitive.name in EXPONENTIALS


def _of_inputs(
    eqn: JaxprEqn, body: Body, known: _Known
) -> tuple[dict[Atom, Expression], dict[Atom, Var]]:
    """What is known of the inputs of an inner program.

    Returns expressions, and for the arrays outside that they depend on the variables inside.
    """
    expressions: dict[Atom, Expression] = {}
    outer: dict[Atom, Var] = {}
    name = eqn.primitive.name
    walked = body.first_xs
    kept = range(body.num_consts) if name in LOOPS else range(len(body.operands))
    inside = {body.operands[i]: body.jaxpr.invars[i] for i in kept if is_var(body.operands[i])}

    def within(v: Atom) -> Atom:
        if not is_var(v):
            return v
        return inside.get(v) or outer.setdefault(v, Var(v.aval))

    for i, (v, operand) in enumerate(zip(body.jaxpr.invars, body.operands, strict=True)):
        e = known(operand)
        if i in kept and not isinstance(e, Element) and (name != "while" or not leaves(e)):
            expressions[v] = with_leaves(e, within)
        elif name == "scan" and i >= walked and not leaves(e) and 0 not in depends(e):
            expressions[v] = with_dims(e, lambda d: d - 1)
    return expressions, outer


def _scan(eqn: JaxprEqn, body: Body, jaxpr: Jaxpr, more: Sequence[Atom]) -> JaxprEqn:
    """A scan of a program with more constants, its last inputs."""
    run = as_function(jaxpr, body.consts)

    def scan(*args: Any) -> list[Any]:
        operands, added = args[: len(eqn.invars)], args[len(eqn.invars) :]
        return run_scan(eqn, body, lambda *inputs: run(*inputs, *added), operands)

    operands = [*eqn.invars, *more]
    shapes = [
        jax.ShapeDtypeStruct(shape_of(v), v.aval.dtype, weak_type=v.aval.weak_type)
        for v in operands
    ]
    closed = jax.make_jaxpr(scan)(*shapes)
    (new_scan,) = closed.jaxpr.eqns
    names = dict(zip(closed.jaxpr.invars, operands, strict=True))
    return new_scan.replace(
        invars=renamed(new_scan.invars, names), outvars=eqn.outvars, source_info=eqn.source_info
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
            for inner_eqn in inner.eqns:
                self._write(inner_eqn, within, position, eqn.source_info.name_stack)
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
        regions: Mapping[int, tuple[set[int], list[JaxprEqn]]],
    ) -> Jaxpr:
        """The program with calls in place of regions; other calls than those with a region stay."""
        members = {m for region, _ in regions.values() for m in region}
        opened = {self.origins[p] for p in {*changed, *members}}
        results = {v for v in self._names.values() if is_var(v)}
        new = [*(eqns for _, eqns in regions.values()), [level.eqns[p] for p in changed]]
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
                if p in regions:
                    written += map(with_names, regions[p][1])
                elif p not in members:
                    written.append(with_names(level.eqns[p]))
        outvars = renamed(renamed(self.jaxpr.outvars, self._names), kept)
        return self.jaxpr.replace(eqns=written, outvars=outvars)


class _Known:
    """The expressions of the variables of a program."""

    def __init__(self, level: Level, expressions: dict[Atom, Expression]) -> None:
        self._found = expressions
        for eqn in level.eqns:
            if len(eqn.outvars) == 1:
                e = expression_of(eqn, [self(v) for v in eqn.invars])
                if e is not None:
                    self._found[eqn.outvars[0]] = e

    def __call__(self, atom: Any) -> Expression:
        expression = self._found.get(atom) if is_var(atom) else None
        return of_atom(atom) if expression is None else expression
