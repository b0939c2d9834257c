"""A layer's gradients on CPUs: equal to the formula, and a product without copies of operands."""

import re

import jax
import numpy as np
import pytest

from jaxspeed.ops.cpu_products import merge_summed_dims
from jaxspeed.placement.mesh import build_mesh, in_mesh

BATCH, SEQ = 4, 6


def lowered(inputs, outputs, of="kernel", **mesh):
    """The gradient of a kernel [inputs, outputs] or its input, in a mesh, with its arguments."""
    merge_summed_dims()
    rng = np.random.default_rng(0)
    shapes = (inputs, *outputs), (BATCH, SEQ, inputs), (BATCH, SEQ, *outputs)
    args = [rng.standard_normal(shape, np.float32) for shape in shapes]

    def gradient(kernel, x, cotangent):
        pulled = jax.vjp(lambda w, x: jax.numpy.tensordot(x, w, 1), kernel, x)[1](cotangent)
        return pulled[("kernel", "input").index(of)]

    devices = jax.devices()[: np.prod(list(mesh.values()), initial=1, dtype=int)]
    function = in_mesh(build_mesh(mesh, devices), gradient) if mesh else gradient
    return jax.jit(function).lower(*args), args


def products(text):
    """The summed dims of each product's operands."""
    return re.findall(r"contracting_dims = \[([\d, ]+)\] x \[([\d, ]+)\]", text)


@pytest.mark.parametrize("outputs", [(32,), (8,), (2, 8)])
@pytest.mark.parametrize("data", [1, 2])
def test_the_gradient_is_one_product_of_matrices(outputs, data):
    found, args = lowered(16, outputs, data=data)
    assert products(found.as_text()) == [("0", "0")]
    compiled, (_, x, cotangent) = found.compile(), args
    wanted = np.einsum("bsi,bs...->i...", x.astype(np.float64), cotangent)
    np.testing.assert_allclose(compiled(*args), wanted, rtol=1e-5, atol=1e-5)
    tokens = BATCH * SEQ
    assert not re.search(rf"f32\[\d+,{tokens}\]", compiled.as_text())  # an operand, transposed


@pytest.mark.parametrize("outputs", [(2, 8), (4, 2, 3)])
@pytest.mark.parametrize("data", [1, 2])
def test_the_gradient_of_the_input_leaves_the_kernel_as_it_is(outputs, data):
    found, args = lowered(16, outputs, of="input", data=data)
    assert products(found.as_text()) == [("2", "1")]
    compiled, (kernel, _, cotangent) = found.compile(), args
    outs = "xyz"[: len(outputs)]
    wanted = np.einsum(f"bs{outs},i{outs}->bsi", cotangent.astype(np.float64), kernel)
    np.testing.assert_allclose(compiled(*args), wanted, rtol=1e-5, atol=1e-5)
    assert not re.search(r" (copy|transpose)\(", compiled.as_text())


def test_the_operand_of_fewer_columns_comes_first():
    """XLA:CPU computes [16, 32] from [tokens, 16] and [tokens, 32] faster than its transpose."""
    for inputs, outputs in ((16, 32), (32, 16)):
        text = lowered(inputs, (outputs,), data=1)[0].compile().as_text()
        assert re.findall(r"(f32\[[\d,]+\])\S* dot\(", text) == ["f32[16,32]"]


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 128), (128, 16)])
def test_the_narrow_operand_of_a_wide_gradient_is_transposed(inputs, outputs):
    found, args = lowered(inputs, (outputs,), data=2)
    assert products(found.as_text()) == [("1", "0")]
    compiled, (_, x, cotangent) = found.compile(), args
    wanted = np.einsum("bsi,bso->io", x.astype(np.float64), cotangent)
    np.testing.assert_allclose(compiled(*args), wanted, rtol=1e-5, atol=1e-5)
    assert not re.search(rf"f32\[128,{BATCH * SEQ // 2}\]", compiled.as_text())  # the wide one
    assert products(lowered(16, (127,), data=2)[0].as_text()) == [("0", "0")]


def test_products_stay_where_a_mesh_axis_may_shard_a_sequence():
    assert products(lowered(16, (32,), tensor=2)[0].as_text()) == [("0, 1", "0, 1")]
    assert products(lowered(16, (32,))[0].as_text()) == [("0, 1", "0, 1")]  # and without a mesh
    assert products(lowered(16, (2, 8), of="input", tensor=2)[0].as_text()) == [("2, 3", "1, 2")]
