"""The rings of a mesh: where its devices stand on them, and what goes round together."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.config import Config
from jaxspeed.placement.mesh import DATA_AXES, data_parallel_size, simulated
from jaxspeed.placement.rows import Row
from jaxspeed.placement.specs import entry_axes
from jaxspeed.ring_reduction.buckets import Bucket, BucketLeaf, buckets_of
from jaxspeed.ring_reduction.levels import Levels, Ranks
from jaxspeed.ring_reduction.steps import Ring, handed_round
from jaxspeed.ring_reduction.wire import WIRES

REPLICA, DATA = DATA_AXES
NO_RANK = -2


@dataclass(frozen=True)
class Rings:
    """The rings of one mesh, and how much goes round at once."""

    mesh: Mesh
    levels: Levels
    bucket_bytes: int

    @property
    def count(self) -> int:
        """The data ranks of all rings."""
        return data_parallel_size(self.mesh)

    @property
    def feedback(self) -> bool:
        """Whether what packing loses is kept from step to step."""
        return self.levels.wire.feedback

    @property
    def sends_its_own_dtype(self) -> bool:
        """Whether a gradient travels in the dtype in which it is added up."""
        return self.levels.wire == WIRES["none"]

    def buckets(self, parts: Iterable[BucketLeaf]) -> tuple[Bucket, ...]:
        """What goes round together."""
        return buckets_of(parts, self.levels.inner.size, self.bucket_bytes)

    def numbers(self) -> tuple[jax.Array, jax.Array]:
        """Each device's number on the inner and on the outer ring, cut over their axes.

        `lax.axis_index` is no instruction that XLA can place wherever other axes are automatic.
        """
        return jnp.arange(self.levels.inner.size), jnp.arange(self.levels.outer.size)

    def told(self, inner: jax.Array, outer: jax.Array) -> Ranks:
        """Where a device stands, by its parts of `numbers`."""
        return Ranks(inner[0], outer[0])

    def on_devices(
        self, per_device: Callable[..., Any], in_specs: Sequence[Any], out_specs: Any
    ) -> Callable[..., Any]:
        """`per_device(ranks, *arrays)` as a global view: manual over all axes of the mesh."""

        def device(inner: jax.Array, outer: jax.Array, *arrays: Any) -> Any:
            return per_device(self.told(inner, outer), *arrays)

        run = jax.shard_map(
            device,
            mesh=self.mesh,
            in_specs=(P(DATA), P(REPLICA), *in_specs),
            out_specs=out_specs,
            check_vma=False,
        )
        return lambda *arrays: run(*self.numbers(), *arrays)

    def once_there(self, ranks: Ranks, values: Any) -> Ranks:
        """The same, not before these floating arrays are there, on simulated devices.

        XLA:CPU would run messages beside loops of what is still computed, in an order of its own on
        each device, and they would wait for each other for ever. It keeps no barrier, only data.
        """
        if not self.levels.inner.unrolled:
            return ranks
        total = sum(
            x.reshape(-1)[0].real.astype(jnp.float32) for x in jax.tree.leaves(values) if x.size
        )
        never = jnp.asarray(total).astype(jnp.int32)
        outer, inner = (jnp.where(r == NO_RANK, never, r) for r in (ranks.outer, ranks.inner))
        return Ranks(inner, outer)

    def of_every_rank(self, x: jax.Array, ranks: Ranks) -> jax.Array:
        """[ranks, length] of what each rank has [length], in the order of the ranks."""
        inner = self.levels.inner
        everyone = Ring((REPLICA, DATA), self.count, inner.directions, inner.unrolled)
        rank = ranks.outer * inner.size + ranks.inner
        if inner.unrolled:  # what is sent waits for what the rank waits for
            x = jnp.where(rank == NO_RANK, jnp.zeros_like(x), x)
        return handed_round(x, rank, everyone)


def rings_of(config: Config, mesh: Mesh) -> Rings | None:
    """The rings that a config asks for."""
    parallel = config.parallel
    if parallel.data_reduction != "ring":
        return None
    unrolled = simulated(mesh)
    inner, outer = (
        Ring(axis, mesh.shape[axis], parallel.ring_directions, unrolled) for axis in (DATA, REPLICA)
    )
    # One rank sends nothing, and so nothing is rounded.
    word = parallel.ring_wire if data_parallel_size(mesh) > 1 else "none"
    return Rings(mesh, Levels(inner, outer, WIRES[word]), parallel.ring_bucket_bytes)


def data_spec(row: Row) -> P:
    """How the data ranks cut what layers read from, other axes left out."""
    return P(*(DATA if DATA in entry_axes(entry) else None for entry in row.source.spec))


def local_shape(mesh: Mesh | AbstractMesh, spec: P, shape: Sequence[int]) -> tuple[int, ...]:
    """Of a device's part of an array."""
    return tuple(NamedSharding(mesh, spec).shard_shape(tuple(shape)))
