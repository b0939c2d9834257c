"""ZeRO 3 with rings: all-gather of a unit's parameters and reduce-scatter of its gradients.

Both use buckets. The loss runs manual over the data axes, where the compiler handles the sharding
over `tensor`; the exchange is manual over all axes and sends each device's shard unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxspeed.ops.free_axes import free_axes
from jaxspeed.placement.codec import pad, unpad
from jaxspeed.ring_reduction.buckets import Bucket, BucketLeaf
from jaxspeed.ring_reduction.levels import (
    Ranks,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from jaxspeed.ring_reduction.rings import Rings, local_shape
from jaxspeed.traced_loss.loss import Loss
from jaxspeed.zero3 import Exchange, ShardedParam


@dataclass(frozen=True)
class RingExchange(Exchange):
    """`zero3.Exchange` by rings; `rank_ids` are this device's shards of `Rings.rank_ids`."""

    rings: Rings
    rank_ids: Sequence[jax.Array]

    @property
    def place(self) -> Sequence[jax.Array]:
        return self.rank_ids

    @property
    def per_rank(self) -> bool:
        return True

    def gather(
        self, stored: Sequence[ShardedParam], shards: Sequence[Any], place: Sequence[Any]
    ) -> list[Any]:
        """Cast the shards, all-gather and unpad them."""
        shards = [x.astype(s.dtype) for s, x in zip(stored, shards, strict=True)]
        sharded = [i for i, s in enumerate(stored) if s.sharded_dim is not None]
        specs = [_other_axes_spec(s) for s in stored]
        buckets = self._buckets([stored[i] for i in sharded], [shards[i] for i in sharded])

        def device(ranks: Ranks, shards: list[Any]) -> list[Any]:
            named = {str(i): x for i, x in enumerate(shards)}
            full: dict[str, Any] = {}
            for bucket in buckets:
                chunk = bucket.own_chunk(named)
                full |= bucket.leaves(hierarchical_all_gather(chunk, ranks, self.rings.levels))
            return [full[name] for name in named]

        exchanged = [specs[i] for i in sharded]
        gathered = self._on_devices(device, place, exchanged, exchanged)(
            [shards[i] for i in sharded]
        )
        for i, full in zip(sharded, gathered, strict=True):
            shards[i] = full
        return [unpad(x, s.shape) for s, x in zip(stored, shards, strict=True)]

    def scatter(
        self,
        stored: Sequence[ShardedParam],
        grads: Sequence[Any],
        likes: Sequence[Any],
        place: Sequence[Any],
    ) -> list[Any]:
        """Pad the gradients and reduce-scatter them to this rank's shards, in the stored dtype."""
        specs = [_other_axes_spec(s) for s in stored]
        padded = [
            pad(g, shape)
            for g, shape in zip(grads, map(self._full_shape, stored, likes), strict=True)
        ]
        if not self.rings.sends_gradient_dtype:
            padded = [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in padded]
        buckets = self._buckets(stored, likes, [g.dtype for g in padded])

        def device(ranks: Ranks, grads: list[Any]) -> list[Any]:
            named = {str(i): x for i, x in enumerate(grads)}
            shards: dict[str, Any] = {}
            for bucket in buckets:
                x, levels = bucket.to_chunks(named), self.rings.levels
                if bucket.is_sharded:
                    shards |= bucket.shards(hierarchical_reduce_scatter(x, ranks, levels)[0])
                else:
                    shards |= bucket.leaves(hierarchical_all_reduce(x, ranks, levels)[0])
            return [shards[name] for name in named]

        summed = self._on_devices(device, place, specs, specs)(padded)
        return [x.astype(like.dtype) for x, like in zip(summed, likes, strict=True)]

    def weight_of_ranks(self, loss: Loss) -> jax.Array:
        """The sum of a loss's weight over all ranks, in rank order, and after its forward pass."""
        first = jax.lax.stop_gradient(loss.total)
        (weight,) = self.rings.ordered([loss.weight], [first], self.place)

        def device(ranks: Ranks, xs: list[Any]) -> list[Any]:
            return [self.rings.gather_ranks(x[None], ranks)[:, 0].sum() for x in xs]

        return self._on_devices(device, self.place, [P()], [P()])([weight])[0]

    def _full_shape(self, stored: ShardedParam, shard: Any) -> tuple[int, ...]:
        """The unsharded shape of the ranks' shards."""
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
                local_shape(s.gathered.mesh, _other_axes_spec(s), self._full_shape(s, x)),
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
        """A shard_map over the remaining axes, within the data axes' manual region."""
        run = jax.shard_map(
            lambda inner, outer, arrays: per_device(self.rings.ranks(inner, outer), arrays),
            in_specs=(P(), P(), in_specs),
            out_specs=out_specs,
            axis_names=set(free_axes()),
            check_vma=False,
        )
        inner, outer = place
        return lambda arrays: run(inner, outer, arrays)


def _other_axes_spec(stored: ShardedParam) -> P:
    """The sharding over other axes; the dim that is also sharded over data is left out."""
    entries = [None if dim == stored.sharded_dim else e for dim, e in enumerate(stored.entries)]
    return P(*entries)
