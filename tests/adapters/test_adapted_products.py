"""An adapted equation equals the equation of the merged weight, in both passes.

The reference is written here: the merged weight by `einsum` in float64, JAX's own derivative of the
equation with it, DoRA's norm by its definition. References of PEFT are in `test_peft_products.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.adapters.products import (
    Factors,
    adapted,
    delta,
    dims_of,
    factor_shapes,
    initialized,
    is_adaptable,
    merged,
    norms,
    squared_norms,
)
from jaxspeed.jaxpr.primitives import PRODUCTS, RAGGED_PRODUCTS
from jaxspeed.jaxpr.traverse import Jaxpr, JaxprEqn, bodies
from jaxspeed.jaxpr.weight_uses import WeightDims
from tests.support.covering import examples

Draw = Callable[..., Any]
KEY = jax.random.key(7)
LETTERS = "abcdefghij"


class Case(NamedTuple):
    """One equation: a function of these operands, of which one is the weight."""

    function: Callable[..., Any]
    operands: Sequence[np.ndarray]
    weight: int
    dims: WeightDims | None = None  # those of another equation that reads the same weight

    def eqn(self) -> JaxprEqn:
        (eqn,) = jax.make_jaxpr(self.function)(*self.operands).jaxpr.eqns
        return eqn

    def chosen(self) -> WeightDims:
        found = self.dims or dims_of(self.eqn(), self.weight)
        assert found is not None
        return found


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Numbers from 0.5 to 1.5, of both signs: a change of less than 0.5 leaves norms large."""
    rng = np.random.default_rng([seed, *shape])
    return (rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)).astype(np.float32)


# -- equations, drawn ------------------------------------------------------------------------------


def any_matmul(draw: Draw) -> Case:
    """Of any dims in any order, on either side."""
    sizes = st.integers(1, 4)
    roles = [
        draw(st.lists(sizes, min_size=least, max_size=most))
        for least, most in ((0, 2), (1, 2), (0, 2), (1, 2))
    ]
    shared, summed, rows, columns = roles
    of_weight = [("shared", i) for i in range(len(shared))]
    of_weight += [("summed", i) for i in range(len(summed))]
    of_x = [*of_weight, *(("rows", i) for i in range(len(rows)))]
    of_weight += [("columns", i) for i in range(len(columns))]
    size = dict(zip(("shared", "summed", "rows", "columns"), roles, strict=True))
    of_weight, of_x = draw(st.permutations(of_weight)), draw(st.permutations(of_x))
    side = draw(st.integers(0, 1))
    operands = [
        numbers(i, *(size[role][n] for role, n in dims)) for i, dims in enumerate((of_weight, of_x))
    ]
    places = of_weight, of_x
    if side == 1:
        operands, places = operands[::-1], places[::-1]
    batch, contracted = (
        tuple(tuple(dims.index((role, n)) for n in range(len(size[role]))) for dims in places)
        for role in ("shared", "summed")
    )
    case = Case(lambda lhs, rhs: lax.dot_general(lhs, rhs, (contracted, batch)), operands, side)
    dims = case.chosen()
    if draw(st.booleans()):  # as a table that is looked up elsewhere
        dims = replace(dims, inputs=dims.outputs, outputs=dims.inputs)
    if len(dims.outputs) > 1 and draw(st.booleans()):  # experts that all see the same input
        dims = replace(dims, stack=(*dims.stack, dims.outputs[0]), outputs=dims.outputs[1:])
    if len(dims.inputs) > 1 and draw(st.booleans()):  # experts that are summed
        dims = replace(dims, stack=(*dims.stack, dims.inputs[1]), inputs=dims.inputs[:1])
    return case._replace(dims=dims)


def any_convolution(draw: Draw) -> Case:
    count = draw(st.integers(1, 2))
    features, results = draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def of_window(least: int, most: int) -> list[int]:
        return [draw(st.integers(least, most)) for _ in range(count)]

    of_x, of_weight, of_result = (draw(st.permutations(range(count + 2))) for _ in range(3))
    window, spread, strides = of_window(1, 3), of_window(1, 2), of_window(1, 2)
    between = of_window(1, 2)
    padding = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(count)]
    x, weight = np.zeros(count + 2, int), np.zeros(count + 2, int)
    x[np.asarray(of_x)] = [draw(st.integers(1, 2)), features, *of_window(5, 7)]
    weight[np.asarray(of_weight)] = [results, features, *window]

    def convolve(x: Any, weight: Any) -> Any:
        return lax.conv_general_dilated(
            x, weight, strides, padding, lhs_dilation=between, rhs_dilation=spread,
            dimension_numbers=lax.ConvDimensionNumbers(*map(tuple, (of_x, of_weight, of_result))),
        )  # fmt: skip

    return Case(convolve, [numbers(0, *x), numbers(1, *weight)], 1)


def any_lookup(draw: Draw) -> Case:
    """Of rows by one or two ids, in one or several tables."""
    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=2)
    shared, indexed, columns = (
        draw(st.lists(st.integers(1, 3), max_size=1)),
        draw(sizes),
        draw(sizes),
    )
    rows = draw(st.lists(st.integers(1, 3), max_size=2))
    table = [*(("shared", n) for n in shared), *(("indexed", n) for n in indexed)]
    table = draw(st.permutations([*table, *(("columns", n) for n in columns)]))
    ids = draw(st.permutations([*(("shared", n) for n in shared), *(("rows", n) for n in rows)]))
    of = {
        role: tuple(d for d, (name, _) in enumerate(table) if name == role)
        for role in ("shared", "indexed", "columns")
    }
    order = draw(st.permutations(of["indexed"]))
    at = draw(
        st.sets(
            st.integers(0, len(ids) + len(columns) - 1),
            min_size=len(columns),
            max_size=len(columns),
        )
    )
    how = lax.GatherDimensionNumbers(
        offset_dims=tuple(sorted(at)),
        collapsed_slice_dims=of["indexed"],
        start_index_map=tuple(order),
        operand_batching_dims=of["shared"],
        start_indices_batching_dims=tuple(d for d, (role, _) in enumerate(ids) if role == "shared"),
    )
    taken = tuple(1 if role != "columns" else size for role, size in table)
    mode = draw(st.sampled_from([lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP]))
    shape = tuple(size for _, size in ids)
    rng = np.random.default_rng(len(shape))
    indices = np.stack([rng.integers(0, table[d][1] + 1, shape) for d in order], axis=-1)
    case = Case(
        lambda table, ids: lax.gather(table, ids, how, taken, mode=mode, fill_value=0),
        [numbers(0, *(size for _, size in table)), indices.astype(np.int32)],
        0,
    )
    dims = case.chosen()
    if len(dims.outputs) > 1 and draw(st.booleans()):  # a stack of tables that share the ids
        dims = replace(dims, stack=(*dims.stack, dims.outputs[0]), outputs=dims.outputs[1:])
    return case._replace(dims=dims)


def any_ragged_matmul(draw: Draw) -> Case:
    counts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    features, results = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = sum(counts) + draw(st.integers(0, 2))
    assume(rows)
    order = draw(st.permutations(range(3)))
    shape = np.zeros(3, int)
    shape[np.asarray(order)] = [len(counts), features, results]
    how = lax.RaggedDotDimensionNumbers((([1], [order[1]]), ([], [])), [0], [order[0]])
    operands = [numbers(0, rows, features), numbers(1, *shape), np.asarray(counts, np.int32)]
    case = Case(lambda x, w, sizes: lax.ragged_dot_general(x, w, sizes, how), operands, 1)
    dims = case.chosen()
    if draw(st.booleans()):
        dims = replace(dims, inputs=dims.outputs, outputs=dims.inputs)
    return case._replace(dims=dims)


KINDS = (any_matmul, any_convolution, any_lookup, any_ragged_matmul)


# -- the reference ---------------------------------------------------------------------------------


def spelled(dims: Sequence[int]) -> str:
    return "".join(LETTERS[d] for d in dims)


def reference_delta(ndim: int, dims: WeightDims, a: Any, b: Any, scale: Any) -> Any:
    stack, inputs, outputs = map(spelled, (dims.stack, dims.inputs, dims.outputs))
    factors, of_scale = f"{stack}{inputs}r,{stack}r{outputs}", stack if np.ndim(scale) else ""
    return jnp.einsum(f"{factors},{of_scale}->{spelled(range(ndim))}", a, b, scale)


def reference_ratio(weight: Any, dims: WeightDims, factors: Factors, scale: Any) -> Any:
    """DoRA's factor of each weight; the norm is a constant."""
    total = weight + reference_delta(weight.ndim, dims, factors.a, factors.b, scale)
    norm = jnp.sqrt(jnp.sum(total**2, axis=dims.inputs, keepdims=True))
    labels = [*dims.stack, *dims.outputs]
    ordered = jnp.transpose(factors.magnitude, np.argsort(labels))
    return jnp.expand_dims(ordered, dims.inputs) / lax.stop_gradient(norm)


def reference(
    case: Case, operands: Sequence[Any], factors: Factors, scale: Any, kept: Any, rate: float
) -> Any:
    """What PEFT computes, from a weight-sized change; `kept` is dropout's mask of the input."""
    dims, weight = case.chosen(), operands[case.weight]
    other = 1 - case.weight

    def product(weight: Any, dropped: bool) -> Any:
        given = list(operands)
        given[case.weight] = weight
        if dropped and rate:
            given[other] = jnp.where(kept, given[other] / (1 - rate), 0)
        return case.function(*given)

    change = reference_delta(weight.ndim, dims, factors.a, factors.b, scale)
    if factors.magnitude is None:
        return product(weight, False) + product(change, True)
    ratio = reference_ratio(weight, dims, factors, scale)
    if not rate:
        return product((weight + change) * ratio, False)
    return product(weight, False) + product((ratio - 1) * weight + ratio * change, True)


@pytest.mark.sampled
@given(st.sampled_from(KINDS), st.data())
@settings(max_examples=examples(24, 800))
def test_adapted_equals_merged_in_both_passes(kind, data):
    case = kind(data.draw)
    dims, weight, eqn = case.chosen(), case.operands[case.weight], case.eqn()
    assume(is_adaptable(eqn, case.weight, dims))
    other = case.operands[1 - case.weight]
    sizes = [weight.shape[d] for d in dims.stack]
    rank = data.draw(st.integers(1, 3))
    scale = numbers(5, *sizes) if sizes and data.draw(st.booleans()) else 0.5
    rate = data.draw(st.sampled_from([0.0, 0.25])) if dims.kind != "lookup" else 0.0
    a, b = (0.4 * numbers(6, *s) / rank for s in factor_shapes(weight.shape, dims, rank))
    factors = Factors(a, b)
    has_dora = is_adaptable(eqn, case.weight, dims, has_magnitude=True)
    if has_dora and data.draw(st.booleans()):
        shape = [weight.shape[d] for d in (*dims.stack, *dims.outputs)]
        factors = factors._replace(magnitude=numbers(7, *shape))
    kept = jax.random.bernoulli(KEY, 1 - rate, other.shape)

    def ours(x: Any, factors: Factors) -> Any:
        given = list(case.operands)
        given[1 - case.weight] = x if x is not None else other
        given = [jnp.asarray(x) for x in given]
        squares = None if factors.magnitude is None else squared_norms(given[case.weight], dims)
        return adapted(
            eqn, given, case.weight, dims, factors._replace(squares=squares), scale,
            dropout=rate, key=KEY,
        )  # fmt: skip

    def theirs(x: Any, factors: Factors) -> Any:
        given = [
            jnp.asarray(x, jnp.float64 if x.dtype == np.float32 else None) for x in case.operands
        ]
        if x is not None:
            given[1 - case.weight] = x
        return reference(case, given, factors, scale, kept, rate)

    x = other if other.dtype == np.float32 else None
    result = jax.eval_shape(case.function, *case.operands)
    cotangent = numbers(8, *result.shape)

    def both_passes(function: Any, x: Any, factors: Any) -> Any:
        y, pull = jax.vjp(function, x, factors)
        return y, pull(jnp.asarray(cotangent, y.dtype))

    found = jax.jit(lambda *given: both_passes(ours, *given))(x, factors)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (x, factors))
        wanted = jax.jit(lambda *given: both_passes(theirs, *given))(*wide)
        wanted = jax.tree.map(np.asarray, wanted)
    assert found[0].dtype == result.dtype
    for mine, good in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert mine.shape == good.shape
        np.testing.assert_allclose(
            mine, good, rtol=0, atol=1e-5 * max(1, np.abs(good).max(initial=0))
        )


# -- some equations, of sizes that all differ ------------------------------------------------------


def matmul(x: Any, weight: Any, **how: Any) -> Any:
    return lax.dot_general(x, weight, (((2,), (0,)), ((), ())), **how)


def head(table: Any, x: Any) -> Any:
    return lax.dot_general(table, x, (((1,), (2,)), ((), ())))


def by_expert(x: Any, weight: Any) -> Any:
    return lax.dot_general(x, weight, (((2,), (1,)), ((1,), (0,))))


def convolution(x: Any, weight: Any, **how: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, weight, (1, 2), "SAME", dimension_numbers=numbers, **how)


def lookup(table: Any, ids: Any, width: int = 5, **how: Any) -> Any:
    numbers = lax.GatherDimensionNumbers((2,), (0,), (0,))
    return lax.gather(table, ids, numbers, (1, width), **how)


IDS = np.array([[[3], [0], [10]], [[5], [5], [1]]], np.int32)
SIZES = np.array([2, 0, 4], np.int32)
X, WEIGHT, TABLE = numbers(0, 2, 3, 5), numbers(1, 5, 7), numbers(2, 11, 5)
IMAGE, KERNEL = numbers(3, 2, 8, 9, 5), numbers(4, 3, 3, 5, 7)
CASES = {
    "matmul": Case(matmul, [X, WEIGHT], 1),
    "head": Case(head, [TABLE, X], 0, WeightDims((), (0,), (1,), "lookup")),
    "experts": Case(by_expert, [numbers(5, 2, 4, 5), numbers(6, 4, 5, 7)], 1),
    "convolution": Case(convolution, [IMAGE, KERNEL], 1),
    "lookup": Case(lookup, [TABLE, IDS], 0),
    "ragged": Case(lax.ragged_dot, [numbers(7, 6, 5), numbers(8, 3, 5, 7), SIZES], 1),
}


def some_factors(case: Case, rank: int = 2, has_magnitude: bool = False) -> Factors:
    weight, dims = case.operands[case.weight], case.chosen()
    a, b = (numbers(6, *shape) / 4 for shape in factor_shapes(weight.shape, dims, rank))
    if not has_magnitude:
        return Factors(a, b)
    shape = [weight.shape[d] for d in (*dims.stack, *dims.outputs)]
    squares = np.square(weight).sum(dims.inputs, keepdims=True)
    squares = squares.squeeze(dims.inputs)  # in the order of the weight, which is theirs here
    return Factors(a, b, numbers(7, *shape), squares)


def values(jaxpr: Jaxpr) -> Iterator[Any]:
    """The types of all results of a program's equations, at any depth.

    A convolution's input gradient is one with the reversed window, which is no array in memory.
    """
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars if eqn.primitive.name != "rev")
        for body in bodies(eqn):
            yield from values(body.jaxpr)


@pytest.mark.fast
@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize(
    ("name", "has_magnitude"),
    [(name, has) for name in CASES for has in (False, True) if not (has and name == "ragged")],
)
def test_no_other_value_has_the_weights_size(name, has_magnitude, rate):
    case = CASES[name]
    weight, eqn = case.operands[case.weight], case.eqn()
    factors = some_factors(case, has_magnitude=has_magnitude)
    squares = factors.squares

    def loss(trained: Any, weight: Any) -> Any:
        given = [jnp.asarray(x) for x in case.operands]
        given[case.weight] = weight
        if trained[1] is not None:
            given[1 - case.weight] = trained[1]
        found = trained[0]._replace(squares=squares)
        y = adapted(eqn, given, case.weight, case.chosen(), found, 2, dropout=rate, key=KEY)
        return jnp.sum(y**2)

    x = case.operands[1 - case.weight]
    trained = factors._replace(squares=None), x if x.dtype == np.float32 else None
    program = jax.make_jaxpr(jax.value_and_grad(loss))(trained, weight)
    sizes = [np.prod(v.shape) for v in values(program.jaxpr) if hasattr(v, "shape")]
    assert len(sizes) > 5
    assert weight.size not in sizes


@pytest.mark.parametrize("name", CASES)
def test_products_have_the_dtype_and_precision_of_the_equation(name):
    """A and B are cast as the weight was; the sum is of the equation's own dtype."""
    how = {"precision": "highest", "preferred_element_type": jnp.float32}
    case = CASES[name]
    takes = name in ("matmul", "convolution")  # others have no such parameters here
    narrow = [x.astype("bfloat16") if x.dtype == np.float32 else x for x in case.operands]
    case = Case(
        partial(case.function, **how) if takes else case.function, narrow, case.weight, case.dims
    )
    eqn, factors = case.eqn(), some_factors(CASES[name])

    def run(factors: Factors) -> Any:
        given = [jnp.asarray(x) for x in narrow]
        return adapted(eqn, given, case.weight, case.chosen(), factors, 0.5)

    program = jax.make_jaxpr(run)(factors).jaxpr
    products = [e for e in program.eqns if e.primitive.name in (*PRODUCTS, *RAGGED_PRODUCTS)]
    assert len(products) == (1 if name == "lookup" else 3)
    # Of the low-rank products the first has a result of the rank: x meets the contracted factor.
    between = {"matmul": 12, "head": 12, "experts": 16, "convolution": 160, "ragged": 12}
    if name in between:
        assert products[1].outvars[0].aval.size == between[name]
    for each in products:
        assert {v.aval.dtype for v in each.invars if v.aval.dtype != np.int32} == {narrow[0].dtype}
        assert each.params["precision"] == eqn.params.get("precision")
        wanted = eqn.params.get("preferred_element_type")
        assert each.params["preferred_element_type"] == wanted
    assert program.outvars[0].aval.dtype == eqn.outvars[0].aval.dtype
    wide = [x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for x in narrow]
    wanted = reference(CASES[name], wide, factors, 0.5, None, 0)
    np.testing.assert_allclose(run(factors), wanted, atol=0.03 * np.abs(wanted).max())


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_a_row_that_does_not_exist_has_the_tables_value(mode):
    case = Case(partial(lookup, mode=mode), [TABLE, np.array([[[0], [11]]], np.int32)], 0)
    given = [jnp.asarray(x) for x in case.operands]
    found = adapted(case.eqn(), given, 0, case.chosen(), some_factors(case), 0.5)
    wanted = reference(case, case.operands, some_factors(case), 0.5, None, 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert np.isnan(np.asarray(found)).any() == (mode == "fill")


# -- the merged weight -----------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=examples(4, 100))
def test_merged_weights_are_those_of_the_definition(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    order = data.draw(st.permutations(range(len(shape))))
    ends = sorted(data.draw(st.sets(st.integers(1, len(shape)), min_size=2, max_size=2)))
    stack, inputs, outputs = order[ends[1] :], order[: ends[0]], order[ends[0] : ends[1]]
    dims, rank = WeightDims(tuple(stack), tuple(inputs), tuple(outputs), "product"), 2
    weight = numbers(0, *shape)
    a, b = (numbers(6, *s) / 4 for s in factor_shapes(shape, dims, rank))
    magnitude = numbers(7, *(shape[d] for d in (*stack, *outputs)))
    scale = numbers(8, *(shape[d] for d in stack))

    def ours(weight: Any, a: Any, b: Any, magnitude: Any) -> list[Any]:
        return [
            delta(shape, dims, a, b, scale),
            merged(weight, dims, Factors(a, b), scale),
            merged(weight, dims, Factors(a, b, magnitude), scale),
            norms(weight, dims, Factors(a, b), scale),
        ]

    def definition(weight: Any, a: Any, b: Any, magnitude: Any) -> list[Any]:
        change = reference_delta(len(shape), dims, a, b, scale)
        ratio = reference_ratio(weight, dims, Factors(a, b, magnitude), scale)
        norm = jnp.sqrt(jnp.sum((weight + change) ** 2, inputs))
        of_labels = np.argsort(np.argsort([*stack, *outputs]))
        total = weight + change
        return [change, total, ratio * total, norm.transpose(of_labels)]

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (weight, a, b, magnitude))
        wanted = jax.tree.map(np.asarray, jax.jit(definition)(*wide))
    found = jax.jit(ours)(weight, a, b, magnitude)
    for mine, good in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, good, rtol=1e-5, atol=1e-5)


# -- equations that cannot do without the merged weight --------------------------------------------


NOT_ADAPTED = {
    "groups of features": (
        lambda w: convolution(np.ones((2, 8, 9, 10)), w, feature_group_count=2), KERNEL[..., :6],
    ),
    "groups of samples": (
        lambda w: convolution(IMAGE[:, :, :, :5], w, batch_group_count=2), KERNEL[..., :6],
    ),
    "an image as the weight": (lambda w: convolution(w, KERNEL), IMAGE),
    "part of each row": (lambda w: lookup(w, IDS, 4), TABLE),
    "rows as a window": (
        lambda w: lax.gather(w, IDS, lax.GatherDimensionNumbers((2, 3), (), (0,)), (2, 5)), TABLE,
    ),
    "a vector": (lambda w: matmul(X, w), WEIGHT[:, 0]),
    "nothing contracted": (lambda w: lax.dot_general(X, w, (((), ()), ((), ()))), WEIGHT),
    "an expert's rows are contracted": (
        lambda w: lax.ragged_dot_general(
            X[0], w, SIZES[:2],
            lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], []),
        ), numbers(9, 3, 6),
    ),
    "no product": (lambda w: w + 1, WEIGHT),
}  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("name", NOT_ADAPTED)
def test_other_equations_are_not_adapted(name):
    function, weight = NOT_ADAPTED[name]
    jaxpr = jax.make_jaxpr(function)(weight).jaxpr
    eqn = jaxpr.eqns[-1]
    assert dims_of(eqn, [v is jaxpr.invars[0] for v in eqn.invars].index(True)) is None


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("matmul", WeightDims((0,), (), (1,), "product")),  # neither factor is contracted
        ("convolution", WeightDims((), (3,), (0, 1, 2), "convolution")),
        ("lookup", WeightDims((0,), (), (1,), "lookup")),
        ("ragged", WeightDims((), (0, 1), (2,), "product")),  # experts that share factors
    ],
)
def test_an_equation_needs_dims_that_it_can_do_with(name, dims):
    case = CASES[name]
    assert is_adaptable(case.eqn(), case.weight, case.chosen())
    assert not is_adaptable(case.eqn(), case.weight, dims)


# -- the start of training -------------------------------------------------------------------------


def start(key: Any, *about: Any, **sharded: Any) -> tuple[Any, Any]:
    return jax.jit(lambda key: initialized(key, *about), **sharded)(key)


def uniform(limit: float) -> tuple[float, float]:
    """(standard deviation, largest magnitude)"""
    return limit / 3**0.5, limit


LARGE = {
    "product": ((16, 64, 512), WeightDims((), (0, 1), (2,), "product"), 1024),
    "convolution": ((512, 3, 3, 64), WeightDims((), (1, 2, 3), (0,), "convolution"), 576),
    "lookup": ((1024, 512), WeightDims((), (0,), (1,), "lookup"), None),
}


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("how", [True, False, "gaussian"])
@pytest.mark.parametrize("kind", LARGE)
def test_initialized_factors_have_the_distributions_of_peft(kind, how):
    shape, dims, fan_in = LARGE[kind]
    rank = 8
    a, b = start(KEY, shape, dims, rank, how)
    normal, zero = (1, None), (0, 0)
    if kind == "lookup":
        wanted = (normal if how is False else zero), normal
    else:
        first = (1 / rank, None) if how == "gaussian" else uniform(fan_in**-0.5)
        wanted = first, (uniform(rank**-0.5) if how is False else zero)
    for x, (std, largest) in zip((a, b), wanted, strict=True):
        np.testing.assert_allclose(x.std(), std, rtol=0.03)
        assert abs(x.mean()) <= 0.05 * std
        if largest is not None:
            assert 0.99 * largest <= abs(x).max() <= largest


@pytest.mark.default_cases("gaussian")
@pytest.mark.parametrize("how", [True, False, "gaussian"])
def test_a_stacked_layers_factors_are_those_of_the_layer_alone(how):
    """Whatever the ranks of the others are."""
    layer = WeightDims((), (1,), (0,), "product")
    stacked = WeightDims((0,), (2,), (1,), "product")
    keys, ranks = jax.random.split(KEY, 4), np.array([2, 4, 0, 1])
    a, b = start(keys, (4, 6, 5), stacked, ranks, how)
    assert (a.shape, b.shape) == factor_shapes((4, 6, 5), stacked, 4)
    for i, rank in enumerate(ranks):
        if not rank:
            assert not a[i].any() and not b[i].any()
            continue
        alone = start(keys[i], (6, 5), layer, int(rank), how)
        np.testing.assert_array_equal(a[i, :, :rank], alone[0])
        np.testing.assert_array_equal(b[i, :rank], alone[1])
        assert not a[i, :, rank:].any()
        assert not b[i, rank:].any()
    of_one_key = start(KEY, (3, 6, 5), stacked, 2, how)
    np.testing.assert_array_equal(
        of_one_key[0][1], start(jax.random.fold_in(KEY, 1), (6, 5), layer, 2, how)[0]
    )


def test_initialized_factors_are_equal_on_every_mesh():
    shape, dims = (4, 16, 8), WeightDims((0,), (1,), (2,), "product")
    wanted = start(KEY, shape, dims, 4, False)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for spec in (P("x", "y"), P("y", None, "x"), P(None, "x", "y")):
        made = start(KEY, shape, dims, 4, False, out_shardings=NamedSharding(mesh, spec))
        jax.tree.map(np.testing.assert_array_equal, made, wanted)
