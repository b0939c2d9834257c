"""Views of a sharded parameter: slices and reshapes that do not gather it.

`w[i]` of an unrolled stack, or a head that a chunked loss folds to [chunks, chunk, embed], must not
be gathered (or brought from host memory) whole first. Each rule here gives the same operation on
the stored (cut and perhaps padded) array and how its result is stored; an operation that touches
the cut dim has no rule.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxspeed.jaxpr.dim_relations import reshape_groups
from jaxspeed.placement.zero import ways
from jaxspeed.zero3.sharded_param import ShardedParam

VIEWS = ("slice", "dynamic_slice", "squeeze", "transpose", "reshape", "pad")


def view(
    eqn: Any, stored: ShardedParam, stored_shape: tuple[int, ...]
) -> tuple[dict, ShardedParam] | None:
    """The parameters with which to bind `eqn` on the stored array, and the result's storage.

    None when the operation needs the gathered array.
    """
    rule = (_ON_HOST if stored.on_host else _RULES).get(eqn.primitive.name)
    cut = stored.cut_dim
    if rule is None or (cut is None and not stored.on_host):
        return None
    return rule(eqn, stored, stored_shape, cut)


def _slice(eqn: Any, stored: ShardedParam, real: tuple[int, ...], cut: int | None) -> Any:
    start, limit, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
    if cut is not None and (
        start[cut] != 0 or limit[cut] != stored.shape[cut] or (strides and strides[cut] != 1)
    ):
        return None
    limit = tuple(real[d] if d == cut else n for d, n in enumerate(limit))
    return {**eqn.params, "limit_indices": limit}, _same_dims(stored, eqn)


def _dynamic_slice(eqn: Any, stored: ShardedParam, real: tuple[int, ...], cut: int | None) -> Any:
    sizes = eqn.params["slice_sizes"]
    if cut is not None and sizes[cut] != stored.shape[cut]:
        return None
    sizes = tuple(real[d] if d == cut else n for d, n in enumerate(sizes))
    return {**eqn.params, "slice_sizes": sizes}, _same_dims(stored, eqn)


def _pad(eqn: Any, stored: ShardedParam, real: tuple[int, ...], cut: int | None) -> Any:
    if cut is not None and any(eqn.params["padding_config"][cut]):
        return None
    return eqn.params, _same_dims(stored, eqn)


def _squeeze(eqn: Any, stored: ShardedParam, real: tuple[int, ...], cut: int | None) -> Any:
    gone = eqn.params["dimensions"]
    if cut in gone:
        return None
    kept: list[int | None] = [d for d in range(len(real)) if d not in gone]
    return eqn.params, stored.moved(eqn.outvars[0].aval.shape, kept)


def _transpose(eqn: Any, stored: ShardedParam, real: tuple[int, ...], cut: int | None) -> Any:
    order = list(eqn.params["permutation"])
    return eqn.params, stored.moved(eqn.outvars[0].aval.shape, order)


def _reshape(eqn: Any, stored: ShardedParam, real: tuple[int, ...], cut: int | None) -> Any:
    """Dims before the cut one may be folded or split as long as the rest stays as it is."""
    old, new = stored.shape, eqn.params["new_sizes"]
    cut = len(old) if cut is None else cut
    tail = len(old) - cut
    front = len(new) - tail
    if eqn.params["dimensions"] is not None or tuple(new[front:]) != tuple(old[cut:]):
        return None
    mesh_sizes = stored.gathered.mesh.shape
    parts = [ways(entry, mesh_sizes) for entry in stored.entries[:cut]]
    dims = _places(old[:cut], new[:front], parts)
    if dims is None:
        return None
    params = {**eqn.params, "new_sizes": (*new[:front], *real[cut:])}
    return params, stored.moved(tuple(new), [*dims, *range(cut, len(old))])


def _places(
    old: Sequence[int], new: Sequence[int], parts: Sequence[int]
) -> list[int | None] | None:
    """For each dim of a reshaped array the dim whose cut it takes over; None where it takes none.

    `parts` is into how many each old dim is cut. Dims that were split or folded together stay cut
    as they were if it is the outermost of them that is cut. None if nothing says how.
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
# What compilers do to an array in host memory without bringing it to the device.
_ON_HOST = {name: _RULES[name] for name in ("slice", "dynamic_slice", "squeeze", "reshape")}
