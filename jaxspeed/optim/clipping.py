"""Global norm of gradients, and gradient clipping."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.placement.specs import spec_axes

_EPS = 1e-6  # DeepSpeed's, in `unscale_and_clip_grads` and `clip_tensors_by_global_norm`


def global_norm(tree: Any, shardings: Any = None) -> jax.Array:
    """The L2 norm of all leaves, with complex magnitudes, computed in float32 at least.

    It is finite only if every element is, so the overflow check needs no second pass.

    With the leaves' `shardings`, NamedShardings of one mesh, each device adds up its shards, and
    the sums are all-reduced once for each set of axes that shard a leaf. Without them XLA
    all-reduces a sum per leaf, which also keeps it from combining the reductions of gradients.
    """
    groups = defaultdict(list)
    leaves = jax.tree.leaves(tree)
    for leaf, at in zip(leaves, jax.tree.leaves(shardings) or [None] * len(leaves), strict=True):
        groups[_sharded_over(at)].append((leaf, at))
    squares = [_sum_of_squares(leaf for leaf, _ in groups.pop((), []))]
    squares += [_sum_over(axes, *zip(*members, strict=True)) for axes, members in groups.items()]
    return jnp.sqrt(sum(squares[1:], start=squares[0]))


def _sum_of_squares(leaves: Iterable[jax.Array]) -> jax.Array:
    squares = (jnp.sum(squared(leaf)) for leaf in leaves)
    return sum(squares, start=jnp.zeros((), jnp.float32))


def _sum_over(
    axes: tuple[str, ...], leaves: tuple[jax.Array, ...], shardings: tuple[NamedSharding, ...]
) -> jax.Array:
    """The sum of squares of leaves that are sharded over these axes and replicated over others."""
    of_each_device = jax.shard_map(
        lambda shards: _sum_of_squares(shards)[None],
        mesh=shardings[0].mesh,
        in_specs=([at.spec for at in shardings],),
        out_specs=PartitionSpec(axes),
    )
    return jnp.sum(of_each_device(list(leaves)))


def _sharded_over(at: NamedSharding | None) -> tuple[str, ...]:
    """The axes that shard an array, in the mesh's order."""
    if at is None:
        return ()
    axes = spec_axes(at.spec)
    return tuple(axis for axis, size in at.mesh.shape.items() if axis in axes and size > 1)


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
