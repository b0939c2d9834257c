"""Windowed operations: convolutions, pooling by maxima, and their derivatives.

XLA partitions these wrongly along a dim that their windows move along (jax 0.12.0.1, with Shardy
and without): the gradient of a convolution's kernel is multiplied by the size of each mesh axis
that shards neither batch nor positions, and that of overlapping maxima is wrong
(`known_jax_bugs.programs`). The gradients of a grouped convolution are wrong as well, or it aborts
("Check failed: ShapeUtil::Compatible"), beside any axis that shards neither samples nor features.

So they run in a `shard_map`, each device on its samples, features and positions. The positions of
neighbours that its windows read are exchanged (a halo). Sums, means and cumulative operations are
right, and stay with the compiler.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxspeed.axes import SEQ, TENSOR
from jaxspeed.jaxpr.traverse import JaxprEqn, product_of

CONVOLUTION = "conv_general_dilated"
MAXIMA = {
    "reduce_window_max": -jnp.inf,
    "reduce_window_min": jnp.inf,
}  # and what they are padded by
# What `jax.grad` and `jax.jvp` of maxima are.
SELECTIONS = ("select_and_scatter_add", "select_and_gather_add")
WINDOWS_SCOPE = "sequence_windows"  # of what exchanges positions
WRONG = (CONVOLUTION, *MAXIMA, *SELECTIONS)

Specs = tuple[tuple[PartitionSpec, ...], PartitionSpec]


@dataclass(frozen=True)
class Window:
    """The windows of an operation along one dim.

    Attributes:
      dim, out: the dim of the operand and of the result.
      length, count: their sizes.
      span: the positions from the first to the last that a window reads.
      stride, before: between windows, and the padding before the first position.
      dilated: whether positions of the operand are dilated (transposed convolutions).
    """

    dim: int
    out: int
    length: int
    count: int
    span: int
    stride: int
    before: int
    dilated: bool

    @property
    def moves(self) -> bool:
        """Whether a result depends on other positions than its own."""
        return self.dilated or (self.span, self.stride, self.before) != (1, 1, 0)

    def shard(self, shards: int) -> tuple[int, int]:
        """Positions of a device's part of the operand and of the result, both padded to them."""
        outs = max(-(-self.count // shards), -(-self.length // (self.stride * shards)))
        return outs * self.stride, outs


def windows_of(eqn: Any) -> list[Window]:
    """The windows of an operation along each dim that has them; none of other operations."""
    conv = product_of(eqn) or eqn
    name, params = conv.primitive.name, conv.params
    if name not in WRONG or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return []
    image, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if name == CONVOLUTION:
        numbers, kernel = params["dimension_numbers"], eqn.invars[1].aval.shape
        places = [*zip(numbers.lhs_spec[2:], numbers.out_spec[2:], strict=True)]
        sizes = [kernel[d] for d in numbers.rhs_spec[2:]]
        dilations, based = params["rhs_dilation"], params["lhs_dilation"]
    else:
        places, sizes = [(d, d) for d in range(len(image))], params["window_dimensions"]
        dilations, based = (params.get(key, (1,) * len(image)) for key in _DILATIONS)
    each = zip(places, sizes, params["window_strides"], params["padding"], dilations, based)
    return [
        Window(d, e, image[d], out[e], (n - 1) * dilation + 1, stride, before, base != 1)
        for (d, e), n, stride, (before, _), dilation, base in each
    ]


_DILATIONS = ("window_dilation", "base_dilation")


def is_grouped(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == CONVOLUTION and any(eqn.params[g] != 1 for g in _GROUPS)


_GROUPS = ("feature_group_count", "batch_group_count")


def moving_dims(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """The dims that windows move along, of each operand and result of a windowed operation."""
    conv = product_of(eqn) or eqn
    arrays = (*eqn.invars, *eqn.outvars)
    if conv.primitive.name == CONVOLUTION:
        numbers = conv.params["dimension_numbers"]
        return [tuple(spec[2:]) for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)]
    return [tuple(w.dim for w in windows_of(eqn) if w.moves)] * len(arrays)


@dataclass(frozen=True)
class Shards:
    """What shards a windowed operation.

    Attributes:
      samples: the axes of the samples, or None.
      seq: the windows along the axis `seq` and its size, or None.
      tensor: the size of the axis `tensor`, where it shards features.
      image, kernel, out: the dim of features that it shards, of each array.
    """

    samples: Any
    seq: tuple[Window, int] | None = None
    tensor: int = 1
    image: int | None = None
    kernel: int | None = None
    out: int | None = None

    @property
    def sums(self) -> bool:
        """Whether each device has a part of the sums over features."""
        return self.kernel is not None and self.out is None


def per_device(eqn: Any, shards: Shards, axes: set[str]) -> Callable[..., jax.Array]:
    """A windowed operation as a function of its operands, manual over `axes`."""
    params = dict(eqn.params)
    conv = eqn.primitive.name == CONVOLUTION
    numbers: Any = params["dimension_numbers"] if conv else None
    if conv and shards.image is not None and shards.out is not None:
        params["feature_group_count"] //= shards.tensor
    fill = MAXIMA.get(eqn.primitive.name, 0)
    if shards.seq:
        window, count = shards.seq
        at = numbers.lhs_spec[2:].index(window.dim) if conv else window.dim
        padding = params["padding"]
        params["padding"] = tuple((0, 0) if i == at else p for i, p in enumerate(padding))

    def spec(v: Any, samples: int | None, seq: int | None, features: int | None) -> PartitionSpec:
        of_dim = {samples: shards.samples, features: TENSOR}
        of_dim |= {seq: SEQ} if shards.seq else {}
        return PartitionSpec(*(of_dim.get(d) for d in range(len(v.aval.shape))))

    position = (window.dim, window.out) if shards.seq else (None, None)
    image, *kernel = eqn.invars
    batch = (numbers.lhs_spec[0], numbers.out_spec[0]) if conv else (0, 0)
    in_specs = (
        spec(image, batch[0], position[0], shards.image),
        *(spec(v, None, None, shards.kernel) for v in kernel),
    )

    def local(x: jax.Array, *rest: jax.Array) -> jax.Array:
        if shards.seq:
            x = _with_neighbours(x, window, count, fill)
        y = eqn.primitive.bind(x, *rest, **params)
        return lax.psum(y, TENSOR) if shards.sums else y

    run = jax.shard_map(
        local,
        in_specs=in_specs,
        out_specs=spec(eqn.outvars[0], batch[1], position[1], shards.out),
        axis_names=axes,
        check_vma=False,
    )
    if not shards.seq:
        return run
    length, outs = window.shard(count)
    if (count * length, count * outs) == (window.length, window.count):
        return run

    def padded(x: jax.Array, *rest: jax.Array) -> jax.Array:
        more = [(0, 0, 0)] * x.ndim
        more[window.dim] = (0, count * length - window.length, 0)
        y = run(lax.pad(x, jnp.asarray(fill, x.dtype), more), *rest)
        return lax.slice_in_dim(y, 0, window.count, axis=window.out)

    return padded


def _with_neighbours(x: jax.Array, window: Window, devices: int, fill: float) -> jax.Array:
    """A device's positions, with those of others that its windows read; `fill` beyond the ends."""
    length = x.shape[window.dim]
    first, last = -window.before, length + window.span - window.stride - window.before
    here, parts = lax.axis_index(SEQ), []
    for hops in range(math.floor(first / length), math.ceil(last / length)):
        start, stop = max(first - hops * length, 0), min(last - hops * length, length)
        part = lax.slice_in_dim(x, start, stop, axis=window.dim)
        if hops:
            pairs = [(i, i - hops) for i in range(devices) if 0 <= i - hops < devices]
            part = lax.ppermute(part, SEQ, pairs)  # zeros where nothing is sent
            if fill:
                outside = (here + hops < 0) | (here + hops >= devices)
                part = jnp.where(outside, jnp.asarray(fill, x.dtype), part)
        parts.append(part)
    return lax.concatenate(parts, window.dim) if len(parts) > 1 else parts[0]


def batch_dim(eqn: Any) -> int | None:
    """The dim of the operand along which a device can compute its part."""
    if eqn.primitive.name != CONVOLUTION:
        moving = {w.dim for w in windows_of(eqn) if w.moves}
        return None if 0 in moving else 0
    of_batch = eqn.params["batch_group_count"] == 1
    return eqn.params["dimension_numbers"].lhs_spec[0] if of_batch else None


def shards_of_features(
    eqn: Any, tensor: int, sharded: Sequence[int | None]
) -> dict[str, int | None]:
    """The dims of features for `Shards`, of the `sharded` dims of operands and result."""
    image, *kernel, out = sharded
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name != CONVOLUTION:
        moving = {0, *(w.dim for w in windows_of(eqn) if w.moves)}
        fits = image not in (None, *moving) and image == out and shapes[0][image] % tensor == 0
        return {"image": image, "out": out} if fits else {}
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    features, (outputs, inputs, *_) = numbers.lhs_spec[1], numbers.rhs_spec
    if eqn.params["batch_group_count"] != 1:
        return {}
    if (kernel, out) == ([outputs], numbers.out_spec[1]) and shapes[1][outputs] % tensor == 0:
        if groups == 1:
            return {"kernel": outputs, "out": out}
        if groups % tensor == 0:
            return {"image": features, "kernel": outputs, "out": out}
    if groups == 1 and (image, kernel) == (features, [inputs]) and shapes[1][inputs] % tensor == 0:
        return {"image": image, "kernel": inputs}
    return {}
