"""Custom VJP of a segment: parameters all-gathered in each pass, gradients reduce-scattered.

Gathered parameters are never residuals: the forward pass gathers them once its inputs exist, the
backward pass gathers them again once the cotangents exist, and residuals computed from parameters
alone are recomputed from them. All other residuals are saved as plain differentiation would save
them, or as the model's `jax.checkpoint` or the config (`ResidualPolicy`) determines.

XLA runs one segment at a time because each gather is tied to its predecessors by an
`optimization_barrier`; measured on TPU and GPU compiles. XLA:CPU drops the barriers; around rings,
whose messages it would mix up, data orders segments (`GatherScatter.ordered`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.jaxpr.evaluate import evaluate
from jaxspeed.jaxpr.primitives import RANDOM
from jaxspeed.jaxpr.slicing import slice_of
from jaxspeed.jaxpr.traverse import is_var, runs
from jaxspeed.placement.memory_kinds import in_memory_of, on_device, on_host
from jaxspeed.zero3.residual_policy import Residual, ResidualPolicy
from jaxspeed.zero3.sharded_param import (
    GatherScatter,
    ShardedParam,
    exchange_of,
    read_all,
    scatter_all,
)

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


def is_real(x: Any) -> bool:
    """Whether an array, or an abstract one, can have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def read_tied(
    fn: Function, stored: Sequence[ShardedParam], weights: Sequence[Any], inputs: Sequence[Any]
) -> Sequence[Any]:
    """`fn(*gathered weights, *inputs)` with the gathers tied to the inputs."""
    weights, inputs = tie(on_device(weights), inputs)
    return fn(*read(stored, weights), *inputs)


def read(stored: Sequence[ShardedParam], weights: Sequence[Any]) -> list[Any]:
    """The parameters as layers read them; differentiable, gradients are reduce-scattered."""
    if exchange_of(stored):  # JAX cannot differentiate an exchange
        return run_segment(lambda *full: list(full), stored, weights, ())
    return read_all(stored, weights, ())


def run_segment(
    fn: Function,
    stored: Sequence[ShardedParam],
    weights: Sequence[Any],
    inputs: Sequence[Any],
    residuals: ResidualPolicy | None = None,
    unshared: Sequence[bool] = (),
    inside: GatherScatter | None = None,
) -> list[Any]:
    """`fn(*gathered weights, *inputs)`: gathers in both passes, saves no gathered parameter.

    `unshared` marks the inputs that no other segment reads; `residuals` applies to those. `inside`
    is the exchange of a function that gathers its weights itself.
    """
    count, exchange = len(weights), inside or exchange_of(stored)
    place = list(exchange.place) if exchange else []
    active = [s.trainable for s in stored]
    active += map(is_real, inputs)
    ordered = exchange.ordered if exchange else lambda arrays, first, place: list(arrays)
    # Set by the forward pass for the backward pass.
    passes: list[Passes] = []
    wanted: list[bool] = []

    def kinds() -> list[Residual]:
        inputs = passes[0].saved_inputs
        return [Residual(i is not None, i is None or unshared[i - count]) for i in inputs]

    @jax.custom_vjp
    def segment(place: Sequence[Any], *args: Any) -> list[Any]:
        tied, inputs = tie(on_device(args[:count]), args[count:])
        return list(fn(*read_all(stored, tied, place), *inputs))

    def forward(place: Sequence[Any], *given: Any) -> tuple[list[Any], Any]:
        place = [x.value for x in place]
        args = [x.value for x in given]
        # Inputs that depend on no parameter, such as rotary angles, need no gradient.
        wanted[:] = [on and x.perturbed for on, x in zip(active, given, strict=True)]
        tied, inputs = tie(on_device(args[:count]), args[count:])
        full = [*read_all(stored, tied, place), *inputs]
        passes[:] = [Passes(fn, wanted, full, count)]
        outs, saved = passes[0].forward(full)
        # The input from before the barrier: a scan then saves a loop-invariant input once, not once
        # per step.
        saved = [
            args[i] if i is not None else x
            for i, x in zip(passes[0].saved_inputs, saved, strict=True)
        ]
        saved = residuals.store(saved, kinds()) if residuals else saved
        return outs, (place, tuple(args[:count]), saved)

    def backward(carried: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        place, shards, saved = carried
        saved = residuals.fetch(saved, kinds()) if residuals else saved
        of_real = zip(cotangents, passes[0].differentiable, strict=True)
        tied, arrived = tie(on_device(shards), [_instantiated(ct) for ct, real in of_real if real])
        tied = ordered(tied, arrived, place)
        if inside:  # what it recomputes, it gathers again
            saved = ordered(saved, arrived, place)
        grads = iter(passes[0].backward(read_all(stored, tied, place), saved, arrived))
        found = [next(grads) if on else None for on in wanted]
        here = scatter_all(stored, found[:count], shards, place)
        # A second barrier: gradients are reduce-scattered before the next segment starts.
        others = _present(found[count:])
        done, onward = map(iter, tie(ordered(_present(here), others, place), others))
        pairs = zip(here, shards, strict=True)
        return (
            None,
            *(None if g is None else in_memory_of(next(done), w) for g, w in pairs),
            *(None if g is None else next(onward) for g in found[count:]),
        )

    segment.defvjp(forward, backward, symbolic_zeros=True)
    return segment(place, *weights, *inputs)


def exchanged_after(
    exchange: GatherScatter, weights: Sequence[Any], first: Sequence[Any]
) -> list[Any]:
    """The shards of a segment, ordered after the results of an earlier one.

    They are gathered after `first` exists, and the backward pass that leads to `first` starts once
    their gradients are scattered.
    """

    @jax.custom_vjp
    def after(place: Sequence[Any], weights: Sequence[Any], first: Sequence[Any]) -> list[Any]:
        return exchange.ordered(weights, first, place)

    def forward(place: Sequence[Any], *args: Any) -> tuple[list[Any], Any]:
        return after(place, *args), place

    def backward(place: Sequence[Any], grads: list[Any]) -> tuple[Any, ...]:
        zeros = [jnp.zeros(x.shape, x.dtype) for x in first]
        return None, grads, exchange.ordered(zeros, grads, place)

    after.defvjp(forward, backward)
    return after(exchange.place, list(weights), list(first))


def _instantiated(cotangent: Any) -> Any:
    """The cotangent as an array: zeros if it is symbolic (the output is unused)."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _present(values: Sequence[Any]) -> list[Any]:
    return [v for v in values if v is not None]


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


def _depends_only_on(jaxpr: Any, sources: Sequence[Any]) -> set[Any]:
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
