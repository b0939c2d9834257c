"""Dispatch of tokens to experts, the experts' products, and the sum of their results.

Each device sorts its pairs of token and expert by expert. Where an expert axis shards the experts,
the rows travel to the devices of their experts and back, within the groups of devices along this
axis. The receive buffer is bounded: in one round, a device sends at most

    c = `pair_rows`: SLACK times (pairs of the device) / (size of the axis)

rows to each other one, and the buffer has SLACK times as many rows as balanced experts need. What
does not fit goes in further rounds. Their number is that of the device that needs most, of all
devices, so that control flow is the same everywhere:

    rounds = max over pairs of devices of ceil(rows from one to the other / c)

Over a sequence axis a device has the pairs of its positions, as it has those of its samples.

The first round stands outside of the loop of the others, which is skipped if there are none.

A layer with such exchanges saves its inputs alone. There are two exchanges of rows forward, of the
tokens and of the results, and three backward: the tokens again, the gradients of the results and of
the tokens. Everything else that is exchanged is small: numbers of tokens, and the weights of the
sum.

All of it is control flow that JAX differentiates; the products are equations of the trace.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import EXPERT
from jaxspeed.errors import ModelError
from jaxspeed.ops import splash
from jaxspeed.ops.attention import operand_dtype
from jaxspeed.ops.mask import not_estimated
from jaxspeed.ops.moe.grouped_products import Dim, Layout, grouped_product, layout
from jaxspeed.ops.moe.routing import Routing
from jaxspeed.ops.token_order import ANY_ORDER

SLACK = Fraction(5, 4)


@dataclass(frozen=True)
class Rows:
    """Tokens sorted by expert, as the feed-forward of the experts gets them.

    Attributes:
      values: [parts, shards, rows, embed]; a row that is no token's is zero.
      weights: [parts, shards, rows, 1] fp32, of the sum of the experts' results. The feed-forward
        multiplies them in before its last product.
      bounds: [shards, experts of a shard + 1], the first rows of the experts, and the end.
    """

    values: jax.Array
    weights: jax.Array
    bounds: jax.Array
    layout: Layout
    active: int

    def product(
        self, weight: jax.Array, values: jax.Array | None = None, sharded: Dim | None = None
    ) -> jax.Array:
        """Rows times the weights [experts, in, out] of their experts, [parts, shards, rows, out].

        Args:
          values: the rows, cast to the dtype of `self.values`; by default these.
          sharded: the dim of the weights that a tensor axis shards. By default the one that the
            shape of the rows implies: "in" if they have a part of it, else "out".
        """
        values = self.values if values is None else values.astype(self.values.dtype)
        if sharded is None:
            sharded = "out" if values.shape[-1] == weight.shape[1] else "in"
        return grouped_product(
            values,
            weight,
            self.bounds,
            layout=self.layout,
            sharded=sharded,
            active=self.active,
        )

    def bias(self, bias: jax.Array, *, last: bool = False) -> jax.Array:
        """The biases [experts, out] of each row's expert, [parts, shards, rows, out].

        Args:
          last: of the last product, which contracts the dim that a tensor axis shards: its results
            are summed over the parts, and only the first part's have the bias.
        """
        parts, shards, rows, _ = self.values.shape
        place = lax.broadcasted_iota(jnp.int32, (shards, rows, 1), 1)
        bounds = self.bounds[:, None]
        # [shards, rows, experts]
        is_expert = (place >= bounds[..., :-1]) & (place < bounds[..., 1:])
        of_expert, tables = is_expert.astype(bias.dtype), bias
        groups, size = self.layout.expert_shards, is_expert.shape[-1]
        # Shards are numbered with the expert axis innermost.
        of_expert = of_expert.reshape(shards // groups, groups, rows, size)
        tables = tables.reshape(groups, size, -1)
        biases = jnp.einsum(
            "dgre,geo->dgro", of_expert, tables, precision=lax.Precision.HIGHEST
        ).reshape(1, shards, rows, -1)
        if last:
            is_first = lax.broadcasted_iota(jnp.int32, (parts, 1, 1, 1), 0) == 0
            return jnp.where(is_first, biases, 0)
        return biases.reshape(shards, rows, parts, -1).transpose(2, 0, 1, 3)


def mixture(x: jax.Array, routing: Routing, feed_forward: Callable[[Rows], jax.Array]) -> jax.Array:
    """The weighted sum of the results of each token's experts, [batch, seq, embed].

    Args:
      x: [batch, seq, embed].
      feed_forward: the experts, a function of rows that are sorted by expert. It multiplies the
        rows by `rows.weights` before its last product, which contracts the dim that a tensor axis
        may shard.
    """
    (batch, seq, embed), dtype = x.shape, x.dtype
    travels = operand_dtype(dtype)  # under automatic mixed precision
    experts, k = routing.counts.shape[-1], routing.experts.shape[-1]
    where = layout()
    if experts % where.expert_shards:
        raise ModelError(
            f"the expert axis of size {where.expert_shards} does not divide {experts} experts"
        )
    shards, parts = where.shards, where.parts
    tokens = -(-batch * seq // shards)  # of a shard
    padding = tokens * shards - batch * seq
    of_samples = shards // where.seq_shards
    in_place = where.seq_shards > 1 and batch % of_samples == seq % where.seq_shards == 0

    def sharded(values: jax.Array, fill: int = 0) -> jax.Array:
        """[batch, seq, n] as [shards, tokens, n]."""
        values = values.reshape(batch, seq, -1)
        if in_place:
            return to_shards(values, where, seq // where.seq_shards)
        values = values.reshape(batch * seq, -1)
        if padding:
            values = jnp.pad(values, ((0, padding), (0, 0)), constant_values=fill)
        return values.reshape(shards, tokens, -1)

    def in_sequences(values: jax.Array) -> jax.Array:
        """[shards, tokens, embed] as [batch, seq, embed]."""
        if in_place:
            return from_shards(values, where, seq // where.seq_shards)
        return values.reshape(shards * tokens, -1)[: batch * seq].reshape(batch, seq, -1)

    def of_shards(x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        sent = _Exchange(where, experts, tokens, k)
        plan = sent.plan(sharded(chosen, experts))
        x = jnp.broadcast_to(sharded(x).astype(travels), (parts, shards, tokens, embed))
        weights = jnp.broadcast_to(sharded(weights), (parts, shards, tokens, k))

        def one_round(number: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
            values, of_rows, bounds = sent.dispatch(plan, number, x, weights)
            # `plan` assumes one round, and FLOPs are counted once.
            active = batch * seq * k if number is FIRST else 0
            rows = Rows(values.astype(dtype), of_rows, bounds, where, active)
            return sent.combine(plan, number, feed_forward(rows).astype(travels))

        total = one_round(FIRST, x, weights)
        if sent.most_rounds > 1:

            @jax.checkpoint  # residuals of one branch are arrays in all of them
            def further(number: jax.Array, *operands: Any) -> jax.Array:
                return operands[0] + one_round(number, *operands[1:])

            @jax.checkpoint  # a residual of a branch would be saved for each trip
            def trip(number: jax.Array, *operands: Any) -> jax.Array:
                return lax.cond(number < plan.rounds, further, _unchanged, number, *operands)

            @jax.checkpoint
            def others(total: jax.Array, *operands: Any) -> jax.Array:
                @not_estimated
                def loop(total: jax.Array, *operands: Any) -> jax.Array:
                    return lax.scan(
                        lambda total, number: (trip(number, total, *operands), None),
                        total,
                        jnp.arange(1, sent.most_rounds),
                    )[0]

                return lax.cond(plan.rounds > 1, loop, lambda total, *_: total, total, *operands)

            total = others(total, x, weights)
        total = jnp.sum(total, axis=0) if parts > 1 else total[0]
        return in_sequences(total)

    # Without exchanges it has residuals as other layers have.
    layer = of_shards
    if where.expert_shards > 1:
        layer = jax.checkpoint(of_shards, policy=saves_layer_inputs)
    with jax.named_scope(ANY_ORDER):
        return layer(x, routing.experts, routing.weights).astype(dtype)


def saves_layer_inputs(*_: Any, **__: Any) -> bool:
    """The checkpoint policy of a mixture, which saves nothing inside of it.

    A unit that is rematerialized knows a mixture's checkpoint by it, and inlines it: it would be
    recomputed twice.
    """
    return False


FIRST = 0  # the round outside of the loop


def _unchanged(number: jax.Array, total: jax.Array, *operands: Any) -> jax.Array:
    return total


def pair_rows(pairs: int, expert_shards: int) -> int:
    """Rows that a device sends to another one in a round, for so many pairs of token and expert."""
    return min(pairs, math.ceil(SLACK * pairs / expert_shards))


def pairs_of_parts(chosen: jax.Array, experts: int) -> jax.Array:
    """[batch, parts, experts] int32: pairs that travel, of each device's part of a sample.

    Args:
      chosen: the experts of tokens, [batch, seq, k]; `experts` is no expert.
    """
    parts, seq = layout().seq_shards, chosen.shape[1]
    size = -(-seq // parts)
    with jax.named_scope(ANY_ORDER):  # these are the tokens that a device has, whichever they are
        of_parts = (chosen[:, i * size : (i + 1) * size, :, None] for i in range(parts))
        numbers = jnp.arange(experts)
        sums = [jnp.sum(part == numbers, axis=(1, 2), dtype=jnp.int32) for part in of_parts]
        return jnp.stack(sums, axis=1)


def rounds_of(sent: jax.Array, k: int, seq: int) -> jax.Array:
    """The rounds that layers need in the context's mesh.

    Args:
      sent: [batch, layers, parts, experts], the pairs of each part of a sample that travel
        (`pairs_of_parts`).
      k: experts of a token.
      seq: tokens of a sample.
    """
    where = layout()
    batch, layers, parts, _ = sent.shape
    groups = where.expert_shards
    shards = where.shards // where.seq_shards  # of the samples
    if groups == 1:
        return jnp.ones((layers,), jnp.int32)
    samples = -(-batch // shards)
    sent = jnp.pad(sent, ((0, samples * shards - batch), *[(0, 0)] * 3))
    sent = sent.reshape(shards, samples, layers, parts, groups, -1).sum((1, 5))
    most = jnp.max(sent, axis=(0, 2, 3))
    return jnp.maximum(-(-most // pair_rows(samples * -(-seq // parts) * k, groups)), 1)


# -- one device's positions of its samples ---------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def to_shards(x: jax.Array, where: Layout, positions: int) -> jax.Array:
    """[batch, seq, n] as [shards, tokens, n]; each device keeps its part, so nothing is sent.

    Its transpose is the inverse, which that of `shard_map` would follow by a sum over other axes.
    """
    del positions
    run = where.on_devices(
        lambda x: x.reshape(1, -1, x.shape[-1]), (where.sequences,), P(where.tokens)
    )
    return run(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def from_shards(x: jax.Array, where: Layout, positions: int) -> jax.Array:
    """[shards, tokens, n] as [batch, seq, n], of so many positions of a device."""
    run = where.on_devices(
        lambda x: x.reshape(-1, positions, x.shape[-1]), (P(where.tokens),), where.sequences
    )
    return run(x)


to_shards.defvjp(
    lambda x, *how: (to_shards(x, *how), None),
    lambda where, positions, _, ct: (from_shards(ct, where, positions),),
)
from_shards.defvjp(
    lambda x, *how: (from_shards(x, *how), None),
    lambda where, positions, _, ct: (to_shards(ct, where, positions),),
)

# -- one device's rows -----------------------------------------------------------------------------


@jax.custom_vjp
def moved(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """sum_j x[index[:, j]], where an index that is out of range stands for zeros.

    `back` is the same of the transpose, so that both are gathers: row i of x is in those rows of
    the result.
    """
    del back
    rows = jnp.take(x, index, axis=0, mode="fill", fill_value=0)  # [rows, j, dim]
    if index.shape[1] == 1:
        return rows[:, 0]
    return jnp.sum(rows, axis=1, dtype=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)


def _moved_forward(x: jax.Array, index: jax.Array, back: jax.Array) -> Any:
    return moved(x, index, back), (index, back)


def _moved_backward(saved: Any, cotangent: jax.Array) -> Any:
    index, back = saved
    return moved(cotangent, back, index), None, None


moved.defvjp(_moved_forward, _moved_backward)


class SortedPairs(NamedTuple):
    """Where the rows of each device go; arrays have its shard in dim 0."""

    order: jax.Array  # [shards, pairs]: the pairs of token and expert, sorted by expert
    inverse: jax.Array  # [shards, pairs]: the place of each pair in this order
    starts: jax.Array  # [shards, experts + 1]: the first places of the experts, and the end
    received: jax.Array  # [shards, sources, own experts + 1]: of the rows for this device
    rounds: jax.Array  # the number of rounds


class _Exchange:
    """The exchange of rows between a mixture's devices."""

    def __init__(self, where: Layout, experts: int, tokens: int, k: int) -> None:
        self.where, self.experts, self.k = where, experts, k
        self.pairs = tokens * k  # of a shard
        self.groups = where.expert_shards
        self.own = experts // self.groups  # experts of a shard
        self.pair_rows = pair_rows(self.pairs, self.groups)
        self.most_rounds = -(-self.pairs // self.pair_rows) if self.groups > 1 else 1
        specs: list[Any] = [*[P(where.tokens or None)] * 4, P()]
        self.plans = SortedPairs(*specs)

    def plan(self, chosen: jax.Array) -> SortedPairs:
        """Of chosen experts [shards, tokens, k]."""

        def device(chosen: jax.Array) -> SortedPairs:
            chosen = chosen.reshape(-1)
            order = jnp.argsort(chosen, stable=True)
            inverse = jnp.argsort(order)
            numbers = jnp.arange(self.experts + 1, dtype=chosen.dtype)
            starts = jnp.sum(chosen < numbers[:, None], axis=1, dtype=jnp.int32)
            if self.groups == 1:
                rounds, received = jnp.int32(1), starts[None]
            else:
                per_group = starts[:-1].reshape(self.groups, self.own)
                ends = starts[1:].reshape(self.groups, self.own)[:, -1:]
                per_group = jnp.concatenate([per_group, ends], 1) - per_group[:, :1]
                # Of this device to each; then of each to this device.
                received = lax.all_to_all(per_group, EXPERT, 0, 0)
                needed = -(-jnp.max(per_group[:, -1]) // self.pair_rows)
                mesh = self.where.mesh
                rounds = jnp.maximum(lax.pmax(needed, mesh.axis_names if mesh else ()), 1)
            return SortedPairs(order[None], inverse[None], starts[None], received[None], rounds)

        return self.where.on_devices(device, (P(self.where.tokens or None),), self.plans)(chosen)

    def dispatch(
        self, plan: SortedPairs, number: Any, x: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rows and weights [parts, shards, rows, ...] sorted by expert, and the experts' bounds."""

        def device(plan: SortedPairs, number: Any, x: jax.Array, weights: jax.Array) -> Any:
            places = self._places(plan, number)
            of_rows = moved(weights.reshape(-1, 1), places.pair_of_slot, places.slot_of_pair)
            if self.groups == 1:
                values = moved(x[0, 0], places.token_of_slot, places.slots_of_token)
            else:
                of_rows = self._exchanged(of_rows)
                values = by_platform(self._padded_there, self._ragged_there, x[0, 0], places)
                values = moved(values, places.slot_of_row, places.row_of_slot)
                of_rows = moved(of_rows, places.slot_of_row, places.row_of_slot)
            return values[None, None], of_rows[None, None], places.bounds[None]

        rows, samples = self.where.rows, P(self.where.tokens or None)
        return self.where.on_devices(device, (self.plans, P(), rows, rows), (rows, rows, samples))(
            plan, jnp.int32(number), x, weights
        )

    def combine(self, plan: SortedPairs, number: Any, y: jax.Array) -> jax.Array:
        """The sum over each token's experts, [parts, shards, tokens, embed]."""

        def device(plan: SortedPairs, number: Any, y: jax.Array) -> jax.Array:
            places, y = self._places(plan, number), y[0, 0]
            if self.groups == 1:
                tokens = moved(y, places.slots_of_token, places.token_of_slot)
            else:
                y = moved(y, places.row_of_slot, places.slot_of_row)
                tokens = by_platform(self._padded_back, self._ragged_back, y, places)
            return tokens[None, None]

        rows = self.where.rows
        return self.where.on_devices(device, (self.plans, P(), rows), rows)(
            plan, jnp.int32(number), y
        )

    def _padded_there(self, x: jax.Array, places: _Places) -> jax.Array:
        return self._exchanged(moved(x, places.token_of_slot, places.slots_of_token))

    def _padded_back(self, y: jax.Array, places: _Places) -> jax.Array:
        return moved(self._exchanged(y), places.slots_of_token, places.token_of_slot)

    def _ragged_there(self, x: jax.Array, places: _Places) -> jax.Array:
        x = moved(x, places.token_of_place, places.places_of_token)
        return ragged_there(x, places.windows, self.groups * self.pair_rows)

    def _ragged_back(self, y: jax.Array, places: _Places) -> jax.Array:
        y = ragged_back(y, places.windows, self.pairs)
        return moved(y, places.places_of_token, places.token_of_place)

    def _exchanged(self, slots: jax.Array) -> jax.Array:
        """Slots [sources or destinations x rows of a pair, dim]: one side's to the other's."""
        slots = slots.reshape(self.groups, self.pair_rows, -1)
        return lax.all_to_all(slots, EXPERT, 0, 0).reshape(-1, slots.shape[-1])

    def _places(self, plan: SortedPairs, number: Any) -> _Places:
        order, inverse, starts, received = (x[0] for x in plan[:4])
        size, groups, k = self.pair_rows, self.groups, self.k
        first = number * size
        # A slot is a row for a device: its number is (device, place in the window).
        of_group = starts[:: self.own]  # [groups + 1]
        slot = jnp.arange(groups * size)
        place = of_group[slot // size] + first + slot % size
        pair = order[jnp.minimum(place, self.pairs - 1)]
        valid = place < of_group[slot // size + 1]
        group = jnp.minimum(_segment(of_group[1:], inverse), groups - 1)
        within = inverse - of_group[group] - first
        sent = (inverse < of_group[-1]) & (within >= 0) & (within < size)
        slot_of_pair = jnp.where(sent, group * size + within, _NONE)
        windows = None
        if groups == 1:
            slot_of_row = row_of_slot = slot
            bounds = starts
        else:
            windows = SentWindows(
                jnp.minimum(of_group[:-1] + first, self.pairs),
                jnp.clip(jnp.diff(of_group) - first, 0, size),
                jnp.arange(groups, dtype=jnp.int32) * size,
                jnp.clip(received[:, -1] - first, 0, size),
            )
            ends = jnp.clip(received - first, 0, size)  # [sources, own + 1], in their windows
            # Received rows are sorted by (source, expert), and are to be by (expert, source).
            sizes = jnp.diff(ends).T.reshape(-1)
            behind = jnp.cumsum(sizes)
            bounds = jnp.sum(ends, axis=0)
            segment = jnp.minimum(_segment(behind, slot), groups * self.own - 1)
            expert, source = segment // groups, segment % groups
            within = slot - (behind - sizes)[segment] + ends[source, expert]
            slot_of_row = jnp.where(slot < behind[-1], source * size + within, _NONE)
            source, within = slot // size, slot % size
            expert = jnp.sum(within[:, None] >= ends[source, 1:], axis=1)
            valid_row = expert < self.own
            expert = jnp.minimum(expert, self.own - 1)
            row = (behind - sizes)[expert * groups + source] + within - ends[source, expert]
            row_of_slot = jnp.where(valid_row, row, _NONE)
        return _Places(
            jnp.where(valid, pair // k, _NONE)[:, None],
            slot_of_pair.reshape(-1, k),
            jnp.where(valid, pair, _NONE)[:, None],
            slot_of_pair[:, None],
            slot_of_row[:, None],
            row_of_slot[:, None],
            bounds.astype(jnp.int32),
            order[:, None] // k,
            inverse.reshape(-1, k),
            windows,
        )


class SentWindows(NamedTuple):
    """What one device sends to each other one of its sorted rows, and has of each one's."""

    first: jax.Array  # [devices]: of its rows, in their order
    sent: jax.Array  # [devices]: how many rows
    slots: jax.Array  # [devices]: first slots of the rows from each device
    received: jax.Array  # [devices]: how many rows


def by_platform(padded: Any, ragged: Any, *args: Any) -> jax.Array:
    """The form of an exchange for the platform that the program is traced for.

    Not `lax.platform_dependent`, whose branch XLA:CPU may keep as a conditional: collectives in it
    are not ordered with those beside it, and simulated devices lock up (jaxlib 0.12.0.1).
    """
    return (padded if splash.generation() is None else ragged)(*args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def ragged_there(x: jax.Array, windows: SentWindows, slots: int) -> jax.Array:
    """Sorted rows to the slots of the devices that they are for; slots without a row are zero."""
    first_slots = windows.slots[lax.axis_index(EXPERT)]  # of this device's rows, on all others
    out = jnp.zeros((slots, x.shape[1]), x.dtype)
    sizes = windows.sent, jnp.full_like(windows.slots, first_slots), windows.received
    return lax.ragged_all_to_all(x, out, windows.first, *sizes, axis_name=EXPERT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def ragged_back(y: jax.Array, windows: SentWindows, pairs: int) -> jax.Array:
    """The transpose: slots back to the places of their rows; rows without a slot are zero."""
    there = lax.all_to_all(windows.first, EXPERT, 0, 0, tiled=True)  # where each device has them
    out = jnp.zeros((pairs, y.shape[1]), y.dtype)
    sizes = windows.received, there, windows.sent
    return lax.ragged_all_to_all(y, out, windows.slots, *sizes, axis_name=EXPERT)


ragged_there.defvjp(
    lambda x, windows, slots: (ragged_there(x, windows, slots), (windows, x.shape[0])),
    lambda slots, saved, ct: (ragged_back(ct, *saved), None),
)
ragged_back.defvjp(
    lambda y, windows, pairs: (ragged_back(y, windows, pairs), (windows, y.shape[0])),
    lambda pairs, saved, ct: (ragged_there(ct, *saved), None),
)

_NONE = jnp.iinfo(jnp.int32).max  # out of range of everything


def _segment(ends: jax.Array, places: jax.Array) -> jax.Array:
    """The segment of each place, of segments that end before `ends`; their number behind all."""
    return jnp.searchsorted(ends, places, side="right", method="compare_all")


class _Places(NamedTuple):
    """The places of one device's rows in one round, as the indices that `moved` takes."""

    token_of_slot: jax.Array
    slots_of_token: jax.Array
    pair_of_slot: jax.Array
    slot_of_pair: jax.Array
    slot_of_row: jax.Array  # of received rows, sorted by expert
    row_of_slot: jax.Array
    bounds: jax.Array  # first rows of the experts, and the end
    token_of_place: jax.Array  # of the device's sorted pairs
    places_of_token: jax.Array
    windows: SentWindows | None
