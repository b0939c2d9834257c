"""Early weight gradients: computed right after the matmul that follows, not at a unit's end.

Only the end of a unit's backward pass needs its weight gradients. By default XLA computes all of
them there (seen on TPU compiles), and until then holds their operands: for a llama block four
arrays as wide as its MLP, throughout the backward pass of its attention. So the input gradient of
each matmul is tied to the weight gradient of the next matmul of the forward pass, which the
backward pass reached just before. That weight gradient can still be reduce-scattered during this
matmul.
"""

from collections.abc import Callable, Collection
from typing import Any

from jaxspeed.jaxpr.evaluate import as_function, bindings, run_equation
from jaxspeed.jaxpr.primitives import PRODUCTS
from jaxspeed.jaxpr.traverse import is_var
from jaxspeed.placement.grad_barrier import grads_together


def with_eager_weight_grads(jaxpr: Any, weights: Collection[Any]) -> Callable[..., list[Any]]:
    """A constant-free jaxpr as a function whose backward pass finishes one matmul at a time.

    `weights` are those of its inputs that are trainable parameters.
    """
    matmuls = _matmuls(jaxpr, weights)
    after = [weight for _, weight in [*matmuls.values()][1:]]
    waits_for = dict(zip(matmuls, after, strict=False))  # the last matmul has no successor

    def run(*args: Any) -> list[Any]:
        env = bindings(jaxpr, (), args)
        for number, eqn in enumerate(jaxpr.eqns):
            given = {v: env[v] for v in eqn.invars if is_var(v)}
            if number in waits_for:
                moving, weight = matmuls[number][0], waits_for[number]
                given[moving], env[weight] = grads_together(env[moving], env[weight])
            outs = run_equation(jaxpr, eqn, given.__getitem__)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [env[v] if is_var(v) else v.val for v in jaxpr.outvars]

    return run if waits_for else as_function(jaxpr)


def _matmuls(jaxpr: Any, weights: Collection[Any]) -> dict[int, tuple[Any, Any]]:
    """{equation number: (activation operand, weight operand)} of the matmuls and convolutions."""
    origin = {v: v for v in weights}  # of values computed from a single weight
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
