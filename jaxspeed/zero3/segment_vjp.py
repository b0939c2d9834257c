"""Custom VJP of a segment: its parameters are gathered in each pass and never saved.

The piece is differentiated by hand so that gathered parameters are never kept between the passes:
the forward pass gathers them once its inputs are there, the backward pass gathers them again once
the cotangents are there, and whatever the derivative needs that was computed from parameters alone
is computed again from them. Everything else is kept as plain differentiation would keep it, or as
the piece's own `jax.checkpoint` says, or as the config does (`ResidualPolicy`).

XLA keeps to "one piece at a time" because each gather is tied to what must be there before it, by
`optimization_barrier`; measured on TPU and GPU compiles. (XLA:CPU drops the barriers.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.jaxpr.evaluate import evaluate
from jaxspeed.jaxpr.primitives import RANDOM
from jaxspeed.jaxpr.slicing import slice_of
from jaxspeed.jaxpr.traverse import is_var, runs
from jaxspeed.zero3.residual_policy import ResidualPolicy, Waiting
from jaxspeed.zero3.sharded_param import ShardedParam, place_of, read_all, scatter_all

Function = Callable[..., Sequence[Any]]


def tie(first: Sequence[Any], second: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Both sequences, such that nothing of either is used before all of both are there.

    What is in host memory is left out: XLA:TPU compiles no barrier of it (libtpu 0.0.51), and in a
    loop over layers it is moved a layer at a time in any case.
    """
    ours = [i for i, x in enumerate(first) if not _in_host(x)]
    theirs = [i for i, x in enumerate(second) if _is_real(x) and not _in_host(x)]
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


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _in_host(x: Any) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def read_tied(
    fn: Function, stored: Sequence[ShardedParam], weights: Sequence[Any], inputs: Sequence[Any]
) -> Sequence[Any]:
    """`fn(*read weights, *inputs)` with the gathers tied to the inputs."""
    weights, inputs = tie(weights, inputs)
    return fn(*read(stored, weights), *inputs)


def read(stored: Sequence[ShardedParam], weights: Sequence[Any]) -> list[Any]:
    """The parameters as layers read them; differentiable, gradients going to their cut."""
    if place_of(stored):  # the derivative of what an exchange does is not the compiler's to find
        return run_piece(lambda *whole: list(whole), stored, weights, ())
    return read_all(stored, weights, ())


def run_piece(
    fn: Function,
    stored: Sequence[ShardedParam],
    weights: Sequence[Any],
    inputs: Sequence[Any],
    keeping: ResidualPolicy | None = None,
    own: Sequence[bool] = (),
) -> list[Any]:
    """`fn(*weights as read, *inputs)`, gathering in both passes and keeping nothing gathered.

    `own` are the inputs that no other piece reads: with `keeping`, they wait as it says.
    """
    count, place = len(weights), place_of(stored)
    active = [s.trainable for s in stored]
    active += [jnp.issubdtype(x.dtype, jnp.inexact) for x in inputs]
    # What the forward pass found out, for the backward pass.
    passes: list[Passes] = []
    wanted: list[bool] = []

    def waiting() -> list[Waiting]:
        handed = passes[0].inputs_kept
        return [Waiting(i is not None, i is None or own[i - count]) for i in handed]

    @jax.custom_vjp
    def piece(place: Sequence[Any], *args: Any) -> list[Any]:
        tied, inputs = tie(args[:count], args[count:])
        return list(fn(*read_all(stored, tied, place), *inputs))

    def forward(place: Sequence[Any], *given: Any) -> tuple[list[Any], Any]:
        place = [x.value for x in place]
        args = [x.value for x in given]
        # Nobody asks for the gradient of an input that was made of no parameter: rotary angles.
        wanted[:] = [on and x.perturbed for on, x in zip(active, given, strict=True)]
        tied, inputs = tie(args[:count], args[count:])
        full = [*read_all(stored, tied, place), *inputs]
        passes[:] = [Passes(fn, wanted, full, count)]
        outs, kept = passes[0].forward(full)
        # An input as it came, not as it was tied: in a scan, what is the same for all steps is then
        # kept once, and not once a step.
        kept = [
            args[i] if i is not None else x
            for i, x in zip(passes[0].inputs_kept, kept, strict=True)
        ]
        kept = keeping.store(kept, waiting()) if keeping else kept
        return outs, (place, tuple(args[:count]), kept)

    def backward(residuals: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        place, shards, kept = residuals
        kept = keeping.fetch(kept, waiting()) if keeping else kept
        of_real = zip(cotangents, passes[0].differentiable, strict=True)
        tied, arrived = tie(shards, [_instantiated(ct) for ct, real in of_real if real])
        grads = iter(passes[0].backward(read_all(stored, tied, place), kept, arrived))
        found = [next(grads) if on else None for on in wanted]
        here = scatter_all(stored, found[:count], shards, place)
        # Tied again, so that a gradient is on its shard before the pass moves on.
        done, onward = map(iter, tie(_present(here), _present(found[count:])))
        return (
            None,
            *(None if g is None else next(done) for g in here),
            *(None if g is None else next(onward) for g in found[count:]),
        )

    piece.defvjp(forward, backward, symbolic_zeros=True)
    return piece(place, *weights, *inputs)


def _instantiated(cotangent: Any) -> Any:
    """An array, of zeros where nobody reads the output."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _present(values: Sequence[Any]) -> list[Any]:
    return [v for v in values if v is not None]


class Passes:
    """The two passes of a function, with what depends on its weights alone left out of between.

    `forward(args)` gives the outputs and what is kept; `backward(whole weights, kept, cotangents)`
    the gradients of the active arguments.
    """

    def __init__(self, fn: Function, active: Sequence[bool], args: list[Any], count: int) -> None:
        self.differentiable: list[bool] = []

        def run(*args: Any) -> tuple[list[Any], list[Any]]:
            moving = [a for a, is_active in zip(args, active, strict=True) if is_active]

            def of_active(*moving: Any) -> tuple[list[Any], list[Any]]:
                values = iter(moving)
                full = [next(values) if on else a for a, on in zip(args, active, strict=True)]
                outs = fn(*full)
                self.differentiable = [jnp.issubdtype(o.dtype, jnp.inexact) for o in outs]
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
        self.again = [is_var(v) and v in from_weights for v in residuals]
        place = {v: i for i, v in enumerate(jaxpr.invars) if i >= count}
        of_kept = [v for v, again in zip(residuals, self.again, strict=True) if not again]
        self.inputs_kept = [place.get(v) if is_var(v) else None for v in of_kept]
        self.again_jaxpr = slice_of(
            jaxpr,
            jaxpr.eqns,
            [*jaxpr.constvars, *self.weight_vars],
            [v for v, again in zip(residuals, self.again, strict=True) if again],
        )

    def forward(self, args: list[Any]) -> tuple[list[Any], list[Any]]:
        values = evaluate(self.closed.jaxpr, self.closed.consts, args)
        kept = [
            v for v, again in zip(values[self.out_count :], self.again, strict=True) if not again
        ]
        return values[: self.out_count], kept

    def backward(self, whole: list[Any], kept: list[Any], cotangents: list[Any]) -> list[Any]:
        again = iter(evaluate(self.again_jaxpr, (), [*self.closed.consts, *whole]))
        stored = iter(kept)
        leaves = [next(again) if a else next(stored) for a in self.again]
        return list(jax.tree.unflatten(self.pullback_tree, leaves)(cotangents))


def _depends_only_on(jaxpr: Any, sources: Sequence[Any]) -> set[Any]:
    """The variables that are computed from `sources` (and constants) and from nothing else.

    Random numbers of a constant key are something else: they are drawn as activations are.
    """
    inside, outside = set(sources), set(jaxpr.invars) - set(sources)
    for eqn in jaxpr.eqns:
        inputs = [v for v in eqn.invars if is_var(v)]
        if any(v in outside for v in inputs) or runs(eqn, RANDOM):
            outside.update(eqn.outvars)
        elif any(v in inside for v in inputs):
            inside.update(eqn.outvars)
    return inside
