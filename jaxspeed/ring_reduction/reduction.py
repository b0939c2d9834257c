"""Ring reduction of the ranks' partial gradients, and ring all-gather of updated parameters.

The sum is sharded as the optimizer's state is. Both run manual over all axes of the mesh: each
shard over `tensor` has its own rings, of the devices that hold that shard.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import axis_names
from jaxspeed.placement.codec import pad, unpad
from jaxspeed.placement.rows import Row
from jaxspeed.placement.specs import sharded_dim, without_axes
from jaxspeed.placement.table import PlacementTable
from jaxspeed.ring_reduction.buckets import Bucket, BucketLeaf
from jaxspeed.ring_reduction.levels import (
    Ranks,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from jaxspeed.ring_reduction.rings import INNER, OUTER, Rings, local_shape
from jaxspeed.traced_loss.accumulate import Sums, per_weight, shares, unit_of
from jaxspeed.train_state.state import Arrays, wide_dtype

RANKS = (*OUTER, *INNER)
PER_RANK = P(RANKS)  # a leading dim over ranks
PER_DEVICE = P(axis_names())  # ... over devices


@dataclass(frozen=True)
class Reduction:
    """`__call__(parts, scale, weighed) -> Sums`, and `gather_updated(values)`."""

    rings: Rings
    table: PlacementTable

    def __call__(self, parts: Sums, scale: Any, weighed: bool) -> Sums:
        """Sum the ranks' parts, each with a leading dim of ranks.

        Args:
          parts: its gradients are those that still differ between ranks.
          scale: the loss scale that is in the gradients: errors are stored without it.
          weighed: whether the gradients are already weighted shares of the mean.
        """
        rows, ranks = {r.path: r for r in self.table if r.path in parts.grads}, self.rings.count
        padded = {p: pad(parts.grads[p], (ranks, *_shape(row))) for p, row in rows.items()}
        buckets = self._buckets(padded.items())
        scalars = (parts.total, parts.weight, parts.metrics)
        run = self.rings.on_devices(
            lambda *args: self._on_device(buckets, weighed, *args),
            (
                {p: P(RANKS, *without_axes(_spec(row), RANKS)) for p, row in rows.items()},
                PER_RANK,
                P(),
                PER_DEVICE,
            ),
            ({p: _spec(row) for p, row in rows.items()}, P(), PER_DEVICE),
        )
        grads, (total, weight, metrics), errors = run(padded, scalars, scale, parts.errors)
        return Sums(grads, total, weight, metrics, errors)

    def _buckets(self, grads: Iterable[tuple[str, Any]]) -> tuple[Bucket, ...]:
        """The gradients [ranks, ...] fused into buckets."""
        parts = []
        for path, grad in grads:
            spec = _spec(self.table[path])
            shape = local_shape(self.rings.mesh, without_axes(spec, RANKS), grad.shape[1:])
            wide = jnp.promote_types(grad.dtype, jnp.float32)
            dtype = grad.dtype if self.rings.sends_gradient_dtype else wide
            parts.append(BucketLeaf(path, shape, jnp.dtype(dtype), sharded_dim(spec, *INNER)))
        return self.rings.buckets(parts)

    def _on_device(
        self,
        buckets: tuple[Bucket, ...],
        weighed: bool,
        ranks: Ranks,
        grads: Arrays,
        scalars: Any,
        scale: Any,
        errors: Arrays,
    ) -> tuple[Arrays, Any, Arrays]:
        """Per-device code; arrays over ranks or devices have a leading dim of 1."""
        ranks = self.rings.after_arrays(ranks, (grads, scalars))
        sums, share = self._summed(scalars, ranks)
        reduced: Arrays = {}
        left: Arrays = {}
        for name, bucket in self._named(buckets):
            local_grads = {part.path: grads[part.path][0] for part in bucket.parts}
            if not weighed:
                local_grads = {path: grad * share for path, grad in local_grads.items()}
            x = bucket.to_chunks(local_grads)
            if errors:
                x = x + errors[name][0] * scale
            reduce = hierarchical_reduce_scatter if bucket.is_sharded else hierarchical_all_reduce
            result, lost = reduce(x, ranks, self.rings.levels)
            reduced |= bucket.shards(result) if bucket.is_sharded else bucket.leaves(result)
            if errors and lost is not None:
                left[name] = (lost / scale)[None]
        return {p: x.astype(grads[p].dtype) for p, x in reduced.items()}, sums, left

    def _summed(self, scalars: Any, ranks: Ranks) -> tuple[Any, jax.Array]:
        """(total, weight, metrics) of all ranks, and this rank's share of the weight.

        Every rank sums the same numbers in rank order.
        """
        total, weight, metrics = jax.tree.map(lambda x: x[0], scalars)
        values, tree = jax.tree.flatten(metrics)
        row = jnp.stack([total, weight, *(x.astype(total.dtype) for x in values)])
        every = self.rings.gather_ranks(row, ranks)  # [ranks, 2 + metrics]
        of_rank, every_weight = shares(every[:, 1])
        columns = (every[:, i].astype(x.dtype) for i, x in enumerate(values, 2))

        def mean(x: jax.Array) -> jax.Array:
            """The mean by weight; a rank's value may be 0 / 0 where nothing weighs."""
            return jnp.where(every[:, 1] > 0, x * of_rank, 0).sum().astype(x.dtype)

        summed = {
            name: metric.over_parts(mean)
            for name, metric in jax.tree.unflatten(tree, columns).items()
        }
        return (every[:, 0].sum(), every_weight, summed), per_weight(unit_of(weight), every_weight)

    # -- error feedback -------------------------------------------------------------------------

    @cached_property
    def errors(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The saved packing errors by bucket: [devices, ranks, length], sharded over devices."""
        if not self.rings.feedback:
            return {}
        rows = [row for row in self.table if row.leaf.trainable]
        every = {row.path: jax.ShapeDtypeStruct((1, *_shape(row)), wide_dtype(row)) for row in rows}
        devices, at = self.rings.mesh.size, NamedSharding(self.rings.mesh, PER_DEVICE)
        return {
            name: jax.ShapeDtypeStruct(
                (devices, bucket.ranks, bucket.length), jnp.float32, sharding=at
            )
            for name, bucket in self._named(self._buckets(every.items()))
        }

    def _named(self, buckets: tuple[Bucket, ...]) -> list[tuple[str, Bucket]]:
        """Buckets by name, which changes with the layout: saved errors fit no other layout."""
        layout = repr((dict(self.rings.mesh.shape), buckets)).encode()
        digest = hashlib.sha256(layout).hexdigest()[:12]
        return [(f"{digest}-{number}", bucket) for number, bucket in enumerate(buckets)]

    # -- updated parameters ---------------------------------------------------------------------

    def gather_updated(self, values: Arrays) -> Arrays:
        """All-gather parameters that were updated as shards, into the sharding that layers read."""
        rows = {path: self.table[path] for path in values}
        read = {path: row.param for path, row in rows.items() if row.param}
        sharded = {p: _spec(row) for p, row in rows.items() if read[p].spec != _spec(row)}
        parts = [
            BucketLeaf(
                path,
                local_shape(self.rings.mesh, without_axes(spec, RANKS), _shape(rows[path])),
                values[path].dtype,
                sharded_dim(spec, *INNER),
            )
            for path, spec in sharded.items()
        ]
        buckets = self.rings.buckets(parts)

        def device(ranks: Ranks, shards: Arrays) -> Arrays:
            full: Arrays = {}
            for bucket in buckets:
                chunk = bucket.own_chunk(shards)
                full |= bucket.leaves(hierarchical_all_gather(chunk, ranks, self.rings.levels))
            return full

        full_specs = {path: without_axes(spec, RANKS) for path, spec in sharded.items()}
        run = self.rings.on_devices(device, (sharded,), full_specs)
        full = values | run({path: values[path] for path in sharded})
        return {path: unpad(x, rows[path].shape(read[path])) for path, x in full.items()}


def _spec(row: Row) -> P:
    """A reduced gradient's sharding: that of the optimizer's state."""
    assert row.opt is not None
    return row.opt.spec


def _shape(row: Row) -> tuple[int, ...]:
    assert row.opt is not None
    return row.shape(row.opt)
