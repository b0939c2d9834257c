"""The two passes of attention on one device of a `seq` axis: a ring, or keys that are gathered.

The queries of a device are one chunk of the sequence, or two in zig-zag. Against the keys of one
device they are a few pairs of chunks, each for one call of the platform's kernel. The results of
the calls are merged by the log-sum-exps L of their scores (arXiv:2310.01889):

    L = log(e^L1 + e^L2),  out = e^(L1 - L) out1 + e^(L2 - L) out2

The kernels' backward pass needs nothing but the final L and out, so that the gradients of all calls
are summed.

Hop i of the ring has the keys of the device that is i places before. Backward, the sum of the
gradients of a device's keys travels behind them from hop 1 on, and after the last hop to their
device, which adds those of its own queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.axes import SEQ
from jaxspeed.ops import cudnn, gpu, gpu_flash, row_blocks, splash
from jaxspeed.ops.attention_call import AttentionForm
from jaxspeed.ops.mask import KernelCall, Mask, Segments, not_estimated
from jaxspeed.ops.token_order import by_device, by_position
from jaxspeed.ops.two_passes import with_narrow_values, with_sinks

_BLIND = -1e29  # above the log-sum-exp of every query that sees no key, below all others
_LOW, _NEVER = -1e30, 1e30  # log-sum-exps of no share in a merge, and of which all shares are 0


@dataclass(frozen=True)
class SequenceShards:
    """Where the positions and heads are among the devices of the axis.

    Attributes:
      parts: devices of the axis.
      group: neighbours that have exchanged positions for heads; the groups form a ring.
      samples: axes that shard the samples.
    """

    parts: int
    group: int
    zigzag: bool
    samples: tuple[str, ...]

    @property
    def ring(self) -> int:
        return self.parts // self.group

    @property
    def place(self) -> jax.Array:
        """This device's place in the ring."""
        return lax.axis_index(SEQ) // self.group

    def _groups(self) -> Any:
        if self.group == self.parts:
            return None
        return [list(range(i, i + self.group)) for i in range(0, self.parts, self.group)]

    def heads_for_positions(self, x: jax.Array) -> jax.Array:
        """[batch, positions, heads, n] with more positions and fewer heads."""
        x = lax.all_to_all(x, SEQ, 2, 1, axis_index_groups=self._groups(), tiled=True)
        return by_position(x, self.group) if self.zigzag else x

    def positions_for_heads(self, x: jax.Array) -> jax.Array:
        """The inverse, and the transpose, of `heads_for_positions`."""
        x = by_device(x, self.group) if self.zigzag else x
        return lax.all_to_all(x, SEQ, 1, 2, axis_index_groups=self._groups(), tiled=True)

    def of_group(self, ids: jax.Array) -> jax.Array:
        """Ids [batch, positions] of all positions of the group."""
        if self.group == 1:
            return ids
        ids = lax.all_gather(ids, SEQ, axis=1, axis_index_groups=self._groups(), tiled=True)
        return by_position(ids, self.group) if self.zigzag else ids

    def gathered(self, x: jax.Array) -> jax.Array:
        """Keys, values or ids [batch, positions, ...] of all devices."""
        x = lax.all_gather(x, SEQ, axis=1, tiled=True)
        return by_position(x, self.parts) if self.zigzag else x

    def scattered(self, x: jax.Array) -> jax.Array:
        """The transpose of `gathered`."""
        x = by_device(x, self.parts) if self.zigzag else x
        return lax.psum_scatter(x, SEQ, scatter_dimension=1, tiled=True)

    def send(self, x: Any, hops: int = 1) -> Any:
        """To the device that is `hops` places behind."""
        step = hops * self.group
        pairs = [(i, (i + step) % self.parts) for i in range(self.parts)]
        return jax.tree.map(lambda x: lax.ppermute(x, SEQ, pairs), x)

    def sum_over_ring(self, x: jax.Array) -> jax.Array:
        if self.ring == 1:
            return x
        others = [list(range(i, self.parts, self.group)) for i in range(self.group)]
        return lax.psum(x, SEQ, axis_index_groups=None if self.group == 1 else others)


class Keys(NamedTuple):
    """Keys and values, and their ids if there are segments: what travels."""

    k: jax.Array
    v: jax.Array
    ids: jax.Array | None


class ChunkPair(NamedTuple):
    """A chunk of queries and a chunk of keys, for one call of a kernel.

    Attributes:
      rows, columns: their places among the device's chunks.
      offset: of the queries; None if the mask needs none.
      seen: whether any query sees any key; None if it is known to.
    """

    rows: int
    columns: int
    mask: Mask
    offset: Any = None
    seen: Any = None


def chunk_pairs(
    mask: Mask,
    numbers: Sequence[Any],
    others: Sequence[Any],
    lengths: tuple[int, int],
    same_device: bool,
) -> Iterator[ChunkPair]:
    """The pairs of a device's queries and one device's keys.

    Args:
      numbers, others: of the chunks of queries and of keys. A first chunk is before every second.
      lengths: of a chunk of queries and one of keys.
      same_device: whether the keys are those of the same device.
    """
    of_q, of_k = lengths
    for i, number in enumerate(numbers):
        for j, other in enumerate(others):
            if mask.causal and of_q == of_k and i < j:
                continue
            if same_device and i == j and of_q == of_k:
                yield ChunkPair(i, j, mask)
            elif not mask.hides or (mask.window is None and of_q == of_k and i > j):
                yield ChunkPair(i, j, Mask(False, None))
            elif mask.window is None and of_q == of_k:
                yield ChunkPair(i, j, Mask(False, None), seen=other < number)
            else:
                offset = number * of_q - other * of_k
                yield ChunkPair(i, j, mask, offset, _sees(mask, offset, of_q, of_k))


def _sees(mask: Mask, offset: Any, of_q: int, of_k: int) -> Any:
    """Whether any of the queries from this position on sees any key."""
    last = offset + of_q - 1
    seen = last >= 0 if mask.causal else True
    if mask.window is not None:
        seen &= (offset - (of_k - 1) < mask.window) & (-last < mask.window)
    return seen


@dataclass(frozen=True)
class DevicePasses:
    """The passes of one device, whose arrays are the shards of (q, k, v, segments, sinks).

    Attributes:
      seq, kv_seq: the lengths of the sequences without padding.
      gathers: whether all keys are gathered; otherwise they go around the ring.
    """

    form: AttentionForm
    shards: SequenceShards
    seq: int
    kv_seq: int
    gathers: bool

    def forward(self, q: Any, k: Any, v: Any, segments: Any, sinks: Any) -> Any:
        """(out, log-sum-exps [batch, heads, positions])."""
        forward, _ = with_sinks(self._forward, self._backward)
        out, sums = forward(q, k, v, self._of_group(segments), self._own(sinks, q))
        blind = sums < _BLIND  # none with sinks
        fill: Any = 0
        if self.form.blind == "nan":
            fill = jnp.nan
        elif self.form.blind == "mean":
            total = self.shards.sum_over_ring(jnp.sum(v, axis=1, keepdims=True, dtype=out.dtype))
            fill = jnp.repeat(total / self.kv_seq, q.shape[2] // v.shape[2], axis=2)
        out = jnp.where(_by_row(blind), fill, out).astype(q.dtype)
        return out, jnp.where(blind, _NEVER, sums)

    def backward(
        self, q: Any, k: Any, v: Any, segments: Any, sinks: Any, out: Any, sums: Any, d_out: Any
    ) -> Any:
        """The gradients of q, k, v and sinks."""
        # Otherwise XLA would hold the keys of other devices from the forward pass until here.
        d_out, k, v, segments = lax.optimization_barrier((d_out, k, v, segments))
        blind = _by_row(sums >= _NEVER)
        segments, own_sinks = self._of_group(segments), self._own(sinks, q)
        _, backward = with_sinks(self._forward, self._backward)
        results = jnp.where(blind, 0, out), sums, d_out
        d_q, d_k, d_v, d_sinks = backward(q, k, v, segments, own_sinks, *results)
        if self.form.blind != "undefined" and sinks is None:
            d_v = (d_v + self._of_blind(blind, v, d_out)).astype(v.dtype)
        if sinks is not None:
            first = self._first_head(q)
            d_sinks = lax.dynamic_update_slice(jnp.zeros_like(sinks), d_sinks, (first,))
            d_sinks = lax.psum(d_sinks, (*self.shards.samples, SEQ))
        return d_q, d_k, d_v, d_sinks

    def _of_blind(self, blind: jax.Array, v: jax.Array, d_out: jax.Array) -> jax.Array:
        """What queries that see no key add to the gradient of each value."""
        wide = jnp.promote_types(v.dtype, jnp.float32)
        if self.form.blind == "nan":  # NaN shares of all values, but not those of padding
            places = self.shards.place * blind.shape[1] + jnp.arange(blind.shape[1])
            there = blind & (places < self.seq)[:, None, None]
            part = jnp.broadcast_to(there, d_out.shape).astype(wide)
        else:
            part = jnp.where(blind, d_out, 0).astype(wide) / self.kv_seq
        total = self.shards.sum_over_ring(jnp.sum(part, axis=1, keepdims=True))
        total = jnp.sum(total.reshape(len(v), 1, v.shape[2], -1, v.shape[3]), axis=3)
        return jnp.where(total > 0, jnp.nan, 0) if self.form.blind == "nan" else total

    def _of_group(self, segments: Any) -> Any:
        return jax.tree.map(self.shards.of_group, segments)

    def _own(self, sinks: Any, q: jax.Array) -> Any:
        """The sinks of this device's heads."""
        if sinks is None:
            return None
        return lax.dynamic_slice_in_dim(sinks, self._first_head(q), q.shape[2])

    def _first_head(self, q: jax.Array) -> jax.Array:
        return lax.axis_index(SEQ) % self.shards.group * q.shape[2]

    # -- attention of keys and values that are at other devices ------------------------------------

    def _forward(self, q: Any, k: Any, v: Any, segments: Any) -> tuple[jax.Array, jax.Array]:
        queries, keys = self._queries(q, segments), _keys(k, v, segments)

        def merged(state: Any, keys: Keys, hop: Any) -> Any:
            state = list(state)
            for pair in self._pairs(q, keys, hop):
                attention = self._call(0, pair, queries[pair.rows], keys)
                state[pair.rows] = _merged(state[pair.rows], attention)
            return tuple(state)

        state: Any = (None,) * self._chunks
        if self.gathers:
            state = merged(state, self._gathered(keys), None)
            return _joined(state)
        hops, send = self._hops(q, k), self.shards.send
        sent: Any = send(keys) if hops else None
        state = merged(state, keys, 0)

        def step(carry: Any, hop: Any) -> Any:
            state, keys = carry
            sent = send(keys)
            return merged(state, keys, hop), sent

        if hops > 1:
            state, sent = _loop(step, (state, sent), range(1, hops))
        return _joined(merged(state, sent, hops) if hops else state)

    def _backward(
        self, q: Any, k: Any, v: Any, segments: Any, out: Any, sums: Any, d_out: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        chunks = self._chunks
        queries, keys = self._queries(q, segments), _keys(k, v, segments)
        of_rows = list(
            zip(*(jnp.split(x, chunks, axis) for x, axis in ((out, 1), (sums, 2), (d_out, 1))))
        )

        def added(d_q: Any, d_keys: Any, keys: Keys, hop: Any) -> Any:
            """The gradients of the queries, and of these keys, with those of a hop."""
            d_q, parts = list(d_q), [None] * (1 if self.gathers else chunks)
            for pair in self._pairs(q, keys, hop):
                rows = pair.rows
                of_q, *of_keys = self._call(1, pair, queries[rows], keys, *of_rows[rows])
                d_q[rows] = _added(d_q[rows], of_q)
                parts[pair.columns] = _added(parts[pair.columns], tuple(of_keys))
            full = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
            return tuple(d_q), jax.tree.map(
                lambda x, k: x.astype(k.dtype), _added(d_keys, full), (k, v)
            )

        def result(d_q: Any, d_keys: Any) -> Any:
            return jnp.concatenate(d_q, axis=1).astype(q.dtype), *d_keys

        d_q: Any = (None,) * chunks
        if self.gathers:
            d_q, d_keys = added(d_q, None, self._gathered(keys), None)
            return result(d_q, [self.shards.scattered(x) for x in d_keys])
        hops, send = self._hops(q, k), self.shards.send
        sent: Any = send(keys) if hops else None
        d_q, d_own = added(d_q, None, keys, 0)
        if not hops:
            return result(d_q, d_own)
        first, sent = sent, send(sent) if hops > 1 else None
        d_q, d_keys = added(d_q, None, first, 1)

        def step(carry: Any, hop: Any) -> Any:
            d_q, d_keys, keys = carry
            sent, d_keys = send(keys), send(d_keys)
            return *added(d_q, d_keys, keys, hop), sent

        if hops > 2:
            d_q, d_keys, sent = _loop(step, (d_q, d_keys, sent), range(2, hops))
        if hops > 1:
            d_q, d_keys = added(d_q, send(d_keys), sent, hops)
        home = send(d_keys, -hops)
        d_keys = jax.tree.map(lambda x, k: x.astype(k.dtype), _added(d_own, home), (k, v))
        return result(d_q, d_keys)

    @property
    def _chunks(self) -> int:
        """Chunks of the sequence on each device; their order matters to masks only."""
        shards = self.shards
        return 2 if shards.zigzag and shards.ring > 1 and self.form.mask.hides else 1

    def _queries(self, q: jax.Array, segments: Any) -> list[tuple[jax.Array, Any]]:
        chunks = self._chunks
        ids = [None] * chunks if segments is None else jnp.split(segments.q, chunks, axis=1)
        return list(zip(jnp.split(q, chunks, axis=1), ids, strict=True))

    def _gathered(self, keys: Keys) -> Keys:
        return jax.tree.map(self.shards.gathered, keys)

    def _hops(self, q: jax.Array, k: jax.Array) -> int:
        """Hops after which no device's queries see a key."""
        mask, last = self.form.mask, self.shards.ring - 1
        if mask.causal and mask.window is not None and q.shape[1] == k.shape[1]:
            # The nearest key of hop i is (i - 1) shards and one position before.
            return last if self._chunks > 1 else min(last, (mask.window - 2) // q.shape[1] + 1)
        return last

    def _pairs(self, q: jax.Array, keys: Keys, hop: Any) -> list[ChunkPair]:
        """Of the queries with the keys of a hop; of hop None with those of all devices."""
        mask, place, chunks = self.form.mask, self.shards.place, self._chunks
        of_q = q.shape[1] // chunks
        numbers = self._numbers(place)
        if hop is None:
            pairs = chunk_pairs(mask, numbers, (0,), (of_q, keys.k.shape[1]), same_device=False)
            return [pair._replace(seen=None) for pair in pairs]
        others = self._numbers((place - hop) % self.shards.ring)
        lengths = of_q, keys.k.shape[1] // chunks
        same_device = isinstance(hop, int) and hop == 0
        return list(chunk_pairs(mask, numbers, others, lengths, same_device))

    def _numbers(self, place: Any) -> tuple[Any, ...]:
        """The numbers of the chunks of a device."""
        return (place,) if self._chunks == 1 else (place, 2 * self.shards.ring - 1 - place)

    def _call(
        self, number: int, pair: ChunkPair, queries: tuple[jax.Array, Any], keys: Keys, *more: Any
    ) -> Any:
        """A pass of the kernel for a pair of chunks; skipped if no query sees a key.

        Forward (out, sums), backward the gradients of queries, keys and values.
        """
        q, ids = queries
        chunks = 1 if self.gathers else self._chunks
        k, v, *of_keys = (jnp.split(x, chunks, axis=1)[pair.columns] for x in keys if x is not None)
        segments = Segments(ids, *of_keys) if of_keys else None
        run = _kernel_passes(self.form, pair, q, k, segments)[number]
        operands = q, k, v, segments, *more
        if pair.seen is None:
            return run(*operands)

        def skip(*operands: Any) -> Any:
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, *operands)
            )
            return zeros if number else (zeros[0], jnp.full_like(zeros[1], _LOW))

        return lax.cond(pair.seen, run, not_estimated(skip), *operands)


def _kernel_passes(
    form: AttentionForm, pair: ChunkPair, q: jax.Array, k: jax.Array, segments: Segments | None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The passes of the kernel of the platform for which the program is traced.

    Not `lax.platform_dependent`, which makes a conditional of it: see `ops.moe.dispatch`.
    """
    call = KernelCall(pair.mask, form.scale, form.soft_cap)
    options: dict[str, Any] = {} if pair.offset is None else {"offset": pair.offset}
    kernel: Any = row_blocks
    if splash.generation() is not None:
        kernel = splash if splash.supports(q, k) else row_blocks
        if kernel is splash and segments is not None:
            # With an offset it leaves out the blocks of other documents.
            options.setdefault("offset", jnp.int32(0))
    elif gpu.is_meant():
        alone = pair.offset is None and segments is None and form.soft_cap is None
        if alone and cudnn.supports(q, k, k, None, pair.mask):  # values get the dims of keys
            kernel = cudnn
        elif gpu_flash.supports(q, k):
            kernel = gpu_flash.kernel(q, k)
    forward, backward = (
        functools.partial(kernel_pass, call, **options)
        for kernel_pass in (kernel.forward, kernel.backward)
    )
    if kernel is row_blocks:
        return forward, backward
    return with_narrow_values(forward, backward)


def _loop(step: Callable[[Any, Any], Any], carry: Any, hops: range) -> Any:
    """The hops one after the other, in a loop of the program except on CPUs.

    XLA:CPU orders the collectives of a program on all devices alike, but not those in a loop with
    others that do not depend on it: simulated devices lock up (jaxlib 0.12.0.1).
    """
    if splash.generation() is None and not gpu.is_meant():
        for hop in hops:
            carry = step(carry, hop)
        return carry
    return lax.scan(
        lambda carry, hop: (step(carry, hop), None), carry, jnp.arange(hops.start, hops.stop)
    )[0]


def _keys(k: jax.Array, v: jax.Array, segments: Segments | None) -> Keys:
    return Keys(k, v, None if segments is None else segments.kv)


def _by_row(x: jax.Array) -> jax.Array:
    """[batch, heads, positions] as [batch, positions, heads, 1]."""
    return x.swapaxes(1, 2)[..., None]


def _merged(state: Any, other: Any) -> tuple[jax.Array, jax.Array]:
    """(out, sums) of the keys of both, in the dtype of the sums."""
    out, sums = other
    sums = jnp.maximum(sums, _LOW)
    out = out.astype(sums.dtype)
    if state is None:
        return out, sums
    total = jnp.logaddexp(state[1], sums)
    first, second = (_by_row(jnp.exp(x - total)) for x in (state[1], sums))
    return first * state[0] + second * out, total


def _joined(state: Any) -> tuple[jax.Array, jax.Array]:
    outs, sums = zip(*state, strict=True)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(sums, axis=2)


def _added(total: Any, other: Any) -> Any:
    """The sum of gradients, of which `total` may be None, in fp32 at least."""
    other = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), other)
    return other if total is None else jax.tree.map(jnp.add, total, other)
