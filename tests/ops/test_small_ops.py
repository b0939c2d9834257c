"""Norms, rotary positions and lookups equal their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.ops import (
    RopeScaling,
    embed,
    frequencies,
    layer_norm,
    rms_norm,
    rotate,
    rotate_neighbours,
    rotation,
)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_layer_norm_equals_the_formula_far_from_zero():
    """A mean 1000 times the spread: E[x^2] - E[x]^2 would keep one digit in fp32."""
    x, scale, bias = normal(3, 64) + 1000, normal(64, seed=1), normal(64, seed=2)
    x = x.astype(np.float32).astype(np.float64)
    wanted = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    wanted = wanted * scale + bias
    found = layer_norm(*(jnp.asarray(a, jnp.float32) for a in (x, scale, bias)))
    np.testing.assert_allclose(found, wanted, atol=4 * 1000 * 2.0**-24 * np.abs(scale).max())


def test_rms_norm_equals_the_formula():
    x, scale = normal(3, 64), normal(64, seed=1)
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    found = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_norms_of_narrow_types_are_taken_in_fp32(dtype):
    x = jnp.asarray(300 * normal(2, 4096), dtype)  # squares that fp16 cannot hold
    one = jnp.ones(4096, jnp.float32)
    exact = np.asarray(x, np.float64)
    wanted = exact / np.sqrt((exact**2).mean(-1, keepdims=True))
    found = rms_norm(x, one)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=jnp.finfo(dtype).eps)
    assert layer_norm(x, one, one).dtype == dtype


def test_frequencies_equal_llama_3s_published_rule():
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    for i, found in enumerate(frequencies(128, 500000.0, scaling)):
        f = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4.0:
            wanted = f
        elif wavelength > 8192 / 1.0:
            wanted = f / 8.0
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            wanted = (1 - smooth) * f / 8.0 + smooth * f
        assert found == pytest.approx(wanted, rel=1e-12)


def test_rotated_products_depend_on_the_distance_alone():
    freqs = frequencies(32, 10000.0)
    q, k = (jnp.asarray(normal(1, 1, 1, 32, seed=s), jnp.float32) for s in (0, 1))

    def product(i, j):
        at = [rotation(jnp.array([p]), freqs) for p in (i, j)]
        return float(jnp.vdot(rotate(q, at[0]), rotate(k, at[1])))

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-2)
    assert product(5, 5) == pytest.approx(float(jnp.vdot(q, k)), abs=1e-5)


@pytest.mark.parametrize("count", [8, 6])
@pytest.mark.parametrize("neighbours", [False, True])
def test_pairs_of_the_first_dims_are_rotated_and_the_others_stay(count, neighbours):
    x = normal(2, 5, 3, 8).astype(np.float32)
    by = rotation(np.arange(5), frequencies(count, 100.0))
    found = (rotate_neighbours if neighbours else rotate)(jnp.asarray(x), by)
    half = count // 2
    first = slice(0, count, 2) if neighbours else slice(0, half)
    second = slice(1, count, 2) if neighbours else slice(half, count)
    angles = np.outer(np.arange(5), 100.0 ** (-np.arange(half) / half))[None, :, None]
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    wanted = x.copy()
    wanted[..., first], wanted[..., second] = turned.real, turned.imag
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_array_equal(found[..., count:], x[..., count:])


def test_rms_norm_over_all_heads_has_one_mean():
    x, scale = normal(2, 5, 3, 8), normal(3, 8, seed=1)
    flat = x.reshape(2, 5, 24)
    wanted = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + 1e-5) * scale.reshape(24)
    found = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32))
    np.testing.assert_allclose(found, wanted.reshape(x.shape), rtol=1e-5)


def test_each_row_of_a_batch_may_have_positions_of_its_own():
    freqs = frequencies(8, 10000.0)
    x = jnp.asarray(normal(2, 3, 1, 8), jnp.float32)
    positions = jnp.array([[0, 1, 2], [5, 6, 7]])
    both = rotate(x, rotation(positions, freqs))
    for row in range(2):
        alone = rotate(x[row : row + 1], rotation(positions[row], freqs))
        np.testing.assert_array_equal(both[row], alone[0])


def test_embed_looks_rows_up_and_marks_ids_outside():
    table = jnp.asarray(normal(5, 3), jnp.float32)
    found = embed(table, jnp.array([[0, 4], [5, -1]]))
    np.testing.assert_array_equal(found[0], table[jnp.array([0, 4])])
    assert np.isnan(found[1]).all()


def test_the_gradient_of_embed_sums_over_equal_ids():
    gradient = jax.grad(lambda t: jnp.sum(embed(t, jnp.array([1, 1, 3]))))(jnp.ones((5, 2)))
    np.testing.assert_array_equal(gradient[:, 0], [0, 2, 0, 1, 0])
