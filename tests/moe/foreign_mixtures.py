"""Mixtures as other people write them: experts stacked, tokens dispatched by one-hot einsums.

Plain Flax that knows nothing of jaxspeed: GShard's form (a mask [batch, seq, experts, capacity]),
and the dense one, in which all experts see all tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

SEQ, EMBED, MLP, EXPERTS, TOP = 16, 16, 32, 4, 2


class Experts(nnx.Module):
    """Stacked weights of a gated feed-forward, their dims named or not."""

    def __init__(self, rngs: nnx.Rngs, named: bool, sizes: tuple[int, int, int]):
        experts, embed, mlp = sizes
        names: Any = lambda *dims: {"logical_axes": dims} if named else {}  # noqa: E731

        def param(*dims: tuple[str, int]) -> nnx.Param:
            shape = tuple(size for _, size in dims)
            value = jax.random.normal(rngs.params(), shape) * shape[-2] ** -0.5
            return nnx.Param(value, **names(*(name for name, _ in dims)))

        e, m, f = ("experts", experts), ("embed", embed), ("mlp", mlp)
        self.gate, self.up, self.down = param(e, m, f), param(e, m, f), param(e, f, m)
        self.bias = nnx.Param(jnp.ones((experts, mlp)) / 8, **names("experts", "mlp"))


class GShard(Experts):
    """Top-2 with a capacity of each sample (Lepikhin et al., arXiv:2006.16668)."""

    def __call__(self, x: jax.Array, scores: jax.Array, top: int = TOP) -> jax.Array:
        _, seq, experts = scores.shape
        capacity = 2 * top * seq // experts
        weights, chosen = jax.lax.top_k(scores, top)  # [b, s, k]
        hot = jax.nn.one_hot(chosen, experts)  # [b, s, k, e]
        places = (jnp.cumsum(hot.reshape(x.shape[0], -1, experts), 1) - 1).reshape(hot.shape)
        place = jax.nn.one_hot((places * hot).sum(-1).astype(int), capacity)  # [b, s, k, c]
        combine = jnp.einsum("bsk,bske,bskc->bsec", weights, hot, place)
        dispatch = (combine > 0).astype(x.dtype)
        rows = jnp.einsum("bsec,bsm->ebcm", dispatch, x)
        hidden = jax.nn.silu(jnp.einsum("ebcm,emf->ebcf", rows, self.gate[...]))
        hidden *= jnp.einsum("ebcm,emf->ebcf", rows, self.up[...])
        hidden += self.bias[...][:, None, None]
        out = jnp.einsum("ebcf,efm->ebcm", hidden, self.down[...])
        return jnp.einsum("ebcm,bsec->bsm", out, combine)


class Dense(Experts):
    """Every expert computes every token; the chosen ones count."""

    def __call__(self, x: jax.Array, scores: jax.Array, top: int = TOP) -> jax.Array:
        least = jax.lax.top_k(scores, top)[0][..., -1:]
        weights = jnp.where(scores >= least, scores, 0)
        hidden = jax.nn.silu(jnp.einsum("bsm,emf->bsef", x, self.gate[...]))
        hidden *= jnp.einsum("bsm,emf->bsef", x, self.up[...])
        hidden += self.bias[...]
        out = jnp.einsum("bsef,efm->bsem", hidden, self.down[...])
        return (out * weights[..., None]).sum(2)


FORMS = {"gshard": GShard, "dense": Dense}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, form: str, named: bool, sizes: tuple[int, int, int]):
        experts, embed, _ = sizes
        self.mix = nnx.Linear(embed, embed, rngs=rngs)
        self.router = nnx.Linear(embed, experts, use_bias=False, rngs=rngs)
        self.experts = FORMS[form](rngs, named, sizes)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + jnp.tanh(self.mix(jnp.cumsum(x, 1) / x.shape[1]))
        return x + self.experts(x, jax.nn.softmax(self.router(x)))


class Mixture(nnx.Module):
    """Blocks and a head."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        form: str = "gshard",
        named: bool = True,
        sizes: tuple[int, int, int] = (EXPERTS, EMBED, MLP),
        blocks: int = 2,
    ):
        self.blocks = nnx.List([Block(rngs, form, named, sizes) for _ in range(blocks)])
        self.head = nnx.Linear(sizes[1], 1, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Listed(nnx.Module):
    """A mixture whose experts are separate modules."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(EMBED, EXPERTS, rngs=rngs)
        self.experts = nnx.List([nnx.Linear(EMBED, EMBED, rngs=rngs) for _ in range(EXPERTS)])
        self.head = nnx.Linear(EMBED, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(self.router(x))
        outs = [expert(x) * weights[..., i : i + 1] for i, expert in enumerate(self.experts)]
        return self.head(sum(outs))


def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    error = jnp.square(model(batch["x"])[..., 0] - batch["y"])
    return error.sum(), jnp.asarray(error.size, error.dtype)


def batch(samples: int = 8, seq: int = SEQ, embed: int = EMBED) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, seq, embed)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(-1))}


def names(form: str = "gshard") -> dict[str, list[str]]:
    """What `parallel.logical_axes` says of a model without names."""
    up = ["experts", "embed", "mlp"]
    return {
        "**/experts/gate": up,
        "**/experts/up": up,
        "**/experts/down": ["experts", "mlp", "embed"],
        "**/experts/bias": ["experts", "mlp"],
    }
