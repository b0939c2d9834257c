"""FLOPs of a traced program, from the shapes of its operations.

One count a primitive and shapes, summed over a program: times the trips of the loops around it (of
a loop of unknown length one), for every device of a region that each runs on its part, and of
branches the largest. What an operation counts is a parameter (`of_products` or `of_all`), and so is
how many points of its grid a kernel runs. `hlo/cost.py`, which counts compiled programs, is the
check on this.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxspeed.jaxpr.primitives import CONSTRAINT, RESHAPES
from jaxspeed.jaxpr.traverse import bodies, open_jaxpr

Shape = Sequence[int]
Count = Callable[[Any], int]  # of an equation that runs no program
_UNCOUNTED = {*RESHAPES, "name", "copy", "broadcast_in_dim", CONSTRAINT}  # names for what is there


def product_flops(name: str, params: Any, operands: Sequence[Shape], result: Shape) -> int | None:
    """Of a matrix product or convolution of these shapes, 2 a multiply-add; None of all else."""
    numbers = params.get("dimension_numbers")
    if name == "dot_general":
        (contracted, _), _ = numbers
        return 2 * math.prod(result) * math.prod(operands[0][int(d)] for d in contracted)
    if name == "conv_general_dilated":
        # Each element of the result sums over the kernel's window and its input features.
        features = operands[1][numbers.rhs_spec[0]]
        return 2 * math.prod(result) * math.prod(operands[1]) // features
    return None


def of_products(eqn: Any) -> int:
    """Matrix products and convolutions alone, as the FLOPs of models are quoted."""
    found = product_flops(
        eqn.primitive.name,
        eqn.params,
        [getattr(v.aval, "shape", ()) for v in eqn.invars],
        getattr(eqn.outvars[0].aval, "shape", ()) if eqn.outvars else (),
    )
    return found or 0


def of_all(eqn: Any) -> int:
    """Any other operation counts as one an element of its results."""
    if found := of_products(eqn):
        return found
    if eqn.primitive.name in _UNCOUNTED:
        return 0
    return sum(math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars)


def program_flops(jaxpr: Any, count: Count) -> int:
    """Of a program."""
    return sum(equation_flops(eqn, count) for eqn in jaxpr.eqns)


def equation_flops(eqn: Any, count: Count) -> int:
    """Of an equation with all that it runs."""
    if eqn.primitive.name == "pallas_call":
        return kernel_flops(eqn.params, count, eqn.params["grid_mapping"].grid)
    found = [
        body.trips * math.prod(n for _, n in body.manual) * program_flops(body.jaxpr, count)
        for body in bodies(eqn)
    ]
    return max(found) if found else count(eqn)


def kernel_flops(params: Any, count: Count, grid: Sequence[int]) -> int:
    """Of a `pallas_call` with these parameters, as often as there are points in `grid`: its own,
    or fewer where a mask leaves some out."""
    return program_flops(open_jaxpr(params["jaxpr"])[0], count) * math.prod(grid)


def nbytes(aval: Any) -> int:
    """Of an array of this shape and dtype; keys of random numbers count as nothing."""
    size = getattr(aval.dtype, "itemsize", 0)
    return math.prod(aval.shape) * size
