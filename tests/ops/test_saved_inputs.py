"""What functions of 16-bit activations save for their backward pass, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspeed.models import blocks

from jaxspeed.ops import layer_norm, rms_norm, saves_inputs

SHAPE = (2, 16, 64)


def rms(x, scale):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-5) * scale).astype(x.dtype)


def layer(x, scale, bias):
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + 1e-5) * scale + bias).astype(x.dtype)


# (the function, it written in plain JAX, its number of activations and of vectors)
FUNCTIONS = {
    "rms_norm": (rms_norm, rms, 1, 1),
    "layer_norm": (layer_norm, layer, 1, 2),
    "llama": (blocks.swiglu, lambda gate, up: jax.nn.silu(gate) * up, 2, 0),
    "gemma": (blocks.geglu, lambda g, up: jax.nn.gelu(g, approximate=True) * up, 2, 0),
    "gpt2": (blocks.gelu, lambda x: jax.nn.gelu(x, approximate=True), 1, 0),
    "vit": (blocks.exact_gelu, lambda x: jax.nn.gelu(x, approximate=False), 1, 0),
}


def arguments(name, dtype):
    _, _, activations, vectors = FUNCTIONS[name]
    keys = jax.random.split(jax.random.key(0), activations + vectors)
    shapes = [SHAPE] * activations + [SHAPE[-1:]] * vectors
    return [jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes)]


def saved_bytes(fn, args):
    pullback = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args)
    large = [x for x in jax.tree.leaves(pullback) if x.size >= args[0].size]
    return sum(x.size * x.dtype.itemsize for x in large)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_only_the_inputs_are_saved(name):
    fn, plain, activations, _ = FUNCTIONS[name]
    args = arguments(name, jnp.bfloat16)
    assert saved_bytes(fn, args) == activations * args[0].size * 2
    assert saved_bytes(plain, args) >= 2 * saved_bytes(fn, args), "as JAX does it"


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients_are_those_of_plain_jax(name, dtype):
    fn, plain, *_ = FUNCTIONS[name]
    args = arguments(name, dtype)
    (out, pull), (expected, pull_plain) = jax.vjp(fn, *args), jax.vjp(plain, *args)
    np.testing.assert_array_equal(out, expected)
    for ours, theirs in zip(pull(out), pull_plain(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_in_fp32_there_is_a_forward_mode_derivative():
    x = jnp.linspace(-1.0, 1.0, 8)
    _, tangent = jax.jvp(saves_inputs(jnp.tanh), (x,), (jnp.ones_like(x),))
    np.testing.assert_allclose(tangent, 1 - jnp.tanh(x) ** 2, rtol=1e-6)
