"""Layers shared by the families: parameters with logical axis names, norms, the scan over blocks.

Every parameter carries its logical axis names in Flax metadata, `logical_axes`, one name per dim:
`layers, vocab, embed, heads, kv_heads, head_dim, mlp, experts, router, q_rank, kv_rank, pos, patch,
classes`. Flax's own key for
this, `out_sharding`, does not work: `nnx.eval_shape` under a mesh takes its values for mesh axes
(flax 0.12.12), and these names are mapped to a mesh by the placement. Parameters have
JAX's default float dtype, or the one that they are cast to, and layers compute in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax import lax

from jaxspeed import ops

zeros = nnx.initializers.zeros_init()
ones = nnx.initializers.ones_init()


def normal(std: float) -> Initializer:
    return nnx.initializers.normal(std)


def check_heads(hidden_size: int, heads: int, kv_heads: int | None = None) -> None:
    """Raise ValueError for numbers of heads that do not divide the sizes that they split."""
    if min(hidden_size, heads, 1 if kv_heads is None else kv_heads) < 1:
        raise ValueError(
            f"hidden_size {hidden_size}, num_attention_heads {heads} and num_key_value_heads "
            f"{kv_heads} must be positive"
        )
    if hidden_size % heads:
        raise ValueError(f"num_attention_heads {heads} does not divide hidden_size {hidden_size}")
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        )


def truncated_normal(std: float) -> Initializer:
    """Normal, truncated at two standard deviations."""
    return nnx.initializers.truncated_normal(std)


def param(
    rngs: nnx.Rngs,
    init: Initializer,
    dims: dict[str, int] | tuple[tuple[str, int], ...],
    **metadata: Any,
) -> nnx.Param:
    """A parameter with dims of (logical axis name, size), in order."""
    named = tuple(dims.items()) if isinstance(dims, dict) else dims
    shape = tuple(size for _, size in named)
    names = tuple(name for name, _ in named)
    return nnx.Param(init(rngs.params(), shape), logical_axes=names, **metadata)


class Linear(nnx.Module):
    """y = x W + b over the last dims of x, which may be several, such as (heads, head_dim)."""

    def __init__(
        self,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        init: Initializer,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        # Pairs, not a dict: a square layer has the same name on both sides.
        self.kernel = param(rngs, init, (*inputs.items(), *outputs.items()))
        self.bias = param(rngs, zeros, outputs) if bias else None
        self.contracted = len(inputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        n = self.contracted
        over = (tuple(range(x.ndim - n, x.ndim)), tuple(range(n)))
        y = lax.dot_general(x, kernel, (over, ((), ())))
        y = y if self.bias is None else y + self.bias[...]
        return y.astype(x.dtype)  # an fp32 kernel does not promote later activations


class Embedding(nnx.Module):
    """An embedding table, also used as the head when tied."""

    def __init__(
        self, rows: int, size: int, *, axis: str = "vocab", init: Initializer, rngs: nnx.Rngs
    ):
        self.table = param(rngs, init, {axis: rows, "embed": size})

    def __call__(self, ids: jax.Array) -> jax.Array:
        return ops.embed(self.table[...], ids)


class LayerNorm(nnx.Module):
    """LayerNorm over the last of dims, such as {"embed": size}."""

    def __init__(self, dims: dict[str, int], *, eps: float, bias: bool = True, rngs: nnx.Rngs):
        self.scale = param(rngs, ones, dims)
        self.bias = param(rngs, zeros, dims) if bias else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        return ops.layer_norm(x, self.scale[...], bias, eps=self.eps)


class RMSNorm(nnx.Module):
    """RMSNorm over dims, such as {"embed": size}.

    With an `offset` the scale is stored without it, as 0 instead of 1.
    """

    def __init__(self, dims: dict[str, int], *, eps: float, offset: float = 0.0, rngs: nnx.Rngs):
        self.scale = param(rngs, zeros if offset else ones, dims)
        self.eps = eps
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        if self.offset:  # in fp32: 1 + scale has few digits of a 16-bit scale
            scale = self.offset + scale.astype(jnp.promote_types(scale.dtype, jnp.float32))
        return ops.rms_norm(x, scale, eps=self.eps)


def dropout(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """Dropout, with a stream of random numbers only if rate > 0."""
    return nnx.Dropout(rate, rngs=rngs if rate else None)


def stacked[Block: nnx.Module](
    make: Callable[[nnx.Rngs], Block], length: int, rngs: nnx.Rngs
) -> Block:
    """`length` blocks stacked: each variable, random streams too, gets a first dim `layers`."""

    new_dim = {nnx.PARTITION_NAME: "layers", "logical_axes": "layers"}

    @nnx.split_rngs(splits=length)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=new_dim)
    def create(rngs: nnx.Rngs) -> Block:
        return make(rngs)

    return create(rngs)


@dataclass(frozen=True)
class LayerCache:
    """A layer's part of a stacked cache, which is written in place."""

    stack: jax.Array
    layer: jax.Array  # its number

    def read(self) -> jax.Array:
        return lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)

    def write(self, value: jax.Array) -> LayerCache:
        stack = lax.dynamic_update_index_in_dim(self.stack, value, self.layer, 0)
        # What is read next depends on the write; otherwise XLA:CPU copies the stack to read it.
        return LayerCache(lax.optimization_barrier(stack), self.layer)

    def write_slots(self, new: jax.Array, slots: jax.Array) -> LayerCache:
        """Write new[i] in slot slots[i] of each row i of a stack [layers, rows, heads, slots, ...].

        Rows are a batch of the scatter: each device has its own.
        """
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2),
            inserted_window_dims=(0, 3),
            scatter_dims_to_operand_dims=(0, 3),
            operand_batching_dims=(1,),
            scatter_indices_batching_dims=(0,),
        )
        at = jnp.stack([jnp.full_like(slots, self.layer), slots], axis=-1)
        stack = lax.scatter(self.stack, at, new.astype(self.stack.dtype), numbers, mode="drop")
        return LayerCache(lax.optimization_barrier(stack), self.layer)


def scan_blocks[Carry](
    blocks: nnx.Module,
    x: Carry,
    *args: object,
    each: tuple[Any, ...] = (),
    unroll: int | bool = 1,
) -> Carry:
    """Apply every block of a stack in order: `x = block(x, *args)`.

    Arrays in `each` have a first dim of layers; a block gets its own as its last arguments.

    `lax.scan` compiles one block, whatever their number; `unroll` is the number of blocks per
    iteration, or True for all. Parameters are only read; other changed variables, such as dropout's
    counters, are written back. A block has its part of an `nnx.Cache` as a `LayerCache`: the stacks
    are carried, because stacked outputs would be a second copy of them.
    """
    graphdef, *states = nnx.split(blocks, nnx.Param, nnx.Cache, ...)
    params, caches, rest = states
    stacks = jax.tree.leaves(caches)
    numbers = jnp.arange(len(stacks[0])) if stacks else None

    def body(carry: tuple[Carry, nnx.State], layer: tuple[Any, ...]):
        x, caches = carry
        number, params, rest, own = layer
        before = {path: v.get_value() for path, v in nnx.to_flat_state(rest)}
        here = jax.tree.map(lambda stack: LayerCache(stack, number), caches)
        block = nnx.merge(graphdef, params, here, rest)
        y = block(x, *args, *own)
        _, *states = nnx.split(block, nnx.Param, nnx.Cache, ...)
        _, written, after = states
        caches = jax.tree.map(lambda cache: cache.stack, written)
        flat = nnx.to_flat_state(after)
        changed = [(path, v) for path, v in flat if v.get_value() is not before.get(path)]
        return (y, caches), nnx.from_flat_state(changed)

    layers = (numbers, params, rest, each)
    (x, caches), changed = lax.scan(body, (x, caches), layers, unroll=unroll)
    for written in (caches, changed):
        if written:
            nnx.update(blocks, written)
    return x
