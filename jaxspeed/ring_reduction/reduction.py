"""Partial gradients of each rank to their sum, cut as the optimizer's state is; and its results to
what layers read.

Both run manual over all axes of the mesh: what the tensor axis cuts goes round in rings of its own,
each of the devices that hold the same part.
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

from jaxspeed.objective.accumulate import Sums, per_weight, shares
from jaxspeed.objective.train_state import Arrays, pad, unpad, wide_dtype
from jaxspeed.placement.mesh import AXES, DATA_AXES
from jaxspeed.placement.rows import Row
from jaxspeed.placement.specs import sharded_dim, without_axes
from jaxspeed.placement.table import PlacementTable
from jaxspeed.ring_reduction.buckets import Bucket, BucketLeaf
from jaxspeed.ring_reduction.levels import Ranks, gathered, sum_of_all, sum_of_chunk
from jaxspeed.ring_reduction.rings import DATA, Rings, local_shape

OF_RANKS = P(DATA_AXES)  # a leading dim with each rank's own
OF_DEVICES = P(AXES)  # ... with each device's own


@dataclass(frozen=True)
class Reduction:
    """`__call__(parts, scale, errors) -> Sums`, and `published(values)`."""

    rings: Rings
    table: PlacementTable

    def __call__(self, parts: Sums, scale: Any, weighed: bool) -> Sums:
        """The ranks' parts, each with a leading dim of ranks, as one.

        Args:
          parts: of its gradients, those that still differ from rank to rank.
          scale: the loss scale that is in the gradients: errors are kept without it.
          weighed: whether the gradients are shares of the mean already, and only to be added up.
        """
        rows, ranks = {r.path: r for r in self.table if r.path in parts.grads}, self.rings.count
        padded = {p: pad(parts.grads[p], (ranks, *_shape(row))) for p, row in rows.items()}
        buckets = self._buckets(padded.items())
        scalars = (parts.total, parts.weight, parts.metrics)
        run = self.rings.on_devices(
            lambda *args: self._on_device(buckets, weighed, *args),
            (
                {p: P(DATA_AXES, *without_axes(_spec(row), DATA_AXES)) for p, row in rows.items()},
                OF_RANKS,
                P(),
                OF_DEVICES,
            ),
            ({p: _spec(row) for p, row in rows.items()}, P(), OF_DEVICES),
        )
        grads, (total, weight, metrics), errors = run(padded, scalars, scale, parts.errors)
        return Sums(grads, total, weight, metrics, errors)

    def _buckets(self, grads: Iterable[tuple[str, Any]]) -> tuple[Bucket, ...]:
        """What of the gradients [ranks, ...] goes round together."""
        parts = []
        for path, grad in grads:
            spec = _spec(self.table[path])
            shape = local_shape(self.rings.mesh, without_axes(spec, DATA_AXES), grad.shape[1:])
            wide = jnp.promote_types(grad.dtype, jnp.float32)
            dtype = grad.dtype if self.rings.sends_its_own_dtype else wide
            parts.append(BucketLeaf(path, shape, jnp.dtype(dtype), sharded_dim(spec, DATA)))
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
        """What each device does; arrays of ranks and of devices have a leading dim of 1."""
        ranks = self.rings.once_there(ranks, (grads, scalars))
        sums, share = self._summed(scalars, ranks)
        reduced: Arrays = {}
        left: Arrays = {}
        for name, bucket in self._named(buckets):
            own = {part.path: grads[part.path][0] for part in bucket.parts}
            if not weighed:
                own = {path: grad * share for path, grad in own.items()}
            x = bucket.laid_out(own)
            if errors:
                x = x + errors[name][0] * scale
            go_round = sum_of_chunk if bucket.is_cut else sum_of_all
            result, lost = go_round(x, ranks, self.rings.levels)
            reduced |= bucket.cuts(result) if bucket.is_cut else bucket.leaves(result)
            if errors and lost is not None:
                left[name] = (lost / scale)[None]
        return {p: x.astype(grads[p].dtype) for p, x in reduced.items()}, sums, left

    def _summed(self, scalars: Any, ranks: Ranks) -> tuple[Any, jax.Array]:
        """(total, weight, metrics) of all ranks, and this rank's share of the weight.

        Every rank adds up the same numbers in the order of the ranks.
        """
        total, weight, metrics = jax.tree.map(lambda x: x[0], scalars)
        row = jnp.stack([total, weight, *(m.astype(total.dtype) for m in metrics.values())])
        every = self.rings.of_every_rank(row, ranks)  # [ranks, 2 + metrics]
        of_rank, whole = shares(every[:, 1])
        means = (every[:, 2:] * of_rank[:, None]).sum(axis=0)
        summed = {name: mean.astype(m.dtype) for (name, m), mean in zip(metrics.items(), means)}
        return (every[:, 0].sum(), whole, summed), per_weight(weight, whole)

    # -- what packing has lost ------------------------------------------------------------------

    @cached_property
    def errors(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What is kept of each bucket: [devices, ranks, length], a device's own on each."""
        if not self.rings.feedback:
            return {}
        rows = [row for row in self.table if row.leaf.trainable]
        every = {row.path: jax.ShapeDtypeStruct((1, *_shape(row)), wide_dtype(row)) for row in rows}
        devices, at = self.rings.mesh.size, NamedSharding(self.rings.mesh, OF_DEVICES)
        return {
            name: jax.ShapeDtypeStruct(
                (devices, bucket.ranks, bucket.length), jnp.float32, sharding=at
            )
            for name, bucket in self._named(self._buckets(every.items()))
        }

    def _named(self, buckets: tuple[Bucket, ...]) -> list[tuple[str, Bucket]]:
        """Names that differ where the same numbers would mean something else."""
        layout = repr((dict(self.rings.mesh.shape), buckets)).encode()
        digest = hashlib.sha256(layout).hexdigest()[:12]
        return [(f"{digest}-{number}", bucket) for number, bucket in enumerate(buckets)]

    # -- what layers read -----------------------------------------------------------------------

    def published(self, values: Arrays) -> Arrays:
        """Parameters that were updated on their cuts, as layers read them: handed round."""
        rows = {path: self.table[path] for path in values}
        read = {path: row.param for path, row in rows.items() if row.param}
        cut = {p: _spec(row) for p, row in rows.items() if read[p].spec != _spec(row)}
        parts = [
            BucketLeaf(
                path,
                local_shape(self.rings.mesh, without_axes(spec, DATA_AXES), _shape(rows[path])),
                values[path].dtype,
                sharded_dim(spec, DATA),
            )
            for path, spec in cut.items()
        ]
        buckets = self.rings.buckets(parts)

        def device(ranks: Ranks, cuts: Arrays) -> Arrays:
            whole: Arrays = {}
            for bucket in buckets:
                chunk = bucket.own_chunk(cuts)
                whole |= bucket.leaves(gathered(chunk, ranks, self.rings.levels))
            return whole

        whole_specs = {path: without_axes(spec, DATA_AXES) for path, spec in cut.items()}
        run = self.rings.on_devices(device, (cut,), whole_specs)
        whole = values | run({path: values[path] for path in cut})
        return {path: unpad(x, rows[path].shape(read[path])) for path, x in whole.items()}


def _spec(row: Row) -> P:
    """How a reduced gradient is cut: as the optimizer's state is."""
    assert row.opt is not None
    return row.opt.spec


def _shape(row: Row) -> tuple[int, ...]:
    assert row.opt is not None
    return row.shape(row.opt)
