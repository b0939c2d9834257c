"""Which array of a tree is not finite."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.placement.paths import flat_with_paths


def nonfinite_flags(tree: Any) -> Any:
    """For each leaf, whether it holds a NaN or an infinity; works inside jit."""

    def flag(leaf: Any) -> jax.Array:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            return jnp.asarray(False)
        return ~jnp.isfinite(leaf).all()

    return jax.tree.map(flag, tree)


def first_nonfinite(tree: Any) -> str | None:
    """The path, joined by `/`, of the first leaf that is not finite, or None."""
    flags = jax.device_get(jax.jit(nonfinite_flags)(tree))
    for path, bad in flat_with_paths(flags).items():
        if bad:
            return path
    return None
