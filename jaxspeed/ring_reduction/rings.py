"""The rings of a mesh: each device's rank, bucket size and message format, from the config."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import copying_axes, product, storing_axes
from jaxspeed.config.parallelism import Parallel
from jaxspeed.placement.mesh import simulated
from jaxspeed.placement.specs import as_entry, entry_axes
from jaxspeed.ring_reduction.buckets import Bucket, BucketLeaf, buckets_of
from jaxspeed.ring_reduction.levels import Levels, Ranks
from jaxspeed.ring_reduction.steps import Ring, ring_all_gather
from jaxspeed.ring_reduction.wire import WIRES

OUTER, INNER = copying_axes(), storing_axes()  # over which a gradient is summed, then stored
NO_RANK = -2


@dataclass(frozen=True)
class Rings:
    """The rings of one mesh, and the bytes of a bucket."""

    mesh: Mesh
    levels: Levels
    bucket_bytes: int

    @property
    def count(self) -> int:
        """The number of data ranks."""
        return self.levels.outer.size * self.levels.inner.size

    @property
    def feedback(self) -> bool:
        """Whether quantization errors are carried from step to step (error feedback)."""
        return self.levels.wire.feedback

    @property
    def sends_gradient_dtype(self) -> bool:
        """Whether gradients are sent in the dtype in which they are summed."""
        return self.levels.wire == WIRES["none"]

    def buckets(self, parts: Iterable[BucketLeaf]) -> tuple[Bucket, ...]:
        """The leaves fused into buckets of at most `bucket_bytes`."""
        return buckets_of(parts, self.levels.inner.size, self.bucket_bytes)

    def rank_ids(self) -> tuple[jax.Array, jax.Array]:
        """The ranks along the inner and the outer ring, to be sharded over their axes.

        A substitute for `lax.axis_index`, which XLA cannot place where other axes are automatic.
        """
        return jnp.arange(self.levels.inner.size), jnp.arange(self.levels.outer.size)

    def ranks(self, inner: jax.Array, outer: jax.Array) -> Ranks:
        """A device's ranks from its shards of `rank_ids`."""
        return Ranks(inner[0], outer[0])

    def on_devices(
        self, per_device: Callable[..., Any], in_specs: Sequence[Any], out_specs: Any
    ) -> Callable[..., Any]:
        """`per_device(ranks, *arrays)` in a shard_map that is manual over all axes of the mesh."""

        def device(inner: jax.Array, outer: jax.Array, *arrays: Any) -> Any:
            return per_device(self.ranks(inner, outer), *arrays)

        run = jax.shard_map(
            device,
            mesh=self.mesh,
            in_specs=(P(INNER), P(OUTER), *in_specs),
            out_specs=out_specs,
            check_vma=False,
        )
        return lambda *arrays: run(*self.rank_ids(), *arrays)

    def after_arrays(self, ranks: Ranks, values: Any) -> Ranks:
        """The same ranks with a data dependency on these floating arrays, on simulated devices.

        XLA:CPU drops barriers, and a program that it loads from the compilation cache orders the
        collectives of each loop apart (jaxlib 0.10.2): without data between them, a ring runs while
        a loop runs another, and messages are mixed up, for JAX gives all the same channel.
        """
        if not self.in_order:
            return ranks
        # The first element was sent in one direction, the last one in the other.
        ends = [x.reshape(-1)[i] for x in jax.tree.leaves(values) if x.size for i in (0, -1)]
        total = sum(x.real.astype(jnp.float32) for x in ends)
        never = jnp.asarray(total).astype(jnp.int32)
        outer, inner = (jnp.where(r == NO_RANK, never, r) for r in (ranks.outer, ranks.inner))
        return Ranks(inner, outer)

    def ordered(
        self, arrays: Sequence[Any], first: Sequence[Any], rank_ids: Sequence[Any]
    ) -> list[Any]:
        """The arrays, with a data dependency on `first` on simulated devices."""
        if not self.in_order:
            return list(arrays)
        rank = self.after_arrays(Ranks(*rank_ids), first).inner[0]
        return [
            jnp.where(rank == NO_RANK, rank.astype(x.dtype), x)
            if jnp.issubdtype(x.dtype, jnp.number)
            else x
            for x in arrays
        ]

    @property
    def in_order(self) -> bool:
        """Whether data has to order the rings: on simulated devices."""
        return self.levels.inner.unrolled

    def gather_ranks(self, x: jax.Array, ranks: Ranks) -> jax.Array:
        """Each rank's [length], gathered to [ranks, length] in rank order."""
        inner = self.levels.inner
        everyone = Ring((*OUTER, *INNER), self.count, inner.directions, inner.unrolled)
        rank = ranks.outer * inner.size + ranks.inner
        if inner.unrolled:  # the message depends on what the rank depends on
            x = jnp.where(rank == NO_RANK, jnp.zeros_like(x), x)
        return ring_all_gather(x, rank, everyone)


def rings_of(parallel: Parallel, mesh: Mesh) -> Rings | None:
    """The rings of `parallel.data_reduction: ring`."""
    if parallel.data_reduction != "ring":
        return None
    unrolled = simulated(mesh)
    inner, outer = (
        Ring(axes, product(axes, mesh.shape), parallel.ring_directions, unrolled)
        for axes in (INNER, OUTER)
    )
    # One rank sends nothing, so nothing is rounded.
    wire = parallel.ring_wire if inner.size * outer.size > 1 else "none"
    return Rings(mesh, Levels(inner, outer, WIRES[wire]), parallel.ring_bucket_bytes)


def data_spec(spec: P) -> P:
    """ZeRO's sharding of an array, without other axes."""
    entries = map(entry_axes, spec)
    return P(*(as_entry(tuple(a for a in axes if a in INNER)) for axes in entries))


def local_shape(mesh: Mesh | AbstractMesh, spec: P, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of one device's shard."""
    return tuple(NamedSharding(mesh, spec).shard_shape(tuple(shape)))
