"""Transformer blocks by where their norms are, and the attention and feed-forward in them.

A block is composed of modules, which create their parameters in the order of its arguments. It is
called as `block(x, rotations, segment_ids, positions, second)`: the rest of the arguments goes to
its attention. Layers may be of two kinds, which differ in their rotation and window: `second` is
whether this layer is of the second one. After it there may be a factor of the layer's queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxspeed import ops

from .cached_attention import CachedAttention
from .layers import Linear, param


@dataclass(frozen=True)
class Projections:
    """Sizes, initializers and biases of attention's four linear layers."""

    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    init: Initializer
    out_init: Initializer | None = None  # of the output's; None: init
    bias: bool = False  # of queries, keys and values
    out_bias: bool = False


class WithImages(NamedTuple):
    """Segments of tokens, and the number of each token's image, or -1: [batch, seq].

    Tokens of an image see all of it, also those after them.
    """

    segment_ids: jax.Array | None
    images: jax.Array

    def bias(self, window: int | None, heads: int) -> jax.Array:
        """[batch, heads, seq, seq], 0 where a query sees a key of those before or of its image."""
        numbers, images = jnp.arange(self.images.shape[1]), self.images
        distance = numbers[:, None] - numbers
        same = (images[:, :, None] == images[:, None]) & (images >= 0)[:, None]
        seen = (distance >= 0) | same
        if window is not None:
            seen &= distance < window
        if self.segment_ids is not None:
            seen &= self.segment_ids[:, :, None] == self.segment_ids[:, None]
        bias = jnp.where(seen, 0.0, jnp.finfo(jnp.float32).min)[:, None]
        return jnp.broadcast_to(bias, (len(images), heads, *seen.shape[1:]))


def of_kinds[Value](second: Sequence[bool], first: Value, other: Value) -> tuple[Value, Value]:
    """The values of both kinds of layers: that of the only one where all are of one kind."""
    return (first if False in second else other, other if True in second else first)


class Attention(CachedAttention):
    """Attention with grouped heads.

    Args:
      causal: whether a token sees only those before it.
      qk_norm: makes the norm of queries, and that of keys, of the sizes of their dims.
      rotate: rotates queries and keys, where a call gets rotations.
      query_scale: of rotated queries, by their positions.
      windows: of all layers, or of each of the two kinds of layers; None: all tokens before.
      scale: of the scores; 1 / sqrt(head_dim) by default.
      cap: bound of the scores.
      sinks: whether each head has a score that no key has.
    """

    def __init__(
        self,
        projections: Projections,
        *,
        qk_norm: Callable[[dict[str, int]], nnx.Module] | None = None,
        rotate: Callable[[jax.Array, ops.Rotation], jax.Array] = ops.rotate,
        query_scale: Callable[[jax.Array], jax.Array] | None = None,
        windows: Sequence[int | None] = (None,),
        scale: float | None = None,
        cap: float | None = None,
        sinks: bool = False,
        causal: bool = True,
        rngs: nnx.Rngs,
    ):
        p = projections
        embed = {"embed": p.embed}
        heads = {"heads": p.heads, "head_dim": p.head_dim}
        kv_heads = {"kv_heads": p.kv_heads, "head_dim": p.head_dim}
        self.q_proj = Linear(embed, heads, init=p.init, bias=p.bias, rngs=rngs)
        self.k_proj = Linear(embed, kv_heads, init=p.init, bias=p.bias, rngs=rngs)
        self.v_proj = Linear(embed, kv_heads, init=p.init, bias=p.bias, rngs=rngs)
        self.o_proj = Linear(heads, embed, init=p.out_init or p.init, bias=p.out_bias, rngs=rngs)
        self.q_norm = qk_norm(heads) if qk_norm else None
        self.k_norm = qk_norm(kv_heads) if qk_norm else None
        self.sinks = param(rngs, p.init, {"heads": p.heads}) if sinks else None
        self.rotate = rotate
        self.query_scale = query_scale
        self.windows = tuple(windows)
        self.scale, self.cap, self.causal = scale, cap, causal

    def __call__(
        self,
        x: jax.Array,
        rotations: Sequence[ops.Rotation] = (),
        segment_ids: jax.Array | WithImages | None = None,
        positions: jax.Array | None = None,
        second: jax.Array | bool = False,
        query_factor: jax.Array | None = None,
    ) -> jax.Array:
        q, k = self.q_proj(x), self.k_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if query_factor is not None:
            q = (q.astype(jnp.promote_types(q.dtype, jnp.float32)) * query_factor).astype(q.dtype)
        if rotations:
            by = rotations[0]
            if len(rotations) > 1:
                by = jax.tree.map(lambda a, b: jnp.where(second, b, a), *rotations)
            q = self.rotate(q, by)
            if self.query_scale is not None:
                read = jnp.arange(q.shape[1]) if positions is None else positions
                q = q * self.query_scale(read)[..., None, None].astype(q.dtype)
            q = checkpoint_name(q, "query")
            k = checkpoint_name(self.rotate(k, by), "key")
        else:
            q, k = checkpoint_name(q, "query"), checkpoint_name(k, "key")
        v = checkpoint_name(self.v_proj(x), "value")  # [batch, seq, kv_heads, head_dim]
        return self.o_proj(self.attend(q, k, v, segment_ids, positions, second))

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | WithImages | None,
        positions: jax.Array | None,
        second: jax.Array | bool,
    ) -> jax.Array:
        """Attention with the layer's window: kernels know it when they are traced."""
        form: dict[str, Any] = {"scale": self.scale, "soft_cap": self.cap}
        if self.sinks is not None:
            form["sinks"] = self.sinks[...]
        if self.key_cache is not None:
            reach: Any = self.windows[0]
            if len(self.windows) > 1:
                everything = jnp.iinfo(jnp.int32).max
                reach = jnp.where(
                    second, *(everything if w is None else w for w in reversed(self.windows))
                )
            cached = self.attend_cached(q, k, v, positions, reach, **form)
            if cached is not None:
                return cached

        def within(window: int | None):
            if isinstance(segment_ids, WithImages):  # no kernel has such a mask
                heads = q.shape[2]
                return lambda q, k, v: ops.attention(
                    q, k, v, causal=False, bias=segment_ids.bias(window, heads), **form
                )
            return lambda q, k, v: ops.attention(
                q, k, v, causal=self.causal, window=window, segment_ids=segment_ids, **form
            )

        if len(self.windows) == 1:
            return within(self.windows[0])(q, k, v)
        first, other = (w if w is not None and w < q.shape[1] else None for w in self.windows)
        if first == other:
            return within(first)(q, k, v)
        return lax.cond(second, within(other), within(first), q, k, v)


@ops.saves_inputs
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


@ops.saves_inputs
def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """With gelu in its tanh form."""
    return jax.nn.gelu(gate, approximate=True) * up


@ops.saves_inputs
def gelu(x: jax.Array) -> jax.Array:
    """In its tanh form."""
    return jax.nn.gelu(x, approximate=True)


@ops.saves_inputs
def exact_gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


@ops.saves_inputs
def quick_gelu(x: jax.Array) -> jax.Array:
    """The approximation by a sigmoid (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return x * jax.nn.sigmoid(1.702 * x)


@ops.saves_inputs
def relu2(x: jax.Array) -> jax.Array:
    """The square of relu (So et al., arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


# By the names of published configs.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_new": gelu,
    "gelu_pytorch_tanh": gelu,
    "gelu": exact_gelu,
    "quick_gelu": quick_gelu,
    "relu": ops.saves_inputs(jax.nn.relu),
    "silu": ops.saves_inputs(jax.nn.silu),
    "tanh": ops.saves_inputs(jnp.tanh),
}


class FeedForward(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(
        self,
        embed: int,
        mlp: int,
        activation: Callable[[jax.Array], jax.Array],
        *,
        init: Initializer,
        out_init: Initializer | None = None,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        outer, inner = {"embed": embed}, {"mlp": mlp}
        self.up = Linear(outer, inner, init=init, bias=bias, rngs=rngs)
        self.down = Linear(inner, outer, init=out_init or init, bias=bias, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        up = checkpoint_name(self.up(x), "mlp_up")
        return self.down(checkpoint_name(self.activation(up), "mlp_hidden"))


class GatedFeedForward(nnx.Module):
    """down(activation(gate(x), up(x))) (Shazeer, arXiv:2002.05202)."""

    def __init__(
        self,
        embed: int,
        mlp: int,
        activation: Callable[[jax.Array, jax.Array], jax.Array],
        *,
        init: Initializer,
        out_init: Initializer | None = None,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        outer, inner = {"embed": embed}, {"mlp": mlp}
        self.gate = Linear(outer, inner, init=init, bias=bias, rngs=rngs)
        self.up = Linear(outer, inner, init=init, bias=bias, rngs=rngs)
        self.down = Linear(inner, outer, init=out_init or init, bias=bias, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = checkpoint_name(self.gate(x), "mlp_gate"), checkpoint_name(self.up(x), "mlp_up")
        return self.down(checkpoint_name(self.activation(gate, up), "mlp_hidden"))


class Scaled(nnx.Module):
    """A module's output times a constant, in fp32."""

    def __init__(self, module: nnx.Module, factor: float):
        self.module = module
        self.factor = factor

    def __call__(self, x: jax.Array) -> jax.Array:
        out = self.module(x)
        return (self.factor * out.astype(jnp.promote_types(out.dtype, jnp.float32))).astype(x.dtype)


class NormBefore(nnx.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)); `dropout` is of what is added."""

    def __init__(self, attn_norm: Any, attn: Any, mlp_norm: Any, mlp: Any, dropout: Any):
        self.attn_norm = attn_norm
        self.attn = attn
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.dropout = dropout

    def __call__(self, x: jax.Array, *context: Any) -> jax.Array:
        normed = checkpoint_name(self.attn_norm(x), "attn_norm")
        x = x + self.dropout(checkpoint_name(self.attn(normed, *context), "attn_out"))
        normed = checkpoint_name(self.mlp_norm(x), "mlp_norm")
        return x + self.dropout(self.mlp(normed))


class NormAfter(nnx.Module):
    """x + norm(attn(x)), then x + norm(mlp(x))."""

    def __init__(self, attn: Any, attn_out_norm: Any, mlp: Any, mlp_out_norm: Any, dropout: Any):
        self.attn = attn
        self.attn_out_norm = attn_out_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm
        self.dropout = dropout

    def __call__(self, x: jax.Array, *context: Any) -> jax.Array:
        out = checkpoint_name(self.attn(x, *context), "attn_out")
        x = x + self.dropout(self.attn_out_norm(out))
        return x + self.dropout(self.mlp_out_norm(self.mlp(x)))


class NormOfSum(nnx.Module):
    """norm(x + attn(x)), then norm(x + mlp(x))."""

    def __init__(self, attn: Any, attn_norm: Any, mlp: Any, mlp_norm: Any, dropout: Any):
        self.attn = attn
        self.attn_norm = attn_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm
        self.dropout = dropout

    def __call__(self, x: jax.Array, *context: Any) -> jax.Array:
        out = checkpoint_name(self.attn(x, *context), "attn_out")
        x = checkpoint_name(self.attn_norm(x + self.dropout(out)), "attn_norm")
        return self.mlp_norm(x + self.dropout(self.mlp(x)))


class NormBoth(nnx.Module):
    """x + norm(attn(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(
        self,
        attn_norm: Any,
        attn: Any,
        attn_out_norm: Any,
        mlp_norm: Any,
        mlp: Any,
        mlp_out_norm: Any,
        dropout: Any,
    ):
        self.attn_norm = attn_norm
        self.attn = attn
        self.attn_out_norm = attn_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm
        self.dropout = dropout

    def __call__(self, x: jax.Array, *context: Any) -> jax.Array:
        normed = checkpoint_name(self.attn_norm(x), "attn_norm")
        out = checkpoint_name(self.attn(normed, *context), "attn_out")
        x = x + self.dropout(self.attn_out_norm(out))
        normed = checkpoint_name(self.mlp_norm(x), "mlp_norm")
        return x + self.dropout(self.mlp_out_norm(self.mlp(normed)))


class ParallelBranches(NormBefore):
    """x + attn(norm(x)) + mlp(norm(x)), each with its own norm or, without `mlp_norm`, one."""

    def __call__(self, x: jax.Array, *context: Any) -> jax.Array:
        normed = checkpoint_name(self.attn_norm(x), "attn_norm")
        attended = self.dropout(checkpoint_name(self.attn(normed, *context), "attn_out"))
        if self.mlp_norm is not None:
            normed = checkpoint_name(self.mlp_norm(x), "mlp_norm")
        return x + attended + self.dropout(self.mlp(normed))
