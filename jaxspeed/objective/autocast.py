"""Automatic mixed precision of a traced loss, by the classes of its operations.

The loss is traced in fp32, so that the model's own arrays (a cache, an LSTM's carry) agree with its
parameters, and the traced program is rewritten as `torch.autocast` would run it:

| class | operations | dtype |
|---|---|---|
| lower | matmuls and convolutions of fp32 operands | operands and result in the low dtype |
| promote | arithmetic, activation functions, data movement | the widest of the operands |
| keep | all others: sums, exponentials, logarithms, squares, roots | fp32 |

Backward, a product's gradients are products in the low dtype too. As in torch, a bias (a parameter
of rank 1) and a scalar do not widen a result. The carry of a loop, the results of branches, and
custom derivatives without products have the dtypes with which they were traced. A product keeps
fp32 if the model sets its precision to HIGHEST, or one of its operands is a view of a parameter in
`parallel.full_precision`. `ops.attention` casts its own operands.

A sharded parameter of a safe module, if only lowered operations read it, becomes an input in the
low dtype: it is all-gathered, and its gradient reduce-scattered, in that dtype.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util

from jaxspeed.jaxpr.evaluate import as_function, bindings, run_equation
from jaxspeed.jaxpr.module_scopes import calls_in
from jaxspeed.jaxpr.primitives import (
    CASTS,
    CHECKPOINTS,
    CONSTRAINT,
    CONTROL,
    CUSTOM_DERIVATIVE,
    ELEMENTWISE,
    IDENTITIES,
    INLINED,
    JOINS,
    LOOPS,
    PAIRWISE,
    PRODUCTS,
    RAGGED_PRODUCTS,
    RESHAPES,
    SLICES,
)
from jaxspeed.jaxpr.slicing import sub_jaxpr
from jaxspeed.jaxpr.traverse import bodies, is_var, open_jaxpr, with_functions
from jaxspeed.objective.safe_modules import SafeModules

LOWER = PRODUCTS | RAGGED_PRODUCTS
# Element-wise, but too steep for 8 bits of mantissa, or the terms of a sum of squares.
_STEEP = frozenset(
    """acos acosh asin atanh cosh digamma erf_inv exp exp2 expm1 lgamma log log1p pow rsqrt sinh
    cbrt sqrt square tan""".split()  # noqa: SIM905
)
VIEWS = RESHAPES | {"transpose", "broadcast_in_dim", "slice", "dynamic_slice", "copy"}
PROMOTE = (
    (ELEMENTWISE - _STEEP)
    | (VIEWS | SLICES | JOINS | IDENTITIES | PAIRWISE)
    | {CONSTRAINT, "gather", "rev", "scatter", "reduce_window_max", "reduce_window_min"}
)
_NESTED = (*INLINED, *CHECKPOINTS, *CONTROL)


@dataclass(frozen=True)
class _Value:
    """A value of the rewritten program.

    Attributes:
      array: in the dtype of the trace, or in the low one.
      parameter: the parameter that it is a view of, if any.
      neutral: it does not widen the result of an operation: a scalar, or the view of a bias.
    """

    array: Any
    parameter: str | None = None
    neutral: bool = False
    casts: dict[Any, Any] = field(default_factory=dict)  # those made so far, by scope


@dataclass(frozen=True)
class Autocast:
    """Settings of automatic mixed precision."""

    dtype: Any  # bf16 or fp16
    full: frozenset[str] = frozenset()  # the parameters whose products keep fp32
    sharded: frozenset[str] = frozenset()  # the parameters that may be inputs in the low dtype
    is_safe: SafeModules = field(default_factory=SafeModules)  # the modules of those


def with_autocast(closed: Any, autocast: Autocast, parameters: Mapping[Any, str]) -> Any:
    """Rewrite a program that was traced in fp32.

    The types of its inputs and results do not change, except for those of `autocast.sharded`.
    `parameters` are paths of its variables that are parameters.
    """
    jaxpr = closed.jaxpr

    def rewritten(narrow: Collection[str]) -> tuple[Any, set[str]]:
        rewriter, types = _Rewriter(autocast), _types(jaxpr)
        for i, v in enumerate(jaxpr.invars):
            if parameters.get(v) in narrow and _is_single(v.aval):
                types[i] = _struct(v.aval, autocast.dtype)
        marks = [(parameters.get(v), False) for v in jaxpr.invars]
        made = rewriter.traced(jaxpr, closed.consts, types, marks, lambda i: True)
        return made, rewriter.wide

    made, wide = rewritten(())
    narrow = autocast.sharded - wide
    return rewritten(narrow)[0] if narrow else made


def autocast_function(function: Callable[..., Any], autocast: Autocast) -> Callable[..., Any]:
    """A function of parameters by path, and of more arguments, with its trace rewritten."""

    def run(parameters: Mapping[str, Any], *args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(parameters, *args)
        paths = dict(zip(closed.jaxpr.invars, sorted(parameters), strict=False))
        made = with_autocast(closed, replace(autocast, sharded=frozenset()), paths)
        outs = as_function(made.jaxpr, made.consts)(*jax.tree.leaves((parameters, *args)))
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return run


def _types(jaxpr: Any) -> list[jax.ShapeDtypeStruct]:
    return [_struct(v.aval, v.aval.dtype) for v in jaxpr.invars]


def _struct(aval: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    weak = bool(aval.weak_type) and dtype == aval.dtype
    return jax.ShapeDtypeStruct(aval.shape, dtype, weak_type=weak)


class _Rewriter:
    """Rewriter of a program; an inner program is traced once per dtypes of its inputs."""

    def __init__(self, settings: Autocast) -> None:
        self.low, self.settings = jnp.dtype(settings.dtype), settings
        self.inner: dict[Any, Any] = {}
        self.wide: set[str] = set()  # the parameters that are read in fp32, or by unsafe modules

    def traced(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        types: Sequence[Any],
        marks: Sequence[tuple[str | None, bool]],
        as_traced: Callable[[int], bool],
    ) -> Any:
        """A program rewritten for inputs of these types.

        `marks` are (parameter, neutral) of its inputs. Results keep their dtype where `as_traced`
        of their index is true.
        """

        def run(*args: Any) -> list[Any]:
            values = [_value(x, *mark) for x, mark in zip(args, marks, strict=True)]
            outs = self._evaluate(jaxpr, consts, values)
            self.wide.update(x.parameter for x in outs if x.parameter)
            return [
                _as_traced(value, v) if as_traced(i) else value.array
                for i, (value, v) in enumerate(zip(outs, jaxpr.outvars, strict=True))
            ]

        return jax.make_jaxpr(run)(*types)

    def _evaluate(
        self, jaxpr: Any, consts: Sequence[Any], values: Sequence[_Value]
    ) -> list[_Value]:
        env = bindings(jaxpr, [_value(c) for c in consts], values)

        def read(atom: Any) -> _Value:
            return env[atom] if is_var(atom) else _value(atom.val, None, True)

        for eqn in jaxpr.eqns:
            outs = self._equation(jaxpr, eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, jaxpr: Any, eqn: Any, values: Sequence[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        if name in _NESTED and bodies(eqn):
            return self._nested(jaxpr, eqn, values)
        if name in CUSTOM_DERIVATIVE and self._holds_products(eqn):
            self._note_readers(eqn, values, None)
            with _source_of(eqn):
                given = [_as_traced(x, v) for x, v in zip(values, eqn.invars, strict=True)]
                return [_value(x) for x in self._custom(jaxpr, eqn)(*given)]
        if self._is_lowered(eqn, values):
            return self._run(jaxpr, self._with_result(eqn), values, self.low)
        if name in CASTS:  # widening is exact: a cast can start from the low dtype
            outs = self._run(jaxpr, eqn, values, None)
        elif name in PROMOTE and not _is_square(eqn):
            outs = self._run(jaxpr, eqn, values, self._widest(eqn, values))
        else:
            return self._run(jaxpr, eqn, values, jnp.float32)
        if name in VIEWS:
            source, *_ = values
            return [_value(out.array, source.parameter, source.neutral) for out in outs]
        return outs

    def _run(self, jaxpr: Any, eqn: Any, values: Sequence[_Value], dtype: Any) -> list[_Value]:
        """Run an equation with operands that were traced in fp32 in this dtype; None: as is."""
        if eqn.primitive.name not in VIEWS:
            self._note_readers(eqn, values, dtype)
        return self._bind(jaxpr, eqn, values, dtype)

    def _note_readers(self, eqn: Any, values: Sequence[_Value], dtype: Any) -> None:
        """Note the parameters that an operation in this dtype reads."""
        calls = calls_in(str(eqn.source_info.name_stack))
        if dtype != self.low or (calls and not self.settings.is_safe(calls[-1])):
            self.wide.update(x.parameter for x in values if x.parameter)

    def _bind(self, jaxpr: Any, eqn: Any, values: Sequence[_Value], dtype: Any) -> list[_Value]:
        given: dict[Any, Any] = {}
        atoms = []
        for atom, value in zip(eqn.invars, values, strict=True):
            x = value.array
            if dtype is not None and _is_single(atom.aval) and x.dtype != dtype:
                x = _cast(value, dtype, eqn)
            if is_var(atom):
                given[atom] = x
            elif x is not atom.val:
                atom = jex.Literal(np.asarray(x)[()], atom.aval.update(dtype=jnp.dtype(dtype)))
            atoms.append(atom)
        outs = run_equation(jaxpr, eqn.replace(invars=atoms), given.__getitem__)
        return [_value(x) for x in outs]

    def _widest(self, eqn: Any, values: Sequence[_Value]) -> Any:
        """The dtype of a promoted operation."""
        pairs = [(x, v) for x, v in zip(values, eqn.invars, strict=True) if _is_single(v.aval)]
        deciding = [x for x, _ in pairs if not x.neutral] or [x for x, _ in pairs]
        is_low = [x.array.dtype == self.low for x in deciding]
        return self.low if is_low and all(is_low) else jnp.float32

    # -- products ----------------------------------------------------------------------------------

    def _is_lowered(self, eqn: Any, values: Sequence[_Value] = ()) -> bool:
        params = eqn.params
        return (
            eqn.primitive.name in LOWER
            and all(_is_single(v.aval) for v in eqn.invars[:2])
            and params.get("preferred_element_type") in (None, jnp.float32)
            and not _asks_for_highest(params.get("precision"))
            and not any(x.parameter in self.settings.full for x in values if x.parameter)
        )

    def _with_result(self, eqn: Any) -> Any:
        if eqn.params.get("preferred_element_type") is None:
            return eqn
        return eqn.replace(params={**eqn.params, "preferred_element_type": self.low})

    def _holds_products(self, eqn: Any) -> bool:
        return self._is_lowered(eqn) or any(
            self._holds_products(e) for body in bodies(eqn) for e in body.jaxpr.eqns
        )

    # -- inner programs ----------------------------------------------------------------------------

    def _nested(self, jaxpr: Any, eqn: Any, values: Sequence[_Value]) -> list[_Value]:
        """A call, loop or branch, with its programs rewritten."""
        is_low = any(getattr(x.array, "dtype", None) == self.low for x in values)
        if not is_low and not self._holds_products(eqn):
            return self._run(jaxpr, eqn, values, None)
        name = eqn.primitive.name
        body = bodies(eqn)[0]
        after_carry = body.num_consts + body.num_carry
        # Conditions and carries have the types of the trace.
        fixed = {*range(body.first), *range(body.first + body.num_consts, body.first + after_carry)}
        with _source_of(eqn):
            values = [
                _value(_as_traced(x, v), x.parameter) if i in fixed else x
                for i, (x, v) in enumerate(zip(values, eqn.invars, strict=True))
            ]
        inside = values[body.first :]
        trips = range(after_carry, len(inside)) if name in LOOPS else ()
        marks = [
            # A carried parameter is another one after the first trip.
            (None, False)
            if body.first + i in fixed
            else (x.parameter, x.neutral and i not in trips)
            for i, x in enumerate(inside)
        ]
        self._note_readers(eqn, [x for i, x in enumerate(values) if i in fixed], None)
        dtypes = [getattr(x.array, "dtype", None) for x in inside]

        def as_traced(i: int) -> bool:
            return name == "cond" or i < body.num_carry

        def new(held: Any) -> Any:
            key = (id(held), *dtypes, *marks)
            if key not in self.inner:
                inner, consts = open_jaxpr(held)
                types = [
                    _struct(v.aval, d or v.aval.dtype)
                    for v, d in zip(inner.invars, dtypes, strict=True)
                ]
                made = self.traced(inner, consts, types, marks, as_traced)
                assert hasattr(held, "jaxpr") or not made.consts
                # The original is kept alive: its id is the key.
                self.inner[key] = held, made if hasattr(held, "jaxpr") else made.jaxpr
            return self.inner[key][1]

        return self._bind(jaxpr, with_functions(eqn, new), values, None)

    def _custom(self, jaxpr: Any, eqn: Any) -> Callable[..., Any]:
        """A function with a custom derivative, with the products of both passes rewritten."""
        (body,) = bodies(eqn)
        inputs = [v for v in eqn.invars if is_var(v)]
        original = as_function(sub_jaxpr(jaxpr, [eqn], inputs, eqn.outvars))
        trees: list[Any] = []

        def variables(args: Sequence[Any]) -> list[Any]:
            return [x for x, v in zip(args, eqn.invars, strict=True) if is_var(v)]

        def rewritten(function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
            closed = jax.make_jaxpr(function)(*args)
            types, marks = _types(closed.jaxpr), [(None, False)] * len(args)
            made = self.traced(closed.jaxpr, closed.consts, types, marks, lambda i: True)
            return as_function(made.jaxpr, made.consts)(*args)

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
            count, active = len(residuals), [_is_real(v) for v in eqn.outvars]

            def pull(*args: Any) -> list[Any]:
                real = iter(args[count:])
                given = [next(real) if on else x for on, x in zip(active, cotangents, strict=True)]
                grads = jax.tree.unflatten(trees[0], args[:count])(given)
                return [g for g, v in zip(grads, inputs, strict=True) if _is_real(v)]

            args = [*residuals, *(x for on, x in zip(active, cotangents, strict=True) if on)]
            grads = dict(zip(filter(_is_real, inputs), rewritten(pull, args), strict=True))
            return tuple(grads.get(v) if is_var(v) else None for v in eqn.invars)

        call.defvjp(forward, backward)
        return call


def _value(array: Any, parameter: str | None = None, neutral: bool = False) -> _Value:
    """A value, which is neutral also if it is a scalar or the vector of a parameter."""
    rank = np.ndim(array)
    neutral = neutral or rank == 0 or (parameter is not None and rank == 1)
    return _Value(array, parameter, neutral)


def _source_of(eqn: Any) -> Any:
    """Context in which equations are traced with an equation's source info and scopes."""
    scopes = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=scopes)


def _cast(value: _Value, dtype: Any, eqn: Any) -> Any:
    """The value as an operand of an equation, cast in its scope.

    Submodules of one module share a cast, such as the three projections of attention: each cast is
    a residual. Modules that may be units do not, for what crosses their boundaries is saved too.
    """
    scopes = [call.serial for call in calls_in(str(eqn.source_info.name_stack))]
    key = (jnp.dtype(dtype), *(scopes[:-1] or scopes))
    if key not in value.casts:
        with _source_of(eqn):
            value.casts[key] = value.array.astype(dtype)
    return value.casts[key]


def _as_traced(value: _Value, atom: Any) -> Any:
    """The value in the dtype with which it was traced."""
    x = value.array
    return x if not _is_single(atom.aval) or x.dtype == atom.aval.dtype else x.astype(jnp.float32)


def _is_single(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == jnp.float32


def _is_real(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _is_square(eqn: Any) -> bool:
    return eqn.primitive.name == "integer_pow" and eqn.params["y"] == 2


def _asks_for_highest(precision: Any) -> bool:
    """Whether a product has the highest precision by itself, and not by JAX's setting for all."""
    if getattr(jax.config, "jax_default_matmul_precision") is not None:  # noqa: B009
        return False
    pair = precision if isinstance(precision, tuple) else (precision,)
    return jax.lax.Precision.HIGHEST in pair
