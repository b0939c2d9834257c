"""Global norm of gradients, and gradient clipping."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

_EPS = 1e-6  # DeepSpeed's, in `unscale_and_clip_grads` and `clip_tensors_by_global_norm`


def global_norm(tree: Any) -> jax.Array:
    """The L2 norm of all leaves, with complex magnitudes, computed in float32 at least.

    It is finite only if every element is, so the overflow check needs no second pass.
    """
    squares = [jnp.sum(squared(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def global_norm_of_shards(
    leaves: Mapping[str, jax.Array], shards: Mapping[str, Sequence[tuple[Any, int]]]
) -> jax.Array:
    """`global_norm` of sharded leaves, with one all-reduce per kind of sharding.

    Each device adds up its shards of all leaves first. An all-reduce per leaf would take XLA a
    third of a step's compile time, if there are a few hundred.

    Args:
      leaves: arrays by path.
      shards: for each dim of a leaf the mesh axes that shard it, and the number of shards.
    """
    sums = defaultdict[Any, list[jax.Array]](list)
    for path, leaf in leaves.items():
        kind, partial = _sum_per_shard(squared(leaf), shards[path])
        sums[kind].append(partial)
    # Stacked: XLA's simplifier moves a reshape along a chain of additions by one in each iteration.
    squares = [jnp.sum(jnp.stack(partial, axis=-1)) for partial in sums.values()]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _sum_per_shard(x: jax.Array, shards: Sequence[tuple[Any, int]]) -> tuple[Any, jax.Array]:
    """(axes of the sharded dims by name, the sum of each shard [shards of each of these dims])."""
    shape: list[int] = []
    axes, kept = [], []
    for size, (entry, count) in zip(x.shape, shards, strict=True):
        if count > 1:
            axes.append(str(entry))
            kept.append(len(shape))
            shape.append(count)
        shape.append(size // count)
    local = [dim for dim in range(len(shape)) if dim not in kept]
    partial = jnp.sum(x.reshape(shape), axis=tuple(local))
    order = sorted(range(len(axes)), key=axes.__getitem__)
    return tuple(axes[i] for i in order), partial.transpose(order)


def squared(x: jax.Array) -> jax.Array:
    """|x|^2, element by element, in float32 at least."""
    if jnp.iscomplexobj(x):
        return squared(x.real) + squared(x.imag)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * x


def clip_factor(norm: jax.Array, max_norm: float) -> jax.Array:
    """The factor that clips gradients of this global norm; max_norm 0 disables clipping."""
    if max_norm <= 0:
        return jnp.ones_like(norm)
    return jnp.minimum(1, max_norm / (norm + _EPS))


def clip_by_norm(tree: Any, norm: jax.Array, max_norm: float) -> tuple[Any, jax.Array]:
    """`factor tree` and `factor = min(1, max_norm / (norm + 1e-6))`; max_norm 0 disables clipping.

    DeepSpeed divides by `max(1, (norm + 1e-6) / max_norm)`, which is the same.

    Args:
      tree: gradients.
      norm: their global norm, which the caller computes for its metrics.
      max_norm: static.

    Returns:
      The clipped tree with unchanged dtypes, and the factor: norm * factor is the clipped norm.
    """
    if max_norm <= 0:
        return tree, jnp.ones_like(norm)
    factor = clip_factor(norm, max_norm)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), tree), factor
