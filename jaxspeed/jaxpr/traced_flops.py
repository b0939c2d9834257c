"""FLOPs of the matrix products and convolutions of a traced function, times scan lengths."""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def forward_flops(jaxpr: Jaxpr) -> int:
    """2 for a multiply-add; of branches the largest, of a loop of unknown length one run."""
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(equation: JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    taken: list[Any] = [x.aval for x in equation.invars]
    made: list[Any] = [x.aval for x in equation.outvars]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        depth = math.prod(taken[0].shape[dim] for dim in contracted)
        return 2 * made[0].size * depth
    if name == "conv_general_dilated":
        kernel = taken[1]
        features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        # Each element of the result sums over the kernel's window and its input features.
        return 2 * made[0].size * kernel.size // features
    if name == "cond":
        return max(forward_flops(branch.jaxpr) for branch in params["branches"])
    inner = sum(map(forward_flops, _inside(params)))
    if name == "scan":
        return inner * params["length"]
    if name == "shard_map":
        return inner * math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":
        return inner * math.prod(params["grid_mapping"].grid)
    return inner


def _inside(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """The programs that an equation runs; a rule for its derivative is a function, not one."""
    for value in params.values():
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
