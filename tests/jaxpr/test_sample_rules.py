"""The rules of samples against JAX itself: what they say of an operation is found by executing it.

An operation is drawn with its parameters, its operands and which of their dims is that of samples.
Where the rules say that a result is of samples, a sum over them or independent of them, the
operation on the whole equals that on the parts, joined, added or taken once, and so do its
derivatives. What they say mixes samples is not executed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxspeed.jaxpr.dim_relations import RULES
from jaxspeed.jaxpr.primitives import (
    CONSTRAINT,
    ELEMENTWISE,
    GROUPED_PRODUCT,
    MORE_ELEMENTWISE,
    OF_MATRICES,
    SAME,
    SCATTERS,
)
from jaxspeed.jaxpr.sample_independence import Analysis, UnlikeTracesError
from jaxspeed.jaxpr.sample_values import SampleKind, SampleValue
from jaxspeed.ops.token_order import in_token_order
from tests.support import covering

N = -1  # in a shape the number of samples; -2: two elements for each
Draw = Callable[..., Any]
Shape = tuple[int, ...]
RATIOS = [(2, 2), (2, 3), (3, 2)]  # samples of a part, parts


class Operand(NamedTuple):
    """An array.

    Attributes:
      shape: with N.
      values: how its elements are made of standard normal ones.
      kinds: what it may be: of samples, the same for each, a sum over samples, or zeros.
    """

    shape: Shape
    values: Callable[[np.ndarray], np.ndarray] = lambda x: x
    kinds: Sequence[str] = ()


class Operation(NamedTuple):
    """A function of arrays, for each number of samples."""

    of: Callable[[int], Callable[..., Any]]
    operands: Sequence[Operand]


def at(shape: Shape, n: int) -> Shape:
    return tuple(d if d >= 0 else -d * n for d in shape)


def some_shape(draw: Draw, least: int = 1, most: int = 3, marked: bool | None = None) -> Shape:
    sizes = draw(st.lists(st.integers(1, 3), min_size=least, max_size=most))
    if sizes and (marked or (marked is None and draw(st.integers(0, 4)))):
        sizes[draw(st.integers(0, len(sizes) - 1))] = draw(st.sampled_from([N, N, 2 * N]))
    return tuple(sizes)


def one_of(draw: Draw, options: Sequence[Any]) -> Any:
    return draw(st.sampled_from(list(options)))


def some_dims(draw: Draw, rank: int) -> tuple[int, ...]:
    return tuple(sorted(draw(st.sets(st.integers(0, max(rank - 1, 0)), max_size=rank))))


def fixed(function: Callable[..., Any], *operands: Operand) -> Operation:
    return Operation(lambda n: function, operands)


def positive(x: np.ndarray) -> np.ndarray:
    return np.abs(x) + 0.5


def within(x: np.ndarray) -> np.ndarray:
    return np.tanh(x) * 0.9


def integers(x: np.ndarray) -> np.ndarray:
    return (3 * x).astype(np.int64)


def indices(size: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: (1000 * np.abs(x)).astype(np.int64) % size


# -- element-wise ----------------------------------------------------------------------------------

BITS = {"and", "or", "xor", "not", "population_count", "clz", "shift_left", "mulhi"}
BITS |= {"shift_right_arithmetic", "shift_right_logical"}
POSITIVE = set(
    """log log2 sqrt rsqrt lgamma digamma pow igamma igammac igamma_grad_a
    regularized_incomplete_beta zeta polygamma cbrt""".split()  # noqa: SIM905
)
DOMAINS = {
    **dict.fromkeys(("acos", "asin", "atanh", "erf_inv", "one_minus_square"), within),
    **dict.fromkeys(POSITIVE, positive),
    "acosh": lambda x: positive(x) + 1,
}
BINARY = set(
    """add sub mul div rem max min pow atan2 nextafter eq ne lt le gt ge complex igamma igammac zeta
    polygamma igamma_grad_a and or xor shift_left mulhi shift_right_arithmetic
    shift_right_logical polynomial""".split()  # noqa: SIM905
)
# Made otherwise than by a function of that name.
CALLED: dict[str, Callable[..., Any]] = {
    "not": lax.bitwise_not, "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "round": lambda x: lax.round(x),
    "convert_element_type": lambda x: lax.convert_element_type(x, jnp.float32),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 20),
    "copy": jnp.copy,
    "stop_gradient": lax.stop_gradient,
    "real": lambda x: lax.real(lax.complex(x, x)), "imag": lambda x: lax.imag(lax.complex(x, x)),
    "conj": lambda x: lax.real(lax.conj(lax.complex(x, x))),
    "complex": lambda x, y: lax.real(lax.complex(x, y)),
    "add_any": lambda x, y: jax.vjp(lambda x: (x, x), x)[1]((x, y))[0],
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.int64),
    "clamp": lambda x, y, z: lax.clamp(lax.min(x, z), y, lax.max(x, z)),
    "select_n": lambda x, y, z: lax.select(x > 0, y, z),
    "polynomial": lambda x, y: lax.polynomial(x, (y, 2 * x)),
    "regularized_incomplete_beta": lambda a, b, x: lax.betainc(a, b, x / (1 + x)),
}  # fmt: skip
TERNARY = {"clamp", "select_n", "regularized_incomplete_beta"}
NOT_CALLED = {"eq_to", "le_to", "lt_to", "zeros_like"}
NAMES = sorted((ELEMENTWISE | MORE_ELEMENTWISE | {"reduce_precision"}) - NOT_CALLED)


def element_wise(draw: Draw) -> Operation:
    name = one_of(draw, NAMES)
    function = CALLED.get(name) or getattr(lax, name)
    count = 2 if name in BINARY | {"add_any"} else 3 if name in TERNARY else 1
    values = integers if name in BITS else DOMAINS.get(name, lambda x: x)
    shape = some_shape(draw)
    if name in ("polygamma", "zeta"):
        function = lambda x, y: CALLED.get(name, getattr(lax, name))(1 + lax.round(x), y + 1)  # noqa: E731
    return fixed(function, *[Operand(shape, values)] * count)


# -- layout ----------------------------------------------------------------------------------------


def transposed(draw: Draw) -> Operation:
    shape = some_shape(draw)
    order = draw(st.permutations(range(len(shape))))
    return fixed(lambda x: lax.transpose(x, order), Operand(shape))


def squeezed(draw: Draw) -> Operation:
    shape = some_shape(draw)
    gone = [d for d in some_dims(draw, len(shape)) if shape[d] == 1]
    return fixed(lambda x: lax.squeeze(x, gone), Operand(shape))


def spread(draw: Draw) -> Operation:
    shape = some_shape(draw)
    places = some_dims(draw, len(shape))
    small = tuple(shape[d] if draw(st.booleans()) else 1 for d in places)
    return Operation(
        lambda n: lambda x: lax.broadcast_in_dim(x, at(shape, n), places), [Operand(small)]
    )


def reshaped(draw: Draw) -> Operation:
    """Dims of equal parts, folded in two ways."""
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 3, N]), min_size=1, max_size=4))
    primes = [p if p != N or i == primes.index(N) else 2 for i, p in enumerate(primes)]

    def folded() -> Shape:
        ends = [i + 1 for i in range(len(primes) - 1) if draw(st.booleans())]
        pairs = zip([0, *ends], [*ends, len(primes)], strict=True)
        return tuple(int(np.prod(primes[a:b])) for a, b in pairs)

    old, new = folded(), folded()
    return Operation(lambda n: lambda x: lax.reshape(x, at(new, n)), [Operand(old)])


def tiled(draw: Draw) -> Operation:
    shape = some_shape(draw)
    reps = [draw(st.integers(1, 2)) for _ in shape]
    return fixed(lambda x: lax.tile(x, reps), Operand(shape))


def barred(draw: Draw) -> Operation:
    how = one_of(draw, [lax.optimization_barrier, lambda xs: jax.device_put(xs)])
    return fixed(lambda x, y: how((x, y)), Operand(some_shape(draw)), Operand(some_shape(draw)))


# -- parts of arrays -------------------------------------------------------------------------------

EXTENTS: list[Callable[[int], tuple[int, int]]] = [  # (start, limit) of a dim
    lambda size: (0, size),
    lambda size: (0, size),
    lambda size: (1, size),
    lambda size: (0, size - 1),
    lambda size: (size - 1, size),
    lambda size: (0, 1),
    lambda size: (0, size // 2),
]


def extents(draw: Draw, shape: Shape) -> Callable[[int], list[tuple[int, int]]]:
    """The bounds of a part of an array; that of a dim of size 1 is all of it."""
    rules = [one_of(draw, EXTENTS) for _ in shape]

    def of(n: int) -> list[tuple[int, int]]:
        pairs = zip(rules, at(shape, n), strict=True)
        return [rule(size) if size > 1 else (0, 1) for rule, size in pairs]

    return of


def sliced(draw: Draw) -> Operation:
    shape = some_shape(draw)
    part, strides = extents(draw, shape), [draw(st.integers(1, 2)) for _ in shape]
    return Operation(
        lambda n: lambda x: lax.slice(x, *zip(*part(n), strict=True), strides), [Operand(shape)]
    )


def dynamically_sliced(draw: Draw) -> Operation:
    shape = some_shape(draw)
    part = extents(draw, shape)
    return Operation(
        lambda n: (
            lambda x: lax.dynamic_slice(x, [a for a, _ in part(n)], [b - a for a, b in part(n)])
        ),
        [Operand(shape)],
    )


def updated(draw: Draw) -> Operation:
    """The update is of samples if it covers their dim."""
    shape = some_shape(draw)
    part = extents(draw, shape)
    small = tuple(
        d if (b - a, y - x) == (m, k) else b - a
        for d, (a, b), (x, y), m, k in zip(
            shape, part(2), part(3), at(shape, 2), at(shape, 3), strict=True
        )
    )
    return Operation(
        lambda n: lambda x, y: lax.dynamic_update_slice(x, y, [a for a, _ in part(n)]),
        [Operand(shape), Operand(small)],
    )


def split(draw: Draw) -> Operation:
    shape = some_shape(draw)
    dim = draw(st.integers(0, len(shape) - 1))

    def of(n: int) -> Callable[..., Any]:
        size = at(shape, n)[dim]
        return lambda x: lax.split(x, (1, size - 1) if size > 1 else (1,), axis=dim)

    return Operation(of, [Operand(shape)])


def joined(draw: Draw) -> Operation:
    shape = some_shape(draw)
    dim = draw(st.integers(0, len(shape) - 1))
    more = tuple(one_of(draw, [1, d]) if i == dim else d for i, d in enumerate(shape))
    return fixed(lambda x, y: lax.concatenate([x, y], dim), Operand(shape), Operand(more))


def stacked(draw: Draw) -> Operation:
    shape = some_shape(draw)
    dim = draw(st.integers(0, len(shape)))
    return fixed(lambda x, y: jnp.stack([x, y], dim), Operand(shape), Operand(shape))


def unstacked(draw: Draw) -> Operation:
    shape = some_shape(draw)
    dim = draw(st.integers(0, len(shape) - 1))
    return fixed(lambda x: jnp.unstack(x, axis=dim), Operand(shape))


def padded(draw: Draw) -> Operation:
    shape = some_shape(draw)
    some = [(0, 0, 0), (0, 0, 0), (1, -1, 0), (1, 0, 0), (0, 0, 1), (-1, 1, 0)]
    config = [one_of(draw, some if d != 1 else some[:1]) for d in shape]
    return fixed(lambda x, y: lax.pad(x, y, config), Operand(shape), Operand(()))


# -- along dims ------------------------------------------------------------------------------------


def reduced(how: Callable[..., Any]) -> Callable[[Draw], Operation]:
    def drawn(draw: Draw) -> Operation:
        shape = some_shape(draw)
        axes = some_dims(draw, len(shape))
        values = (lambda x: x > 0) if "and" in how.__name__ or "or" in how.__name__ else positive
        return fixed(lambda x: how(x, axes), Operand(shape, values))

    return drawn


def reduced_together(draw: Draw) -> Operation:
    shape = some_shape(draw)
    axes = some_dims(draw, len(shape))

    def least(a: Any, b: Any) -> Any:
        return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])

    return fixed(lambda x, y: lax.reduce((x, y), (9.0, -9.0), least, axes), *[Operand(shape)] * 2)


def along_one(how: Callable[[Any, int], Any]) -> Callable[[Draw], Operation]:
    def drawn(draw: Draw) -> Operation:
        shape = some_shape(draw)
        dim = draw(st.integers(0, len(shape) - 1))
        return fixed(lambda x: how(x, dim), Operand(shape))

    return drawn


def accumulated(how: Callable[..., Any]) -> Callable[[Draw], Operation]:
    def drawn(draw: Draw) -> Operation:
        reverse = draw(st.booleans())
        return along_one(lambda x, dim: how(x, dim, reverse))(draw)

    return drawn


def ordered(draw: Draw) -> Operation:
    shape = some_shape(draw)
    dim = draw(st.integers(0, len(shape) - 1))
    return fixed(lambda x, y: lax.sort((x, y), dimension=dim, num_keys=1), *[Operand(shape)] * 2)


def turned_round(draw: Draw) -> Operation:
    shape = some_shape(draw)
    dims = some_dims(draw, len(shape))
    return fixed(lambda x: lax.rev(x, dims), Operand(shape))


def in_zigzag(draw: Draw) -> Operation:
    dim, zigzag = draw(st.integers(0, 1)), draw(st.booleans())
    shape = one_of(draw, [(4 * N, 4), (4, 4 * N), (4, 8)])
    return fixed(lambda x: in_token_order(x, dim, 2, zigzag=zigzag), Operand(shape))


def windowed(how: Any) -> Callable[[Draw], Operation]:
    def drawn(draw: Draw) -> Operation:
        shape = some_shape(draw)
        window = [draw(st.integers(1, 2)) if d != 1 else 1 for d in shape]
        strides = [draw(st.integers(1, 2)) for _ in shape]
        padding = one_of(draw, ["SAME", "VALID"])
        start = {lax.add: 0.0, lax.max: -np.inf, lax.min: np.inf}.get(how, 1.0)
        return fixed(
            lambda x: lax.reduce_window(
                x, start, how or (lambda a, b: a * b), window, strides, padding
            ),
            Operand(shape),
        )

    return drawn


def of_matrices(name: str) -> Callable[[Draw], Operation]:
    def drawn(draw: Draw) -> Operation:
        lead = some_shape(draw, 1, 2) if draw(st.booleans()) else (N,)
        size = one_of(draw, [2, 3, N])
        square = Operand((*lead, size, size) if N not in lead else (*lead, 2, 2))

        def positive_definite(x: Any) -> Any:
            return x @ x.swapaxes(-1, -2) + 3 * jnp.eye(x.shape[-1])

        if name == "triangular_solve":
            return fixed(
                lambda a, b: lax.linalg.triangular_solve(
                    positive_definite(a), b, left_side=True, lower=True
                ),
                square, square,
            )  # fmt: skip
        functions: dict[str, Callable[[Any], Any]] = {
            "cholesky": lambda x: lax.linalg.cholesky(positive_definite(x)),
            "lu": lambda x: lax.linalg.lu(positive_definite(x))[0],
            "qr": lambda x: lax.linalg.qr(positive_definite(x))[1],
            "eigh": lambda x: lax.linalg.eigh(positive_definite(x))[1],
            "svd": lambda x: lax.linalg.svd(x, compute_uv=False)[0],
        }
        return fixed(functions[name], square)

    return drawn


def transformed(draw: Draw) -> Operation:
    shape = some_shape(draw)
    return fixed(lambda x: jnp.fft.fft(x).real, Operand(shape))


# -- products --------------------------------------------------------------------------------------


def multiplied(draw: Draw) -> Operation:
    """Any dims are contracted, shared or free, and stand anywhere."""
    sizes = some_shape(draw, 2, 4)
    roles = [one_of(draw, ["sum", "batch", "lhs", "rhs"]) for _ in sizes]

    def side(own: str) -> list[int]:
        return draw(
            st.permutations([d for d, role in enumerate(roles) if role in ("sum", "batch", own)])
        )

    lhs, rhs = side("lhs"), side("rhs")
    numbers = tuple(
        tuple([of.index(d) for d, r in enumerate(roles) if r == role] for of in (lhs, rhs))
        for role in ("sum", "batch")
    )
    operands = [Operand(tuple(sizes[d] for d in of)) for of in (lhs, rhs)]
    return fixed(lambda x, y: lax.dot_general(x, y, numbers), *operands)


def convolved(draw: Draw) -> Operation:
    """The samples are a batch, positions or features."""
    place = one_of(draw, ["batch", "batch", "position", "features"])
    groups = one_of(draw, [(1, 1), (2, 1), (1, 2)])
    batch, seq, features = 2 * groups[1], 3, 2
    batch = 2 * N if place == "batch" else batch
    seq = N if place == "position" else seq
    each = features // groups[0]
    if place == "features" and groups == (1, 1):
        features = each = N
    how = {
        "window_strides": (draw(st.integers(1, 2)),),
        "padding": one_of(draw, ["SAME", "VALID"]),
        "dimension_numbers": ("NWC", "WIO", "NWC"),
        "feature_group_count": groups[0],
        "batch_group_count": groups[1],
    }
    width = draw(st.integers(1, 2))
    return fixed(
        lambda x, k: lax.conv_general_dilated(x, k, **how),
        Operand((batch, seq, features)),
        Operand((width, each, 4)),
    )


# -- lookups and updates by indices ----------------------------------------------------------------


def looked_up(draw: Draw) -> Operation:
    """Rows and windows of any dims of a table, with or without dims of a batch."""
    table = some_shape(draw, 2, 3)
    batched = draw(st.booleans())
    dims = [d for d in range(int(batched), len(table)) if draw(st.booleans())]
    rows = (table[0], *some_shape(draw, 0, 1)) if batched else some_rows(draw)
    whole = [draw(st.booleans()) for _ in table]
    offsets = len(table) - len(dims) - batched
    numbers = lax.GatherDimensionNumbers(
        offset_dims=some_places(draw, len(rows) + offsets, offsets),
        collapsed_slice_dims=tuple(dims),
        start_index_map=tuple(dims),
        operand_batching_dims=(0,) if batched else (),
        start_indices_batching_dims=(0,) if batched else (),
    )
    mode = one_of(draw, ["clip", "fill"])

    def of(n: int) -> Callable[..., Any]:
        sizes = [
            1 if d in dims or (batched and d == 0) or not whole[d] else size
            for d, size in enumerate(at(table, n))
        ]
        return lambda t, i: lax.gather(t, i, numbers, sizes, mode=mode)

    return Operation(of, [Operand(table), Operand((*rows, len(dims)), indices(3))])


def scattered(how: Callable[..., Any]) -> Callable[[Draw], Operation]:
    def drawn(draw: Draw) -> Operation:
        table = some_shape(draw, 2, 3)
        batched = draw(st.booleans())
        dims = [d for d in range(int(batched), len(table)) if draw(st.booleans())]
        # What is written twice at one place is not defined: then one row each.
        rows: Shape = (table[0],) if batched else some_rows(draw) if how is not lax.scatter else ()
        kept = [d for d in range(int(batched), len(table)) if d not in dims]
        windows = [one_of(draw, [table[d], table[d], 1]) for d in kept]
        if any(n < 0 for n in rows):  # the updates have one dim of samples
            windows = [max(n, 1) for n in windows]
        places = some_places(draw, len(rows) + len(windows), len(windows))
        left, inner = list(rows), list(windows)
        shape = [
            inner.pop(0) if d in places else left.pop(0) for d in range(len((*rows, *windows)))
        ]
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=places,
            inserted_window_dims=tuple(dims),
            scatter_dims_to_operand_dims=tuple(dims),
            operand_batching_dims=(0,) if batched else (),
            scatter_indices_batching_dims=(0,) if batched else (),
        )
        return fixed(
            lambda t, i, u: how(t, i, u, numbers, mode="clip"),
            Operand(table),
            Operand((*rows, len(dims)), indices(3)),
            Operand(tuple(shape)),
        )

    return drawn


def some_rows(draw: Draw) -> Shape:
    return some_shape(draw, 1, 2) if draw(st.booleans()) else ()


def some_places(draw: Draw, of: int, count: int) -> tuple[int, ...]:
    return tuple(sorted(draw(st.permutations(range(of)))[:count]))


def by_number(draw: Draw) -> Operation:
    """x[jnp.arange(n), i] and updates: by the numbers of the samples, or by others."""
    shape = (N, 3, *some_shape(draw, 0, 1, marked=False))
    shift, update = one_of(draw, [0, 0, 1]), draw(st.booleans())

    def of(n: int) -> Callable[..., Any]:
        def numbered(x: Any, i: Any) -> Any:
            rows = (jnp.arange(n) + shift) % n if shift else jnp.arange(n)
            return x.at[rows, i].add(1.0) if update else x[rows, i]

        return numbered

    return Operation(of, [Operand(shape), Operand((N,), indices(3))])


# -- programs --------------------------------------------------------------------------------------


def looped(draw: Draw) -> Operation:
    """Loops over samples and over positions, branches and loops in a vmap."""
    programs: list[Callable[..., Any]] = [
        lambda x, w: lax.scan(lambda c, r: (c + (r * w).sum(), r * c), 0.0, x),
        lambda x, w: lax.scan(lambda c, r: (c + jnp.sin(r * w), None), jnp.zeros_like(w), x)[0],
        lambda x, w: lax.scan(lambda c, r: (c, c * r), w, x)[1],
        lambda x, w: lax.scan(lambda c, r: (c * w.sum() + r, c), x[:, 0], x.T),
        lambda x, w: lax.map(lambda r: jnp.sort(r) * w, x),
        lambda x, w: jax.vmap(
            lambda r: lax.while_loop(lambda r: r.max() > 0.1, lambda r: r / 2, r)
        )(x),
        lambda x, w: jax.vmap(lambda r: lax.cond(r.sum() > 0, jnp.sin, lambda r: r * w, r))(x),
        lambda x, w: lax.while_loop(lambda x: x.max() > 0.1, lambda x: x / 2, x),
        lambda x, w: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + i, x),
        lambda x, w: lax.fori_loop(0, 3, lambda i, c: c + x.sum(0), w),
        lambda x, w: jax.vmap(
            lambda t: lax.while_loop(
                lambda c: c[0] < t, lambda c: (c[0] + 1, c[1] * 2), (0.0, w.sum())
            )
        )(jnp.arange(len(x))),
        lambda x, w: (jax.grad(lambda x: jnp.tanh(x @ w).sum())(x) ** 2).sum(1),
        lambda x, w: jax.grad(lambda w: jnp.tanh(x @ w).sum())(w),
        lambda x, w: jax.vmap(jax.grad(lambda w, r: jnp.tanh(r @ w)), (None, 0))(w, x),
        lambda x, w: jax.vmap(
            lambda r: jnp.linalg.solve(jnp.outer(r, r) + 3 * jnp.eye(3), r * w)
        )(x),
        lambda x, w: jnp.linalg.solve(x.T @ x + 3 * jnp.eye(3), w),
        lambda x, w: jax.jvp(lambda x: jnp.tanh(x @ w).sum(), (x,), (jnp.ones_like(x),))[1],
    ]  # fmt: skip
    return fixed(one_of(draw, programs), Operand((N, 3)), Operand((3,)))


# Of the gradient that arrives [samples, 3], the operand and a parameter [3].
BACKWARD: list[Callable[..., Any]] = [
    lambda g, x, w: g * w,
    lambda g, x, w: g * jnp.cos(x),
    lambda g, x, w: g - g.mean(1, keepdims=True),
    lambda g, x, w: jnp.where(x > 0, g, 0.0),
    lambda g, x, w: g / (1 + jnp.abs(x).max(1, keepdims=True)),
    lambda g, x, w: g[:, ::-1],
    lambda g, x, w: g - g.mean(0),
    lambda g, x, w: jnp.roll(g, 1, 0),
    lambda g, x, w: jnp.flip(g, 0),
    lambda g, x, w: jnp.clip(g, -0.1, 0.1),
    lambda g, x, w: g / (1e-3 + jnp.linalg.norm(g)),
    lambda g, x, w: jnp.tanh(g),
    lambda g, x, w: g * len(x),
    lambda g, x, w: g * x[:1],
    lambda g, x, w: g + w,
    lambda g, x, w: lax.dynamic_update_slice(g, w[None], (0, 0)),
    lambda g, x, w: jnp.cumsum(g, 0),
]
OF_PARAMETER: list[Callable[..., Any]] = [
    lambda g, x, w: (g * x).sum(0),
    lambda g, x, w: jnp.zeros_like(w),
    lambda g, x, w: g.sum(0) * w,
    lambda g, x, w: w,
    lambda g, x, w: jnp.tanh((g * x).sum(0)),
    lambda g, x, w: g.mean(0),
    lambda g, x, w: (g * x).max(0),
]


def with_derivative(draw: Draw) -> Operation:
    """A function with a derivative of its own, by either rule."""
    back, back_w = one_of(draw, BACKWARD), one_of(draw, OF_PARAMETER)
    kind = one_of(draw, ["vjp", "jvp"])

    def value(x: Any, w: Any) -> Any:
        return jnp.sin(x) * w

    if kind == "vjp":
        of = jax.custom_vjp(value)
        of.defvjp(
            lambda x, w: (value(x, w), (x, w)),
            lambda saved, g: (back(g, *saved), back_w(g, *saved)),
        )
        return fixed(of, Operand((N, 3)), Operand((3,)))
    linear = one_of(draw, [f for i, f in enumerate(BACKWARD) if i not in (9, 10, 11, 14, 15)])
    of_jvp = jax.custom_jvp(value)
    of_jvp.defjvp(lambda p, t: (value(*p), linear(t[0], *p) + jnp.sin(p[0]) * t[1]))
    return fixed(of_jvp, Operand((N, 3)), Operand((3,)))


DRAWN: dict[str, Callable[[Draw], Operation]] = {
    "element-wise": element_wise,
    "transpose": transposed,
    "squeeze": squeezed,
    "broadcast_in_dim": spread,
    "reshape": reshaped,
    "tile": tiled,
    "optimization_barrier": barred,
    "slice": sliced,
    "dynamic_slice": dynamically_sliced,
    "dynamic_update_slice": updated,
    "split": split,
    "concatenate": joined,
    "stack": stacked,
    "unstack": unstacked,
    "pad": padded,
    "reduce_sum": reduced(lax.reduce_sum),
    "reduce_prod": reduced(lax.reduce_prod),
    "reduce_max": reduced(lax.reduce_max),
    "reduce_min": reduced(lax.reduce_min),
    "reduce_and": reduced(lax.reduce_and),
    "reduce_or": reduced(lax.reduce_or),
    "reduce_xor": reduced(lax.reduce_xor),
    "reduce": reduced_together,
    "argmax": along_one(lambda x, dim: lax.argmax(x, dim, np.int32)),
    "argmin": along_one(lambda x, dim: lax.argmin(x, dim, np.int32)),
    "reduce_window_sum": windowed(lax.add),
    "reduce_window_max": windowed(lax.max),
    "reduce_window_min": windowed(lax.min),
    "reduce_window": windowed(None),
    "cumsum": accumulated(lax.cumsum),
    "cumprod": accumulated(lax.cumprod),
    "cummax": accumulated(lax.cummax),
    "cummin": accumulated(lax.cummin),
    "cumlogsumexp": accumulated(lax.cumlogsumexp),
    "sort": ordered,
    "rev": turned_round,
    "top_k": along_one(lambda x, dim: lax.top_k(jnp.moveaxis(x, dim, -1), 1)),
    "token_order": in_zigzag,
    **{name: of_matrices(name) for name in sorted(OF_MATRICES)},
    "fft": transformed,
    "dot_general": multiplied,
    "conv_general_dilated": convolved,
    "gather": looked_up,
    "scatter": scattered(lax.scatter),
    "scatter-add": scattered(lax.scatter_add),
    "scatter-sub": scattered(lax.scatter_sub),
    "scatter-mul": scattered(lax.scatter_mul),
    "scatter-min": scattered(lax.scatter_min),
    "scatter-max": scattered(lax.scatter_max),
    "by number": by_number,
    "programs": looped,
    "derivatives": with_derivative,
}


def test_every_rule_is_executed():
    """Except for casts and constraints that are the same, and what is of tokens alone."""
    beside = {GROUPED_PRODUCT, "device_put"}
    assert set(RULES) - beside <= set(DRAWN) and set(SCATTERS) | OF_MATRICES <= set(DRAWN)
    assert {CONSTRAINT, "reshard", "name"} == SAME - set(NAMES)


# -- execution -------------------------------------------------------------------------------------


class Given(NamedTuple):
    """An operand: its value in the analysis, and its arrays."""

    value: SampleValue
    arrays: list[np.ndarray]  # those of the parts, or one of all
    whole: Callable[[Sequence[Any]], Any]


def realized(draw: Draw, operand: Operand, own: int, parts: int) -> Given:
    """What an operand is, at random."""
    marked = next((d for d, size in enumerate(operand.shape) if size < 0), None)
    is_real = operand.values(np.ones(1)).dtype.kind == "f"
    kinds = ["samples"] * 4 + ["same"] if marked is not None else ["free"] * 4
    kinds += ["zero"] if is_real else []
    kinds += ["sum"] if is_real and marked is None else []
    kind = one_of(draw, kinds)
    degree = one_of(draw, [0, 0, 0, 1, -1]) if is_real and kind != "zero" else 0
    power = float(parts) ** degree
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    shape, all_dims = at(operand.shape, own), frozenset(range(len(operand.shape)))

    def array() -> np.ndarray:
        return operand.values(rng.normal(size=shape))

    def joined(xs: Sequence[Any]) -> Any:
        every = xs if kind == "samples" else [xs[0]] * parts
        whole = xs[0] if marked is None else jnp.concatenate(every, marked)
        return (sum(xs) if kind == "sum" else whole) * (power if degree else 1)

    if kind in ("samples", "sum"):
        value = (
            SampleValue(SampleKind.SAMPLES, marked, degree)
            if kind == "samples"
            else SampleValue(SampleKind.SUM, None, degree)
        )
        return Given(value, [array() for _ in range(parts)], joined)
    one = np.zeros(shape) if kind == "zero" else array()
    if marked is not None:  # the same for all samples
        one = np.take(one, [0] * shape[marked], marked)
    varies = all_dims - {marked}
    value = SampleValue(SampleKind.FREE, None, degree, varies, zero=kind == "zero")
    return Given(value, [one], joined)


def combined(values: Sequence[SampleValue], of_parts: list[list[Any]], ratio: float) -> list[Any]:
    """The results on the whole that the rules claim; None where they claim none."""
    found: list[Any] = []
    for i, value in enumerate(values):
        each = [outs[i] for outs in of_parts]
        power = ratio**value.degree
        if value.kind is SampleKind.SAMPLES:
            found.append(jnp.concatenate(each, value.dim))
        elif value.kind is SampleKind.SUM:
            found.append(sum(each))
        else:
            found.append(each[0] if value.kind is SampleKind.FREE else None)
        if found[-1] is not None and value.degree:
            found[-1] = found[-1] * power
    return found


def claims(operation: Operation, given_: Sequence[Given], counts: tuple[int, int]) -> Any:
    """What the rules say of each result; None if the programs do not correspond."""
    shapes = [
        [jax.ShapeDtypeStruct(at(o.shape, n), g.arrays[0].dtype)
         for o, g in zip(operation.operands, given_, strict=True)]
        for n in counts
    ]  # fmt: skip
    pair = [jax.make_jaxpr(operation.of(n))(*s) for n, s in zip(counts, shapes, strict=True)]
    analysis = Analysis(counts, frozenset())
    consts = map(analysis.constant, pair[0].consts, pair[1].consts)
    try:
        return analysis.run(pair[0].jaxpr, pair[1].jaxpr, [*consts, *(g.value for g in given_)])
    except UnlikeTracesError:
        return None


ACCEPTED: dict[str, int] = {}


def check(name: str, draw: Draw) -> None:
    operation = DRAWN[name](draw)
    own, parts = one_of(draw, RATIOS)
    given_ = [realized(draw, operand, own, parts) for operand in operation.operands]
    values = claims(operation, given_, (own, own * parts))
    if values is None or all(v.kind is SampleKind.MIXED for v in values):
        return
    ACCEPTED[name] = ACCEPTED.get(name, 0) + 1
    small, large = operation.of(own), operation.of(own * parts)
    inputs = [g.arrays for g in given_]

    def constant(inputs: list[list[Any]]) -> list[list[Any]]:
        """Zeros of a program have no derivative."""
        pairs = zip(given_, inputs, strict=True)
        return [lax.stop_gradient(xs) if g.value.zero else xs for g, xs in pairs]

    def whole(inputs: list[list[Any]]) -> list[Any]:
        pairs = zip(given_, inputs, strict=True)
        return jax.tree.leaves(large(*(g.whole(xs) for g, xs in pairs)))

    def by_parts(inputs: list[list[Any]]) -> list[Any]:
        each = [[xs[min(j, len(xs) - 1)] for xs in inputs] for j in range(parts)]
        return combined(values, [jax.tree.leaves(small(*xs)) for xs in each], float(parts))

    def claimed(outs: list[Any], claim: list[Any]) -> list[tuple[Any, Any]]:
        """Pairs of results; of what is independent of the batch, the first of a growing dim."""
        pairs = []
        for a, b, v in zip(outs, claim, values, strict=True):
            if b is None or (v.kind is SampleKind.FREE and a.shape != b.shape and v.varies):
                continue
            pairs.append((a[tuple(map(slice, b.shape))], b))
        return pairs

    def every(inputs: list[list[Any]]) -> Any:
        pairs = claimed(whole(inputs), by_parts(inputs))
        real = [i for i, (a, _) in enumerate(pairs) if a.dtype.kind == "f"]

        def scalar(of: int) -> Callable[[Any], Any]:
            def loss(inputs: Any) -> Any:
                inputs = constant(inputs)
                own = claimed(whole(inputs), by_parts(inputs))
                return sum(
                    (
                        own[i][of] * jnp.cos(jnp.arange(own[i][0].size)).reshape(own[i][0].shape)
                    ).sum()
                    for i in real
                )

            return loss

        if not real or not differentiable:
            return pairs, []
        grads = [jax.grad(scalar(of), allow_int=True)(inputs) for of in (0, 1)]
        return pairs, [
            pair for pair in zip(*map(jax.tree.leaves, grads), strict=True)
            if pair[0].dtype != jax.dtypes.float0
        ]  # fmt: skip

    # Functions that are equal have equal derivatives, if they have none of their own.
    differentiable = covering.is_full or name == "derivatives"
    try:
        jax.eval_shape(every, inputs)
    except (NotImplementedError, ValueError, TypeError):  # it has no derivative
        differentiable = False
    for pairs in jax.jit(every)(inputs):
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("name", DRAWN)
@settings(max_examples=covering.examples(2, 36), deadline=None)
@given(st.data())
def test_an_operation_on_parts_is_what_the_rules_say(name, data):
    with jax.enable_x64(True):
        check(name, data.draw)
