"""Models as people write them who have never heard of this library: no names on any dim.

Each is (a model, a batch, its loss); what should be cut of them is said in test_infer_sharding.py.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

BATCH, SEQ, VOCAB, WIDTH, HEADS = 8, 12, 64, 32, 8


class Foreign(NamedTuple):
    model: Any
    batch: dict[str, np.ndarray]
    loss: Callable[[Any, Any], Any]


def tokens(length: int = SEQ, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (BATCH, length)).astype(np.int32)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(BATCH, *shape)).astype(np.float32)


def next_token(model: Any, batch: dict[str, Any]) -> Any:
    logits = model(batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return losses.mean()


def squared(model: Any, batch: dict[str, Any]) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


# -- an encoder and a decoder ---------------------------------------------------------------------


def attention(rngs: nnx.Rngs) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)


class FeedForward(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = WIDTH, inner: int = 4 * WIDTH):
        self.widen = nnx.Linear(width, inner, rngs=rngs)
        self.narrow = nnx.Linear(inner, width, rngs=rngs)

    def __call__(self, x):
        return self.narrow(jax.nn.gelu(self.widen(x)))


class EncoderLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention, self.feed = attention(rngs), FeedForward(rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.feed(self.norms[1](x))


class DecoderLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(3)])
        self.own, self.cross, self.feed = attention(rngs), attention(rngs), FeedForward(rngs)

    def __call__(self, x, memory, mask):
        x = x + self.own(self.norms[0](x), mask=mask)
        x = x + self.cross(self.norms[1](x), memory)
        return x + self.feed(self.norms[2](x))


class EncoderDecoder(nnx.Module):
    """Of two layers each; one table for all tokens, or two and a head of its own."""

    def __init__(self, rngs: nnx.Rngs, shared: bool):
        self.source = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.target = self.source if shared else nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.places = nnx.Embed(SEQ, WIDTH, rngs=rngs)
        self.encoder = nnx.List([EncoderLayer(rngs) for _ in range(2)])
        self.decoder = nnx.List([DecoderLayer(rngs) for _ in range(2)])
        self.memory_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = None if shared else nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, source, target):
        memory = self.source(source) + self.places(jnp.arange(source.shape[1]))
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.memory_norm(memory)
        x = self.target(target) + self.places(jnp.arange(target.shape[1]))
        mask = nnx.make_causal_mask(target)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        x = self.norm(x)
        return self.target.attend(x) if self.head is None else self.head(x)


def translation(model: Any, batch: dict[str, Any]) -> Any:
    logits = model(batch["source"], batch["target"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"][:, 1:])
    return losses.sum(), jnp.asarray(losses.size, jnp.float32)


def encoder_decoder(shared: bool) -> Foreign:
    batch = {"source": tokens(SEQ - 2), "target": tokens(SEQ, seed=2)}
    return Foreign(lambda rngs: EncoderDecoder(rngs, shared), batch, translation)


# -- convolutions and attention -------------------------------------------------------------------


class Inverted(nnx.Module):
    """Widened by a 1x1 convolution, filtered a channel at a time, narrowed again."""

    def __init__(self, rngs: nnx.Rngs, channels: int, inner: int):
        self.norm = nnx.GroupNorm(channels, num_groups=4, rngs=rngs)
        self.widen = nnx.Conv(channels, inner, (1, 1), rngs=rngs)
        self.depthwise = nnx.Conv(inner, inner, (3, 3), feature_group_count=inner, rngs=rngs)
        self.narrow = nnx.Conv(inner, channels, (1, 1), rngs=rngs)

    def __call__(self, x):
        return x + self.narrow(jax.nn.silu(self.depthwise(self.widen(self.norm(x)))))


class ConvAttention(nnx.Module):
    """A stem, two inverted blocks, attention over the pixels, a head of 10 classes."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, WIDTH, (3, 3), strides=(2, 2), rngs=rngs)
        self.convs = nnx.List([Inverted(rngs, WIDTH, 4 * WIDTH) for _ in range(2)])
        self.mixer = EncoderLayer(rngs)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images):
        x = self.stem(images)
        for conv in self.convs:
            x = conv(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        return self.head(self.mixer(x).mean(axis=1))


def classified(model: Any, batch: dict[str, Any]) -> Any:
    logits = model(batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def conv_attention() -> Foreign:
    batch = {"images": numbers(8, 8, 3), "labels": tokens(1)[:, 0] % 10}
    return Foreign(ConvAttention, batch, classified)


# -- plain stacks ---------------------------------------------------------------------------------


class Tower(nnx.Module):
    """Linear layers of unequal widths, one after the other, under odd names."""

    def __init__(self, rngs: nnx.Rngs, widths: tuple[int, ...]):
        self.floors = len(widths) - 1
        for i, (wide, narrow) in enumerate(pairwise(widths)):
            setattr(self, f"etage{chr(97 + i)}", nnx.Linear(wide, narrow, rngs=rngs))

    def __call__(self, x):
        for i in range(self.floors):
            x = getattr(self, f"etage{chr(97 + i)}")(x)
            x = jnp.tanh(x) if i < self.floors - 1 else x
        return x


def tower(*widths: int) -> Foreign:
    batch = {"x": numbers(widths[0]), "y": numbers(widths[-1])}
    return Foreign(lambda rngs: Tower(rngs, widths), batch, squared)


class Residual(nnx.Module):
    """Branches of two layers, their inner widths unlike."""

    def __init__(self, rngs: nnx.Rngs):
        self.gate_in = nnx.Linear(6, WIDTH, rngs=rngs)
        self.twigs = nnx.List([FeedForward(rngs, WIDTH, n) for n in (48, 96, 40)])
        self.gate_out = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        x = self.gate_in(x)
        for twig in self.twigs:
            x = x + twig(x)
        return self.gate_out(x)


def residual() -> Foreign:
    return Foreign(Residual, {"x": numbers(6), "y": numbers(3)}, squared)


class Square(nnx.Module):
    """A residual around single products: there is no pair."""

    def __init__(self, rngs: nnx.Rngs):
        self.steps = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for step in self.steps:
            x = x + jnp.tanh(step(x))
        return x


def square() -> Foreign:
    return Foreign(Square, {"x": numbers(WIDTH), "y": numbers(WIDTH)}, squared)


class Gated(nnx.Module):
    """Raw matrices and einsum."""

    def __init__(self, rngs: nnx.Rngs):
        key, inner = rngs.params(), 3 * WIDTH
        self.w13 = nnx.Param(jax.random.normal(key, (2, WIDTH, inner)) / 6)
        self.w2 = nnx.Param(jax.random.normal(key, (inner, WIDTH)) / 10)

    def __call__(self, x):
        gate, up = jnp.einsum("bsd,gdf->gbsf", x, self.w13[...])
        return x + jnp.einsum("bsf,fd->bsd", jax.nn.silu(gate) * up, self.w2[...])


def gated() -> Foreign:
    return Foreign(Gated, {"x": numbers(4, WIDTH), "y": numbers(4, WIDTH)}, squared)


# -- decoders, each written in another way --------------------------------------------------------


class SelfAttention(nnx.Module):
    """Weights [embed, heads * head_dim]; `kv` key-value heads; or one weight for all three."""

    def __init__(self, rngs: nnx.Rngs, kv: int = HEADS, fused: bool = False):
        self.kv, size = kv, WIDTH // HEADS
        outs = {"qkv": 3 * WIDTH} if fused else {"q": WIDTH, "k": kv * size, "v": kv * size}
        for name, out in outs.items():
            setattr(self, name, nnx.Linear(WIDTH, out, rngs=rngs))
        self.fused = fused
        self.o = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        if self.fused:
            parts = jnp.split(self.qkv(x), 3, axis=-1)
        else:
            parts = [self.q(x), self.k(x), self.v(x)]
        q, k, v = (y.reshape(*x.shape[:2], -1, WIDTH // HEADS) for y in parts)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **how: Any):
        self.norm1, self.norm2 = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attn, self.mlp = SelfAttention(rngs, **how), FeedForward(rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def one_by_one(block: nnx.Module, x: Any) -> Any:
    return block(x)


def checkpointed(block: nnx.Module, x: Any) -> Any:
    graph, state = nnx.split(block)
    return jax.checkpoint(lambda s, y: nnx.merge(graph, s)(y))(state, x)


def jitted(block: nnx.Module, x: Any) -> Any:
    graph, state = nnx.split(block)
    return jax.jit(lambda s, y: nnx.merge(graph, s)(y))(state, x)


class Decoder(nnx.Module):
    """Two blocks in a list, called in one of the ways above."""

    def __init__(self, rngs: nnx.Rngs, call: Callable[..., Any] = one_by_one, **how: Any):
        self.tok = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, **how) for _ in range(2)])
        self.call = call

    def __call__(self, ids):
        x = self.tok(ids)
        for block in self.blocks:
            x = self.call(block, x)
        return self.tok.attend(x)


def decoder(call: Callable[..., Any] = one_by_one, **how: Any) -> Foreign:
    return Foreign(lambda rngs: Decoder(rngs, call, **how), {"tokens": tokens()}, next_token)


class Stacked(nnx.Module):
    """Made by vmap, run by scan; nothing says that the first dim is layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.tok = nnx.Embed(VOCAB, WIDTH, rngs=rngs)

        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)

    def __call__(self, ids):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return self.tok.attend(run(self.tok(ids), self.blocks))


def stacked() -> Foreign:
    return Foreign(Stacked, {"tokens": tokens()}, next_token)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
        h = nn.Dense(3 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.relu(h))


class LinenDecoder(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(ids)
        for _ in range(2):
            x = LinenBlock()(x)
        return nn.Dense(VOCAB, use_bias=False)(x)


def linen() -> Foreign:
    return Foreign(LinenDecoder(), {"tokens": tokens()}, next_token)
