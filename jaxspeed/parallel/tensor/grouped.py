"""Grouped convolutions that no axis cuts: each device computes its own samples.

On a mesh with an axis beside those that cut the samples, XLA's partitioner gives the gradient of a
depthwise kernel that axis's size times too large (jax 0.10.2 and 0.12.0, CPU, with Shardy and
without). Per-device code is not partitioned, and so is right.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

GROUPS = ("feature_group_count", "batch_group_count")


def is_grouped(eqn: Any) -> bool:
    return eqn.primitive.name == "conv_general_dilated" and any(eqn.params[g] != 1 for g in GROUPS)


def each_on_its_own(
    eqn: Any, samples: Any, axes: set[str]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The convolution of an equation, manual over `axes`; `samples` are those that cut them."""
    numbers = eqn.params["dimension_numbers"]

    def along(dim: int, ndim: int) -> PartitionSpec:
        return PartitionSpec(*(samples if d == dim else None for d in range(ndim)))

    ndim = len(eqn.invars[0].aval.shape)
    return jax.shard_map(
        lambda x, w: eqn.primitive.bind(x, w, **eqn.params),
        in_specs=(along(numbers.lhs_spec[0], ndim), PartitionSpec()),
        out_specs=along(numbers.out_spec[0], ndim),
        axis_names=axes,
        check_vma=False,
    )
