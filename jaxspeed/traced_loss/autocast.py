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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from jaxspeed.axes import PIPE
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.module_scopes import calls_in
from jaxspeed.jaxpr.primitives import (
    CASTS,
    CONSTRAINT,
    CUSTOM_DERIVATIVE,
    ELEMENTWISE,
    ENTERED,
    IDENTITIES,
    JOINS,
    LOOPS,
    PAIRWISE,
    PRODUCTS,
    RAGGED_PRODUCTS,
    RESHAPES,
    SLICES,
)
from jaxspeed.jaxpr.rewriter import Atom, Rewriter, Rewriting
from jaxspeed.jaxpr.traverse import Body, bodies, equations, is_var
from jaxspeed.placement.table import PlacementTable
from jaxspeed.traced_loss.safe_modules import SafeModules

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


class _Value(NamedTuple):
    """A value of the program.

    Attributes:
      parameter: the parameter that it is a view of, if any.
      neutral: it does not widen the result of an operation: a scalar, or the view of a bias.
    """

    parameter: str | None = None
    neutral: bool = False

    @classmethod
    def of(cls, atom: Any, parameter: str | None = None, neutral: bool = False) -> "_Value":
        """The value of an atom: neutral also if it is a scalar or the vector of a parameter."""
        rank = len(getattr(atom.aval, "shape", ()))
        return cls(parameter, neutral or rank == 0 or (parameter is not None and rank == 1))


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
        rewriter = _Rewriter(autocast)
        values = [_Value.of(v, parameters.get(v)) for v in jaxpr.invars]
        dtypes = [
            autocast.dtype if parameters.get(v) in narrow and _is_single(v) else v.aval.dtype
            for v in jaxpr.invars
        ]
        return closed.replace(jaxpr=rewriter.run(jaxpr, values, dtypes)), rewriter.wide

    lowered, wide = rewritten(())
    narrow = autocast.sharded - wide
    return rewritten(narrow)[0] if narrow else lowered


def autocast_function(function: Callable[..., Any], autocast: Autocast) -> Callable[..., Any]:
    """A function of parameters by path, and of more arguments, with its trace rewritten."""

    def run(parameters: Mapping[str, Any], *args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(parameters, *args)
        paths = dict(zip(closed.jaxpr.invars, sorted(parameters), strict=False))
        lowered = with_autocast(closed, replace(autocast, sharded=frozenset()), paths)
        outs = as_function(lowered.jaxpr, lowered.consts)(*jax.tree.leaves((parameters, *args)))
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return run


def lowers(eqn: jex.JaxprEqn, autocast: Autocast) -> bool:
    """Whether the operands of a product of activations are cast."""
    return _Rewriter(autocast)._is_lowered(eqn)


def asks_for_full_precision(jaxpr: Any) -> bool:
    """Whether a program has products, and sets the precision of all of them to HIGHEST."""

    products = [e for e in equations(jaxpr.eqns) if e.primitive.name in LOWER]
    return bool(products) and all(_asks_for_highest(e.params.get("precision")) for e in products)


class _Rewriter(Rewriter[_Value]):
    enters = ENTERED
    custom_derivatives = True

    def __init__(self, settings: Autocast) -> None:
        super().__init__()
        self.low, self.settings = jnp.dtype(settings.dtype), settings
        self.rules = (
            dict.fromkeys(PROMOTE, self._promoted)
            | dict.fromkeys(CASTS, self._cast)
            | dict.fromkeys(LOWER, self._product)
        )
        self.casts: dict[Any, Atom] = {}  # those made so far, by program, atom and scope
        self.wide: set[str] = set()  # the parameters that are read in fp32, or by unsafe modules

    def constant(self, atom: Atom) -> _Value:
        return _Value.of(atom, neutral=not is_var(atom))

    def unknown(self, atom: Atom) -> _Value:
        return _Value.of(atom)

    def derived(self, states: Sequence[_Value], out: jex.Var) -> _Value:
        return _Value.of(out)

    def body_states(
        self, program: Rewriting[_Value], eqn: jex.JaxprEqn, body: Body
    ) -> list[_Value]:
        """A loop has slices of its operands; what it carries is another value after each trip."""
        slices = body.first_xs if eqn.primitive.name in LOOPS else len(eqn.invars)
        states = super().body_states(program, eqn, body)
        return [
            _Value.of(v, x.parameter, x.neutral and i < slices)
            for i, (x, v) in enumerate(zip(states, body.jaxpr.invars, strict=True))
        ]

    def write(self, jaxpr: jex.Jaxpr, *args: Any) -> Rewriting[_Value]:
        program = super().write(jaxpr, *args)
        results = map(program.state, jaxpr.outvars)
        self.wide.update(x.parameter for x in results if x.parameter)
        return program

    # -- rules -------------------------------------------------------------------------------------

    def _product(self, program: Rewriting[_Value], eqn: jex.JaxprEqn) -> list[_Value]:
        if not self._is_lowered(eqn, [program.state(v) for v in eqn.invars]):
            return self.other(program, eqn)
        if eqn.params.get("preferred_element_type") is not None:
            eqn = eqn.replace(params={**eqn.params, "preferred_element_type": self.low})
        return self._write(program, eqn, self.low)

    def _cast(self, program: Rewriting[_Value], eqn: jex.JaxprEqn) -> list[_Value]:
        """Widening is exact: a cast can start from the low dtype."""
        return self._write(program, eqn, None)

    def _promoted(self, program: Rewriting[_Value], eqn: jex.JaxprEqn) -> list[_Value]:
        if eqn.primitive.name == "integer_pow" and eqn.params["y"] == 2:
            return self.other(program, eqn)
        operands = [v for v in eqn.invars if _is_single(v)]
        deciding = [v for v in operands if not program.state(v).neutral] or operands
        is_low = [program.atom(v).aval.dtype == self.low for v in deciding]
        return self._write(program, eqn, self.low if is_low and all(is_low) else jnp.float32)

    def other(self, program: Rewriting[_Value], eqn: jex.JaxprEqn) -> list[_Value]:
        opaque = eqn.primitive.name in self.enters and bodies(eqn)
        return self._write(program, eqn, None if opaque else jnp.float32)

    def enter(self, program: Rewriting[_Value], eqn: jex.JaxprEqn) -> bool:
        if not super().enter(program, eqn):
            return False
        operands = [] if eqn.primitive.name in CUSTOM_DERIVATIVE else eqn.invars
        is_low = any(getattr(program.atom(v).aval, "dtype", None) == self.low for v in operands)
        return is_low or self._holds_products(eqn)

    def nested(self, program: Rewriting[_Value], eqn: jex.JaxprEqn) -> list[_Value]:
        body = bodies(eqn)[0]
        start = body.first + body.num_consts
        as_traced = [*eqn.invars[: body.first], *eqn.invars[start : start + body.num_carry]]
        self._note_readers(program, eqn, as_traced, None)
        return super().nested(program, eqn)

    def custom_derivative(self, program: Rewriting[_Value], eqn: jex.JaxprEqn) -> list[_Value]:
        self._note_readers(program, eqn, eqn.invars, None)
        return super().custom_derivative(program, eqn)

    # -- equations ---------------------------------------------------------------------------------

    def _write(self, program: Rewriting[_Value], eqn: jex.JaxprEqn, dtype: Any) -> list[_Value]:
        """Write an equation with operands that were traced in fp32 in this dtype; None: as is."""
        is_view = eqn.primitive.name in VIEWS
        if not is_view:
            self._note_readers(program, eqn, eqn.invars, dtype)
        operands = [
            self._operand(program, program.atom(v), dtype, eqn)
            if dtype is not None and _is_single(v)
            else program.atom(v)
            for v in eqn.invars
        ]
        program.emit(eqn, operands)
        source = program.state(eqn.invars[0]) if is_view else _Value()
        return [_Value.of(out, *source) for out in eqn.outvars]

    def _operand(self, program: Rewriting[_Value], x: Atom, dtype: Any, eqn: jex.JaxprEqn) -> Atom:
        """An atom as an operand of an equation, cast in its scope.

        Submodules of one module share a cast, such as the three projections of attention: each cast
        is a residual. Modules that may be units do not, for what crosses their boundaries is saved
        too.
        """
        dtype = jnp.dtype(dtype)
        if x.aval.dtype == dtype:
            return x
        if not is_var(x):
            return jex.Literal(np.asarray(x.val).astype(dtype)[()], x.aval.update(dtype=dtype))
        scopes = [call.serial for call in calls_in(str(eqn.source_info.name_stack))]
        key = (program, x, dtype, *(scopes[:-1] or scopes))
        if key not in self.casts:
            (self.casts[key],) = program.splice(lambda x: x.astype(dtype), [x], eqn)
        return self.casts[key]

    def _note_readers(
        self, program: Rewriting[_Value], eqn: jex.JaxprEqn, atoms: Sequence[Any], dtype: Any
    ) -> None:
        """Note the parameters that an operation in this dtype reads."""
        calls = calls_in(str(eqn.source_info.name_stack))
        if dtype != self.low or (calls and not self.settings.is_safe(calls[-1])):
            values = (program.state(v) for v in atoms)
            self.wide.update(x.parameter for x in values if x.parameter)

    # -- products ----------------------------------------------------------------------------------

    def _is_lowered(self, eqn: jex.JaxprEqn, values: Sequence[_Value] = ()) -> bool:
        params = eqn.params
        return (
            eqn.primitive.name in LOWER
            and all(map(_is_single, eqn.invars[:2]))
            and params.get("preferred_element_type") in (None, jnp.float32)
            and not _asks_for_highest(params.get("precision"))
            and not any(x.parameter in self.settings.full for x in values if x.parameter)
        )

    def _holds_products(self, eqn: jex.JaxprEqn) -> bool:
        return any(map(self._is_lowered, equations([eqn])))


def _is_single(atom: Any) -> bool:
    return getattr(atom.aval, "dtype", None) == jnp.float32


def _asks_for_highest(precision: Any) -> bool:
    """Whether a product has the highest precision by itself, and not by JAX's setting for all."""
    of_all = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009
    if of_all in ("highest", "float32"):
        return False
    pair = precision if isinstance(precision, tuple) else (precision,)
    return jax.lax.Precision.HIGHEST in pair


def autocast_of(low: Any, safe: Sequence[str] | None, table: PlacementTable) -> Autocast:
    """Automatic mixed precision of a model with these parameters, by its safe modules."""
    full = frozenset(row.path for row in table if row.leaf.full_precision)
    gathered = (row.path for row in table if row.gathered and row.leaf.dtype == jnp.float32)
    sharded = frozenset(gathered) - full if table.mesh.shape[PIPE] == 1 else frozenset()
    is_safe = SafeModules(None if safe is None else tuple(safe))
    return Autocast(low, full, sharded, is_safe)
