"""Sharding of random numbers that a loss draws over the data axes, like the batch.

The batch is sharded, and so is all that is computed from it. Random numbers in a loss (the noise of
a GAN, the times of a diffusion model) have no sharding: the partitioner replicates them over the
data axes, and with them all that depends only on them, such as a generator's forward and backward
pass. So each draw with one row per sample is constrained on dim 0 in the traced loss. Threefry
computes each number from its index alone, so a device computes only its rows, with the same values.
"""

import enum
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.jaxpr.rewriter import Atom, Rewriter, Rewriting
from jaxspeed.jaxpr.traverse import Jaxpr, JaxprEqn, Var, is_var
from jaxspeed.ops.free_axes import free_sample_axes
from jaxspeed.placement.constrain import constrain
from jaxspeed.tensor_parallel.activation_layout import context_mesh
from jaxspeed.tensor_parallel.insert_constraints import DRAWS, is_threefry


class Kind(enum.IntEnum):
    """Origin of a value; of several inputs the largest counts."""

    CONSTANT = 0  # only literals
    DRAWN = 1  # random numbers and constants; not constrained yet
    OTHER = 2  # anything else


def _axes(size: int, mesh: Any, also: tuple[str, ...]) -> tuple[str, ...]:
    """The axes over which so many rows are drawn: `also` too, if these divide them."""
    return free_sample_axes(size, mesh, also) or free_sample_axes(size, mesh)


def shared_sizes(sizes: Collection[int], mesh: Any, also: tuple[str, ...] = ()) -> frozenset[int]:
    """Numbers of samples that divide over the axes that shard samples and are automatic here."""
    mesh = context_mesh(mesh)
    return frozenset(size for size in sizes if _axes(size, mesh, also))


def with_draws_sharded(
    jaxpr: Jaxpr, sizes: Collection[int], mesh: Any, also: tuple[str, ...] = ()
) -> Jaxpr:
    """Constrain the draws of a traced loss on dim 0, where its size is one of `sizes`.

    A draw of another shape is followed through what is computed from draws alone: the first value
    with so many rows is constrained, for example that of `normal(key, (n * k,)).reshape(n, k)`.
    """
    if not sizes:
        return jaxpr
    return _Draws(sizes, context_mesh(mesh), also).run(jaxpr)


class _Draws(Rewriter[Kind]):
    def __init__(self, sizes: Collection[int], mesh: Any, also: tuple[str, ...]) -> None:
        super().__init__()
        self.sizes, self.mesh, self.also = sizes, mesh, also

    def constant(self, atom: Atom) -> Kind:
        return Kind.OTHER if is_var(atom) else Kind.CONSTANT

    def unknown(self, atom: Atom) -> Kind:
        return Kind.OTHER

    def derived(self, states: Sequence[Kind], out: Var) -> Kind:
        return max(states, default=Kind.CONSTANT)

    def equation(self, program: Rewriting[Kind], eqn: JaxprEqn) -> list[Kind]:
        kinds = list(super().equation(program, eqn))
        if eqn.primitive.name in DRAWS:
            kinds = [Kind.DRAWN if is_threefry(eqn) else Kind.OTHER] * len(kinds)
        outs: list[Any] = eqn.outvars
        for i, (out, kind) in enumerate(zip(outs, kinds, strict=True)):
            if kind is Kind.DRAWN and out.aval.shape[:1] and out.aval.shape[0] in self.sizes:
                program.replace([out], program.splice(self._constrained, [program.atom(out)], eqn))
                kinds[i] = Kind.OTHER
        return kinds

    def _constrained(self, drawn: jax.Array) -> jax.Array:
        rest = [PartitionSpec.UNCONSTRAINED] * (drawn.ndim - 1)
        rows = _axes(drawn.shape[0], self.mesh, self.also) or None
        return constrain(drawn, NamedSharding(self.mesh, PartitionSpec(rows, *rest)), "draw")
