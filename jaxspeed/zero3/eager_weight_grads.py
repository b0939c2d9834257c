"""Weight gradients computed as early as possible, not at the end of their unit.

Only the end of a unit waits for the gradients of its weights. Left to itself XLA makes all of them
there (seen on TPU compiles), and until then holds what they are products of: of a llama block four
arrays as wide as its mlp, all through the backward pass of its attention. So what a product hands
back waits for the gradient of the weight of the product after it, which the backward pass came to
just before: that gradient can still go to its shard while this product is under way.
"""

from collections.abc import Callable, Collection
from typing import Any

from jaxspeed.jaxpr.evaluate import as_function, bindings, is_var, part
from jaxspeed.jaxpr.primitives import PRODUCTS
from jaxspeed.placement.grad_barrier import gradients_together


def in_turn(jaxpr: Any, weights: Collection[Any]) -> Callable[..., list[Any]]:
    """A jaxpr without constants as a function whose backward pass ends a product before the next.

    `weights` are those of its inputs that are parameters with a gradient.
    """
    products = _products(jaxpr, weights)
    after = [weight for _, weight in [*products.values()][1:]]
    waits_for = dict(zip(products, after, strict=False))  # the last one is followed by none

    def run(*args: Any) -> list[Any]:
        env = bindings(jaxpr, (), args)
        for number, eqn in enumerate(jaxpr.eqns):
            free = list(dict.fromkeys(v for v in eqn.invars if is_var(v)))
            given = {v: env[v] for v in free}
            if number in waits_for:
                moving, weight = products[number][0], waits_for[number]
                given[moving], env[weight] = gradients_together(env[moving], env[weight])
            outs = as_function(part(jaxpr, [eqn], free, eqn.outvars))(*given.values())
            env.update(zip(eqn.outvars, outs, strict=True))
        return [env[v] if is_var(v) else v.val for v in jaxpr.outvars]

    return run if waits_for else as_function(jaxpr)


def _products(jaxpr: Any, weights: Collection[Any]) -> dict[int, tuple[Any, Any]]:
    """{number of an equation: (what is multiplied, the weight that it is multiplied with)}."""
    origin = {v: v for v in weights}  # of what is made of a single weight
    found = {}
    for number, eqn in enumerate(jaxpr.eqns):
        read = [v for v in eqn.invars if is_var(v)]
        origins = {origin.get(v) for v in read}
        if len(origins) == 1 and None not in origins:
            origin.update(dict.fromkeys(eqn.outvars, *origins))
        elif eqn.primitive.name in PRODUCTS and None in origins:
            moving = next(v for v in read if v not in origin)
            weight = next((origin[v] for v in read if v in origin), None)
            if weight is not None:
                found[number] = moving, weight
    return found
