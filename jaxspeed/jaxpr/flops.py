"""FLOPs of a traced program, estimated from the shapes of its operations."""

import math
from typing import Any

from jaxspeed.jaxpr.evaluate import bodies, open_jaxpr

_NAMES_ONLY = {"name", "reshape", "squeeze", "broadcast_in_dim", "sharding_constraint", "copy"}


def flops(jaxpr: Any) -> int:
    """Of products and convolutions; any other operation counts as one an element of its result."""
    return sum(map(flops_of, jaxpr.eqns))


def flops_of(eqn: Any) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * _elements(eqn) * math.prod(shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * _elements(eqn) * math.prod(kernel) // features
    if name == "cond":  # which one runs only the platform or the data tell
        return max(flops(open_jaxpr(branch)[0]) for branch in eqn.params["branches"])
    if inner := programs_in(eqn):
        return sum(trips * flops(body) for body, trips in inner)
    if name in _NAMES_ONLY:
        return 0
    return _elements(eqn)


def programs_in(eqn: Any) -> list[tuple[Any, int]]:
    """[(program, how often it runs)] of an operation that runs others.

    Those with a derivative of their own count, and what each device does for itself.
    """
    if found := bodies(eqn):
        return [(body, trips) for body, _, trips in found]
    keys = ("call_jaxpr", "fun_jaxpr", "jaxpr")
    opened = (open_jaxpr(eqn.params[key])[0] for key in keys if key in eqn.params)
    return [(each, 1) for each in opened if hasattr(each, "eqns")]


def _elements(eqn: Any) -> int:
    """Of the results."""
    return sum(math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars)


def nbytes(aval: Any) -> int:
    """Of an array of this shape and dtype; keys of random numbers count as nothing."""
    size = getattr(aval.dtype, "itemsize", 0)
    return math.prod(aval.shape) * size
