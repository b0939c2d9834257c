"""Models that fail when parameters and inputs are cast to 16 bits: some arrays are their own.

As found in models of others: a recurrent carry, a cache and statistics that are made in fp32, time
embeddings that an assertion holds to fp32, and operations that demand one dtype.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from tests.support.foreign_models import Foreign

BATCH, TIME, WIDTH, VOCAB = 8, 6, 16, 24


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(BATCH, *shape)).astype(np.float32)


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (BATCH, TIME)).astype(np.int32)


def squared(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def next_token(model, batch):
    logits = model(batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return losses.sum(), losses.size


class Recurrent(nnx.Module):
    """An LSTM whose scan begins with a carry in fp32."""

    def __init__(self, rngs: nnx.Rngs):
        self.gates = nnx.Linear(2 * WIDTH, 4 * WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        def step(carry, x):
            hidden, cell = carry
            parts = jnp.split(self.gates(jnp.concatenate([x, hidden], axis=-1)), 4, axis=-1)
            i, f, o = (jax.nn.sigmoid(p) for p in parts[:3])
            cell = f * cell + i * jnp.tanh(parts[3])
            hidden = (o * jnp.tanh(cell)).astype(self.head.kernel.dtype)
            return (hidden, cell), hidden

        zeros = jnp.zeros((x.shape[0], WIDTH), jnp.float32)
        _, hidden = lax.scan(step, (zeros, zeros), x.swapaxes(0, 1))
        return self.head(hidden.swapaxes(0, 1))


class Decoder(nnx.Module):
    """Attention over a cache in fp32, into which the scan writes each position's keys."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.embed.embedding[ids]
        length = ids.shape[1]

        def step(cache, at):
            number, x = at
            q, k, v = jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
            keys = lax.dynamic_update_slice(cache[0], k[:, None], (0, number, 0))
            values = lax.dynamic_update_slice(cache[1], v[:, None], (0, number, 0))
            scores = jnp.einsum("be,bte->bt", q, keys) / WIDTH**0.5
            scores = jnp.where(jnp.arange(length) <= number, scores, -1e9)
            seen = jnp.einsum("bt,bte->be", jax.nn.softmax(scores), values)
            return (keys, values), x + self.out(seen)

        cache = jnp.zeros((2, ids.shape[0], length, WIDTH), jnp.float32)
        _, x = lax.scan(step, (cache[0], cache[1]), (jnp.arange(length), x.swapaxes(0, 1)))
        return self.head(x.swapaxes(0, 1))


class NormalizedScan(nnx.Module):
    """Equal layers in a scan, with batch norm by hand, whose running mean is the scan's output."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (3, WIDTH, WIDTH)) / WIDTH**0.5)
        self.scale = nnx.Param(jnp.ones((3, WIDTH)))

    def __call__(self, x):
        def layer(carry, weights):
            x, spread = carry
            kernel, scale = weights
            y = x @ kernel
            mean, var = y.mean(0), y.astype(jnp.float32).var(0)
            y = (y - mean) * lax.rsqrt(var + 1e-3) * scale
            return (x + jax.nn.relu(y), spread + var.mean()), None

        start = (x, jnp.zeros((), jnp.float32))
        weights = self.kernel.get_value(), self.scale.get_value()
        (x, spread), _ = lax.scan(layer, start, weights)
        return x + 0.01 * spread


class Denoiser(nnx.Module):
    """A small UNet, whose middle blocks add a time embedding in fp32 in a loop."""

    def __init__(self, rngs: nnx.Rngs):
        def conv(inputs, outputs, stride=1):
            return nnx.Conv(inputs, outputs, (3, 3), stride, rngs=rngs)

        self.time = nnx.Linear(8, 8, rngs=rngs)
        self.down, self.middle, self.up = conv(1, 8), conv(8, 16, 2), conv(16, 8)
        self.refine = conv(8, 8)
        self.shift = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.out = conv(16, 1)

    def __call__(self, x):
        times = jnp.linspace(0.0, 1.0, x.shape[0], dtype=jnp.float32)
        angles = times[:, None] * 2.0 ** jnp.arange(4, dtype=jnp.float32)
        embedded = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))
        shift = self.shift(embedded)[:, None, None]
        high = jax.nn.silu(self.down(x))
        high = lax.fori_loop(0, 2, lambda _, h: h + jax.nn.silu(self.refine(h) + shift), high)
        low = jax.nn.silu(self.middle(high))
        low = jax.image.resize(self.up(low), high.shape, "nearest")
        return self.out(jnp.concatenate([self.norm(low), high], axis=-1))


class Strict(nn.Module):
    """A Linen model of `lax` operations, which do not convert between dtypes."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        gate = self.param("gate", nn.initializers.ones, (WIDTH,))
        x = nn.Dense(2 * WIDTH)(x)
        a, b = jnp.split(x, 2, axis=-1)
        ramp = jnp.arange(WIDTH, dtype=jnp.float32) / WIDTH
        ramp = lax.broadcast_in_dim(ramp, a.shape, (a.ndim - 1,))
        y = lax.add(lax.mul(a, ramp), jnp.tanh(b))
        y = lax.mul(y, lax.broadcast_in_dim(gate, y.shape, (y.ndim - 1,)))
        return nn.Dense(1)(nn.LayerNorm()(y))


def pair(*shape: int) -> dict[str, np.ndarray]:
    return {"x": numbers(1, *shape), "y": numbers(2, *shape)}


CASES = {
    "an LSTM's carry": Foreign(Recurrent, pair(TIME, WIDTH), squared),
    "a decoder's cache": Foreign(Decoder, {"tokens": tokens()}, next_token),
    "batch norm in a scan": Foreign(NormalizedScan, pair(WIDTH), squared),
    "times of a UNet": Foreign(Denoiser, pair(8, 8, 1), squared),
    "strict operations": Foreign(Strict(), pair(WIDTH) | {"y": numbers(2, 1)}, squared),
}
