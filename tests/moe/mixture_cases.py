"""Inputs of a mixture layer, its loss by the package and by a dense reference, their error."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.ops.moe import Routing, mixture

EXPERTS, K, EMBED, MLP = 8, 2, 12, 16
# Tokens that no block of rows, and no bounded buffer, is a multiple of.
BATCH, SEQ = 8, 5


class Case(NamedTuple):
    """x, the experts' weights and what a router gave."""

    x: Any
    gate: Any
    up: Any
    down: Any
    combine: Any  # [batch, seq, k]
    chosen: Any  # [batch, seq, k]


def case(load: str = "random", batch: int = BATCH, seq: int = SEQ, seed: int = 0) -> Case:
    """A case whose experts are chosen at random, skewed, all alike, or some of them not at all."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    scores = rng.random((batch, seq, EXPERTS))
    if load == "skewed":
        scores *= 1 + np.arange(EXPERTS)
    elif load == "empty":
        scores[..., [0, 3, 4, EXPERTS - 1]] = 0
    elif load == "alike":
        scores = np.broadcast_to(np.arange(EXPERTS), scores.shape)
    chosen = np.argsort(-scores, axis=-1)[..., :K].astype(np.int32)
    combine = rng.random((batch, seq, K)).astype(np.float32)
    if load == "dropped":
        dropped = rng.random(chosen.shape) < 0.3
        chosen, combine = np.where(dropped, EXPERTS, chosen), np.where(dropped, 0, combine)
        chosen, combine = chosen.astype(np.int32), combine.astype(np.float32)
    return Case(
        rng.normal(size=(batch, seq, EMBED)).astype(np.float32),
        normal(EXPERTS, EMBED, MLP),
        normal(EXPERTS, EMBED, MLP),
        normal(EXPERTS, MLP, EMBED),
        combine,
        chosen,
    )


LOADS = ("random", "skewed", "empty", "alike", "dropped")


def routing_of(chosen: Any, combine: Any) -> Routing:
    """Without the statistics of the balance, which the dispatch does not read."""
    batch = chosen.shape[0]
    counts = jnp.sum(chosen[..., None] == jnp.arange(EXPERTS), axis=(1, 2), dtype=jnp.int32)
    zeros = jnp.zeros(batch)
    return Routing(chosen, combine, counts, jnp.zeros((batch, EXPERTS)), zeros, zeros)


def layer(case: Case) -> jax.Array:
    """The package's mixture."""

    def feed_forward(rows: Any) -> jax.Array:
        hidden = jax.nn.silu(rows.product(case.gate)) * rows.product(case.up)
        return rows.product(case.down, hidden * rows.weights)

    return mixture(case.x, routing_of(case.chosen, case.combine), feed_forward)


def dense_layer(case: Case) -> jax.Array:
    """Each expert computes each token; the weights of those that were not chosen are zero."""
    out = jnp.zeros_like(case.x)
    for e in range(EXPERTS):
        weight = jnp.sum(jnp.where(case.chosen == e, case.combine, 0), axis=-1)
        hidden = jax.nn.silu(case.x @ case.gate[e]) * (case.x @ case.up[e])
        out += weight[..., None] * (hidden @ case.down[e])
    return out


def with_gradients(function: Any) -> Any:
    """(the output, the gradients of all but the choice) of a layer, as one compiled function."""

    def loss(parts: Any, chosen: Any) -> Any:
        y = function(Case(*parts, chosen))
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def run(case: Case) -> dict[str, Any]:
        (_, y), grads = compiled(case[:-1], case.chosen)
        return {"y": y, **dict(zip(Case._fields, grads, strict=False))}

    return run


def errors(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest error of each array, relative to its largest element."""
    return {
        name: float(np.max(np.abs(found[name] - x)) / np.max(np.abs(x)))
        for name, x in ((name, np.asarray(x)) for name, x in expected.items())
    }
