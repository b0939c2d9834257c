"""ZeRO 3 around rings: a unit's parameters are gathered as buckets, its gradients scattered so.

The loss runs manual over the data axes. What the tensor axis cuts is the compiler's business there,
but not inside of the exchange: that is manual over all axes, so that each device's part of a
parameter goes round as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxspeed.ops.free_axes import free_axes
from jaxspeed.ring_reduction.buckets import Bucket, BucketLeaf
from jaxspeed.ring_reduction.levels import Ranks, gathered, sum_of_all, sum_of_chunk
from jaxspeed.ring_reduction.rings import Rings, local_shape
from jaxspeed.zero3 import ShardedParam


@dataclass(frozen=True)
class RingExchange:
    """See `zero3/sharded_param.py`."""

    rings: Rings
    place: Sequence[jax.Array]  # this device's parts of `Rings.numbers`

    def gather(
        self, stored: Sequence[ShardedParam], shards: Sequence[Any], place: Sequence[Any]
    ) -> list[Any]:
        """Cast on the shard, gathered, unpadded."""
        shards = [x.astype(s.dtype) for s, x in zip(stored, shards, strict=True)]
        moving = [i for i, s in enumerate(stored) if s.sharded_dim is not None]
        specs = [_left(s) for s in stored]
        buckets = self._buckets([stored[i] for i in moving], [shards[i] for i in moving])

        def device(ranks: Ranks, cuts: list[Any]) -> list[Any]:
            named = {str(i): x for i, x in enumerate(cuts)}
            whole: dict[str, Any] = {}
            for bucket in buckets:
                chunk = bucket.own_chunk(named)
                whole |= bucket.leaves(gathered(chunk, ranks, self.rings.levels))
            return [whole[name] for name in named]

        moved = [specs[i] for i in moving]
        found = self._on_devices(device, place, moved, moved)([shards[i] for i in moving])
        for i, whole in zip(moving, found, strict=True):
            shards[i] = whole
        return [
            x if x.shape == s.shape else x[tuple(map(slice, s.shape))]
            for s, x in zip(stored, shards, strict=True)
        ]

    def scatter(
        self,
        stored: Sequence[ShardedParam],
        grads: Sequence[Any],
        likes: Sequence[Any],
        place: Sequence[Any],
    ) -> list[Any]:
        """Padded, summed to this rank's cut, in the dtype of what is stored."""
        specs = [_left(s) for s in stored]
        padded = [
            jnp.pad(g, [(0, b - a) for a, b in zip(g.shape, shape, strict=True)])
            for g, shape in zip(grads, map(self._whole, stored, likes), strict=True)
        ]
        if not self.rings.sends_its_own_dtype:
            padded = [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in padded]
        buckets = self._buckets(stored, likes, [g.dtype for g in padded])

        def device(ranks: Ranks, grads: list[Any]) -> list[Any]:
            named = {str(i): x for i, x in enumerate(grads)}
            cuts: dict[str, Any] = {}
            for bucket in buckets:
                x, levels = bucket.laid_out(named), self.rings.levels
                if bucket.is_cut:
                    cuts |= bucket.cuts(sum_of_chunk(x, ranks, levels)[0])
                else:
                    cuts |= bucket.leaves(sum_of_all(x, ranks, levels)[0])
            return [cuts[name] for name in named]

        summed = self._on_devices(device, place, specs, specs)(padded)
        return [x.astype(like.dtype) for x, like in zip(summed, likes, strict=True)]

    def over_ranks(self, x: jax.Array) -> jax.Array:
        """The sum of a scalar over all ranks, in their order."""

        def device(ranks: Ranks, xs: list[Any]) -> list[Any]:
            return [self.rings.of_every_rank(x[None], ranks)[:, 0].sum() for x in xs]

        return self._on_devices(device, self.place, [P()], [P()])([x])[0]

    def _whole(self, stored: ShardedParam, shard: Any) -> tuple[int, ...]:
        """The shape that the ranks' shards make up."""
        ranks = self.rings.levels.inner.size
        return tuple(n * ranks if d == stored.sharded_dim else n for d, n in enumerate(shard.shape))

    def _buckets(
        self,
        stored: Sequence[ShardedParam],
        shards: Sequence[Any],
        dtypes: Sequence[Any] | None = None,
    ) -> tuple[Bucket, ...]:
        parts = [
            BucketLeaf(
                str(i),
                local_shape(s.gathered.mesh, _left(s), self._whole(s, x)),
                jnp.dtype(dtypes[i] if dtypes else x.dtype),
                s.sharded_dim,
            )
            for i, (s, x) in enumerate(zip(stored, shards, strict=True))
        ]
        return self.rings.buckets(parts)

    def _on_devices(
        self,
        per_device: Callable[[Ranks, list[Any]], list[Any]],
        place: Sequence[Any],
        in_specs: list[P],
        out_specs: list[P],
    ) -> Callable[[list[Any]], list[Any]]:
        """Manual over the axes that are left, within the data axes' manual region."""
        run = jax.shard_map(
            lambda inner, outer, arrays: per_device(self.rings.told(inner, outer), arrays),
            in_specs=(P(), P(), in_specs),
            out_specs=out_specs,
            axis_names=set(free_axes()),
            check_vma=False,
        )
        inner, outer = place
        return lambda arrays: run(inner, outer, arrays)


def _left(stored: ShardedParam) -> P:
    """How other axes cut it. A dim that the data ranks cut as well is whole while it goes round."""
    entries = [None if dim == stored.sharded_dim else e for dim, e in enumerate(stored.entries)]
    return P(*entries)
