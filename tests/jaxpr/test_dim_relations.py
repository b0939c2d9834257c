"""Dim relations against JAX itself: what they claim is proven by evaluating the operation.

Where dims of operands and results have one factor, the blocks of all those operands are put into
another order along it, and the operation is evaluated: its result has to come out in that order,
exactly. A factor of operands alone is reduced: then the order must not matter. All arrays are small
integers, so that sums in another order are equal.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from jaxspeed.jaxpr.dim_relations import RULES, DimRelations, Factors, relations
from jaxspeed.ops.moe.grouped_products import Layout, grouped_product
from jaxspeed.ops.token_order import in_token_order
from tests.support.covering import examples

Draw = Callable[..., Any]


class Case(NamedTuple):
    """One operation on given operands.

    Attributes:
      indexed: {(operand, its dim): (operand of ids, the column of its last dim)}: along this dim
        elements are found by the ids, which have to follow where elements are moved.
      stays: (operand, its dim) of dims at which an operand's own place counts.
    """

    function: Callable[..., Any]
    operands: Sequence[np.ndarray]
    indexed: Mapping[tuple[int, int], tuple[int, int]] = MappingProxyType({})
    stays: frozenset[tuple[int, int]] = frozenset()


def shapes(draw: Draw, least: int = 1, most: int = 4) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 3), min_size=least, max_size=most)))


def array(draw: Draw, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    return rng.integers(-2, 3, shape).astype(np.float32)


def some_dims(draw: Draw, rank: int) -> tuple[int, ...]:
    return tuple(sorted(draw(st.sets(st.integers(0, rank - 1), max_size=rank))))


def one_dim(draw: Draw, x: np.ndarray) -> int:
    return draw(st.integers(0, x.ndim - 1))


# -- operations ------------------------------------------------------------------------------------


def moved(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    order = draw(st.permutations(range(x.ndim)))
    return Case(lambda x: lax.transpose(x, order), [x])


def tiled(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    reps = [draw(st.integers(1, 2)) for _ in x.shape]
    return Case(lambda x: lax.tile(x, reps), [x])


def squeezed(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    gone = [d for d in some_dims(draw, x.ndim) if x.shape[d] == 1]
    return Case(lambda x: lax.squeeze(x, gone), [x])


def spread(draw: Draw) -> Case:
    shape = shapes(draw)
    places = some_dims(draw, len(shape))
    x = array(draw, *(shape[d] if draw(st.booleans()) else 1 for d in places))
    return Case(lambda x: lax.broadcast_in_dim(x, shape, places), [x])


def reshaped(draw: Draw) -> Case:
    """Into dims of which some are folded and some are split."""
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=6))

    def folded() -> tuple[int, ...]:
        ends = [i + 1 for i in range(len(primes) - 1) if draw(st.booleans())]
        return tuple(int(np.prod(primes[a:b])) for a, b in zip([0, *ends], [*ends, len(primes)]))

    shape = folded()
    return Case(lambda x: lax.reshape(x, shape), [array(draw, *folded())])


def sliced(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    starts = [draw(st.integers(0, n - 1)) for n in x.shape]
    ends = [draw(st.integers(a + 1, n)) for a, n in zip(starts, x.shape, strict=True)]
    strides = [draw(st.integers(1, 2)) for _ in x.shape]
    return Case(lambda x: lax.slice(x, starts, ends, strides), [x])


def dynamically_sliced(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    sizes = [draw(st.integers(1, n)) for n in x.shape]
    starts = [draw(st.integers(0, n - 1)) for n in x.shape]
    return Case(lambda x: lax.dynamic_slice(x, starts, sizes), [x])


def updated(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    part = array(draw, *(draw(st.integers(1, n)) for n in x.shape))
    starts = [draw(st.integers(0, n - 1)) for n in x.shape]
    partly = frozenset((0, d) for d in range(x.ndim) if part.shape[d] != x.shape[d])
    return Case(lambda x, part: lax.dynamic_update_slice(x, part, starts), [x, part], stays=partly)


def split(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    dim = one_dim(draw, x)
    sizes = (1,) * x.shape[dim]
    return Case(lambda x: lax.split(x, sizes, axis=dim), [x])


def stacked(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    dim = draw(st.integers(0, x.ndim))
    return Case(lambda x, y: jnp.stack([x, y], dim), [x, x + 1])


def unstacked(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    dim = one_dim(draw, x)
    return Case(lambda x: jnp.unstack(x, axis=dim), [x])


def joined(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    dim = one_dim(draw, x)
    more = array(draw, *(draw(st.integers(0, 2)) if d == dim else n for d, n in enumerate(x.shape)))
    return Case(lambda x, y: lax.concatenate([x, y], dim), [x, more])


def padded(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    some = [(0, 0, 0), (1, -1, 0), (1, 0, 0), (0, 1, 1), (-1, 1, 0)]
    config = [draw(st.sampled_from(some)) for _ in x.shape]
    return Case(lambda x: lax.pad(x, 7.0, config), [x])


def reduced(how: Callable[..., Any]) -> Callable[[Draw], Case]:
    def case(draw: Draw) -> Case:
        x = array(draw, *shapes(draw))
        if how in BITWISE:
            x = (x > 0) if how is not lax.reduce_xor else x.astype(np.int32)
        axes = some_dims(draw, x.ndim)
        return Case(lambda x: how(x, axes), [x])

    return case


BITWISE = (lax.reduce_and, lax.reduce_or, lax.reduce_xor)


def reduced_together(draw: Draw) -> Case:
    """The least of x, and what y has there: of two arrays at once."""
    x = array(draw, *shapes(draw))
    y = array(draw, *x.shape)
    axes = some_dims(draw, x.ndim)

    def least(a: Any, b: Any) -> Any:
        return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])

    return Case(lambda x, y: lax.reduce((x, y), (9.0, -9.0), least, axes), [x, y])


def argument(how: Callable[..., Any]) -> Callable[[Draw], Case]:
    def case(draw: Draw) -> Case:
        x = array(draw, *shapes(draw))
        dim = one_dim(draw, x)
        return Case(lambda x: how(x, dim, np.int32), [x])

    return case


def windowed(how: Any) -> Callable[[Draw], Case]:
    def case(draw: Draw) -> Case:
        x = array(draw, *shapes(draw))
        window = [draw(st.integers(1, min(2, n))) for n in x.shape]
        strides = [draw(st.integers(1, 2)) for _ in x.shape]
        padding = draw(st.sampled_from(["SAME", "VALID", [(1, 0)] * x.ndim]))
        start = {lax.add: 0.0, lax.max: -np.inf, lax.min: np.inf}.get(how, 1.0)

        def product(a: Any, b: Any) -> Any:
            return a * b

        return Case(
            lambda x: lax.reduce_window(x, start, how or product, window, strides, padding), [x]
        )

    return case


def accumulated(how: Callable[..., Any]) -> Callable[[Draw], Case]:
    def case(draw: Draw) -> Case:
        x = array(draw, *shapes(draw))
        dim, reverse = one_dim(draw, x), draw(st.booleans())
        return Case(lambda x: how(x, dim, reverse), [x])

    return case


def ordered(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    y, dim = array(draw, *x.shape), one_dim(draw, x)
    return Case(lambda x, y: lax.sort((x, y), dimension=dim, num_keys=1), [x, y])


def in_zigzag(draw: Draw) -> Case:
    devices, dim = draw(st.integers(1, 2)), draw(st.integers(0, 1))
    x = array(draw, *(2 * devices * draw(st.integers(1, 2)) for _ in range(2)))
    order = draw(st.booleans())
    return Case(lambda x: in_token_order(x, dim, devices, zigzag=order), [x])


def turned_round(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    dims = some_dims(draw, x.ndim)
    return Case(lambda x: lax.rev(x, dims), [x])


def largest(draw: Draw) -> Case:
    x = array(draw, *shapes(draw))
    count = draw(st.integers(1, x.shape[-1]))
    return Case(lambda x: lax.top_k(x, count), [x])


def kept_apart(draw: Draw) -> Case:
    """Two arrays of one shape, which have nothing to do with each other."""
    x = array(draw, *shapes(draw))
    y = array(draw, *(x.shape if draw(st.booleans()) else shapes(draw)))
    return Case(lambda x, y: lax.optimization_barrier((x, y)), [x, y])


def put(draw: Draw) -> Case:
    return Case(lambda x: jax.device_put(x, jax.devices()[0]), [array(draw, *shapes(draw))])


def multiplied(draw: Draw) -> Case:
    """Any dims are contracted, shared or free, and stand anywhere."""
    sizes = shapes(draw, 2, 5)
    roles = [draw(st.sampled_from(["sum", "batch", "lhs", "rhs"])) for _ in sizes]

    def side(own: str) -> list[int]:
        dims = [d for d, role in enumerate(roles) if role in ("sum", "batch", own)]
        return draw(st.permutations(dims))

    lhs, rhs = side("lhs"), side("rhs")
    numbers = tuple(
        tuple([at.index(d) for d, r in enumerate(roles) if r == role] for at in (lhs, rhs))
        for role in ("sum", "batch")
    )
    given_ = [array(draw, *(sizes[d] for d in at)) for at in (lhs, rhs)]
    return Case(lambda x, y: lax.dot_general(x, y, numbers), given_)


def convolved(draw: Draw) -> Case:
    groups, batch_groups = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2)]))
    features, samples = 4, 2 * batch_groups
    out = 4 * draw(st.integers(1, 2))
    spec = draw(st.sampled_from([("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")]))
    last = spec[0] == "NHWC"
    x = array(draw, *((samples, 3, 3, features) if last else (samples, features, 3, 3)))
    window, each = draw(st.integers(1, 3)), features // groups
    k = array(draw, *((window, window, each, out) if last else (out, each, window, window)))
    strides = draw(st.sampled_from([(1, 1), (2, 1)]))
    padding = draw(st.sampled_from(["SAME", "VALID"]))
    return Case(
        lambda x, k: lax.conv_general_dilated(
            x,
            k,
            strides,
            padding,
            dimension_numbers=spec,
            feature_group_count=groups,
            batch_group_count=batch_groups,
        ),
        [x, k],
    )


def looked_up(draw: Draw) -> Case:
    """Whole, partial and single rows of any dims of a table, with or without batch dims."""
    table = array(draw, *shapes(draw, 2, 4))
    batched = draw(st.booleans())
    dims = [d for d in range(1 if batched else 0, table.ndim) if draw(st.booleans())]
    rows = (table.shape[0], *shapes(draw, 0, 1)) if batched else shapes(draw, 0, 2)
    sizes = [
        1 if d in dims or (batched and d == 0) else draw(st.integers(1, n))
        for d, n in enumerate(table.shape)
    ]
    ids = indices(draw, table, dims, rows)
    offsets = table.ndim - len(dims) - batched
    numbers = lax.GatherDimensionNumbers(
        offset_dims=some_places(draw, len(rows) + offsets, offsets),
        collapsed_slice_dims=tuple(dims),
        start_index_map=tuple(dims),
        operand_batching_dims=(0,) if batched else (),
        start_indices_batching_dims=(0,) if batched else (),
    )
    indexed = {(0, d): (1, place) for place, d in enumerate(dims)}
    return Case(lambda t, i: lax.gather(t, i, numbers, sizes), [table, ids], indexed)


def grouped(draw: Draw) -> Case:
    """On one device."""
    rows, inner, outer = shapes(draw, 3, 3)
    experts = draw(st.integers(1, 3))
    ends = sorted(draw(st.lists(st.integers(0, rows), min_size=experts, max_size=experts)))
    bounds = np.array([[0, *ends]], np.int32)
    operands = [array(draw, 1, 1, rows, inner), array(draw, experts, inner, outer), bounds]
    return Case(grouped_on_one_device, operands)


def grouped_on_one_device(values: Any, weight: Any, bounds: Any) -> Any:
    where = Layout(None, (), ())
    return grouped_product(values, weight, bounds, layout=where, active=values.shape[2])


def scattered(how: Callable[..., Any]) -> Callable[[Draw], Case]:
    def case(draw: Draw) -> Case:
        target = array(draw, *shapes(draw, 2, 4))
        batched = draw(st.booleans())
        dims = [d for d in range(1 if batched else 0, target.ndim) if draw(st.booleans())]
        # What is written twice at one place is not defined: then one row each.
        most = 0 if how is lax.scatter else 1
        rows = (target.shape[0], *shapes(draw, 0, most)) if batched else shapes(draw, 0, 2 * most)
        windows = [
            draw(st.integers(1, n))
            for d, n in enumerate(target.shape)
            if d not in dims and not (batched and d == 0)
        ]
        places = some_places(draw, len(rows) + len(windows), len(windows))
        left, inner = list(rows), list(windows)
        shape = [
            inner.pop(0) if d in places else left.pop(0) for d in range(len(rows) + len(windows))
        ]
        ids = indices(draw, target, dims, rows)
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=places,
            inserted_window_dims=tuple(dims),
            scatter_dims_to_operand_dims=tuple(dims),
            operand_batching_dims=(0,) if batched else (),
            scatter_indices_batching_dims=(0,) if batched else (),
        )
        kept = [d for d in range(target.ndim) if d not in dims and not (batched and d == 0)]
        partly = {(0, d) for d, n in zip(kept, windows, strict=True) if n != target.shape[d]}
        indexed = {(0, d): (1, place) for place, d in enumerate(dims)}
        return Case(
            lambda t, i, u: how(t, i, u, numbers),
            [target, ids, array(draw, *shape)],
            indexed,
            frozenset(partly),
        )

    return case


def indices(draw: Draw, x: np.ndarray, dims: Sequence[int], rows: Sequence[int]) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    columns = [rng.integers(0, x.shape[d], rows) for d in dims]
    return np.stack(columns, -1).astype(np.int32) if dims else np.zeros((*rows, 0), np.int32)


def some_places(draw: Draw, of: int, count: int) -> tuple[int, ...]:
    return tuple(sorted(draw(st.permutations(range(of)))[:count]))


CASES: dict[str, Callable[[Draw], Case]] = {
    "transpose": moved,
    "squeeze": squeezed,
    "tile": tiled,
    "broadcast_in_dim": spread,
    "reshape": reshaped,
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
    "argmax": argument(lax.argmax),
    "argmin": argument(lax.argmin),
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
    "token_order": in_zigzag,
    "top_k": largest,
    "optimization_barrier": kept_apart,
    "device_put": put,
    "dot_general": multiplied,
    "conv_general_dilated": convolved,
    "grouped_product": grouped,
    "gather": looked_up,
    "scatter": scattered(lax.scatter),
    "scatter-add": scattered(lax.scatter_add),
    "scatter-sub": scattered(lax.scatter_sub),
    "scatter-mul": scattered(lax.scatter_mul),
    "scatter-min": scattered(lax.scatter_min),
    "scatter-max": scattered(lax.scatter_max),
}


# -- the claims ------------------------------------------------------------------------------------


def of_operation(name: str, function: Callable[..., Any], *operands: Any) -> DimRelations | None:
    """The relations of the operation that a function is; None where JAX leaves it out."""
    jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]
    if not eqns:
        return None
    (eqn,) = eqns
    assert eqn.invars[: len(operands)] == jaxpr.invars
    given, made = [[v.aval.shape for v in atoms] for atoms in (eqn.invars, eqn.outvars)]
    return relations(name, eqn.params, given, made)


def places(arrays: Sequence[Factors], factor: int) -> list[tuple[int, int]]:
    """(array, dim) of the dims that have a factor."""
    return [(i, d) for i, each in enumerate(arrays) for d, f in enumerate(each) if f == factor]


def reordered(x: Any, dims: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """An array whose contiguous blocks along these dims stand in another order."""
    x = np.asarray(x)
    for dim in dims:
        size = x.shape[dim] // len(order)
        x = np.take(x, [block * size + i for block in order for i in range(size)], dim)
    return x


def along(arrays: Sequence[Any], given_: Sequence[Factors], factor: int, order: Any) -> list[Any]:
    at = places(given_, factor)
    return [reordered(x, [d for j, d in at if j == i], order) for i, x in enumerate(arrays)]


def test_every_rule_is_tested():
    assert set(CASES) == set(RULES)


@pytest.mark.default_cases(every=5)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=examples(5, 10))
@given(st.data())
def test_an_operation_does_what_its_relations_say(name, data):
    function, operands, indexed, stays = CASES[name](data.draw)
    found = of_operation(name, function, *operands)
    assume(found is not None)
    results = jax.tree.leaves(function(*operands))
    read, made = (
        {f for a in arrays for f in a} - {None} for arrays in (found.operands, found.results)
    )
    # What is in none of the operands is also in no other result.
    assert all(len(places(found.results, f)) == 1 for f in made - read - found.mixed)
    for factor in read:
        at = places(found.operands, factor)
        sizes = [operands[i].shape[d] for i, d in at]
        sizes += [results[i].shape[d] for i, d in places(found.results, factor)]
        assert len(set(sizes)) == 1 or name == "reshape" or factor in found.groups
        if factor in found.mixed:
            continue
        blocks = math.gcd(*sizes, found.groups.get(factor, 0))
        if blocks == 1 or not stays.isdisjoint(at):
            continue
        order = np.roll(range(blocks), data.draw(st.integers(1, blocks - 1)))
        moved_ = along(operands, found.operands, factor, order)
        for ids, column in (indexed[place] for place in at if place in indexed):
            moved_[ids] = np.array(moved_[ids])
            moved_[ids][..., column] = np.argsort(order)[moved_[ids][..., column]]
        expected = along(results, found.results, factor, order)
        for x, y in zip(jax.tree.leaves(function(*moved_)), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


# As an einsum: a letter for each factor, upper case where the operation mixes along it.
WRITTEN: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], str]] = {
    "dot_general": (lambda x, w: jnp.einsum("bij,bkj->bik", x, w), [(4, 2, 3), (4, 5, 3)],
                    "abc,adc->abd"),
    "transpose": (lambda x: x.transpose(1, 2, 0), [(2, 3, 4)], "abc->bca"),
    "reshape": (lambda x: x.reshape(5, 12, 8, 8), [(5, 96, 8)], "abc->ab_c"),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), [(2, 1, 3)], "abc->ac"),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (4, 2, 3), (0, 2)), [(4, 3)],
                         "ab->a_b"),
    "slice": (lambda x: x[:, 2:], [(4, 5)], "a_->a_"),
    "dynamic_update_slice": (lambda x, y: lax.dynamic_update_slice(x, y, (0, 1)),
                             [(4, 5), (4, 1)], "ab,a_,,->ab"),
    "concatenate": (lambda x, y: jnp.concatenate([x, y]), [(4, 5), (3, 5)], "_a,_a->_a"),
    "pad": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0))), [(4, 5)], "aB,->aB"),
    "reduce_sum": (lambda x: x.sum((0, 2)), [(2, 3, 4)], "abc->b"),
    "argmax": (lambda x: lax.argmax(x, 1, np.int32), [(2, 3)], "a_->a"),
    "cumsum": (lambda x: lax.cumsum(x, 1), [(2, 3)], "aB->aB"),
    "sort": (lambda x: lax.sort(x, dimension=0), [(2, 3)], "Ab->Ab"),
    "top_k": (lambda x: lax.top_k(x, 2), [(5, 3)], "a_->a_,a_"),
    "reduce_window_sum": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"), [(4, 5)], "aB->aB"
    ),
    "optimization_barrier": (lambda x, y: lax.optimization_barrier((x, y)), [(4, 5), (4, 5)],
                             "ab,cd->ab,cd"),
    "conv_general_dilated": (
        lambda x, k: lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        [(2, 4, 4, 8), (3, 3, 8, 16)], "aBCd,__de->aBCe",
    ),
    "grouped_product": (grouped_on_one_device, [(1, 1, 4, 2), (3, 2, 5), (1, 4)],
                        "abC_,___,b_->abC_"),
    "gather": (
        lambda table, ids: lax.gather(
            table, ids, lax.GatherDimensionNumbers((2,), (0,), (0,)), (1, 7)
        ),
        [(9, 7), (2, 3, 1)], "ab,cd_->cdb",
    ),
    "scatter-add": (
        lambda table, ids, rows: lax.scatter_add(
            table, ids, rows, lax.ScatterDimensionNumbers((2,), (0,), (0,))
        ),
        [(9, 7), (2, 3, 1), (2, 3, 7)], "ab,cd_,cdb->ab",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_relations_are_those_of_the_einsum(name):
    function, given_, expected = WRITTEN[name]
    indexes = name in ("gather", "scatter-add")
    dtypes = [np.int32 if indexes and i == 1 else np.float32 for i in range(len(given_))]
    operands = [jax.ShapeDtypeStruct(*of) for of in zip(given_, dtypes, strict=True)]
    found = of_operation(name, function, *operands)
    assert found is not None and einsum(found) == expected


def einsum(found: DimRelations) -> str:
    read = dict.fromkeys(f for each in found.operands for f in each if f is not None)
    letters = dict(zip(read, "abcdefgh", strict=False))

    def written(arrays: Sequence[Factors]) -> str:
        return ",".join("".join(map(letter, each)) for each in arrays)

    def letter(factor: int | None) -> str:
        known = "_" if factor is None else letters.get(factor, "_")
        return known.upper() if factor in found.mixed else known

    return f"{written(found.operands)}->{written(found.results)}"
