"""A layer's gradients on CPUs: as the formula, products without copies, sums computed once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.ops.cpu_gradients import lower_gradients
from jaxspeed.placement.mesh import build_mesh, in_mesh

BATCH, SEQ = 4, 6


def lowered(inputs, outputs, of="kernel", **mesh):
    """The gradient of a kernel [inputs, outputs] or its input, in a mesh, with its arguments."""
    lower_gradients()
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


def test_the_gradients_of_a_stack_are_transposed_before_they_are_joined():
    """By a copy each: a join of transposed arrays reads them in strides."""
    lower_gradients()
    rng = np.random.default_rng(0)
    for inputs, outputs, copies in ((32, 16, 3), (16, 16, 0), (16, 32, 0)):
        kernels = rng.standard_normal((3, inputs, outputs), np.float32)
        x = rng.standard_normal((3, BATCH, SEQ, inputs), np.float32)

        def loss(kernels, x):
            def layer(total, of_layer):
                return total + jnp.sum(jnp.sin(jnp.tensordot(*of_layer, 1))), None

            return jax.lax.scan(layer, 0.0, (x, kernels), unroll=True)[0]

        gradient = in_mesh(build_mesh({"data": 1}, jax.devices()[:1]), jax.grad(loss))
        text = jax.jit(gradient).lower(kernels, x).compile().as_text()
        (join,) = (body for body in text.split("\n}") if " concatenate(" in body)
        assert " transpose(" not in join and len(re.findall(r" transpose\(", text)) == copies
        cos = np.cos(np.einsum("lbsi,lio->lbso", x.astype(np.float64), kernels))
        wanted = np.einsum("lbsi,lbso->lio", x, cos)
        np.testing.assert_allclose(jax.jit(gradient)(kernels, x), wanted, rtol=1e-4, atol=1e-4)


def residual_stream(layers, width=256):
    """The gradient of a stream that each layer reads twice and adds to, and its argument."""
    weights = np.random.default_rng(0).standard_normal((layers, width), np.float32) / width

    def loss(x):
        for w in weights:
            x = x + w * jnp.sin(x) + jnp.cos(x) * jnp.sum(x, -1, keepdims=True) / width
        return jnp.sum(x * x)

    return jax.grad(loss), np.ones((2, 256, width), np.float32)


def additions(layers, function=lambda gradient: gradient):
    gradient, x = residual_stream(layers)
    text = jax.jit(function(gradient)).lower(x).compile().as_text()
    return len(re.findall(r" add\(", text))


def test_the_gradient_of_a_residual_stream_is_summed_once():
    """Linear in the layers; by itself XLA's is quadratic with jaxlib 0.10.2."""
    mesh = build_mesh({"data": 1}, jax.devices()[:1])
    lower_gradients()
    here = [additions(n, lambda gradient: in_mesh(mesh, gradient)) for n in (4, 8, 12)]
    assert here[2] - here[1] == here[1] - here[0]
    gradient, x = residual_stream(8)
    jax.clear_caches()
    found, wanted = jax.jit(in_mesh(mesh, gradient))(x), jax.jit(gradient)(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_products_stay_where_a_mesh_axis_may_shard_a_sequence():
    assert products(lowered(16, (32,), tensor=2)[0].as_text()) == [("0, 1", "0, 1")]
    assert products(lowered(16, (32,))[0].as_text()) == [("0, 1", "0, 1")]  # and without a mesh
    assert products(lowered(16, (2, 8), of="input", tensor=2)[0].as_text()) == [("2, 3", "1, 2")]
