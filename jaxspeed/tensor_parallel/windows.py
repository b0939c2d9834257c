"""Windowed operations: convolutions, pooling by maxima, and their derivatives.

XLA partitions these wrongly along a dim that their windows move along (jax 0.12.0.1): the gradient
of a convolution's kernel is multiplied by the size of each mesh axis that shards neither batch nor
positions, that of overlapping maxima is wrong (`known_jax_bugs.programs`). Gradients of grouped
convolutions are wrong beside any axis that shards neither batch nor features, or they abort
("Check failed: ShapeUtil::Compatible").

So each device computes its samples, features and positions in a `shard_map`, and gets the positions
of neighbours that its windows read (a halo). Sums, means and cumulative operations are right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxspeed.axes import SEQ, TENSOR
from jaxspeed.jaxpr.primitives import WINDOW_SELECTIONS
from jaxspeed.jaxpr.traverse import product_of

CONVOLUTION = "conv_general_dilated"
MAXIMA = {"reduce_window_max": -jnp.inf, "reduce_window_min": jnp.inf}  # and what pads them
WINDOWED = (CONVOLUTION, *MAXIMA, *WINDOW_SELECTIONS)
WINDOWS_SCOPE = "sequence_windows"  # of what exchanges positions


@dataclass(frozen=True)
class Window:
    """The windows of an operation along one dim.

    Attributes:
      dim, out: the dim of the operand and of the result.
      span: the positions from the first to the last that a window reads.
      before: the padding before the first position.
      dilated: whether positions of the operand are dilated, as in a transposed convolution.
    """

    dim: int
    out: int
    span: int
    stride: int
    before: int
    dilated: bool

    @property
    def moves(self) -> bool:
        """Whether a result depends on other positions than its own."""
        return self.dilated or (self.span, self.stride, self.before) != (1, 1, 0)


def windows_of(eqn: Any) -> list[Window]:
    """The windows of an operation along each dim that has them; none of other operations."""
    like = product_of(eqn) or eqn
    name, params = like.primitive.name, like.params
    if name not in WINDOWED or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return []
    if name == CONVOLUTION:
        numbers = params["dimension_numbers"]
        places = [*zip(numbers.lhs_spec[2:], numbers.out_spec[2:])]
        sizes = [eqn.invars[1].aval.shape[d] for d in numbers.rhs_spec[2:]]
        dilations, of_operand = params["rhs_dilation"], params["lhs_dilation"]
    else:
        sizes = params["window_dimensions"]
        places, ones = [(d, d) for d in range(len(sizes))], (1,) * len(sizes)
        dilations = params.get("window_dilation", ones)
        of_operand = params.get("base_dilation", ones)
    fields = zip(places, sizes, dilations, params["window_strides"], params["padding"], of_operand)
    return [
        Window(d, e, (size - 1) * dilation + 1, stride, padding[0], operand != 1)
        for (d, e), size, dilation, stride, padding, operand in fields
    ]


def moving_dims(eqn: Any) -> list[tuple[int, ...]]:
    """The dims that windows move along, of each operand and result of a windowed operation."""
    like = product_of(eqn) or eqn
    if like.primitive.name == CONVOLUTION:
        numbers = like.params["dimension_numbers"]
        return [tuple(spec[2:]) for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)]
    dims = tuple(w.dim for w in windows_of(eqn) if w.moves)
    return [dims] * (len(eqn.invars) + len(eqn.outvars))


def dims_of_features(eqn: Any, tensor: int, dims: Sequence[int | None]) -> Sequence[int | None]:
    """Those of the `dims` of operands and result that can be features of `tensor` devices."""
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    if not any(d is not None and shape[d] % tensor for d, shape in zip(dims, shapes)):
        if eqn.primitive.name in MAXIMA and dims[0] == dims[1]:
            moving = {0, *(w.dim for w in windows_of(eqn) if w.moves)}
            return [None, None] if dims[0] in moving else dims
        if eqn.primitive.name == CONVOLUTION and eqn.params["batch_group_count"] == 1:
            numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
            (outputs, inputs, *_), image = numbers.rhs_spec, numbers.lhs_spec[1]
            columns = [image if groups > 1 else None, outputs, numbers.out_spec[1]]
            if [*dims[1:]] == columns[1:] and (groups == 1 or groups % tensor == 0):
                return columns
            if groups == 1 and [*dims[:2]] == [image, inputs]:
                return [image, inputs, None]
    return [None] * len(dims)


def per_device(
    eqn: Any,
    axes: Sequence[Mapping[int | None, Any]],
    mesh: Mapping[str, int],
    window: Window | None,
) -> Callable[..., jax.Array]:
    """A windowed operation as a function of its operands, manual over the axes of a mesh.

    `axes` are those of the dims of operands and result; `window` has the dims that `seq` shards.
    """
    params, arrays = dict(eqn.params), [*eqn.invars, *eqn.outvars]
    *in_specs, out_specs = [
        PartitionSpec(*(axis_of.get(d) for d in range(len(v.aval.shape))))
        for v, axis_of in zip(arrays, axes, strict=True)
    ]
    reads, makes = (TENSOR in spec for spec in (in_specs[0], out_specs))
    if eqn.primitive.name == CONVOLUTION and reads and makes:
        params["feature_group_count"] //= mesh[TENSOR]
    fill, shards = MAXIMA.get(eqn.primitive.name, 0), mesh.get(SEQ, 1)
    if window:
        at = [w.dim for w in windows_of(eqn)].index(window.dim)
        params["padding"] = (*params["padding"][:at], (0, 0), *params["padding"][at + 1 :])

    def local(x: jax.Array, *rest: jax.Array) -> jax.Array:
        x = _with_neighbours(x, window, shards, fill) if window else x
        y = eqn.primitive.bind(x, *rest, **params)
        return lax.psum(y, TENSOR) if reads and not makes else y

    run = jax.shard_map(
        local,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        axis_names={*mesh},
        check_vma=False,
    )

    def padded(x: jax.Array, *rest: jax.Array) -> jax.Array:
        """Of as many positions on each device as its results need."""
        if window is None:
            return run(x, *rest)
        length, count = x.shape[window.dim], eqn.outvars[0].aval.shape[window.out]
        step = shards * window.stride
        padding = [(0, 0, 0)] * x.ndim
        padding[window.dim] = (0, max(-(-count // shards), -(-length // step)) * step - length, 0)
        x = lax.pad(x, jnp.asarray(fill, x.dtype), padding) if any(map(any, padding)) else x
        return lax.slice_in_dim(run(x, *rest), 0, count, axis=window.out)

    return padded


def _with_neighbours(x: jax.Array, window: Window, shards: int, fill: float) -> jax.Array:
    """A device's positions, with those of others that its windows read; `fill` beyond the ends."""
    length, here, parts = x.shape[window.dim], lax.axis_index(SEQ), []
    first, last = -window.before, length + window.span - window.stride - window.before
    for hops in range(first // length, -(-last // length)):
        start, stop = max(first - hops * length, 0), min(last - hops * length, length)
        part = lax.slice_in_dim(x, start, stop, axis=window.dim)
        if hops:
            pairs = [(i, i - hops) for i in range(shards) if 0 <= i - hops < shards]
            part = lax.ppermute(part, SEQ, pairs)  # zeros where nothing is sent
            sent = (here + hops >= 0) & (here + hops < shards)
            part = jnp.where(sent, part, jnp.asarray(fill, x.dtype)) if fill else part
        parts.append(part)
    return lax.concatenate(parts, window.dim)
