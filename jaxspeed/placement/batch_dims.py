"""The dims of a batch's arrays that are samples and positions, and how a batch is sharded."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspeed.axes import position_axes, product, sample_axes
from jaxspeed.errors import BatchError
from jaxspeed.placement.paths import flat_with_paths, listed

Named = Mapping[str, int]  # the dim of positions, by the name of an array
# Names of arrays of images begin so: their dim 1 has the patches of a sample.
OF_IMAGES = "patch"


def sequence_dims(batch: Any, named: Named) -> list[int | None]:
    """The dim of the positions of each array (or shape), in the order of the batch's leaves.

    An array that `named` does not name has one if it looks like tokens: integers or booleans
    [batch, seq]. So has any other of rank 2 or more whose dim 1 is as long as that of such arrays:
    weights of tokens, or their embeddings. Arrays of images have none.
    """
    arrays = flat_with_paths(batch)
    of_images = {p for p in arrays if p.rpartition("/")[2].startswith(OF_IMAGES)}
    lengths = {x.shape[1] for p, x in arrays.items() if p not in of_images and _is_of_tokens(x)}

    def dim_of(path: str, x: Any) -> int | None:
        for name, dim in named.items():
            if _names(name, path):
                return dim
        has_positions = path not in of_images and len(x.shape) > 1
        return 1 if has_positions and x.shape[1] in lengths else None

    return [dim_of(path, x) for path, x in arrays.items()]


def _is_of_tokens(x: Any) -> bool:
    of_numbers = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
    return len(x.shape) == 2 and bool(of_numbers)


def _names(name: str, path: str) -> bool:
    return path == name or path.endswith(f"/{name}")


def check_sequence_dims(batch: Any, named: Named, sizes: Mapping[str, int]) -> None:
    """Raise BatchError if a batch has no positions to shard, or not the dims that are named."""
    if product(position_axes(), sizes) == 1:
        return
    arrays, key = flat_with_paths(batch), "parallel.sequence.dims"
    for name, dim in named.items():
        named_arrays = {path: x for path, x in arrays.items() if _names(name, path)}
        if not named_arrays:
            raise BatchError(f"{key} names {name!r}; the batch has {listed(list(arrays))}")
        for path, x in named_arrays.items():
            if not 0 < dim < len(x.shape):
                raise BatchError(
                    f"{key} has {dim} for {name!r}, and {path} is {list(x.shape)}: its positions "
                    f"are one of the dims after the samples, 1 to {len(x.shape) - 1}"
                )
    if all(dim is None for dim in sequence_dims(batch, named)):
        (axis,) = position_axes()
        shapes = [f"{path} {x.dtype}{list(x.shape)}" for path, x in arrays.items()]
        raise BatchError(
            f"mesh.{axis} is {sizes[axis]}, and no array of the batch is known to have a dim of "
            f"positions (integers [batch, seq] are): {listed(shapes)}. Name it, as {key}: "
            f'{{"{next(iter(arrays), "x")}": 1}}, or write mesh.{axis} 1'
        )


def batch_specs(batch: Any, named: Named, sizes: Mapping[str, int]) -> Any:
    """Shard a batch's arrays along samples and positions; replicate scalars.

    Positions that their axis does not divide are unsharded, as those of tokens [batch, seq + 1]: 4
    bytes a token, until the loss has split them into inputs and targets.
    """
    axes = position_axes()
    shards = product(axes, sizes)

    def spec(x: Any, dim: int | None) -> PartitionSpec:
        if not x.shape:
            return PartitionSpec()
        entries: list[Any] = [sample_axes()]
        if dim is not None and shards > 1 and x.shape[dim] % shards == 0:
            entries += [None] * (dim - 1) + [axes]
        return PartitionSpec(*entries)

    leaves, tree = jax.tree.flatten(batch)
    specs = map(spec, leaves, sequence_dims(batch, named))
    return jax.tree.unflatten(tree, list(specs))


def sample_specs(batch: Any) -> Any:
    """Shard a batch's arrays along samples alone."""
    return jax.tree.map(lambda x: PartitionSpec(*[sample_axes()] * bool(x.shape)), batch)
