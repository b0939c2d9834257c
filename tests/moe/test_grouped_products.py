"""Grouped products on one device: by blocks, and by megablox in interpret mode."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.jaxpr.flops import count_products, program_flops
from jaxspeed.ops.moe import grouped_products as products
from jaxspeed.ops.moe import megablox
from jaxspeed.ops.moe.grouped_products import Layout, grouped_product

ONE_DEVICE = Layout(None, (), ())
# Rows before the first expert, an empty one in the middle, rows behind the last one.
BOUNDS = {
    "unaligned": (0, 3, 20, 20, 37),
    "rows of no expert": (5, 9, 9, 30, 31),
    "one expert": (0, 0, 0, 41, 41),
    "no rows": (0, 0, 0, 0, 0),
}
ROWS, IN, OUT = 41, 24, 40


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def expected(values, weight, bounds):
    """With NumPy: the product, and the gradient of the weights if that is the cotangent."""
    y = np.zeros((len(values), weight.shape[2]), np.float64)
    grad = np.zeros(weight.shape)
    for e, (start, end) in enumerate(itertools.pairwise(bounds)):
        y[start:end] = values[start:end] @ weight[e]
        grad[e] = values[start:end].T @ y[start:end]
    return y, grad


def close(found, wanted):
    return np.max(np.abs(found - wanted)) <= 1e-5 * max(np.max(np.abs(wanted)), 1)


@pytest.fixture(params=["blocks", "megablox"])
def form(request, monkeypatch):
    monkeypatch.setattr(megablox, "INTERPRET", True)
    monkeypatch.setattr(megablox, "ROW_TILE", 16)
    if request.param == "blocks":
        return products.by_blocks, products.gradient_by_blocks
    return megablox.product, megablox.gradient


@pytest.mark.default_cases(
    "blocks-unaligned",
    "blocks-rows of no expert",
    "blocks-one expert",
    "blocks-no rows",
    "megablox-rows of no expert",
    "megablox-one expert",
    "megablox-no rows",
)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_products_and_gradients_of_one_device(form, bounds):
    multiply, gradient = form
    edges = np.array(BOUNDS[bounds], np.int32)
    values, weight = numbers(ROWS, IN), numbers(4, IN, OUT, seed=1)
    y, grad = expected(values, weight, edges)
    assert close(multiply(values, weight, edges, False, jnp.float32), y)
    transposed = weight.swapaxes(1, 2).copy()
    assert close(multiply(values, transposed, edges, True, jnp.float32), y)
    cotangent = y.astype(np.float32)
    cotangent[: edges[0]] = cotangent[edges[-1] :] = np.nan  # of rows that are no expert's
    assert close(gradient(values, cotangent, edges, jnp.float32), grad)


def test_rows_of_no_expert_may_be_anything(form):
    multiply, _ = form
    edges = np.array(BOUNDS["rows of no expert"], np.int32)
    values = numbers(ROWS, IN)
    values[: edges[0]] = values[edges[-1] :] = np.nan
    y = multiply(values, numbers(4, IN, OUT), edges, False, jnp.float32)
    assert np.isfinite(y).all() and not np.any(y[: edges[0]]) and not np.any(y[edges[-1] :])


def test_derivatives_are_those_of_the_dense_product():
    edges = jnp.array([BOUNDS["rows of no expert"]], jnp.int32)
    values, weight = numbers(1, 1, ROWS, IN), numbers(4, IN, OUT, seed=1)
    ids = np.digitize(np.arange(ROWS), edges[0]) - 1

    def dense(values, weight):
        chosen = jnp.where(((ids >= 0) & (ids < 4))[:, None, None], weight[ids.clip(0, 3)], 0)
        return jnp.einsum("psri,rio->psro", values, chosen)

    def grouped(values, weight):
        return grouped_product(values, weight, edges, layout=ONE_DEVICE, active=ROWS)

    args, tangents = (values, weight), (numbers(*values.shape, seed=2), numbers(*weight.shape))
    for mine, theirs in zip(
        jax.tree.leaves(jax.jvp(grouped, args, tangents)),
        jax.tree.leaves(jax.jvp(dense, args, tangents)),
        strict=True,
    ):
        assert close(mine, theirs)

    def loss(function):
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(function(*args))), argnums=(0, 1)))

    for mine, theirs in zip(loss(grouped)(*args), loss(dense)(*args), strict=True):
        assert close(mine, theirs)
    batched = jax.vmap(grouped, (0, None))(np.stack([values, 2 * values]), weight)
    assert close(batched[1], 2 * dense(values, weight))


def test_no_expert_has_a_copy_of_the_weights_by_block():
    """The largest array of the compiled product is an operand, or the result."""
    args = (
        jax.ShapeDtypeStruct((1, 1, 512, 8), jnp.float32),
        jax.ShapeDtypeStruct((4, 8, 256), jnp.float32),
        jax.ShapeDtypeStruct((1, 5), jnp.int32),
    )
    run = functools.partial(grouped_product, layout=ONE_DEVICE, active=512)
    memory = jax.jit(run).lower(*args).compile().memory_analysis()
    block = products.block_rows(512, 4)
    assert memory.temp_size_in_bytes < 4 * (512 * 256 + 3 * 8 * 256 + 4 * block * 256) + 4096


def test_flops_are_those_of_the_active_rows():
    def loss(values, weight):
        edges = jnp.zeros((1, 5), jnp.int32)
        return jnp.sum(grouped_product(values, weight, edges, layout=ONE_DEVICE, active=30))

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(
        numbers(1, 1, ROWS, IN), numbers(4, IN, OUT)
    )
    assert program_flops(traced.jaxpr, count_products) == 3 * 2 * 30 * IN * OUT


def test_bf16_rows_are_summed_in_fp32(form):
    multiply, gradient = form
    edges = np.array([0, ROWS], np.int32)
    values, weight = (x.astype(jnp.bfloat16) for x in (numbers(ROWS, 400), numbers(1, 400, OUT)))
    y = multiply(values, weight, edges, False, jnp.bfloat16)
    wide = values.astype(np.float32) @ weight[0].astype(np.float32)
    assert y.dtype == jnp.bfloat16 and np.max(np.abs(y - wide)) < 2**-8 * np.max(np.abs(wide))
    assert gradient(values, y, edges, jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("rows", [1, 7, 64, 4096])
@pytest.mark.parametrize("experts", [1, 8, 128])
def test_blocks_fit_the_rows(rows, experts):
    block = products.block_rows(rows, experts)
    assert 1 <= block <= min(rows, products.MAX_BLOCK)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_tiles_fit_vmem(dtype):
    """fp32 results of `tgmm` at tiles (512, 1024, 1024) do not fit a v5p's."""
    size, result = jnp.dtype(dtype).itemsize, 4
    tile = megablox.ROW_TILE
    a, b = megablox.gradient_tiles(tile, 4096, 14336, dtype, jnp.float32)
    assert 2 * (size * tile * (a + b) + result * a * b) + 4 * a * b < megablox.VMEM
    assert (a, b) != (1024, 1024)
