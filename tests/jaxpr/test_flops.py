"""FLOPs of traced programs against XLA's own count, and against what their shapes say."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from jaxspeed.jaxpr.flops import (
    count_all,
    count_products,
    equation_flops,
    product_flops,
    program_flops,
)


def traced(function, *shapes):
    return jax.make_jaxpr(function)(*(jnp.zeros(s) for s in shapes)).jaxpr


def counted(function, *shapes, count=count_products):
    return program_flops(traced(function, *shapes), count)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda a, b: jnp.einsum("bik,bkj->bij", a, b), [(3, 5, 7), (3, 7, 11)]),
        (lambda a, b: jax.jit(lambda x: x @ b)(a).sum(), [(5, 7), (7, 11)]),
        (lambda a, b: jax.checkpoint(lambda x: x @ b)(a), [(5, 7), (7, 11)]),
        (lambda x, k: lax.conv(x, k, (2, 2), "VALID"), [(2, 4, 16, 16), (8, 4, 3, 3)]),
        (
            lambda x, k: lax.conv_general_dilated(
                x, k, (1,), "VALID", feature_group_count=4, dimension_numbers=("NWC", "WIO", "NWC")
            ),
            [(2, 16, 8), (3, 2, 12)],
        ),
    ],
)
def test_products_and_convolutions_are_counted_as_xla_counts_them(function, shapes):
    compiled = jax.jit(function).lower(*(jnp.zeros(s) for s in shapes)).compile()
    flops = compiled.cost_analysis()["flops"]
    # XLA adds what is element-wise, a sum say; products are nearly all.
    assert counted(function, *shapes) == pytest.approx(flops, rel=0.1)


def test_a_scan_counts_as_often_as_it_runs_and_of_branches_the_largest():
    w = jnp.zeros((8, 8))

    def looped(x):
        return lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]

    def chosen(x):
        return lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x @ w, x)

    product = 2 * 4 * 8 * 8
    assert counted(looped, (4, 8)) == 5 * product
    assert counted(chosen, (4, 8)) == 2 * product


def test_what_runs_on_each_device_counts_for_all_of_them():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("data")
    w = jnp.zeros((8, 16))

    def per_device(x):
        return jax.shard_map(
            lambda x: x @ w, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"}
        )(x)

    assert counted(per_device, (32, 8)) == 2 * 32 * 8 * 16


def test_a_loop_of_unknown_length_counts_once():
    w = jnp.zeros((8, 8))

    def doubled(x):
        return lax.while_loop(lambda x: x[0, 0] < 5, lambda x: x @ w, x)

    assert counted(doubled, (4, 8)) == 2 * 4 * 8 * 8


def test_a_kernel_counts_its_whole_grid():
    def product(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] @ y_ref[...]

    def multiply(x, y):
        return pl.pallas_call(
            product,
            grid=(4,),
            in_specs=[pl.BlockSpec((32, 64), lambda i: (i, 0)), pl.BlockSpec((64, 128))],
            out_specs=pl.BlockSpec((32, 128), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((128, 128), jnp.float32),
        )(x, y)

    assert counted(multiply, (128, 64), (64, 128)) == 2 * 128 * 64 * 128


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a * b + a,
        lambda a, b: jnp.where(a > b, a, b),
        lambda a, b: jax.jit(lambda a: a - b)(a) @ b.T,
        lambda a, b: jax.checkpoint(lambda a: (a + b).reshape(3, 10))(a),
    ],
)
def test_any_other_operation_counts_one_an_element_as_xla_counts_it(function):
    shapes = (5, 6), (5, 6)
    compiled = jax.jit(function).lower(*(jnp.zeros(s) for s in shapes)).compile()
    found = sum(equation_flops(eqn, count_all) for eqn in traced(function, *shapes).eqns)
    assert found == counted(function, *shapes, count=count_all)
    # XLA counts one addition less a sum.
    assert found == pytest.approx(compiled.cost_analysis()["flops"], rel=0.1)


def test_nothing_but_products_is_one():
    assert product_flops("add", {}, [(2, 3), (2, 3)], (2, 3)) is None
