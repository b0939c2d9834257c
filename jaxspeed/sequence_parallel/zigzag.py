"""Sequences in zig-zag order, where a traced loss is proved not to depend on the order of tokens.

What enters the sequence is permuted once (`ops.token_order`), outside of what reads it; results
that have tokens come out in their order. Draws are the same for each token, and permuted where they
are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.axes import SEQ, TENSOR
from jaxspeed.errors import ConfigError
from jaxspeed.jaxpr.primitives import ATTENTION, CONTROL, CUSTOM_DERIVATIVE, ENTERED, RANDOM
from jaxspeed.jaxpr.rewriter import LEAVE, Atom, Rewriter, Rewriting
from jaxspeed.jaxpr.sample_rules import place, relations_of
from jaxspeed.jaxpr.traverse import Body, Jaxpr, JaxprEqn, Var, is_var, shape_of
from jaxspeed.ops import splash
from jaxspeed.ops.attention_call import AttentionForm, attention_call, body_of, form_of
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.ops.token_order import in_token_order
from jaxspeed.sequence_parallel.choose_form import choose_form
from jaxspeed.sequence_parallel.settings import SequenceSettings
from jaxspeed.sequence_parallel.zigzag_proof import (
    Along,
    ContiguousError,
    OrderProof,
    TokenDims,
    is_in_any_order,
)
from jaxspeed.tensor_parallel.dim_propagation import CallFrame, propagate_dims
from jaxspeed.tensor_parallel.sequence_dims import SequenceDims


def gains(form: AttentionForm, q: Sequence[int], k: Sequence[int], settings: Any) -> bool:
    """Whether an attention's work is divided more evenly in zig-zag order.

    A window of no more tokens than a device has is even in contiguous order, with fewer hops. What
    the config asks for and an attention cannot have is refused where its form is chosen.
    """
    free, mask = free_axes(), form.mask
    try:
        ordered = replace(form, zigzag=True)
        how, _ = choose_form(ordered, q, k, settings, free[SEQ], free.get(TENSOR, 1))
    except ConfigError:
        return False
    wide = mask.window is None or mask.window > q[1] // free[SEQ]
    return how.kind != "ulysses" and mask.causal and wide


def in_zigzag(
    jaxpr: Jaxpr,
    parameters: Mapping[str, Var],
    batch: Sequence[Var],
    positions: Mapping[Var, int],
    settings: SequenceSettings,
) -> Jaxpr:
    """A traced program with its sequences in zig-zag order; its inputs and results have their own.

    The same program where `settings.layout` is "auto" and nothing is gained. Raises
    ContiguousError.
    """
    propagated = propagate_dims(jaxpr, parameters, batch)
    dims = SequenceDims(propagated, positions, free_axes()[SEQ])
    attentions = [
        (frame, eqn)
        for frame, _, eqn in propagated.top.equations()
        if eqn.primitive.name == ATTENTION and dims.of(frame, eqn.invars[0]) == 1
    ]
    if not attentions and settings.layout == "auto":
        return jaxpr
    if not attentions:
        raise ContiguousError("no attention over the sequence is known")
    shapes = [[shape_of(v) for v in eqn.invars[:2]] for _, eqn in attentions]
    if settings.layout == "auto":
        calls = zip(attentions, shapes, strict=True)
        if not any(gains(eqn.params["form"], q, k, settings) for (_, eqn), (q, k) in calls):
            return jaxpr
    classes, (first, eqn) = propagated.classes, attentions[0]
    node, length = first.of(eqn.invars[0])[1], shapes[0][0][1]
    assert node is not None
    for (frame, other), (q, k) in zip(attentions, shapes, strict=True):
        same = all(classes.same(frame.of(v)[1], node) for v in other.invars[:3])
        if not same or (q[1], k[1]) != (length, length):
            raise ContiguousError(f"attention of several sequences{place(other)}")
    tokens = TokenDims(classes, {classes.of(node): 1}, length, free_axes()[SEQ], dims)
    chunks = 2 * tokens.devices
    if length % chunks:
        raise ContiguousError(f"zig-zag has {chunks} chunks, which do not divide {length} tokens")
    of_chunk = length // chunks
    if splash.generation() is not None and of_chunk > splash.LANES and of_chunk % splash.LANES:
        raise ContiguousError(f"the TPU's kernel does not take chunks of {of_chunk} tokens")
    analysis = OrderProof(tokens)
    analysis.plan(propagated.top, [None] * len(jaxpr.outvars))
    return _Zigzag(analysis).run(jaxpr, scope=_Scope(propagated.top, _Role.TOP))


class _Order(Enum):
    """The order of the tokens of a value."""

    NONE = auto()  # it has none
    ORIGINAL = auto()
    # Original, and computed from draws: permuted where it is read, when it may be a mask of bits.
    DRAWN = auto()
    ZIGZAG = auto()


class _Role(Enum):
    """What a program is to the equation that runs it."""

    TOP = auto()
    CALL = auto()
    CONTROL = auto()  # a body of a loop or a branch, whose results have the order of its inputs


@dataclass(frozen=True, eq=False)
class _Scope:
    frame: CallFrame
    role: _Role


class _Zigzag(Rewriter[_Order]):
    """Write a program with its tokens in zig-zag order, by its plan."""

    enters = ENTERED

    def __init__(self, analysis: OrderProof) -> None:
        super().__init__()
        self.analysis, self.tokens = analysis, analysis.tokens
        self._other: dict[tuple[int, Var], Atom] = {}  # a value in zig-zag order, beside its own

    def constant(self, atom: Atom) -> _Order:
        return _Order.NONE

    def unknown(self, atom: Atom) -> _Order:
        return _Order.NONE

    def derived(self, states: Sequence[_Order], out: Var) -> _Order:
        (state, *others) = states
        return state if all(other is state for other in others) else _Order.ZIGZAG

    def scope(self, program: Rewriting[_Order], body: Body) -> Any:
        frames = program.scope.frame.inner.get(program.position, ())
        frame = next((frame for frame in frames if frame.jaxpr is body.jaxpr), None)
        if frame is None or id(frame) not in self.analysis.plans:
            return LEAVE
        eqn = program.jaxpr.eqns[program.position]
        return _Scope(frame, _Role.CONTROL if eqn.primitive.name in CONTROL else _Role.CALL)

    def write(
        self, jaxpr: Jaxpr, states: Any = None, dtypes: Any = None, scope: Any = None
    ) -> Rewriting[_Order]:
        frame, plan = scope.frame, self.analysis.plans[id(scope.frame)]

        def given(v: Var) -> _Order:
            return _Order.ORIGINAL if self.analysis.of(frame, v) else _Order.NONE

        states = [*map(given, jaxpr.invars)] if states is None else states
        program: Rewriting[_Order] = Rewriting(self, jaxpr, states, dtypes, scope)
        for v in jaxpr.constvars:
            program.set_state(v, given(v))
        for v in (*jaxpr.constvars, *jaxpr.invars):
            self._enter_sequence(program, v, None)
        for position in range(len(jaxpr.eqns)):
            program.write(position)
        outs: list[Any] = []
        for out, why in zip(jaxpr.outvars, plan.results, strict=True):
            original = scope.role is _Role.TOP or why is not None
            if scope.role is _Role.CALL and is_var(out):
                original |= program.state(out) is _Order.DRAWN
            wanted = _Order.ORIGINAL if original else _Order.ZIGZAG
            outs.append(self._alias(program, out, wanted, None) if is_var(out) else out)
        if any(a is not b for a, b in zip(outs, jaxpr.outvars, strict=True)):
            program.jaxpr = jaxpr.replace(outvars=outs)
        return program

    def body_states(self, program: Rewriting[_Order], eqn: JaxprEqn, body: Body) -> list[_Order]:
        return [program.state(v) for v in body.operands]

    def equation(self, program: Rewriting[_Order], eqn: JaxprEqn) -> Sequence[_Order]:
        frame = program.scope.frame
        orders, results = self._orders(program, frame, eqn)
        invars = [
            v if order is None else self._alias(program, v, order, eqn)
            for v, order in zip(eqn.invars, orders, strict=True)
        ]
        moved = any(a is not b for a, b in zip(invars, eqn.invars, strict=True))
        asked = eqn.replace(invars=invars) if moved else eqn
        kind = self.analysis.kind(frame, program.position)
        if kind is Along.TOKEN and eqn.primitive.name == ATTENTION:
            self._attention(program, asked)
            states: Sequence[_Order] = results
        elif kind is Along.INNER:
            states = self.nested(program, asked)
        else:
            program.emit(asked)
            states = results
        for v, state in zip(eqn.outvars, states, strict=True):
            program.set_state(v, state)
            self._enter_sequence(program, v, eqn)
        return states

    def _orders(
        self, program: Rewriting[_Order], frame: CallFrame, eqn: JaxprEqn
    ) -> tuple[list[_Order | None], list[_Order]]:
        """The orders in which an equation reads its operands (None: as they are), and its results.

        Those of the results of inner programs are found inside.
        """
        plan, position = self.analysis.plans[id(frame)], program.position
        kind = self.analysis.kind(frame, position)
        has = [self._has_tokens(frame, eqn, v, kind) for v in eqn.invars]
        makes = [bool(self.analysis.of(frame, v)) for v in eqn.outvars]
        held = [program.state(v) for v in eqn.invars]
        as_they_are: list[_Order | None] = [None] * len(held)

        def all_in(order: _Order) -> list[_Order | None]:
            return [order if on else None for on in has]

        def made(order: _Order) -> list[_Order]:
            return [order if on else _Order.NONE for on in makes]

        if kind is Along.APART:
            return as_they_are, made(_Order.NONE)
        if kind is Along.EACH:
            return as_they_are, [x if on else _Order.NONE for x, on in zip(held, makes)]
        if kind is Along.INNER:
            return self._orders_inside(program, frame, eqn, held), []
        needed = any(v in plan.needed for v in eqn.outvars)
        if kind is Along.FILL:
            return as_they_are, made(_Order.ORIGINAL if needed else _Order.ZIGZAG)
        drawn = eqn.primitive.name in RANDOM or _Order.DRAWN in held
        before = _Order.DRAWN if drawn else _Order.ORIGINAL
        if kind in (Along.BORN, Along.MIXES):
            return all_in(_Order.ORIGINAL), made(before)
        in_zigzag = _Order.ZIGZAG in held
        if kind is Along.SUM:
            return all_in(_Order.ZIGZAG if in_zigzag else _Order.ORIGINAL), made(_Order.NONE)
        if needed or (drawn and not in_zigzag and not self.analysis.is_of_model(frame, eqn)):
            return all_in(_Order.ORIGINAL), made(before)
        return all_in(_Order.ZIGZAG), made(_Order.ZIGZAG)

    def _orders_inside(
        self, program: Rewriting[_Order], frame: CallFrame, eqn: JaxprEqn, held: Sequence[_Order]
    ) -> list[_Order | None]:
        orders: list[_Order | None] = [None] * len(held)
        inner = frame.inner[program.position]
        is_call = eqn.primitive.name not in CONTROL
        for i, v in enumerate(inner[0].body.operands):
            at = inner[0].body.first + i
            if not self.analysis.of(frame, v):
                continue
            needed = any(
                body_frame.jaxpr.invars[i] in self.analysis.plans[id(body_frame)].needed
                for body_frame in inner
            )
            if needed:
                orders[at] = _Order.ORIGINAL
            elif not (is_call and held[at] is _Order.DRAWN):
                orders[at] = _Order.ZIGZAG
        return orders

    def _has_tokens(self, frame: CallFrame, eqn: JaxprEqn, v: Any, kind: Along) -> bool:
        if is_var(v):
            return bool(self.analysis.of(frame, v))
        proved = kind in (Along.TOKEN, Along.SUM) and not is_in_any_order(eqn)
        return proved and bool(self._of_literal(frame, eqn, v))

    def _of_literal(self, frame: CallFrame, eqn: JaxprEqn, literal: Any) -> dict[int, int]:
        """The dims of tokens of a constant among an equation's operands."""
        if not shape_of(literal) or eqn.primitive.name in (*CUSTOM_DERIVATIVE, ATTENTION):
            return {}
        relations = relations_of(eqn)
        if relations is None:
            return {}
        counts = {
            factors[d]: count
            for v, factors in zip(eqn.invars, relations.operands, strict=True)
            for d, count in self.analysis.of(frame, v).items()
        }
        (literal_factors,) = {
            f for v, f in zip(eqn.invars, relations.operands, strict=True) if v is literal
        }
        shape = shape_of(literal)
        return {
            d: counts[f] for d, f in enumerate(literal_factors) if f in counts and shape[d] != 1
        }

    # -- values in either order --------------------------------------------------------------------

    def _enter_sequence(self, program: Rewriting[_Order], v: Var, like: JaxprEqn | None) -> None:
        """Permute a value where it is made, outside of what reads it."""
        plan = self.analysis.plans[id(program.scope.frame)]
        if program.state(v) is _Order.ORIGINAL and v in plan.wanted:
            self._in_order(program, v, _Order.ZIGZAG, like)

    def _in_order(
        self,
        program: Rewriting[_Order],
        v: Any,
        order: _Order,
        like: JaxprEqn | None,
    ) -> Atom:
        """What stands for a value in an order."""
        held, atom = program.state(v), program.atom(v)
        zigzag = order is _Order.ZIGZAG
        if held is _Order.NONE or (held is _Order.ZIGZAG) == zigzag:
            return atom
        frame = program.scope.frame
        ordered = partial(self.tokens.ordered, dims=self.analysis.of(frame, v), zigzag=zigzag)
        key = id(program), v
        if not zigzag:
            return program.splice(ordered, [atom], like)[0]
        if key not in self._other:
            (self._other[key],) = program.splice(ordered, [atom], like)
        return self._other[key]

    def _alias(
        self, program: Rewriting[_Order], v: Any, order: _Order, eqn: JaxprEqn | None
    ) -> Any:
        """A variable for an operand or a result in an order."""
        if eqn is not None and not is_var(v):
            if order is not _Order.ZIGZAG:
                return v
            dims = self._of_literal(program.scope.frame, eqn, v)
            ordered = partial(self.tokens.ordered, dims=dims, zigzag=True)
            atom = program.splice(lambda: ordered(jnp.asarray(v.val)), [], eqn)[0]
        else:
            if program.state(v) in (order, _Order.NONE):
                return v
            atom = self._in_order(program, v, order, eqn)
            if atom is program.atom(v):
                return v
        alias = Var(v.aval)
        program.replace([alias], [atom])
        program.set_state(alias, order)
        return alias

    def _attention(self, program: Rewriting[_Order], eqn: JaxprEqn) -> None:
        """Write an attention of operands in zig-zag order; its own program knows of it as well."""
        form, body, devices = form_of(eqn), body_of(eqn), self.tokens.devices
        assert form is not None
        count = 5 if form.segments else 3

        def ordered(*operands: jax.Array) -> jax.Array:
            of_tokens = [in_token_order(x, 1, devices, zigzag=False) for x in operands[:count]]
            return in_token_order(body(*of_tokens, *operands[count:]), 1, devices, zigzag=True)

        call = partial(attention_call, replace(form, zigzag=True), ordered)
        operands = [program.as_traced(v, eqn) for v in eqn.invars]
        program.replace(eqn.outvars, program.splice(call, operands, eqn))
