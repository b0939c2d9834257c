"""The programs that equations run, and how their variables are the equation's.

What differs between versions of jax in how an equation holds a program is known here alone.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspeed.jaxpr.primitives import CALLS, CHECKPOINTS, CONTROL, INLINED, KERNELS

# Parameters that hold the one program of an equation.
_HOLDERS = {"while": ("body_jaxpr",), "cond": ("branches",)}
_HOLDERS_OF_OTHERS = ("call_jaxpr", "fun_jaxpr", "jaxpr", "call")
# Their program combines two elements, and runs as often as there are elements.
_COMBINERS = ("reduce", "reduce_window")


def is_var(atom: Any) -> bool:
    """A variable, not a literal."""
    return not hasattr(atom, "val")


def open_jaxpr(closed: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, consts) of what an equation holds; jax 0.12 keeps open jaxprs in some of them."""
    return getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())


def with_jaxpr(closed: Any, jaxpr: Any) -> Any:
    """What an equation holds, with another jaxpr in it."""
    return closed.replace(jaxpr=jaxpr) if hasattr(closed, "jaxpr") else jaxpr


def called(eqn: Any) -> Any:
    """What a call or a loop runs, as the equation holds it."""
    return eqn.params[_holder(eqn)]


def _holder(eqn: Any) -> Any:
    """The parameter that holds what an equation runs, or None."""
    keys = _HOLDERS.get(eqn.primitive.name, _HOLDERS_OF_OTHERS)
    return next((key for key in keys if key in eqn.params), None)


def consts_and_carry(loop: Any) -> tuple[int, int]:
    """How many inputs of a loop's body all trips read, and how many one hands to the next.

    Of a scan they are the equation's first operands too.
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
    """A program that an equation runs; its results are the equation's.

    Attributes:
      jaxpr: the program, and `consts` the values of its constants.
      first: the place of the operand that its first input is.
      operands: of the equation, one for each input. Of a scan those after constants and carry are
        given to each trip slice by slice, and the results after the carry are stacked.
      trips: how often it runs; 1 where only the data tell.
      num_consts: of a loop: its first inputs, which all trips read.
      num_carry: ... and those that follow, which a trip hands on as its first results.
      manual: the mesh axes over which the program, and not what is around it, is manual, with their
        sizes: each of these devices runs it.
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
        """Its inputs that a trip hands to the next."""
        return self.jaxpr.invars[self.num_consts : self.num_consts + self.num_carry]


def bodies(eqn: Any) -> list[Body]:
    """The programs that an equation runs: several are branches, of which one runs.

    A kernel has none: its inputs are blocks of the operands. Of a `while` it is the body alone,
    without the condition.
    """
    name, params = eqn.primitive.name, eqn.params
    holder = _holder(eqn)
    if holder is None or name in KERNELS or name in _COMBINERS:
        return []
    first = {"cond": 1, "while": params.get("cond_nconsts")}.get(name, 0)
    operands = eqn.invars[first:]
    held = params[holder] if name == "cond" else (params[holder],)
    opened = [open_jaxpr(each) for each in held]
    if any(not hasattr(j, "eqns") or len(j.invars) != len(operands) for j, _ in opened):
        return []  # something else under that name
    consts, carry = consts_and_carry(eqn) if name in ("scan", "while") else (0, 0)
    trips, manual = params["length"] if name == "scan" else 1, _manual_axes(params)
    return [Body(*each, first, operands, trips, consts, carry, manual) for each in opened]


def _manual_axes(params: Any) -> tuple[tuple[str, int], ...]:
    axes = params.get("newly_manual_axes", params.get("manual_axes", ()))
    return tuple((axis, params["mesh"].shape[axis]) for axis in axes)


def transparent_bodies(eqn: Any) -> list[Body]:
    """The bodies whose dims are the equation's: none of regions that a device runs on its part."""
    return bodies(eqn) if eqn.primitive.name in (*CALLS, *CONTROL) else []


def sliceable_bodies(eqn: Any) -> list[Body]:
    """The bodies that can be run in segments: none of what has a derivative of its own, nor of a
    loop of unknown length."""
    names = (*INLINED, *CHECKPOINTS, "scan", "cond")
    return bodies(eqn) if eqn.primitive.name in names else []


def runs(eqn: Any, names: Container[str]) -> bool:
    """Whether an equation, or one anywhere within it, is of one of these primitives."""
    return eqn.primitive.name in names or any(
        runs(e, names) for jaxpr in _all_programs(eqn) for e in jaxpr.eqns
    )


def _all_programs(eqn: Any) -> Iterator[Any]:
    """Every program among the parameters, whatever it is for: kernels, conditions, combiners."""
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(jaxpr := open_jaxpr(each)[0], "eqns"):
                yield jaxpr


def with_functions(eqn: Any, new: Callable[[Any], Any]) -> Any:
    """An equation with `new(function)` for each that it holds; itself if none changes."""
    key = _holder(eqn)
    old = eqn.params[key]
    held = old if isinstance(old, tuple) else (old,)
    found = tuple(map(new, held))
    if all(a is b for a, b in zip(found, held, strict=True)):
        return eqn
    return eqn.replace(params={**eqn.params, key: found if isinstance(old, tuple) else found[0]})


# -- what comes out as it went in ------------------------------------------------------------------


def forwarded(jaxpr: Any) -> list[Any]:
    """For each result of a jaxpr the input variable that it is, unchanged; None for all others.

    Looked for inside of calls, loops and branches too: what a jit returns as it came is the same.
    """
    origin = {v: v for v in jaxpr.invars}
    for eqn in jaxpr.eqns:
        for out, i in zip(eqn.outvars, forwarded_operands(eqn)):
            if i is not None and is_var(eqn.invars[i]) and eqn.invars[i] in origin:
                origin[out] = origin[eqn.invars[i]]
    return [origin.get(v) if is_var(v) else None for v in jaxpr.outvars]


def forwarded_operands(eqn: Any) -> list[int | None]:
    """For each result of an equation the operand that it is; empty where it runs no program."""
    by_body = [_forwarded_by(body) for body in transparent_bodies(eqn)]
    return [found[0] if len({*found}) == 1 else None for found in zip(*by_body)]


def _forwarded_by(body: Body) -> list[int | None]:
    """... as one body does it: of a loop, a carry that comes out as it went in, and slices of an
    input that are stacked up again."""
    place = {v: i for i, v in enumerate(body.jaxpr.invars)}
    walked = range(body.num_consts + body.num_carry, len(place))

    def operand(number: int, found: Any) -> int | None:
        here = (body.num_consts + number,) if number < body.num_carry else walked
        return body.first + place[found] if place.get(found) in here else None

    return [operand(number, found) for number, found in enumerate(forwarded(body.jaxpr))]
