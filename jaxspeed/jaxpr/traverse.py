"""Traversal of traced programs: the inner programs of equations, and forwarded variables.

Differences between versions of jax in how an equation stores a program are handled only here.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxspeed.jaxpr.primitives import CALLS, CONTROL, INLINED, KERNELS, PLAIN_CALLS, PRODUCTS

__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var"]  # the types of programs

# Parameters that contain an equation's inner program.
_HOLDERS = {"while": ("body_jaxpr",), "cond": ("branches",)}
_HOLDERS_OF_OTHERS = ("call_jaxpr", "fun_jaxpr", "jaxpr", "call")
# Their program combines two elements and runs once per element.
_COMBINERS = ("reduce", "reduce_window")


def is_var(atom: Any) -> bool:
    """Whether an atom is a variable, not a literal."""
    return not hasattr(atom, "val")


def shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def is_real(x: Any) -> bool:
    """Whether a variable, an array or an abstract one can have a gradient."""
    return bool(jnp.issubdtype(getattr(x, "aval", x).dtype, jnp.inexact))


def like(variables: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """Abstract arrays like these variables."""
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]


def open_jaxpr(closed: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, consts) of an inner program; in some primitives of jax 0.12 it is an open jaxpr."""
    return getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())


def with_jaxpr(closed: Any, jaxpr: Any) -> Any:
    """An inner program, open or closed, with its jaxpr replaced."""
    return closed.replace(jaxpr=jaxpr) if hasattr(closed, "jaxpr") else jaxpr


def called(eqn: Any) -> Any:
    """The inner program of a call or a loop, open or closed."""
    return eqn.params[_holder(eqn)]


def _holder(eqn: Any) -> Any:
    """The name of the parameter that contains an equation's inner program, or None."""
    keys = _HOLDERS.get(eqn.primitive.name, _HOLDERS_OF_OTHERS)
    return next((key for key in keys if key in eqn.params), None)


def consts_and_carry(loop: Any) -> tuple[int, int]:
    """Numbers of a loop's constants and of its carried values: the first inputs of its body.

    They are also a scan's first operands.
    """
    params = loop.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    if "body_nconsts" in params:
        consts = params["body_nconsts"]
        return consts, len(open_jaxpr(params["body_jaxpr"])[0].invars) - consts
    consts, carry = params["ft_in"].unpack()[:2]  # jax 0.12
    return len(consts), len(carry)


@dataclass(frozen=True)
class Body:
    """An inner program of an equation; its results are the equation's.

    Attributes:
      jaxpr: the program; `consts` are the values of its constants.
      first: the index of the operand of its first input.
      operands: of the equation, one per input. A scan slices those after constants and carry, one
        slice per trip, and stacks the results after the carry.
      trips: number of runs; 1 if it depends on data.
      num_consts: of a loop: its first inputs, which all trips read.
      num_carry: of a loop: the inputs after those, which each trip returns as its first results.
      manual: (axis, size) of the mesh axes that are manual inside but not outside; each of
        these devices runs the program.
    """

    jaxpr: Any
    consts: Sequence[Any]
    first: int
    operands: Sequence[Any]
    trips: int = 1
    num_consts: int = 0
    num_carry: int = 0
    manual: tuple[tuple[str, int], ...] = ()

    @property
    def carried(self) -> Sequence[Any]:
        """The inputs that are carried from trip to trip."""
        return self.jaxpr.invars[self.num_consts : self.first_xs]

    def passed[T](self, values: Mapping[Any, T]) -> dict[Any, T]:
        """By input, the values of the operands that have one."""
        pairs = zip(self.jaxpr.invars, self.operands, strict=True)
        return {iv: values[v] for iv, v in pairs if is_var(v) and v in values}

    @property
    def first_xs(self) -> int:
        """The index of the first input that is scanned."""
        return self.num_consts + self.num_carry


def bodies(eqn: Any) -> list[Body]:
    """The inner programs of an equation; several are branches, of which one runs.

    A kernel has none: its inputs are blocks of the operands. A `while` has its body, without the
    condition.
    """
    name, params = eqn.primitive.name, eqn.params
    holder = _holder(eqn)
    if holder is None or name in KERNELS or name in _COMBINERS:
        return []
    first = {"cond": 1, "while": params.get("cond_nconsts")}.get(name, 0)
    operands = eqn.invars[first:]
    held = params[holder] if name == "cond" else (params[holder],)
    opened = [open_jaxpr(program) for program in held]
    if any(not hasattr(j, "eqns") or len(j.invars) != len(operands) for j, _ in opened):
        return []  # the parameter is not a program on these operands
    consts, carry = consts_and_carry(eqn) if name in ("scan", "while") else (0, 0)
    trips, manual = params["length"] if name == "scan" else 1, _manual_axes(params)
    return [Body(*program, first, operands, trips, consts, carry, manual) for program in opened]


def _manual_axes(params: Any) -> tuple[tuple[str, int], ...]:
    axes = params.get("newly_manual_axes", params.get("manual_axes", ()))
    return tuple((axis, params["mesh"].shape[axis]) for axis in axes)


def transparent_bodies(eqn: Any) -> list[Body]:
    """The bodies whose dims are those of the operands: not those of manual regions."""
    return bodies(eqn) if eqn.primitive.name in (*CALLS, *CONTROL) and not is_marked(eqn) else []


def sliceable_bodies(eqn: Any) -> list[Body]:
    """The bodies that can be split into segments: not those of custom derivatives and `while`."""
    names = (*PLAIN_CALLS, "scan", "cond")
    return bodies(eqn) if eqn.primitive.name in names and not is_marked(eqn) else []


# -- products that a pass has wrapped --------------------------------------------------------------

_PRODUCT = "jaxspeed_product"


def as_product(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Mark a function of a product's operands: to passes it stays that product.

    It contains a matmul or convolution of arrays of these dims, between casts, scales, or in a
    custom derivative. Passes do not enter it.
    """

    def marked(lhs: Any, rhs: Any) -> Any:
        return function(lhs, rhs)

    marked.__name__ = _PRODUCT
    return jax.jit(marked)


def is_marked(eqn: Any) -> bool:
    """Whether an equation calls a function that `as_product` marked."""
    return eqn.primitive.name in INLINED and eqn.params.get("name") == _PRODUCT


def product_of(eqn: Any) -> Any | None:
    """The matmul or convolution that an equation is, or for which a marked function stands."""
    if eqn.primitive.name in PRODUCTS:
        return eqn
    if not is_marked(eqn):
        return None

    return next(e for e in equations([eqn]) if e.primitive.name in PRODUCTS)


def equations(
    eqns: Iterable[Any], entered: Callable[[Any], Iterable[Body]] = bodies
) -> Iterator[Any]:
    """Equations, each before those of its inner programs that are `entered`."""
    for eqn in eqns:
        yield eqn
        for body in entered(eqn):
            yield from equations(body.jaxpr.eqns, entered)


def runs(eqn: Any, names: Container[str]) -> bool:
    """Whether an equation, or one nested in it at any depth, is of one of these primitives."""
    return contains(eqn, lambda e: e.primitive.name in names)


def contains(eqn: Any, predicate: Callable[[Any], bool]) -> bool:
    """Whether an equation, or one nested in it at any depth, satisfies `predicate`."""
    return predicate(eqn) or any(
        contains(e, predicate) for jaxpr, _ in programs(eqn) for e in jaxpr.eqns
    )


def nested_constants(eqn: Any) -> Iterator[Any]:
    """The constants of the programs nested in an equation, at any depth."""
    for jaxpr, consts in programs(eqn):
        yield from consts
        for inner in jaxpr.eqns:
            yield from nested_constants(inner)


def programs(eqn: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Every (jaxpr, consts) among the parameters: also kernels, conditions and combiners."""
    for value in eqn.params.values():
        for element in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr, consts = open_jaxpr(element)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr, consts


def with_functions(eqn: Any, new: Callable[[Any], Any]) -> Any:
    """An equation with `new(function)` for each inner program; the same object if none changes."""
    key = _holder(eqn)
    old = eqn.params[key]
    held = old if isinstance(old, tuple) else (old,)
    functions = tuple(map(new, held))
    if all(a is b for a, b in zip(functions, held, strict=True)):
        return eqn
    return eqn.replace(
        params={**eqn.params, key: functions if isinstance(old, tuple) else functions[0]}
    )


# -- forwarded variables ---------------------------------------------------------------------------


def forwarded(jaxpr: Any) -> list[Any]:
    """For each result of a jaxpr the input variable that it equals unchanged, or None.

    Calls, loops and branches are looked into, and transpositions may cancel: `nnx.scan` along
    another dim than the first returns the parameters that it sliced.
    """
    # The input that a variable equals, with its dims in this order.
    origin: dict[Any, tuple[Any, tuple[int, ...]]] = {v: (v, _in_order(v)) for v in jaxpr.invars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "transpose" and eqn.invars[0] in origin:
            source, order = origin[eqn.invars[0]]
            origin[eqn.outvars[0]] = source, tuple(order[d] for d in eqn.params["permutation"])
        for out, i in zip(eqn.outvars, forwarded_operands(eqn)):
            if i is not None and is_var(eqn.invars[i]) and eqn.invars[i] in origin:
                origin[out] = origin[eqn.invars[i]]
    result_origins = [origin.get(v, (None, ())) if is_var(v) else (None, ()) for v in jaxpr.outvars]
    return [v if v is not None and order == _in_order(v) else None for v, order in result_origins]


def _in_order(variable: Any) -> tuple[int, ...]:
    return tuple(range(len(getattr(variable.aval, "shape", ()))))


def forwarded_operands(eqn: Any) -> list[int | None]:
    """For each result the index of the operand that it equals; empty without an inner program."""
    by_body = [_forwarded_by(body) for body in transparent_bodies(eqn)]
    return [candidates[0] if len({*candidates}) == 1 else None for candidates in zip(*by_body)]


def _forwarded_by(body: Body) -> list[int | None]:
    """`forwarded_operands` of one body.

    In a loop: an unchanged carry, or the slices of an input, stacked again.
    """
    place = {v: i for i, v in enumerate(body.jaxpr.invars)}
    scanned = range(body.first_xs, len(place))

    def operand(number: int, source: Any) -> int | None:
        same = (body.num_consts + number,) if number < body.num_carry else scanned
        return body.first + place[source] if place.get(source) in same else None

    return [operand(number, source) for number, source in enumerate(forwarded(body.jaxpr))]
