"""FLOPs of a traced program, from the shapes of its operations.

The count of each operation is multiplied by the trips of its enclosing loops (1 if unknown) and by
the devices of its enclosing manual regions; of branches the largest counts. Parameters are the
count of an operation (`count_products` or `count_all`) and the grid points that a kernel runs.
`hlo/cost.py`, which counts compiled programs, is the cross-check.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxspeed.jaxpr.primitives import CONSTRAINT, GROUPED_GRADIENT, GROUPED_PRODUCT, RESHAPES
from jaxspeed.jaxpr.traverse import bodies, open_jaxpr

Shape = Sequence[int]
Count = Callable[[Any], int]  # FLOPs of an equation without inner programs
_UNCOUNTED = {*RESHAPES, "name", "copy", "broadcast_in_dim", CONSTRAINT}  # compute nothing


def product_flops(name: str, params: Any, operands: Sequence[Shape], result: Shape) -> int | None:
    """FLOPs of a matmul or convolution, 2 per multiply-add; None for other primitives."""
    numbers = params.get("dimension_numbers")
    if name == "dot_general":
        (contracted, _), _ = numbers
        return 2 * math.prod(result) * math.prod(operands[0][int(d)] for d in contracted)
    if name == "conv_general_dilated":
        # Each element of the result sums over the kernel's window and its input features.
        features = operands[1][numbers.rhs_spec[0]]
        return 2 * math.prod(result) * math.prod(operands[1]) // features
    if name in (GROUPED_PRODUCT, GROUPED_GRADIENT):
        # Rows that are no token's do not count, nor rounds that balanced experts do not need.
        _, inner, outer = operands[1] if name == GROUPED_PRODUCT else result[1:]
        return 2 * params["active"] * inner * outer
    return None


def count_products(eqn: Any) -> int:
    """FLOPs of matmuls and convolutions only, as model FLOPs are quoted."""
    flops = product_flops(
        eqn.primitive.name,
        eqn.params,
        [getattr(v.aval, "shape", ()) for v in eqn.invars],
        getattr(eqn.outvars[0].aval, "shape", ()) if eqn.outvars else (),
    )
    return flops or 0


def count_all(eqn: Any) -> int:
    """FLOPs of an equation; other than products, one per element of the results."""
    if products := count_products(eqn):
        return products
    if eqn.primitive.name in _UNCOUNTED:
        return 0
    return sum(math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars)


def program_flops(jaxpr: Any, count: Count) -> int:
    """FLOPs of a program."""
    return sum(equation_flops(eqn, count) for eqn in jaxpr.eqns)


def equation_flops(eqn: Any, count: Count) -> int:
    """FLOPs of an equation, inner programs included."""
    if eqn.primitive.name == "pallas_call":
        return kernel_flops(eqn.params, count, eqn.params["grid_mapping"].grid)
    body_flops = [
        body.trips * math.prod(n for _, n in body.manual) * program_flops(body.jaxpr, count)
        for body in bodies(eqn)
    ]
    return max(body_flops) if body_flops else count(eqn)


def kernel_flops(params: Any, count: Count, grid: Sequence[int]) -> int:
    """FLOPs of a `pallas_call` on `grid`: its own, or a smaller one if a mask skips points."""
    return program_flops(open_jaxpr(params["jaxpr"])[0], count) * math.prod(grid)


def nbytes(aval: Any) -> int:
    """Bytes of an array; random keys count as 0."""
    size = getattr(aval.dtype, "itemsize", 0)
    return math.prod(aval.shape) * size
