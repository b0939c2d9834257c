"""The zig-zag order of tokens: what each device has, the inverse, its transpose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.ops.token_order import in_token_order


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_device_r_has_chunks_r_and_r_from_the_end(devices):
    tokens = np.arange(16)
    chunks = tokens.reshape(2 * devices, -1)
    expected = [x for r in range(devices) for x in (chunks[r], chunks[-1 - r])]
    found = in_token_order(jnp.asarray(tokens), 0, devices, zigzag=True)
    np.testing.assert_array_equal(found, np.concatenate(expected))
    np.testing.assert_array_equal(in_token_order(found, 0, devices, zigzag=False), tokens)


def test_its_transpose_is_the_inverse_also_under_vmap():
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))

    def ordered(x, zigzag=True):
        return jax.vmap(lambda row: in_token_order(row, 1, 2, zigzag=zigzag))(x)

    out, pullback = jax.vjp(ordered, x)
    (grad,) = pullback(out)
    np.testing.assert_array_equal(grad, x)
    np.testing.assert_array_equal(ordered(out, zigzag=False), x)
