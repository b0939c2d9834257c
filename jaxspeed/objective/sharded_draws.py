"""Sharding of random numbers that a loss draws over the data axes, like the batch.

The batch is sharded, and so is all that is computed from it. Random numbers in a loss (the noise of
a GAN, the times of a diffusion model) have no sharding: the partitioner replicates them over the
data axes, and with them all that depends only on them, such as a generator's forward and backward
pass. So each draw with one row per sample is constrained on dim 0 in the traced loss. Threefry
computes each number from its index alone, so a device computes only its rows, with the same values.
"""

import enum
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.jaxpr.inline_calls import Spliced
from jaxspeed.jaxpr.primitives import CUSTOM_DERIVATIVE, LOOPS
from jaxspeed.jaxpr.traverse import (
    is_var,
    open_jaxpr,
    transparent_bodies,
    with_functions,
    with_jaxpr,
)
from jaxspeed.ops.free_axes import free_sample_axes
from jaxspeed.placement.constrain import constrain
from jaxspeed.tensor_parallel.activation_layout import context_mesh

DRAWS = ("random_bits", "random_gamma")  # all of jax.random comes down to these, on keys


class Kind(enum.IntEnum):
    """Origin of a value; of several inputs the largest counts."""

    CONSTANT = 0  # only literals
    DRAWN = 1  # random numbers and constants; not constrained yet
    OTHER = 2  # anything else


def shared_sizes(sizes: Collection[int], mesh: Any) -> frozenset[int]:
    """Numbers of samples that divide over the data axes that are automatic here."""
    mesh = context_mesh(mesh)
    return frozenset(size for size in sizes if free_sample_axes(size, mesh))


def with_draws_sharded(jaxpr: Any, sizes: Collection[int], mesh: Any) -> Any:
    """Constrain the draws of a traced loss on dim 0, where its size is one of `sizes`.

    A draw of another shape is followed through what is computed from draws alone: the first value
    with so many rows is constrained, for example that of `normal(key, (n * k,)).reshape(n, k)`.
    """
    if not sizes:
        return jaxpr
    return _Writing(sizes, context_mesh(mesh)).run(jaxpr, [Kind.OTHER] * len(jaxpr.invars))[0]


class _Writing:
    """Rewriter of a program; a function that is called twice is rewritten once."""

    def __init__(self, sizes: Collection[int], mesh: Any) -> None:
        self.sizes, self.mesh = sizes, mesh
        self.written: dict[Any, tuple[Any, list[Kind]]] = {}

    def run(self, jaxpr: Any, given: Sequence[Kind]) -> tuple[Any, list[Kind]]:
        """Rewrite a program; also return the origin of its outputs."""
        kinds = dict(zip(jaxpr.invars, given, strict=True))
        kinds.update((v, Kind.OTHER) for v in jaxpr.constvars)

        def of(atom: Any) -> Kind:
            return kinds[atom] if is_var(atom) else Kind.CONSTANT

        eqns: list[Any] = []
        for eqn in jaxpr.eqns:
            written, made = self._equation(eqn, [of(v) for v in eqn.invars])
            eqns += written
            kinds.update(zip(eqn.outvars, made, strict=True))
        if any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=False)):
            jaxpr = jaxpr.replace(eqns=eqns)
        return jaxpr, [of(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, given: Sequence[Kind]) -> tuple[list[Any], list[Kind]]:
        kind = max(given, default=Kind.CONSTANT)
        if transparent_bodies(eqn) and eqn.primitive.name not in CUSTOM_DERIVATIVE:
            eqn, made = self._call(eqn, given)
        elif eqn.primitive.name in DRAWS:
            made = [Kind.DRAWN if _is_threefry(eqn) else Kind.OTHER for _ in eqn.outvars]
        else:
            made = [kind] * len(eqn.outvars)
        after: list[Any] = []
        outs = list(eqn.outvars)
        for i, (out, kind) in enumerate(zip(eqn.outvars, made, strict=True)):
            if kind is Kind.DRAWN and out.aval.shape[:1] and out.aval.shape[0] in self.sizes:
                pin = Spliced.of(self._constrained, [out])
                after += pin.eqns(pin.ins, [out], eqn)
                outs[i], made[i] = pin.ins[0], Kind.OTHER
        return [eqn.replace(outvars=outs) if after else eqn, *after], made

    def _call(self, eqn: Any, given: Sequence[Kind]) -> tuple[Any, list[Kind]]:
        """Rewrite an equation with inner functions; loop carries count as from the batch."""
        loops = eqn.primitive.name in LOOPS
        found = []

        def new(closed: Any) -> Any:
            jaxpr = open_jaxpr(closed)[0]
            ins = len(jaxpr.invars)
            kinds = [Kind.OTHER] * ins if loops else list(given[len(given) - ins :])
            key = (id(closed), *kinds)
            if key not in self.written:
                inner, outs = self.run(jaxpr, kinds)
                if inner is not jaxpr:
                    closed = with_jaxpr(closed, inner)
                self.written[key] = closed, outs
            closed, outs = self.written[key]
            found.append(outs)
            return closed

        called = with_functions(eqn, new)
        made = [Kind.OTHER if loops else max(kinds) for kinds in zip(*found, strict=True)]
        return called, made

    def _constrained(self, drawn: jax.Array) -> jax.Array:
        rest = [PartitionSpec.UNCONSTRAINED] * (drawn.ndim - 1)
        rows = free_sample_axes(drawn.shape[0], self.mesh) or None
        return constrain(drawn, NamedSharding(self.mesh, PartitionSpec(rows, *rest)), "draw")


def _is_threefry(eqn: Any) -> bool:
    """Whether draws do not depend on the sharding, as those of other generators (`rbg`) do."""
    return eqn.invars[0].aval.dtype == _threefry_key().dtype


@functools.cache
def _threefry_key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
