"""The dim of tokens in a traced program, and evaluation of what is per token for fewer of them.

An equation is *per token* if its results have this dim once, and an element of them depends on no
other token: by the dim relations of operations that are known, through calls, checkpoints,
custom derivatives and loops over something else. A program of such equations can be evaluated for a
part of the tokens, with the sizes that some operations have among their parameters adapted.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import jax
import numpy as np

from jaxspeed.jaxpr.dim_relations import DimRelations
from jaxspeed.jaxpr.evaluate import as_function, bindings, run_equation, run_scan
from jaxspeed.jaxpr.primitives import CHECKPOINTS, CUSTOM_DERIVATIVE, PAIRWISE, PLAIN_CALLS, SUMS
from jaxspeed.jaxpr.sample_rules import is_linear, relations_of, writes_along
from jaxspeed.jaxpr.sample_values import FREE, SUM, SampleValue
from jaxspeed.jaxpr.slicing import dependents, slice_of, sub_jaxpr
from jaxspeed.jaxpr.traverse import (
    Jaxpr,
    JaxprEqn,
    is_real,
    is_var,
    like,
    shape_of,
)
from jaxspeed.tensor_parallel.dim_equivalence import DimEquivalence, Node
from jaxspeed.tensor_parallel.dim_propagation import CallFrame, propagate_dims

# Evaluated by the equations of what they run.
_EVALUATED = (*PLAIN_CALLS, *CUSTOM_DERIVATIVE, "scan")


class MixesTokensError(Exception):
    """A derivative is not per token, although its function is."""


class Along(Enum):
    """What an equation does along the dims of tokens."""

    APART = auto()  # it has none
    BORN = auto()  # its results have them, its operands do not
    FILL = auto()  # of these: one value for all tokens
    TOKEN = auto()  # per token
    EACH = auto()  # result i is operand i
    SUM = auto()  # results without them, in any order of the tokens
    INNER = auto()  # it runs programs that are looked into
    MIXES = auto()  # anything else


def token_factor(
    eqn: JaxprEqn,
    relations: DimRelations,
    reads: Sequence[Collection[int]],
    makes: Sequence[Collection[int]],
) -> int | None:
    """The factor of the dims of tokens of operands and results, if an equation is per token."""
    pairs = zip((*reads, *makes), (*relations.operands, *relations.results), strict=True)
    factors = {factors_of[d] for dims, factors_of in pairs for d in dims}
    mixed = None, *relations.mixed
    mixes = not factors.isdisjoint(mixed) or writes_along(eqn, relations, reads[0])
    return factors.pop() if len(factors) == 1 and not mixes else None


@dataclass(frozen=True)
class Tokens:
    """The dim of tokens: one class of the dims of a program, and its size there.

    What is evaluated is `differentiated`, unless it is a pass of a derivative itself.
    """

    classes: DimEquivalence
    node: Node
    size: int
    differentiated: bool = True

    def dims(self, frame: CallFrame, atom: Any) -> tuple[int, ...]:
        """The dims of tokens of a value; two of scores, for example."""
        nodes = frame.of(atom)
        return tuple(d for d, node in enumerate(nodes) if self.classes.same(node, self.node))

    def dim(self, frame: CallFrame, atom: Any) -> int | None:
        return next(iter(self.dims(frame, atom)), None)

    def kind(self, frame: CallFrame, position: int) -> Along:
        """The kind of an equation."""
        eqn = frame.jaxpr.eqns[position]
        reads = [self.dims(frame, v) for v in eqn.invars]
        makes = [self.dims(frame, v) for v in eqn.outvars]
        inner = frame.inner.get(position, [])
        within = [self.kind(f, i) for f in inner for i in range(len(f.jaxpr.eqns))]
        if not any((*reads, *makes)) and Along.MIXES not in within:
            return Along.APART
        # Of an equation for several values, those without tokens depend on none.
        least = 0 if inner or eqn.primitive.name in PAIRWISE else 1
        once = all(least <= len(dims) <= 1 for dims in makes) and all(len(d) <= 1 for d in reads)
        pairs = [*zip(eqn.invars, reads, strict=True), *zip(eqn.outvars, makes, strict=True)]
        parts = any(shape_of(v)[d] % self.size for v, dims in pairs for d in dims)
        if eqn.effects or not once or parts:  # parts: fewer than tokens, as of pairs of them
            return Along.MIXES
        if inner:
            (body, *others) = (f.body for f in inner)
            known = eqn.primitive.name in _EVALUATED and not others
            if eqn.primitive.name == "scan":  # over slices of something else
                known = (0,) not in (*reads[body.first_xs :], *makes[body.num_carry :])
            known = known and not any(self.dims(f, v) for f in inner for v in f.jaxpr.constvars)
            return Along.TOKEN if known and Along.MIXES not in within else Along.MIXES
        relations = relations_of(eqn)
        if relations is None:
            return Along.MIXES
        dims_with_factors = [*zip(pairs, (*relations.operands, *relations.results), strict=True)]
        factors = {factors_of[d] for (_, dims), factors_of in dims_with_factors for d in dims}
        if any(
            f in factors and f is not None and d not in dims and shape_of(v)[d] != 1
            for (v, dims), factors_of in dims_with_factors
            for d, f in enumerate(factors_of)
        ):
            return Along.MIXES  # a constant of all tokens, whose dims are of no class
        if not any(reads):
            return Along.FILL if eqn.primitive.name == "broadcast_in_dim" else Along.MIXES
        if eqn.primitive.name == "gather" and not reads[0]:
            return Along.MIXES  # a lookup, of a table that may be stored sharded
        if eqn.primitive.name in PAIRWISE:
            return Along.TOKEN
        return Along.MIXES if token_factor(eqn, relations, reads, makes) is None else Along.TOKEN

    # -- evaluation --------------------------------------------------------------------------------

    def evaluate(
        self, frame: CallFrame, positions: Iterable[int], env: dict[Any, Any], count: int
    ) -> None:
        """Run equations for `count` tokens; `env` has the values of variables, and gets more."""

        def value(atom: Any) -> Any:
            return env[atom] if is_var(atom) else atom.val

        for position in positions:
            eqn = frame.jaxpr.eqns[position]
            if any(self.dims(frame, v) for v in (*eqn.invars, *eqn.outvars)):
                with eqn.ctx.manager:
                    outs = self._equation(frame, position, [*map(value, eqn.invars)], count)
            else:
                outs = run_equation(frame.jaxpr, eqn, value)
            env.update(zip(eqn.outvars, outs, strict=True))

    def _program(
        self, frame: CallFrame, consts: Sequence[Any], args: Sequence[Any], count: int
    ) -> list[Any]:
        env = bindings(frame.jaxpr, consts, args)
        self.evaluate(frame, range(len(frame.jaxpr.eqns)), env, count)
        return [env[v] if is_var(v) else v.val for v in frame.jaxpr.outvars]

    def _equation(
        self, frame: CallFrame, position: int, values: list[Any], count: int
    ) -> Sequence[Any]:
        eqn = frame.jaxpr.eqns[position]
        name = eqn.primitive.name
        if name in CUSTOM_DERIVATIVE and self.differentiated:
            return self._with_derivative(frame, eqn, values, count)
        if inner := frame.inner.get(position):
            body = inner[0].body

            def run(*args: Any) -> list[Any]:
                return self._program(inner[0], body.consts, args, count)

            if name in CHECKPOINTS:
                how = {key: eqn.params[key] for key in ("policy", "prevent_cse")}
                return jax.checkpoint(run, **how)(*values)
            return run_scan(eqn, body, run, values) if name == "scan" else run(*values)
        results = eqn.primitive.bind(*values, **self._resized(frame, eqn, count))
        return results if eqn.primitive.multiple_results else [results]

    def _resized(self, frame: CallFrame, eqn: JaxprEqn, count: int) -> dict[str, Any]:
        """The parameters of an operation, for so many tokens."""
        name, params = eqn.primitive.name, dict(eqn.params)

        def sized(shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
            return tuple(n * count // self.size if d == dim else n for d, n in enumerate(shape))

        if name in ("reshape", "broadcast_in_dim"):
            key = "new_sizes" if name == "reshape" else "shape"
            params[key] = sized(params[key], self.dim(frame, eqn.outvars[0]))
        elif name == "slice":
            params["limit_indices"] = sized(params["limit_indices"], self.dim(frame, eqn.invars[0]))
        elif name in ("dynamic_slice", "gather"):
            dim, sizes = self.dim(frame, eqn.invars[0]), params["slice_sizes"]
            if dim is not None and sizes[dim] == shape_of(eqn.invars[0])[dim]:
                params["slice_sizes"] = sized(sizes, dim)
        return params

    def _with_derivative(
        self, frame: CallFrame, eqn: JaxprEqn, values: Sequence[Any], count: int
    ) -> Sequence[Any]:
        """A function with a derivative of its own: both passes are traced as they are, and resized.

        Its derivative for an array without tokens, such as a norm's scale, is a sum over tokens.
        """
        inputs = [v for v in eqn.invars if is_var(v)]
        original = as_function(sub_jaxpr(frame.jaxpr, [eqn], inputs, eqn.outvars))
        active = [is_real(v) for v in eqn.outvars]
        pullbacks: list[Any] = []

        def both(*args: Any) -> list[Any]:
            outs, pullback = jax.vjp(original, *args)
            leaves, tree = jax.tree.flatten(pullback)
            pullbacks[:] = [tree]
            return [*outs, *leaves]

        program, consts = _traced(both, inputs)
        results, residuals = program.outvars[: len(active)], program.outvars[len(active) :]
        real = [v for v, on in zip(results, active, strict=True) if on]
        moving = dependents(program, program.invars)
        saved = [is_var(v) and v in moving for v in residuals]
        kept = [v for v, on in zip(residuals, saved, strict=True) if on]
        # Constants, whose dims are related to others in the pass that reads them.
        rest = [v for v, on in zip(residuals, saved, strict=True) if not on]
        filled = as_function(slice_of(program, program.eqns, (), rest))
        of_inputs = [self.dims(frame, v) for v in inputs]
        first = self._pass(program, consts, [*results, *kept], of_inputs, sums=False)

        def pull(*args: Any) -> list[Any]:
            arrays, others = iter(args), iter(filled())
            leaves = [next(arrays if on else others) for on in saved]
            cotangents = [
                next(arrays) if on else np.zeros(shape_of(v), jax.dtypes.float0)
                for on, v in zip(active, results, strict=True)
            ]
            grads = jax.tree.unflatten(pullbacks[0], leaves)(cotangents)
            return [g for g, v in zip(grads, inputs, strict=True) if is_real(v)]

        @jax.custom_vjp
        def call(*args: Any) -> list[Any]:
            return first.run(args, count)[: len(results)]

        def forward(*args: Any) -> tuple[list[Any], list[Any]]:
            outs = first.run(args, count)
            return outs[: len(results)], outs[len(results) :]

        def backward(carried: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
            inputs_of_pass = [*kept, *real]
            program, consts = _traced(pull, inputs_of_pass)
            dims_of_inputs = [first.dims(v) for v in inputs_of_pass]
            second = self._pass(program, consts, program.outvars, dims_of_inputs, sums=True)
            arrived = [ct for ct, on in zip(cotangents, active, strict=True) if on]
            grads = iter(second.run([*carried, *arrived], count))
            return tuple(next(grads) if is_real(v) else None for v in inputs)

        call.defvjp(forward, backward)
        pairs = zip(values, eqn.invars, strict=True)
        return call(*(x for x, v in pairs if is_var(v)))

    def _pass(
        self,
        program: Jaxpr,
        consts: Sequence[Any],
        outputs: Sequence[Any],
        dims: Sequence[tuple[int, ...]],
        *,
        sums: bool,
    ) -> "_Pass":
        """A traced pass, with the dims of tokens of its inputs.

        Raises MixesTokensError if it is not per token, or a sum over tokens, where `sums` says that
        those of tiles are added. A sum is read by what is linear in it, and by no token.
        """
        invars = [*program.constvars, *program.invars]
        # Without what nothing reads, whose dims are related to no others.
        jaxpr = slice_of(program, program.eqns, invars, outputs)
        propagated = propagate_dims(jaxpr, {})
        nodes = [
            propagated.top.of(v)[d]
            for v, token_dims in zip(program.invars, dims)
            for d in token_dims
        ]
        for node in nodes[1:]:
            propagated.classes.tie(nodes[0], node)
        assert nodes[0] is not None
        tokens = Tokens(propagated.classes, nodes[0], self.size, differentiated=False)
        summed: set[Any] = set()
        for position, eqn in enumerate(jaxpr.eqns):
            name, top = eqn.primitive.name, propagated.top
            of_sums = [is_var(v) and v in summed for v in eqn.invars]
            with_tokens = any(tokens.dims(top, v) for v in eqn.outvars)
            of_tokens = any(tokens.dims(top, v) for v in eqn.invars)
            is_sum = name in SUMS and of_tokens and not with_tokens
            if any(of_sums):
                kinds = (SUM if on else FREE for on in of_sums)
                known = not with_tokens and is_linear(name, [SampleValue(kind) for kind in kinds])
            else:
                known = sums if is_sum else tokens.kind(top, position) is not Along.MIXES
            if not known:
                raise MixesTokensError(name)
            if is_sum or any(of_sums):
                summed.update(eqn.outvars)
        return _Pass(tokens, propagated.top, consts)


@dataclass(frozen=True)
class _Pass:
    """One pass of a function with a derivative of its own."""

    tokens: Tokens
    frame: CallFrame
    consts: Sequence[Any]

    def dims(self, atom: Any) -> tuple[int, ...]:
        return self.tokens.dims(self.frame, atom)

    def run(self, args: Sequence[Any], count: int) -> list[Any]:
        return self.tokens._program(self.frame, (), [*self.consts, *args], count)


def _traced(function: Any, inputs: Sequence[Any]) -> tuple[Jaxpr, Sequence[Any]]:
    """The program of a function of arrays like `inputs`, and its constants."""
    closed = jax.make_jaxpr(function)(*like(inputs))
    return closed.jaxpr, closed.consts
