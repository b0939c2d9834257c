"""Views of a sharded parameter: slices and reshapes that do not gather it.

`w[i]` of an unrolled stack, or a head that a chunked loss reshapes to [chunks, chunk, embed], must
not be gathered (or copied from host memory) in full first. Each rule returns the same operation on
the stored (sharded and perhaps padded) array, and the sharding of its result; an operation on the
sharded dim has no rule.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxspeed.jaxpr.dim_relations import reshape_groups
from jaxspeed.placement.codec import Stored
from jaxspeed.placement.specs import num_shards
from jaxspeed.zero3.sharded_param import ShardedParam

VIEWS = ("slice", "dynamic_slice", "squeeze", "transpose", "reshape", "pad")


def run_view(
    eqn: Any, stored: ShardedParam, values: Sequence[Any]
) -> tuple[Stored, ShardedParam] | None:
    """The result of `eqn` on a stored parameter, the first of `values`, and how it is stored.

    None if the operation needs the gathered parameter.
    """
    source, *others = values
    if stored.parts:
        return _of_encoded(eqn, stored, source, others)
    viewed = view(eqn, stored, source.shape)
    if viewed is None:
        return None
    params, changed = viewed
    if eqn.primitive.name == "pad":
        others[0] = others[0].astype(source.dtype)
    return eqn.primitive.bind(source, *others, **params), changed


def _of_encoded(
    eqn: Any, stored: ShardedParam, arrays: Stored, others: Sequence[Any]
) -> tuple[Stored, ShardedParam] | None:
    """The operation on each array of an encoded parameter, if its codec allows that.

    It is the same in the dims of which an array has every element. It has to take all of any other
    dim, where blocks, or the entire value, share an element of the array.
    """
    name, params = eqn.primitive.name, eqn.params
    shape = stored.shape
    padded = jax.eval_shape(lambda x: stored.codec.decode(x, shape, stored.dtype), arrays).shape
    allowed = name in _ENCODED and name in stored.codec.views
    viewed = _RULES[name](eqn, stored, padded, stored.sharded_dim) if allowed else None
    if viewed is None:
        return None
    gone = params["dimensions"] if name == "squeeze" else ()
    key = "limit_indices" if name == "slice" else "slice_sizes"
    partial = [*gone] if gone else [d for d, n in enumerate(shape) if not _takes_all(eqn, d, n)]
    results, parts = {}, []
    for part, how in stored.parts:
        x = arrays[part]
        if any(d >= x.ndim or how.blocks[d] != 1 for d in partial):
            return None
        starts = others[: x.ndim]  # of a dynamic slice
        part_params = dict(params)
        if not gone:
            part_params[key] = tuple(
                params[key][d] if d in partial else size for d, size in enumerate(x.shape)
            )
        if name == "slice":
            part_params["start_indices"] = params["start_indices"][: x.ndim]
            part_params["strides"] = params["strides"] and params["strides"][: x.ndim]
        results[part] = x = eqn.primitive.bind(x, *starts, **part_params)
        dims: list[int | None] = [d for d in range(len(how.shape)) if d not in gone]
        parts.append((part, how.moved(x.shape, dims)))
    return results, replace(viewed[1], parts=tuple(parts))


def _takes_all(eqn: Any, dim: int, size: int) -> bool:
    """Whether a slice has all elements of a dim."""
    params = eqn.params
    if eqn.primitive.name == "dynamic_slice":
        return bool(params["slice_sizes"][dim] == size)
    strides = params["strides"] or (1,) * (dim + 1)
    taken = params["start_indices"][dim], params["limit_indices"][dim], strides[dim]
    return bool(taken == (0, size, 1))


def view(
    eqn: Any, stored: ShardedParam, stored_shape: tuple[int, ...]
) -> tuple[dict, ShardedParam] | None:
    """The parameters for binding `eqn` on the stored array, and the result's storage.

    None if the operation needs the gathered array.
    """
    rule = (_ON_HOST if stored.on_host else _RULES).get(eqn.primitive.name)
    sharded = stored.sharded_dim
    if rule is None or (sharded is None and not stored.on_host):
        return None
    return rule(eqn, stored, stored_shape, sharded)


def _slice(eqn: Any, stored: ShardedParam, real: tuple[int, ...], sharded: int | None) -> Any:
    start, limit, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
    if sharded is not None and (
        start[sharded] != 0
        or limit[sharded] != stored.shape[sharded]
        or (strides and strides[sharded] != 1)
    ):
        return None
    limit = tuple(real[d] if d == sharded else n for d, n in enumerate(limit))
    return {**eqn.params, "limit_indices": limit}, _same_dims(stored, eqn)


def _dynamic_slice(
    eqn: Any, stored: ShardedParam, real: tuple[int, ...], sharded: int | None
) -> Any:
    sizes = eqn.params["slice_sizes"]
    if sharded is not None and sizes[sharded] != stored.shape[sharded]:
        return None
    sizes = tuple(real[d] if d == sharded else n for d, n in enumerate(sizes))
    return {**eqn.params, "slice_sizes": sizes}, _same_dims(stored, eqn)


def _pad(eqn: Any, stored: ShardedParam, real: tuple[int, ...], sharded: int | None) -> Any:
    if sharded is not None and any(eqn.params["padding_config"][sharded]):
        return None
    return eqn.params, _same_dims(stored, eqn)


def _squeeze(eqn: Any, stored: ShardedParam, real: tuple[int, ...], sharded: int | None) -> Any:
    removed = eqn.params["dimensions"]
    if sharded in removed:
        return None
    left: list[int | None] = [d for d in range(len(real)) if d not in removed]
    return eqn.params, stored.moved(eqn.outvars[0].aval.shape, left)


def _transpose(eqn: Any, stored: ShardedParam, real: tuple[int, ...], sharded: int | None) -> Any:
    order = list(eqn.params["permutation"])
    return eqn.params, stored.moved(eqn.outvars[0].aval.shape, order)


def _reshape(eqn: Any, stored: ShardedParam, real: tuple[int, ...], sharded: int | None) -> Any:
    """Merge or split the dims before the sharded one; the others must not change."""
    old, new = stored.shape, eqn.params["new_sizes"]
    sharded = len(old) if sharded is None else sharded
    tail = len(old) - sharded
    front = len(new) - tail
    if eqn.params["dimensions"] is not None or tuple(new[front:]) != tuple(old[sharded:]):
        return None
    mesh_sizes = stored.gathered.mesh.shape
    parts = [num_shards(entry, mesh_sizes) for entry in stored.entries[:sharded]]
    dims = _source_dims(old[:sharded], new[:front], parts)
    if dims is None:
        return None
    params = {**eqn.params, "new_sizes": (*new[:front], *real[sharded:])}
    return params, stored.moved(tuple(new), [*dims, *range(sharded, len(old))])


def _source_dims(
    old: Sequence[int], new: Sequence[int], parts: Sequence[int]
) -> list[int | None] | None:
    """For each dim of a reshaped array the old dim whose sharding it inherits, or None.

    `parts` is the number of shards of each old dim. Dims that are split or merged keep their
    sharding if only the outermost of them is sharded. None in place of the list if the sharding has
    no image.
    """
    if math.prod(old) != math.prod(new):
        return None
    dims: list[int | None] = [None] * len(new)
    for (first, *inner), (place, *_) in reshape_groups(old, new):
        outer = parts[first]
        if any(parts[d] > 1 for d in inner) or old[first] % outer or new[place] % outer:
            return None
        dims[place] = first if outer > 1 else None
    taken = sum(dim is not None for dim in dims)
    return dims if taken == sum(n > 1 for n in parts) else None


def _same_dims(stored: ShardedParam, eqn: Any) -> ShardedParam:
    shape = eqn.outvars[0].aval.shape
    return stored.moved(shape, list(range(len(shape))))


_RULES = {
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "pad": _pad,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "reshape": _reshape,
}
# Operations that a codec may allow on its arrays.
_ENCODED = ("slice", "dynamic_slice", "squeeze")
# Operations that compilers run on an array in host memory, without a copy to the device.
_ON_HOST = {name: _RULES[name] for name in ("slice", "dynamic_slice", "squeeze", "reshape")}
