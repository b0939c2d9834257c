"""Custom VJP of a segment: parameters all-gathered in each pass, gradients reduce-scattered.

Gathered parameters are never residuals: the forward pass gathers them once its inputs exist, the
backward pass gathers them again once the cotangents exist, and residuals computed from parameters
alone are recomputed from them. All other residuals are saved as plain differentiation would save
them, or as the model's `jax.checkpoint` or the config (`ResidualPolicy`) determines.

XLA runs one segment at a time because each gather is tied to its predecessors by an
`optimization_barrier`; measured on TPU and GPU compiles. XLA:CPU drops the barriers; around rings,
whose messages it would mix up, data orders segments (`exchange.InOrder`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.jaxpr.evaluate import evaluate
from jaxspeed.jaxpr.primitives import RANDOM
from jaxspeed.jaxpr.slicing import slice_of
from jaxspeed.jaxpr.traverse import Jaxpr, is_real, is_var, runs
from jaxspeed.placement.memory_kinds import in_memory_of, on_device, on_host
from jaxspeed.zero3.exchange import Exchange, arrays_of, decoded
from jaxspeed.zero3.residual_policy import Residual, ResidualPolicy
from jaxspeed.zero3.sharded_param import ShardedParam

Function = Callable[..., Sequence[Any]]


def tie(first: Sequence[Any], second: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Both sequences behind one barrier: no element is used before all elements exist.

    Arrays in host memory are left out: XLA:TPU compiles no barrier on them (libtpu 0.0.52).
    """
    ours = [i for i, x in enumerate(first) if not on_host(x)]
    theirs = [i for i, x in enumerate(second) if is_real(x) and not on_host(x)]
    firsts, seconds = list(first), list(second)
    if not ours or not theirs:
        return firsts, seconds
    tied, waited = jax.lax.optimization_barrier(
        ([firsts[i] for i in ours], [seconds[i] for i in theirs])
    )
    for values, places, done in ((firsts, ours, tied), (seconds, theirs, waited)):
        for i, x in zip(places, done, strict=True):
            values[i] = x
    return firsts, seconds


def read_tied(
    exchange: Exchange,
    fn: Function,
    stored: Sequence[ShardedParam],
    weights: Sequence[Any],
    inputs: Sequence[Any],
) -> Sequence[Any]:
    """`fn(*gathered weights, *inputs)` with the gathers tied to the inputs."""
    shards, tree = jax.tree.flatten(list(weights))
    tied, inputs = tie(on_device(shards), inputs)
    return fn(*read(exchange, stored, jax.tree.unflatten(tree, tied)), *inputs)


def read(exchange: Exchange, stored: Sequence[ShardedParam], weights: Sequence[Any]) -> list[Any]:
    """The parameters as layers read them; differentiable, gradients are reduce-scattered."""
    if exchange.differentiable:
        shards = jax.tree.leaves(list(weights))
        return decoded(stored, exchange.gather(arrays_of(stored), shards, exchange.place))
    return SegmentVJP(lambda *full: list(full), stored, exchange)(weights, ())


class SegmentVJP:
    """`__call__(weights, inputs)`: `fn(*gathered weights, *inputs)` with a custom VJP.

    It gathers in both passes; of the gathered parameters only the exchange may save some. The
    backward pass, which JAX traces after the forward pass, reads what that has found: `passes` and
    `wanted`.

    Args:
      stored: how the weights are stored; none of a function that gathers its own.
      residuals: applies to the inputs that `unshared` marks: those that no other segment reads.
    """

    passes: "Passes"
    wanted: Sequence[bool]  # the arguments that get a gradient

    def __init__(
        self,
        fn: Function,
        stored: Sequence[ShardedParam],
        exchange: Exchange,
        residuals: ResidualPolicy | None = None,
        unshared: Sequence[bool] = (),
    ) -> None:
        self.fn, self.stored, self.exchange = fn, stored, exchange
        self.residuals, self.unshared, self.count = residuals, unshared, len(stored)

    def __call__(self, weights: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        leaves, tree = jax.tree.flatten(list(inputs))
        if len(leaves) > len(inputs):  # encoded parameters, of a function that gathers its own
            fn, pairs = self.fn, list(zip(inputs, self.unshared))
            self.fn = lambda *args: fn(
                *args[: self.count], *jax.tree.unflatten(tree, args[self.count :])
            )
            self.unshared = [alone for x, alone in pairs for _ in jax.tree.leaves(x)]
            inputs = leaves
        self.active = [*(s.trainable for s in self.stored), *map(is_real, inputs)]
        segment = jax.custom_vjp(self.segment)
        segment.defvjp(self.forward, self.backward, symbolic_zeros=True)
        outs: list[Any] = segment(list(self.exchange.place), *weights, *inputs)
        return outs

    def segment(self, place: Sequence[Any], *args: Any) -> list[Any]:
        arrays, inputs = self._gathered(place, args)
        return list(self.fn(*decoded(self.stored, arrays), *inputs))

    def _gathered(self, place: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The arrays of the weights, whose gathers wait for the inputs; and the inputs."""
        shards = jax.tree.leaves(args[: self.count])
        tied, inputs = tie(on_device(shards), args[self.count :])
        return self.exchange.gather(arrays_of(self.stored), tied, place), inputs

    def forward(self, place: Sequence[Any], *operands: Any) -> tuple[list[Any], Any]:
        place = [x.value for x in place]
        args, count = jax.tree.map(lambda x: x.value, list(operands)), self.count
        # Inputs that depend on no parameter, such as rotary angles, need no gradient.
        self.wanted = [on and x.perturbed for on, x in zip(self.active, operands, strict=True)]
        arrays, inputs = self._gathered(place, args)
        kept = self.exchange.saved(arrays_of(self.stored), arrays, place)
        full = [*decoded(self.stored, arrays), *inputs]
        self.passes = Passes(self.fn, self.wanted, full, count)
        outs, saved = self.passes.forward(full)
        # The input from before the barrier: a scan then saves a loop-invariant input once, not once
        # per step.
        saved = [
            args[i] if i is not None else x
            for i, x in zip(self.passes.saved_inputs, saved, strict=True)
        ]
        saved = self.residuals.store(saved, self._kinds()) if self.residuals else saved
        return outs, (place, tuple(args[:count]), kept, saved)

    def backward(self, carried: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        place, shards, kept, saved = carried
        exchange, stored, count = self.exchange, self.stored, self.count
        saved = self.residuals.fetch(saved, self._kinds()) if self.residuals else saved
        of_real = zip(cotangents, self.passes.differentiable, strict=True)
        of_weights = [*jax.tree.leaves(shards), *kept]
        tied, arrived = tie(
            on_device(of_weights), [_instantiated(ct) for ct, real in of_real if real]
        )
        tied = exchange.ordered(tied, arrived, place)
        if not stored:  # what it recomputes, it gathers again
            saved = exchange.ordered(saved, arrived, place)
        first = len(of_weights) - len(kept)
        arrays = exchange.gather_again(arrays_of(stored), tied[:first], tied[first:], place)
        grads = iter(self.passes.backward(decoded(stored, arrays), saved, arrived))
        input_grads = [next(grads) if on else None for on in self.wanted]
        scattered = [i for i, on in enumerate(self.wanted[:count]) if on]
        here = exchange.scatter(
            [stored[i] for i in scattered],
            [input_grads[i] for i in scattered],
            [shards[i] for i in scattered],
            place,
        )
        # A second barrier: gradients are reduce-scattered before the next segment starts.
        others = [g for g in input_grads[count:] if g is not None]
        done, onward = tie(exchange.ordered(here, others, place), others)
        for i, g in zip(scattered, done, strict=True):
            input_grads[i] = in_memory_of(g, shards[i])
        later = iter(onward)
        return (
            None,
            *input_grads[:count],
            *(None if g is None else next(later) for g in input_grads[count:]),
        )

    def _kinds(self) -> list[Residual]:
        inputs = self.passes.saved_inputs
        return [Residual(i is not None, i is None or self.unshared[i - self.count]) for i in inputs]


def exchanged_after(exchange: Exchange, weights: Sequence[Any], first: Sequence[Any]) -> list[Any]:
    """The shards of a segment, ordered after the results of an earlier one.

    They are gathered after `first` exists, and the backward pass that leads to `first` starts once
    their gradients are scattered.
    """

    leaves, tree = jax.tree.flatten(list(weights))

    @jax.custom_vjp
    def after(place: Sequence[Any], weights: Sequence[Any], first: Sequence[Any]) -> list[Any]:
        return exchange.ordered(weights, first, place)

    def forward(place: Sequence[Any], *args: Any) -> tuple[list[Any], Any]:
        return after(place, *args), place

    def backward(place: Sequence[Any], grads: list[Any]) -> tuple[Any, ...]:
        zeros = [jnp.zeros(x.shape, x.dtype) for x in first]
        real = [g for g in grads if is_real(g)]
        return None, grads, exchange.ordered(zeros, real, place)

    after.defvjp(forward, backward)
    ordered: list[Any] = jax.tree.unflatten(tree, after(exchange.place, leaves, list(first)))
    return ordered


def _instantiated(cotangent: Any) -> Any:
    """The cotangent as an array: zeros if it is symbolic (the output is unused)."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


class Passes:
    """Forward and backward pass of a function; residuals of weights alone are recomputed.

    `forward(args)` gives the outputs and the saved residuals; `backward(full weights, saved,
    cotangents)` the gradients of the active arguments.
    """

    def __init__(self, fn: Function, active: Sequence[bool], args: list[Any], count: int) -> None:
        self.differentiable: list[bool] = []

        def run(*args: Any) -> tuple[list[Any], list[Any]]:
            moving = [a for a, is_active in zip(args, active, strict=True) if is_active]

            def of_active(*moving: Any) -> tuple[list[Any], list[Any]]:
                values = iter(moving)
                full = [next(values) if on else a for a, on in zip(args, active, strict=True)]
                outs = fn(*full)
                self.differentiable = [
                    jnp.issubdtype(jnp.result_type(o), jnp.inexact) for o in outs
                ]
                pairs = list(zip(outs, self.differentiable, strict=True))
                return [o for o, d in pairs if d], [o for o, d in pairs if not d]

            outs, pullback, fixed = jax.vjp(of_active, *moving, has_aux=True)
            leaves, self.pullback_tree = jax.tree.flatten(pullback)
            real, rest = iter(outs), iter(fixed)
            return [next(real) if d else next(rest) for d in self.differentiable], leaves

        closed, shape = jax.make_jaxpr(run, return_shape=True)(*args)
        self.closed, self.out_count = closed, len(shape[0])
        jaxpr = closed.jaxpr
        self.weight_vars = jaxpr.invars[:count]
        residuals = jaxpr.outvars[self.out_count :]
        from_weights = _depends_only_on(jaxpr, self.weight_vars)
        self.recomputed = [is_var(v) and v in from_weights for v in residuals]
        index: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars) if i >= count}
        saved = [v for v, again in zip(residuals, self.recomputed, strict=True) if not again]
        self.saved_inputs = [index.get(v) if is_var(v) else None for v in saved]
        self.recompute_jaxpr = slice_of(
            jaxpr,
            jaxpr.eqns,
            [*jaxpr.constvars, *self.weight_vars],
            [v for v, again in zip(residuals, self.recomputed, strict=True) if again],
        )

    def forward(self, args: list[Any]) -> tuple[list[Any], list[Any]]:
        values = evaluate(self.closed.jaxpr, self.closed.consts, args)
        residuals = zip(values[self.out_count :], self.recomputed, strict=True)
        return values[: self.out_count], [v for v, again in residuals if not again]

    def backward(self, full: list[Any], saved: list[Any], cotangents: list[Any]) -> list[Any]:
        computed = iter(evaluate(self.recompute_jaxpr, (), [*self.closed.consts, *full]))
        stored = iter(saved)
        leaves = [next(computed) if again else next(stored) for again in self.recomputed]
        return list(jax.tree.unflatten(self.pullback_tree, leaves)(cotangents))


def _depends_only_on(jaxpr: Jaxpr, sources: Sequence[Any]) -> set[Any]:
    """The variables that are computed only from `sources` and constants.

    Random numbers from a constant key do not count: they are drawn as activations are.
    """
    inside, outside = set(sources), set(jaxpr.invars) - set(sources)
    for eqn in jaxpr.eqns:
        inputs = [v for v in eqn.invars if is_var(v)]
        if any(v in outside for v in inputs) or runs(eqn, RANDOM):
            outside.update(eqn.outvars)
        elif any(v in inside for v in inputs):
            inside.update(eqn.outvars)
    return inside
