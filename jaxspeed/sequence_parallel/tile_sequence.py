"""What is per token, in tiles of the sequence: the memory of a long sequence's widest activations.

Between the operations that mix tokens, such as attention, a unit and the head are functions of one
token: norms, projections, a feed-forward block, the logits and their loss. Their results inside are
wider than what enters and leaves. Each such *group* of equations becomes a loop over tiles of the
sequence, whose backward pass is another one that computes a tile again (arXiv:2506.13996). A loop
reads its tiles from the arrays, and writes results and gradients where an array of the same type is
not read any more. Gradients of weights are summed in fp32, and over devices after the loop
(`sharded_gradients`). Weights are inputs of the loop: a unit under ZeRO 3 has gathered them before
it, once.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxspeed.axes import SEQ, TENSOR
from jaxspeed.jaxpr.flops import nbytes
from jaxspeed.jaxpr.primitives import PLAIN_CALLS, RAGGED_PRODUCTS
from jaxspeed.jaxpr.rewriter import LEAVE, Rewriter, Rewriting
from jaxspeed.jaxpr.slicing import free_variables
from jaxspeed.jaxpr.traverse import (
    Body,
    Jaxpr,
    JaxprEqn,
    Var,
    is_real,
    is_var,
    like,
    product_of,
    shape_of,
)
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.placement.specs import spec_axes
from jaxspeed.sequence_parallel.settings import SequenceTiles
from jaxspeed.sequence_parallel.sharded_gradients import (
    ShardedProduct,
    TokenShards,
    sharded_products,
)
from jaxspeed.sequence_parallel.token_dim import Along, MixesTokensError, Tokens
from jaxspeed.tensor_parallel.dim_propagation import CallFrame, PropagatedDims, propagate_dims

# By default, sequences of more tokens per device are divided where the results of products inside a
# group have more than `MOST` bytes there, into tiles in which they have at most `TILE`.
SHORT = 8192
MOST = 2**29
TILE = 2**28


@dataclass(frozen=True)
class TokenGroup:
    """Equations of a program that become a loop: by their positions, in order.

    Attributes:
      arrays: (input with tokens, its dim of them); `shared` are the inputs without.
      results: the same of what later equations read.
      tiles: their number on each device.
      products: by position, those whose weights' gradients are summed by shard.
    """

    positions: tuple[int, ...]
    shared: tuple[Var, ...]
    arrays: tuple[tuple[Var, int], ...]
    results: tuple[tuple[Var, int], ...]
    tiles: int
    products: Mapping[int, ShardedProduct]


def in_sequence_tiles(
    jaxpr: Jaxpr,
    parameters: Mapping[str, Var],
    batch: Sequence[Var],
    specs: Mapping[str, PartitionSpec],
    mesh: Mesh,
    unit_of: Callable[[JaxprEqn], Any],
    tiles: SequenceTiles,
) -> Jaxpr:
    """A traced program with its groups in tiles.

    `parameters`, `batch`, `specs` and `unit_of` are as in `with_boundary_constraints`.
    """
    shards = free_axes(mesh).get(SEQ, 1)
    longest = max((n for v in batch for n in shape_of(v)[1:]), default=0)
    if tiles.number == 1 or (tiles.number == "auto" and longest // shards <= SHORT):
        return jaxpr
    propagated = propagate_dims(jaxpr, parameters, batch)
    sharded = {
        propagated.classes.of(node): mesh.shape[TENSOR]
        for path, spec in specs.items()
        if path in propagated.parameters
        for entry, node in zip(spec, propagated.parameters[path])
        if node is not None and TENSOR in spec_axes((entry,))
    }
    tokens = _dim_of_tokens(propagated)
    if tokens is None or tokens.size % shards:
        return jaxpr
    tiling = _Tiling(propagated, tokens, unit_of, tiles, TokenShards(mesh), sharded)
    return tiling.run(jaxpr, scope=propagated.top)


def _dim_of_tokens(propagated: PropagatedDims) -> Tokens | None:
    """The dim of tokens: the one, besides that of samples, with most bytes of products."""
    classes, product_bytes = propagated.classes, dict[Any, int]()
    sizes: dict[Any, int] = {}
    for frame, _, eqn in propagated.top.equations():
        activations = [v for v in eqn.invars if not frame.is_weight(v)]
        if product_of(eqn) is None or len(activations) != 1:
            continue
        among = {classes.of(node) for node in frame.of(activations[0]) if node is not None}
        for node, size in zip(frame.of(eqn.outvars[0]), shape_of(eqn.outvars[0])):
            if node is not None and not propagated.is_sample(node):
                which = classes.of(node)
                if which in among:
                    bytes_there = frame.times * nbytes(eqn.outvars[0].aval)
                    product_bytes[which] = product_bytes.get(which, 0) + bytes_there
                    sizes[which] = min(sizes.get(which, size), size)
    if not product_bytes:
        return None
    most = max(product_bytes, key=lambda which: product_bytes[which])
    return Tokens(classes, most, sizes[most])


class _Tiling(Rewriter[None]):
    """Write groups as loops; the scope of a program is its frame."""

    enters = (*PLAIN_CALLS, "scan", "cond")

    def __init__(
        self,
        propagated: PropagatedDims,
        tokens: Tokens,
        unit_of: Callable[[JaxprEqn], Any],
        tiles: SequenceTiles,
        placed: TokenShards,
        sharded: Mapping[Any, int],
    ) -> None:
        super().__init__()
        self.propagated, self.tokens, self.unit_of, self.tiles = propagated, tokens, unit_of, tiles
        self.placed, self.sharded = placed, sharded
        self.sample_shards, self.shards = placed.shape

    def scope(self, program: Rewriting[None], body: Body) -> Any:
        frames = program.scope.inner.get(program.position, ())
        return next((frame for frame in frames if frame.jaxpr is body.jaxpr), LEAVE)

    def write(
        self, jaxpr: Jaxpr, states: Any = None, dtypes: Any = None, scope: Any = None
    ) -> Rewriting[None]:
        initial_states = [None] * len(jaxpr.invars) if states is None else states
        program: Rewriting[None] = Rewriting(self, jaxpr, initial_states, dtypes, scope)
        runs = itertools.groupby(range(len(jaxpr.eqns)), lambda i: self.unit_of(jaxpr.eqns[i]))
        for _, positions in runs:
            for step in self._steps(scope, list(positions)):
                if isinstance(step, int):
                    program.write(step)
                else:
                    self._write_group(program, step)
        return program

    def _write_group(self, program: Rewriting[None], group: TokenGroup) -> None:
        frame: CallFrame = program.scope
        values: list[Any] = [*group.shared, *(v for v, _ in group.arrays)]
        # The equation that it stands for in the unit, and in messages.
        like = program.jaxpr.eqns[group.positions[-1]]
        loop = over_tiles(self.tokens, frame, group, self.placed)
        results = program.splice(loop, [program.atom(v) for v in values], like)
        program.replace([v for v, _ in group.results], results)
        program.done.update(group.positions)

    def _steps(self, frame: CallFrame, positions: list[int]) -> list[int | TokenGroup]:
        """The equations of a run, those of groups that become loops together and in their place.

        The level of an equation is the largest number of equations before it that mix tokens, each
        computed from the one before.
        """
        eqns = frame.jaxpr.eqns
        kinds = {i: self._kind(frame, i) for i in positions}
        if Along.TOKEN not in kinds.values():
            return [*positions]
        maker = {v: i for i in positions for v in eqns[i].outvars}
        level: dict[int, int] = {}  # of the results of each
        first: list[int] = []
        levels: dict[int, tuple[list[int], list[int]]] = {}  # of tokens, and those that mix
        for i in positions:
            before = [maker[v] for v in eqns[i].invars if is_var(v) and v in maker]
            base = max((level[j] for j in before), default=0)
            free = kinds[i] is not Along.TOKEN and set(before) <= set(first)
            if free:
                first.append(i)
                level[i] = 0
            else:
                token = kinds[i] is Along.TOKEN
                level[i] = base + (not token)
                levels.setdefault(base, ([], []))[not token].append(i)
        steps: list[int | TokenGroup] = [*first]
        fills = {i for i in first if kinds[i] is Along.FILL}
        for number in sorted(levels):
            per_token, mixing = levels[number]
            group, rest = self._group(frame, per_token, fills)
            steps += [group, *rest] if group else per_token
            steps += mixing
        return steps if any(isinstance(step, TokenGroup) for step in steps) else [*positions]

    def _kind(self, frame: CallFrame, position: int) -> Along:
        eqn = frame.jaxpr.eqns[position]
        if eqn.primitive.name == "name" and eqn.params["name"] in self.tiles.kept:
            return Along.MIXES
        return self.tokens.kind(frame, position)

    def _group(
        self, frame: CallFrame, per_token: list[int], fills: set[int]
    ) -> tuple[TokenGroup | None, list[int]]:
        """The loop of equations that are per token, if it pays, and those that follow it."""
        eqns = frame.jaxpr.eqns
        readers: dict[Var, set[int]] = {}
        for i, eqn in enumerate(eqns):
            for v in eqn.invars:
                if is_var(v):
                    readers.setdefault(v, set()).add(i)
        ends = {v for v in frame.jaxpr.outvars if is_var(v)}
        inside, rest = list(per_token), list[int]()
        for i in reversed(per_token):  # names of results stay outside, for residual policies
            (out, *_) = eqns[i].outvars
            named = eqns[i].primitive.name == "name" and is_var(eqns[i].invars[0])
            if named and not readers.get(out, set()) & set(inside):
                inside.remove(i)
                rest.insert(0, i)
        read = {v for i in inside for v in eqns[i].invars if is_var(v)}
        again = [i for i in sorted(fills) if eqns[i].outvars[0] in read]
        positions = (*again, *inside)
        results = [
            v
            for i in inside
            for v in eqns[i].outvars
            if v in ends or readers.get(v, set()) - set(inside)
        ]
        tiles = self._number(frame, inside, results)
        if tiles <= 1:
            return None, []
        free = free_variables([eqns[i] for i in positions])
        dims = {v: self.tokens.dims(frame, v) for v in (*free, *results)}
        if any(len(dims[v]) > 1 for v in free) or not all(len(dims[v]) == 1 for v in results):
            return None, []
        group = TokenGroup(
            positions,
            tuple(v for v in free if not dims[v]),
            tuple((v, dims[v][0]) for v in free if dims[v]),
            tuple((v, dims[v][0]) for v in results),
            tiles,
            self._products(frame, positions, [v for v in free if not dims[v]], results),
        )
        return (group, rest) if self._is_differentiable(frame, group) else (None, [])

    def _products(
        self,
        frame: CallFrame,
        positions: Sequence[int],
        shared: Sequence[Var],
        results: Sequence[Var],
    ) -> dict[int, ShardedProduct]:
        if self.placed.shape == (1, 1):
            return {}

        def dims_of(v: Var) -> tuple[int, int] | None:
            nodes = frame.of(v)
            samples = [d for d, node in enumerate(nodes) if self.propagated.is_sample(node)]
            along = self.tokens.dims(frame, v)
            once = len(samples) == len(along) == 1 and samples[0] != along[0]
            if not once or shape_of(v)[samples[0]] % self.sample_shards:
                return None
            return samples[0], along[0]

        weights = [
            v for v in shared if is_real(v) and not any(map(self.propagated.is_sample, frame.of(v)))
        ]
        return sharded_products(frame.jaxpr, positions, weights, results, dims_of)

    def _number(self, frame: CallFrame, inside: list[int], results: Sequence[Var]) -> int:
        """The number of tiles; 1 where nothing inside is as large as what enters and leaves."""
        size = sum(self._bytes(frame, i, {*results}) for i in inside)
        local = self.tokens.size // self.shards
        if size == 0:
            return 1
        if self.tiles.number != "auto":
            return min(self.tiles.number, local)
        size //= self.shards * self.sample_shards
        if local <= SHORT or size <= MOST:
            return 1
        wanted = -(-size // TILE)
        even = (n for n in range(wanted, 2 * wanted) if local % n == 0)
        return next(even, wanted)

    def _bytes(self, frame: CallFrame, position: int, results: set[Var]) -> int:
        """Bytes of the results of products in an equation, without those that leave the group."""
        eqn = frame.jaxpr.eqns[position]
        inner = frame.inner.get(position, ())
        size = sum(
            self._bytes(inner_frame, i, set())
            for inner_frame in inner
            for i in range(len(inner_frame.jaxpr.eqns))
        )
        if product_of(eqn) is not None or eqn.primitive.name in RAGGED_PRODUCTS:
            for v in eqn.outvars:
                if v not in results and self.tokens.dims(frame, v):
                    classes = self.tokens.classes
                    over = {classes.of(node) for node in frame.of(v) if node is not None}
                    size += nbytes(v.aval) // math.prod(self.sharded.get(c, 1) for c in over)
        return size

    def _is_differentiable(self, frame: CallFrame, group: TokenGroup) -> bool:
        """Whether it can be evaluated in tiles, with the derivatives of the functions in it."""
        values: list[Any] = [*group.shared, *(v for v, _ in group.arrays)]
        shapes = like(values)
        loop = over_tiles(self.tokens, frame, group, self.placed)

        def both(*args: Any) -> Any:
            real = [i for i, x in enumerate(args) if is_real(x)]

            def of_real(*moving: Any) -> list[Any]:
                operands = list(args)
                for i, x in zip(real, moving, strict=True):
                    operands[i] = x
                outs = loop(*operands)
                return [x for x in outs if is_real(x)]

            outs, pullback = jax.vjp(of_real, *(args[i] for i in real))
            return pullback(outs)

        try:
            jax.eval_shape(both, *shapes)
        except MixesTokensError:
            return False
        return True


def over_tiles(
    tokens: Tokens, frame: CallFrame, group: TokenGroup, placed: TokenShards
) -> Callable[..., list[jax.Array]]:
    """A group as a function of its inputs: the shared ones, then the arrays."""
    shared_count = len(group.shared)
    names = [*group.shared, *(v for v, _ in group.arrays)]
    dims = [dim for _, dim in group.arrays]
    out_avals: list[tuple[Any, Any]] = [(v.aval, dim) for v, dim in group.results]
    tiling = TiledLoop(tokens.size, placed.shape[1], group.tiles)
    local = {product.weight for product in group.products.values()}

    def of_tile(
        count: int, shared: Sequence[Any], tile: Sequence[Any], sums: Mapping[Var, Any]
    ) -> list[Any]:
        """The results for a tile; `sums` has those of weights whose gradients are by shard."""
        env = dict(zip(names, [*shared, *tile], strict=True))
        for position in group.positions:
            product = group.products.get(position)
            if product is None or product.weight not in sums:
                tokens.evaluate(frame, [position], env, count)
            else:
                (result,) = frame.jaxpr.eqns[position].outvars
                operands = env[product.operand], env[product.weight], sums[product.weight]
                env[result] = product.apply(placed, *operands)
        return [env[v] for v, _ in group.results]

    def run(*args: Any) -> list[Any]:
        shared = args[:shared_count]
        results, _ = tiling.run(
            lambda count, tile: (of_tile(count, shared, tile, {}), []),
            args[shared_count:],
            dims,
            out_avals,
        )
        return results

    @jax.custom_vjp
    def loop(*args: Any) -> list[Any]:
        return run(*args)

    def forward(*inputs: Any) -> tuple[list[Any], Any]:
        args = [x.value for x in inputs]
        real = [i for i, x in enumerate(inputs) if x.perturbed and is_real(x.value)]
        return run(*args), (_Inputs(tuple(real)), args)

    def backward(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        real, args = saved[0].numbers, saved[1]
        arrived = [
            i
            for i, ct in enumerate(cotangents)
            if not isinstance(ct, jax.custom_derivatives.SymbolicZero)
            and jnp.issubdtype(out_avals[i][0].dtype, jnp.inexact)
        ]
        grads: list[Any] = [None] * len(args)
        if not arrived or not real:
            return tuple(grads)
        sums = [i for i in real if i < shared_count]
        moved = [i for i in real if i >= shared_count]
        shared = args[:shared_count]

        def of_cotangents(count: int, tile: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            cts, xs = tile[: len(arrived)], tile[len(arrived) :]

            def of_real(*moving: Any) -> list[Any]:
                both, of_shards = [*shared, *xs], {}
                for i, x in zip(real, moving, strict=True):
                    if names[i] in local:
                        of_shards[names[i]] = x
                    else:
                        both[i] = x
                outs = of_tile(count, both[:shared_count], both[shared_count:], of_shards)
                return [outs[i] for i in arrived]

            def primal(i: int) -> jax.Array:
                x = [*shared, *xs][i]
                return jnp.zeros((*placed.shape, *x.shape), x.dtype) if names[i] in local else x

            _, pullback = jax.vjp(of_real, *map(primal, real))
            grads_of_tile = dict(zip(real, pullback(list(cts)), strict=True))
            return [grads_of_tile[i] for i in moved], [grads_of_tile[i] for i in sums]

        tile_grads, total = tiling.run(
            of_cotangents,
            [*(cotangents[i] for i in arrived), *args[shared_count:]],
            [*(out_avals[i][1] for i in arrived), *dims],
            [(args[i], dims[i - shared_count]) for i in moved],
            [placed.zeros(args[i]) if names[i] in local else args[i] for i in sums],
        )
        for i, g in zip([*moved, *sums], [*tile_grads, *total], strict=True):
            grads[i] = placed.reduced(g) if names[i] in local else g
        return tuple(grads)

    loop.defvjp(forward, backward, symbolic_zeros=True)
    return loop


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Inputs:
    """The numbers of the inputs that have gradients: a tree without leaves."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class TiledLoop:
    """A loop over tiles of `size` tokens, which are sharded contiguously into `shards`."""

    size: int
    shards: int
    tiles: int

    def run(
        self,
        body: Callable[[int, list[jax.Array]], tuple[list[jax.Array], list[jax.Array]]],
        arrays: Sequence[jax.Array],
        dims: Sequence[int],
        results: Sequence[tuple[Any, int]],
        sums: Sequence[Any] = (),
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """`body(number of tokens, tiles of the arrays) -> (tiles of the results, terms of sums)`.

        `results` and `sums` are of the shapes and dtypes that are returned. A result is written
        over the first array of its type, tile by tile, which the compiler copies if it is needed.
        """
        local = self.size // self.shards
        tile_size = -(-local // self.tiles)
        homes: list[int | None] = []
        for aval, dim in results:
            same = (
                i
                for i, x in enumerate(arrays)
                if i not in homes and (x.shape, x.dtype, dims[i]) == (aval.shape, aval.dtype, dim)
            )
            homes.append(next(same, None))
        buffers = [
            jnp.zeros(aval.shape, aval.dtype) if i is None else arrays[i]
            for i, (aval, _) in zip(homes, results, strict=True)
        ]
        totals = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in sums]

        def step(carry: Any, start: Any, count: int) -> Any:
            buffers, totals = carry
            now = dict(zip(homes, buffers, strict=True))
            tile = [
                self._read(now.get(i, x), dim, start, count)
                for i, (x, dim) in enumerate(zip(arrays, dims, strict=True))
            ]
            tile_results, terms = body(count * self.shards, tile)
            buffers = [
                self._put(into, x, dim, start, count)
                for into, x, (_, dim) in zip(buffers, tile_results, results, strict=True)
            ]
            totals = [a + x.astype(a.dtype) for a, x in zip(totals, terms, strict=True)]
            return buffers, totals

        full, rest = divmod(local, tile_size)
        starts = jnp.arange(full, dtype=jnp.int32) * tile_size
        carry, _ = lax.scan(
            lambda c, start: (step(c, start, tile_size), None), (buffers, totals), starts
        )
        if rest:
            carry = step(carry, jnp.int32(full * tile_size), rest)
        buffers, totals = carry
        return buffers, [x.astype(like.dtype) for x, like in zip(totals, sums, strict=True)]

    def _read(self, x: jax.Array, dim: int, start: Any, count: int) -> jax.Array:
        """A tile of every shard."""
        x, rows = self._by_shard(x, dim), x.shape[dim] // self.size
        x = lax.dynamic_slice_in_dim(x, start * rows, count * rows, dim + (self.shards > 1))
        return self._merged(x, dim)

    def _put(self, into: jax.Array, x: jax.Array, dim: int, start: Any, count: int) -> jax.Array:
        rows = into.shape[dim] // self.size
        place = dim + (self.shards > 1)
        into, x = self._by_shard(into, dim), self._by_shard(x, dim)
        return self._merged(lax.dynamic_update_slice_in_dim(into, x, start * rows, place), dim)

    def _by_shard(self, x: jax.Array, dim: int) -> jax.Array:
        if self.shards == 1:
            return x
        return x.reshape(*x.shape[:dim], self.shards, -1, *x.shape[dim + 1 :])

    def _merged(self, x: jax.Array, dim: int) -> jax.Array:
        return x if self.shards == 1 else x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
