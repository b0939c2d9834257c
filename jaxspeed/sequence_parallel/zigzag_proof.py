"""The proof that a program does not depend on the order of tokens, but where they enter it.

What enters the sequence (the batch's tokens, iotas, tables of positions, random draws) is computed
in the original order. All that follows is *per token*, sums over tokens, and attention, which knows
of the order. Before, where the batch is split into inputs and targets, anything may mix tokens:
slices by one, comparisons of neighbours, cumulative sums. What mixes tokens that have met
parameters disproves it.

A walk backwards finds what is needed in the original order. Each equation is checked by its own
dim relations: it gives the same numbers in both orders.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxspeed.jaxpr.dim_relations import reshape_groups
from jaxspeed.jaxpr.evaluate import derivative
from jaxspeed.jaxpr.primitives import (
    ATTENTION,
    CUSTOM_DERIVATIVE,
    ENTERED,
    PAIRWISE,
    REDUCTIONS,
    SCATTERS,
)
from jaxspeed.jaxpr.sample_rules import place, relations_of
from jaxspeed.jaxpr.slicing import free_variables, read_by
from jaxspeed.jaxpr.traverse import (
    JaxprEqn,
    Var,
    is_real,
    is_var,
    product_of,
    shape_of,
)
from jaxspeed.ops.attention_call import form_of
from jaxspeed.ops.token_order import ANY_ORDER, in_token_order
from jaxspeed.sequence_parallel.token_dim import Along, token_factor
from jaxspeed.tensor_parallel.dim_equivalence import DimEquivalence, Node
from jaxspeed.tensor_parallel.dim_propagation import CallFrame, propagate_dims
from jaxspeed.tensor_parallel.sequence_dims import SequenceDims

# Reductions of which the order of the elements does not matter.
_SUMS = (REDUCTIONS - {"reduce"}) | {"dot_general"} | (SCATTERS - {"scatter"})


class ContiguousError(Exception):
    """Why a program stays in contiguous order."""


@dataclass(frozen=True)
class TokenDims:
    """The dims of tokens of a program: a class of dims, and what reshapes merge of it with samples.

    Attributes:
      sequences: of each class, how many sequences one after the other such a dim has.
      length, devices: tokens of a sequence, and devices of the axis.
    """

    classes: DimEquivalence
    sequences: Mapping[Node, int]
    length: int
    devices: int
    dims: SequenceDims | None = None

    def of(self, frame: CallFrame, atom: Any) -> dict[int, int]:
        """{dim of tokens: sequences in it} of a value."""
        token_dims = {}
        for dim, node in enumerate(frame.of(atom)):
            if node is None:
                continue
            if (count := self.sequences.get(self.classes.of(node))) is not None:
                token_dims[dim] = count
                continue
            merged = self.dims.merged(node) if self.dims else None
            if merged is not None and merged.positions == self.length:
                token_dims[dim] = merged.samples
        return token_dims

    def has_chunks(self, size: int, sequences: int) -> bool:
        return size % (sequences * 2 * self.devices) == 0

    def ordered(self, x: jax.Array, dims: Mapping[int, int], *, zigzag: bool) -> jax.Array:
        """An array in the other order."""
        for dim, count in dims.items():
            shape = x.shape
            if count > 1:
                x = x.reshape(*shape[:dim], count, -1, *shape[dim + 1 :])
            at = dim + (count > 1)
            x = in_token_order(x, at, self.devices, zigzag=zigzag).reshape(shape)
        return x


@dataclass
class OrderPlan:
    """What a walk backwards knows of a frame's values.

    Attributes:
      needed: those that are read in the original order, and why.
      wanted: those that are read in zig-zag order.
      results: why each result is needed in the original order, or None.
    """

    results: Sequence[str | None] = ()

    needed: dict[Var, str] = field(default_factory=dict)
    wanted: set[Var] = field(default_factory=set)


@dataclass
class OrderProof:
    """The proof: kinds of equations, and what is needed in the original order."""

    tokens: TokenDims
    differentiated: bool = True  # what is proved is no derivative itself
    plans: dict[int, OrderPlan] = field(default_factory=dict)  # by the id of a frame
    _kinds: dict[tuple[int, int], Along] = field(default_factory=dict)

    def of(self, frame: CallFrame, atom: Any) -> dict[int, int]:
        return self.tokens.of(frame, atom)

    # -- backwards ---------------------------------------------------------------------------------

    def plan(
        self, frame: CallFrame, needed: Sequence[str | None], where: str = ""
    ) -> list[str | None]:
        """Plan a frame whose results are needed in the original order for these reasons.

        `where` is the line of the user's that runs it. Returns the same of its inputs. Raises
        ContiguousError.
        """
        plan = self.plans[id(frame)] = OrderPlan(tuple(needed))
        for v, why in zip(frame.jaxpr.outvars, needed, strict=True):
            if is_var(v):
                self._read(plan, frame, v, why)
        for position in reversed(range(len(frame.jaxpr.eqns))):
            self._backwards(plan, frame, position, where)
        return [plan.needed.get(v) for v in frame.jaxpr.invars]

    def _read(self, plan: OrderPlan, frame: CallFrame, v: Any, why: str | None) -> None:
        if is_var(v) and self.of(frame, v):
            if why is None:
                plan.wanted.add(v)
            else:
                plan.needed.setdefault(v, why)

    def _backwards(self, plan: OrderPlan, frame: CallFrame, position: int, where: str) -> None:
        eqn, kind = frame.jaxpr.eqns[position], self.kind(frame, position)
        why = next((plan.needed[v] for v in eqn.outvars if v in plan.needed), None)
        if kind is Along.INNER:
            self._through(plan, frame, position, where)
        elif kind is Along.EACH:
            for v, out in zip(eqn.invars, eqn.outvars, strict=True):
                self._read(plan, frame, v, plan.needed.get(out))
        elif kind is Along.MIXES:
            why = f"{eqn.primitive.name} mixes tokens{place(eqn) or where}"
            if self.is_of_model(frame, eqn):
                raise ContiguousError(why)
            for v in eqn.invars:
                self._read(plan, frame, v, why)
        elif kind is Along.TOKEN:
            if why is not None and self.is_of_model(frame, eqn):
                raise ContiguousError(why)
            for v in eqn.invars:
                self._read(plan, frame, v, why)

    def _through(self, plan: OrderPlan, frame: CallFrame, position: int, where: str) -> None:
        eqn = frame.jaxpr.eqns[position]
        where = place(eqn) or where
        out_reasons = [plan.needed.get(v) for v in eqn.outvars]
        first = frame.inner[position][0].body
        while True:
            inside = [self.plan(inner, out_reasons, where) for inner in frame.inner[position]]
            reasons = [next((x for x in whys if x), None) for whys in zip(*inside, strict=True)]
            carry = slice(first.num_consts, first.first_xs)
            carried = [b or a for a, b in zip(reasons[carry], out_reasons, strict=False)]
            if carried == out_reasons[: first.num_carry]:
                break
            out_reasons[: first.num_carry] = carried
        reasons[carry] = carried
        for inner in frame.inner[position]:  # branches and trips share the orders of their inputs
            pairs = zip(inner.jaxpr.invars, reasons, strict=True)
            self.plans[id(inner)].needed.update((v, why) for v, why in pairs if why)
        for v, why in zip(first.operands, reasons, strict=True):
            self._read(plan, frame, v, why)

    def is_of_model(self, frame: CallFrame, eqn: JaxprEqn) -> bool:
        """Whether tokens of the batch meet parameters in an equation, or each other."""
        if eqn.primitive.name == ATTENTION:
            return True
        weights = any(is_var(v) and frame.sources(v) for v in eqn.invars)
        tokens = (v for v in eqn.invars if is_var(v) and self.of(frame, v))
        return weights and any(not frame.is_weight(v) for v in tokens)

    # -- kinds of equations ------------------------------------------------------------------------

    def kind(self, frame: CallFrame, position: int) -> Along:
        key = id(frame), position
        if key not in self._kinds:
            self._kinds[key] = self._kind(frame, position)
        return self._kinds[key]

    def _kind(self, frame: CallFrame, position: int) -> Along:
        eqn, name = frame.jaxpr.eqns[position], frame.jaxpr.eqns[position].primitive.name
        reads = [self.of(frame, v) for v in eqn.invars]
        makes = [self.of(frame, v) for v in eqn.outvars]
        if is_in_any_order(eqn):
            return Along.TOKEN if any((*reads, *makes)) else Along.APART
        if name in ENTERED and position in frame.inner:
            return self._kind_of_call(frame, position, reads, makes)
        if not any((*reads, *makes)):
            return Along.APART
        for v, dims in zip((*eqn.invars, *eqn.outvars), (*reads, *makes), strict=True):
            sizes = [(shape_of(v)[d], count) for d, count in dims.items()]
            if len(dims) > 1 or not all(self.tokens.has_chunks(*size) for size in sizes):
                return Along.MIXES
        if eqn.effects:
            return Along.MIXES
        if name == ATTENTION:
            return self._kind_of_attention(eqn, reads, makes)
        if name in PAIRWISE:
            return Along.EACH
        if name in CUSTOM_DERIVATIVE:
            return self._kind_of_derivative(frame, position, reads, makes)
        if not any(reads):
            return self._kind_of_birth(eqn, makes)
        if name == "reshape":
            return self._kind_of_reshape(eqn, reads[0], makes[0])
        return self._kind_of_plain(eqn, reads, makes)

    def _kind_of_call(
        self, frame: CallFrame, position: int, reads: Sequence[Any], makes: Sequence[Any]
    ) -> Along:
        eqn, inner = frame.jaxpr.eqns[position], frame.inner[position]
        tokens = any((*reads, *makes))
        inside = any(
            self.of(inner_frame, v)
            for f in inner
            for inner_frame in f.walk()
            for v in inner_frame.nodes
            if is_var(v)
        )
        if not tokens and not inside:
            return Along.APART
        body = inner[0].body
        if len(eqn.params.get("branches", inner)) != len(inner):
            return Along.MIXES  # a branch with a kernel
        xs, stacked = reads[body.first + body.first_xs :], makes[body.num_carry :]
        if inner[0].in_loop and any(0 in dims for dims in (*xs, *stacked)):
            return Along.MIXES  # over time
        if eqn.primitive.name == "while":
            condition = inner[0].condition
            carry = condition.invars[-body.num_carry :] if body.num_carry else []
            read = read_by(condition)
            of_carry = zip(carry, makes, strict=True)
            if any(reads[: body.first]) or any(v in read for v, dims in of_carry if dims):
                return Along.MIXES
        return Along.INNER

    def _kind_of_attention(
        self, eqn: JaxprEqn, reads: Sequence[Any], makes: Sequence[Any]
    ) -> Along:
        form = form_of(eqn)
        assert form is not None
        count = 5 if form.segments else 3
        along = all(dims == {1: 1} for dims in (*reads[:count], *makes))
        if form.rows is not None:
            raise ContiguousError(f"the mask or bias of attention is a general one{place(eqn)}")
        return Along.TOKEN if along and not any(reads[count:]) else Along.MIXES

    def _kind_of_birth(self, eqn: JaxprEqn, makes: Sequence[Mapping[int, int]]) -> Along:
        name = eqn.primitive.name
        relations = relations_of(eqn)
        filled = name == "iota" and eqn.params["dimension"] not in makes[0]
        if name == "broadcast_in_dim" and relations is not None:
            filled = all(relations.results[0][d] not in relations.operands[0] for d in makes[0])
        return Along.FILL if filled else Along.BORN

    def _kind_of_reshape(self, eqn: JaxprEqn, reads: Any, makes: Any) -> Along:
        """A reshape before which the chunks of all sequences are where they are after it."""
        old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
        if eqn.params.get("dimensions") is not None:
            return Along.MIXES
        for olds, news in reshape_groups(old, new):
            places = []
            for shape, dims, tokens in ((old, olds, reads), (new, news, makes)):
                here = [i for i, d in enumerate(dims) if d in tokens]
                before = [math.prod(shape[d] for d in dims[:i]) * tokens[dims[i]] for i in here]
                places.append(before)
            if places[0] != places[1]:
                return Along.MIXES
        return Along.TOKEN

    def _kind_of_plain(
        self, eqn: JaxprEqn, reads: Sequence[Mapping[int, int]], makes: Sequence[Mapping[int, int]]
    ) -> Along:
        product = product_of(eqn)
        relations = relations_of(eqn if product is None else product)
        name = eqn.primitive.name if product is None else product.primitive.name
        if relations is None:
            return Along.MIXES
        factor = token_factor(eqn, relations, reads, makes)
        every, values = (*reads, *makes), (*eqn.invars, *eqn.outvars)
        if factor is None or len({n for dims in every for n in dims.values()}) != 1:
            return Along.MIXES
        # Along it there are tokens everywhere, or one value for all.
        for v, dims, factors_of in zip(
            values, every, (*relations.operands, *relations.results), strict=True
        ):
            there = {d for d, f in enumerate(factors_of) if f == factor and shape_of(v)[d] != 1}
            if is_var(v) and there != {*dims}:
                return Along.MIXES
        if any(makes):
            return Along.TOKEN if all(makes) else Along.MIXES
        return Along.SUM if name in _SUMS else Along.MIXES

    def _kind_of_derivative(
        self, frame: CallFrame, position: int, reads: Sequence[Any], makes: Sequence[Any]
    ) -> Along:
        """A function with a derivative of its own: both passes are looked into."""
        eqn = frame.jaxpr.eqns[position]
        inputs = free_variables([eqn])
        moving, active = (list(filter(is_real, variables)) for variables in (inputs, eqn.outvars))
        if not (moving and active and self.differentiated):
            inner = frame.inner.get(position, ())
            return Along.TOKEN if inner and all(map(self.is_per_token, inner)) else Along.MIXES
        traced = derivative(eqn).jaxpr
        propagated = propagate_dims(traced, {})
        pairs = zip((*eqn.invars, *eqn.outvars), (*reads, *makes), strict=True)
        of = {v: dims for v, dims in pairs if is_var(v)}
        dims_of_values = [
            *zip(traced.invars, (of[v] for v in (*inputs, *active)), strict=True),
            *zip(traced.outvars, (of[v] for v in (*eqn.outvars, *moving)), strict=True),
        ]
        first: dict[int, Node] = {}  # by the number of sequences
        for v, dims in dims_of_values:
            for dim, count in dims.items():
                node = propagated.top.of(v)[dim]
                if node is None:
                    return Along.MIXES
                propagated.classes.tie(first.setdefault(count, node), node)
        sequences = {propagated.classes.of(node): count for count, node in first.items()}
        tokens = replace(self.tokens, classes=propagated.classes, sequences=sequences, dims=None)
        inside = OrderProof(tokens, differentiated=False)
        same = all(tokens.of(propagated.top, v) == dims for v, dims in dims_of_values)
        return Along.TOKEN if same and inside.is_per_token(propagated.top) else Along.MIXES

    def is_per_token(self, frame: CallFrame) -> bool:
        """Whether no equation of a program depends on the order of tokens, or mixes them."""
        for position, eqn in enumerate(frame.jaxpr.eqns):
            kind = self.kind(frame, position)
            if kind in (Along.BORN, Along.MIXES) or eqn.primitive.name == ATTENTION:
                return False
            inner = frame.inner.get(position, ()) if kind is Along.INNER else ()
            if not all(map(self.is_per_token, inner)):
                return False
        return True


def is_in_any_order(eqn: JaxprEqn) -> bool:
    """Whether an equation is one of a function that gives the same in any order of tokens."""
    scopes = eqn.source_info.name_stack.stack
    return any(getattr(scope, "name", None) == ANY_ORDER for scope in scopes)
