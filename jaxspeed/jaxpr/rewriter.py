"""Rewriting of traced programs: one walk, and one assembly of equations, for all passes.

A pass derives a `Rewriter`. It gives rules by primitive, and a state of each value: what a value is
computed from, say. Equations without a rule are copied; inner programs are entered, and rewritten
once for equal states and dtypes of their inputs. What is inserted has the name stack and the source
info of the equation for which it is, so that the equations of a unit stay together. What is
inserted for a product, marked by `traverse.as_product`, is one to later passes.

A rule may change the dtype of a result. Readers then get the new dtype, up to where the types of
the trace matter: the carry of a loop, the results of branches, and of the program.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.primitives import CUSTOM_BATCHING, CUSTOM_DERIVATIVE, ENTERED
from jaxspeed.jaxpr.slicing import renamed, sub_jaxpr
from jaxspeed.jaxpr.traverse import (
    Body,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    called,
    is_marked,
    is_real,
    is_var,
    like,
    open_jaxpr,
    runs,
    with_functions,
    with_jaxpr,
)

Atom = Any  # a variable or a literal: jax types neither's aval
LEAVE = object()  # the scope of an inner program that is not rewritten


class Rewriter[State]:
    """The rewriting of programs by the rules of a pass.

    Attributes:
      rules: by primitive; a rule writes its equation, and returns the states of the results.
      enters: the primitives whose inner programs are rewritten.
      custom_derivatives: whether functions with a custom derivative are entered as well, if they
        contain a primitive with a rule; both of their passes are rewritten.
    """

    enters: ClassVar[Collection[str]] = (*ENTERED, *CUSTOM_BATCHING)
    custom_derivatives: ClassVar[bool] = False

    def __init__(self) -> None:
        self.rules: Mapping[str, Callable[[Rewriting[State], Any], Sequence[State]]] = {}
        self._written: dict[Any, tuple[Any, Any, Rewriting[State]]] = {}

    # -- what a pass gives; one without a state gives none -----------------------------------------

    def constant(self, atom: Atom) -> State:
        """The state of a literal or a constant."""
        return None  # type: ignore[return-value]

    def unknown(self, atom: Atom) -> State:
        """The state of what a loop carries, and of other values of which nothing is known."""
        return None  # type: ignore[return-value]

    def derived(self, states: Sequence[State], out: Var) -> State:
        """The state of the result of an equation without a rule, or of several branches."""
        return None  # type: ignore[return-value]

    def scope(self, program: "Rewriting[State]", body: Body) -> Any:
        """What else the pass knows of one call of an inner program; `LEAVE` not to rewrite it."""
        return None

    def enter(self, program: "Rewriting[State]", eqn: JaxprEqn) -> bool:
        """Whether the inner programs of an equation are rewritten."""
        if eqn.primitive.name in CUSTOM_DERIVATIVE:
            return self.custom_derivatives and runs(eqn, self.rules)
        return eqn.primitive.name in self.enters and bool(bodies(eqn)) and not is_marked(eqn)

    def equation(self, program: "Rewriting[State]", eqn: JaxprEqn) -> Sequence[State]:
        """Write an equation; return the states of its results."""
        name = eqn.primitive.name
        if name in self.rules:
            return self.rules[name](program, eqn)
        if not self.enter(program, eqn):
            return self.other(program, eqn)
        enter = self.custom_derivative if name in CUSTOM_DERIVATIVE else self.nested
        return enter(program, eqn)

    def other(self, program: "Rewriting[State]", eqn: JaxprEqn) -> Sequence[State]:
        """Write an equation without a rule; a program that is not entered keeps its types."""
        opaque = eqn.primitive.name in CUSTOM_DERIVATIVE or bodies(eqn)
        program.emit(eqn, [program.as_traced(v, eqn) for v in eqn.invars] if opaque else None)
        states = [program.state(v) for v in eqn.invars]
        return [self.derived(states, v) for v in eqn.outvars]

    # -- programs ----------------------------------------------------------------------------------

    def run(
        self,
        jaxpr: Jaxpr,
        states: Sequence[State] | None = None,
        dtypes: Sequence[Any] | None = None,
        scope: Any = None,
    ) -> Jaxpr:
        """Rewrite a program for inputs of these states and dtypes; the same object if all is equal.

        The results have the dtypes of the trace.
        """
        return self.write(jaxpr, states, dtypes, scope).finished()

    def write(
        self,
        jaxpr: Jaxpr,
        states: Sequence[State] | None = None,
        dtypes: Sequence[Any] | None = None,
        scope: Any = None,
    ) -> "Rewriting[State]":
        """Write all equations of a program; `states` are those of its inputs, or unknown."""
        input_states = [self.unknown(v) for v in jaxpr.invars] if states is None else states
        program = Rewriting(self, jaxpr, input_states, dtypes, scope)
        for position in range(len(jaxpr.eqns)):
            program.write(position)
        return program

    def nested(self, program: "Rewriting[State]", eqn: JaxprEqn) -> list[State]:
        """Write a call, a loop or branches, with the inner programs rewritten."""
        inner_bodies = bodies(eqn)
        first, carry = inner_bodies[0].first, inner_bodies[0].num_carry
        carried = range(first + inner_bodies[0].num_consts, first + inner_bodies[0].first_xs)
        atoms = [
            program.as_traced(v, eqn) if i < first or i in carried else program.atom(v)
            for i, v in enumerate(eqn.invars)
        ]
        states = self.body_states(program, eqn, inner_bodies[0])
        dtypes = [_dtype(x) for x in atoms[first:]]
        branches = eqn.primitive.name == "cond"
        inner: list[Rewriting[State]] = []
        left = iter(inner_bodies)

        def new(held: Any) -> Any:
            body = next(left)
            scope = self.scope(program, body)
            if scope is LEAVE:
                inner.append(Rewriting(self, body.jaxpr, states))
                return held
            key = (id(held), id(scope), *dtypes, *states)
            if key not in self._written:
                written = self.write(body.jaxpr, states, dtypes, scope)
                new_body = written.finished(lambda i: branches or i < carry)
                new_body = held if new_body is body.jaxpr else with_jaxpr(held, new_body)
                # The original is kept alive: its id is the key.
                self._written[key] = (held, scope), new_body, written
            inner.append(self._written[key][2])
            return self._written[key][1]

        rewritten = with_functions(eqn, new)
        program.emit(rewritten, atoms, retyped=rewritten is not eqn)
        results = zip(*([p.state(v) for v in p.jaxpr.outvars] for p in inner), strict=True)
        return [
            self.derived(branch_states, v)
            for v, branch_states in zip(eqn.outvars, results, strict=True)
        ]

    def body_states(self, program: "Rewriting[State]", eqn: JaxprEqn, body: Body) -> list[State]:
        """The states of the inputs of an inner program."""
        carried = {*body.carried}
        return [
            self.unknown(inner) if inner in carried else program.state(v)
            for v, inner in zip(body.operands, body.jaxpr.invars, strict=True)
        ]

    def custom_derivative(self, program: "Rewriting[State]", eqn: JaxprEqn) -> list[State]:
        """Write a function with a custom derivative, with both of its passes rewritten."""
        atoms = [program.as_traced(v, eqn) for v in eqn.invars]
        function = self._both_passes(program.jaxpr, eqn)
        program.replace(eqn.outvars, program.splice(function, atoms, eqn))
        return [self.unknown(v) for v in eqn.outvars]

    def _both_passes(self, jaxpr: Jaxpr, eqn: JaxprEqn) -> Callable[..., list[Any]]:
        (body,) = bodies(eqn)
        inputs = [v for v in eqn.invars if is_var(v)]
        original = as_function(sub_jaxpr(jaxpr, [eqn], inputs, eqn.outvars))
        trees: list[Any] = []

        def variables(args: Sequence[Any]) -> list[Any]:
            return [x for x, v in zip(args, eqn.invars, strict=True) if is_var(v)]

        def rewritten(function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
            closed = jax.make_jaxpr(function)(*args)
            return as_function(self.run(closed.jaxpr), closed.consts)(*args)

        @jax.custom_vjp
        def call(*args: Any) -> list[Any]:
            return rewritten(as_function(body.jaxpr, body.consts), args)

        def forward(*args: Any) -> tuple[list[Any], list[Any]]:
            def both(*args: Any) -> list[Any]:
                outs, pullback = jax.vjp(original, *variables(args))
                residuals, tree = jax.tree.flatten(pullback)
                trees[:] = [tree, len(outs)]
                return [*outs, *residuals]

            values = rewritten(both, args)
            return values[: trees[1]], values[trees[1] :]

        def backward(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
            count, active = len(residuals), [is_real(v) for v in eqn.outvars]

            def pull(*args: Any) -> list[Any]:
                real = iter(args[count:])
                all_cotangents = [
                    next(real) if on else x for on, x in zip(active, cotangents, strict=True)
                ]
                grads = jax.tree.unflatten(trees[0], args[:count])(all_cotangents)
                return [g for g, v in zip(grads, inputs, strict=True) if is_real(v)]

            args = [*residuals, *(x for on, x in zip(active, cotangents, strict=True) if on)]
            grads = dict(zip(filter(is_real, inputs), rewritten(pull, args), strict=True))
            return tuple(grads.get(v) if is_var(v) else None for v in eqn.invars)

        call.defvjp(forward, backward)
        return call


class Rewriting[State]:
    """A program while it is rewritten: its new equations, and what stands for its variables."""

    def __init__(
        self,
        rewriter: Rewriter[State],
        jaxpr: Jaxpr,
        states: Sequence[State],
        dtypes: Sequence[Any] | None = None,
        scope: Any = None,
    ) -> None:
        self.rewriter, self.jaxpr, self.scope = rewriter, jaxpr, scope
        self.eqns: list[JaxprEqn] = []
        self.position = 0  # of the equation that is being written
        self.done: set[int] = set()  # positions of those that are written
        self._atoms: dict[Var, Atom] = {}
        self._states = {v: rewriter.constant(v) for v in jaxpr.constvars}
        self._states.update(zip(jaxpr.invars, states, strict=True))
        for v, dtype in zip(jaxpr.invars, dtypes or (), strict=dtypes is not None):
            if dtype != _dtype(v):
                self._atoms[v] = Var(v.aval.update(dtype=jnp.dtype(dtype), weak_type=False))
        self._invars = [self._atoms.get(v, v) for v in jaxpr.invars]

    # -- values, by the variables of the original program ------------------------------------------

    def atom(self, atom: Atom) -> Atom:
        """What stands for an atom of the original program."""
        return self._atoms.get(atom, atom) if is_var(atom) else atom

    def state(self, atom: Atom) -> State:
        if not is_var(atom):
            return self.rewriter.constant(atom)
        return self._states[atom] if atom in self._states else self.rewriter.unknown(atom)

    def set_state(self, variable: Var, state: State) -> None:
        self._states[variable] = state

    def as_traced(self, atom: Atom, like: JaxprEqn | None = None) -> Atom:
        """What stands for an atom, cast to the dtype with which it was traced."""
        x, dtype = self.atom(atom), _dtype(atom)
        if _dtype(x) == dtype:
            return x
        return self.splice(lambda x: x.astype(dtype), [x], like)[0]

    def replace(self, variables: Iterable[Var], atoms: Iterable[Atom]) -> None:
        """Let other atoms of the new program stand for variables, for all that reads them later."""
        self._atoms.update(zip(variables, atoms, strict=True))

    # -- equations ---------------------------------------------------------------------------------

    def write(self, position: int) -> None:
        """Write the equation at a position, unless it is written."""
        if position not in self.done:
            self.done.add(position)
            within, self.position = self.position, position
            self.write_equation(self.jaxpr.eqns[position])
            self.position = within

    def write_equation(self, eqn: JaxprEqn) -> None:
        states = self.rewriter.equation(self, eqn)
        self._states.update(zip(eqn.outvars, states, strict=True))

    def emit(
        self, eqn: JaxprEqn, operands: Sequence[Any] | None = None, retyped: bool = False
    ) -> None:
        """Append an equation, of `operands` or of what stands for its own.

        `retyped` says that its results may have other types although its operands have not.
        """
        atoms = [self.atom(v) for v in eqn.invars] if operands is None else list(operands)
        pairs = list(zip(atoms, eqn.invars, strict=True))
        if any(a is not b for a, b in pairs):
            retyped = retyped or any(_dtype(a) != _dtype(b) for a, b in pairs)
            eqn = eqn.replace(invars=atoms)
        self.eqns.append(self._with_result_types(eqn) if retyped else eqn)

    def _with_result_types(self, eqn: JaxprEqn) -> JaxprEqn:
        """The equation with results of the types that follow from its operands."""
        with eqn.ctx.manager:
            params = eqn.params
            out_avals, effects = eqn.primitive.abstract_eval(
                *(v.aval for v in eqn.invars), **params
            )
        avals = out_avals if eqn.primitive.multiple_results else [out_avals]
        outs = []
        for v, aval in zip(eqn.outvars, avals, strict=True):
            if getattr(aval, "dtype", None) == _dtype(v):
                outs.append(v)
            else:
                outs.append(type(v)(aval))
                self._atoms[v] = outs[-1]
        return eqn.replace(outvars=outs, effects=effects)

    def splice(
        self, function: Callable[..., Any], operands: Sequence[Atom], like: JaxprEqn | None
    ) -> list[Atom]:
        """Append a function's equations, with the source info of `like`; return its results.

        `operands` are atoms of the new program.
        """
        shapes = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
            for v in operands
        ]
        closed = jax.make_jaxpr(function)(*shapes)
        names = self._names(closed, operands)
        for eqn in closed.jaxpr.eqns:
            eqn = eqn.replace(invars=renamed(eqn.invars, names))
            self.eqns.append(eqn.replace(source_info=like.source_info) if like else eqn)
        return renamed(closed.jaxpr.outvars, names)

    def inline(self, call: JaxprEqn) -> list[Atom]:
        """Write the equations of a call's program in its place.

        Returns its results, as atoms of the original program.
        """
        inner, consts = open_jaxpr(called(call))
        # Traced again: one program may be inlined twice, and a weakly typed input is typed here.
        closed = jax.make_jaxpr(as_function(inner, consts))(*like(inner.invars))
        names = self._names(closed, call.invars)
        outer = call.source_info.name_stack
        for eqn in closed.jaxpr.eqns:
            info = eqn.source_info.replace(name_stack=outer + eqn.source_info.name_stack)
            invars = renamed(eqn.invars, names)
            self.write_equation(eqn.replace(invars=invars, source_info=info))
        results = renamed(closed.jaxpr.outvars, names)
        self.replace(call.outvars, map(self.atom, results))
        return results

    def _names(self, closed: ClosedJaxpr, operands: Sequence[Atom]) -> dict[Any, Atom]:
        """What stands for the inputs and constants of a program that is inserted."""
        constants = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        literals: dict[Any, Atom] = {v: Literal(const, v.aval) for v, const in constants}
        return literals | dict(zip(closed.jaxpr.invars, operands, strict=True))

    def finished(self, as_traced: Callable[[int], bool] = lambda i: True) -> Jaxpr:
        """The new program; the original one if nothing changed.

        Results have the dtype of the trace where `as_traced` of their index is true.
        """
        jaxpr = self.jaxpr
        outs = [
            self.as_traced(v) if as_traced(i) else self.atom(v) for i, v in enumerate(jaxpr.outvars)
        ]
        old = (*jaxpr.eqns, *jaxpr.outvars, *jaxpr.invars)
        new = (*self.eqns, *outs, *self._invars)
        if len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True)):
            return jaxpr
        return jaxpr.replace(invars=self._invars, outvars=outs, eqns=self.eqns)


def _dtype(atom: Atom) -> Any:
    return getattr(atom.aval, "dtype", None)
