"""Early weight gradients: computed right after the matmul that follows, not at a unit's end.

Only the end of a unit's backward pass needs its weight gradients. By default XLA computes all of
them there (seen on TPU compiles), and until then holds their operands: for a llama block four
arrays as wide as its MLP, throughout the backward pass of its attention. So the input gradient of
each matmul is tied to the weight gradient of the next matmul of the forward pass, which the
backward pass reached just before. That weight gradient can still be reduce-scattered during this
matmul.

Matmuls that read one operand with weights sharded over `tensor`, such as queries, keys and values,
are tied together: each one's input gradient is a partial sum, and a barrier of its own would have
each all-reduced, instead of their sum.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxspeed.jaxpr.evaluate import as_function, bindings, run_equation
from jaxspeed.jaxpr.traverse import is_var
from jaxspeed.jaxpr.weight_uses import weight_uses
from jaxspeed.placement.grad_barrier import grads_together
from jaxspeed.zero3.sharded_param import Storage


@dataclass(frozen=True)
class Tie:
    """Matmuls of one operand, whose gradient waits for weight gradients."""

    operand: Any
    numbers: tuple[int, ...]  # of the matmuls' equations
    after: tuple[Any, ...]  # the weights of the matmuls that follow each of them

    def apply(self, env: dict[Any, Any]) -> dict[int, Any]:
        """The operand of each matmul; `env` gets the weights."""
        operand, *weights = grads_together(env[self.operand], *(env[v] for v in self.after))
        env.update(zip(self.after, weights, strict=True))
        return dict.fromkeys(self.numbers, operand)


def ties_of(matmuls: Mapping[int, tuple[Any, Any]], storage: Storage) -> dict[int, Tie]:
    """The ties of matmuls {equation number: (operand, weight)}, by the first one's number."""
    sharded = {v for v, stored in storage.items() if any(stored.entries)}
    ties: list[Tie] = []
    previous: Any = None
    weights = [weight for _, weight in matmuls.values()]
    for i, (number, (operand, weight)) in enumerate(matmuls.items()):
        after = tuple(weights[i + 1 : i + 2])  # none for the last matmul
        tie = ties[-1] if ties else None
        if tie and tie.operand is operand and (weight in sharded or previous in sharded):
            ties[-1] = Tie(operand, (*tie.numbers, number), (*tie.after, *after))
        elif after:
            ties.append(Tie(operand, (number,), after))
        previous = weight
    return {tie.numbers[0]: tie for tie in ties}


def with_eager_weight_grads(jaxpr: Any, storage: Storage) -> Callable[..., list[Any]]:
    """A constant-free jaxpr as a function whose backward pass finishes one matmul at a time."""
    uses, _ = weight_uses(jaxpr, {v: v for v, stored in storage.items() if stored.trainable})
    matmuls = {
        use.position: (use.beside[0], next(iter(use.weights)))
        for use in uses
        if use.is_product and len(use.weights) == 1
    }
    ties = ties_of(matmuls, storage)

    def run(*args: Any) -> list[Any]:
        env = bindings(jaxpr, (), args)
        operands: dict[int, Any] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            if number in ties:
                operands |= ties[number].apply(env)
            inputs = {v: env[v] for v in eqn.invars if is_var(v)}
            if number in operands:
                inputs[matmuls[number][0]] = operands[number]
            outs = run_equation(jaxpr, eqn, inputs.__getitem__)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [env[v] if is_var(v) else v.val for v in jaxpr.outvars]

    return run if ties else as_function(jaxpr)
