"""The order of tokens over the devices of a sequence axis.

Zig-zag: of 2 P chunks device r of P has chunks r and 2 P - 1 - r, so that under a causal mask all
devices have equal work. A change of the order is one equation of a traced program, which keeps its
dims for the analyses that follow; its transpose is the inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxspeed.jaxpr.primitives import TOKEN_ORDER

# The named scope of a function of tokens that gives each token the same result in any order of
# them, although its operations do not show it.
ANY_ORDER = "any_order_of_tokens"


def by_position(x: jax.Array, devices: int, dim: int = 1) -> jax.Array:
    """An array with the positions of a dim in their order, from the zig-zag order."""
    pairs = x.reshape(*x.shape[:dim], devices, 2, -1, *x.shape[dim + 1 :])
    first, second = (jax.lax.index_in_dim(pairs, i, dim + 1, keepdims=False) for i in (0, 1))
    return jnp.concatenate([first, jnp.flip(second, dim)], axis=dim).reshape(x.shape)


def by_device(x: jax.Array, devices: int, dim: int = 1) -> jax.Array:
    """The inverse of `by_position`."""
    chunks = x.reshape(*x.shape[:dim], 2 * devices, -1, *x.shape[dim + 1 :])
    first, second = jnp.split(chunks, 2, axis=dim)
    return jnp.stack([first, jnp.flip(second, dim)], axis=dim + 1).reshape(x.shape)


def in_token_order(x: jax.Array, dim: int, devices: int, *, zigzag: bool) -> jax.Array:
    """An array in zig-zag order, from that of its positions; or the other way round."""
    return token_order_p.bind(x, dim=dim, devices=devices, zigzag=zigzag)


token_order_p = Primitive(TOKEN_ORDER)


def _run(x: jax.Array, *, dim: int, devices: int, zigzag: bool) -> jax.Array:
    with jax.named_scope(TOKEN_ORDER):
        return (by_device if zigzag else by_position)(x, devices, dim)


def _transpose(ct: Any, x: Any, *, zigzag: bool, **how: Any) -> list[Any]:
    return [ct if isinstance(ct, ad.Zero) else token_order_p.bind(ct, zigzag=not zigzag, **how)]


def _batch(args: Sequence[Any], dims: Sequence[int], *, dim: int, **how: Any) -> Any:
    (x,), (at,) = args, dims
    return token_order_p.bind(x, dim=dim + (at <= dim), **how), at


token_order_p.def_impl(lambda x, **how: _run(x, **how))
token_order_p.def_abstract_eval(lambda x, **how: x.update(weak_type=False))
ad.deflinear2(token_order_p, _transpose)
batching.primitive_batchers[token_order_p] = _batch
mlir.register_lowering(token_order_p, mlir.lower_fun(_run, multiple_results=False))
