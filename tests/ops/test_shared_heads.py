"""Devices that share the query heads: any number of key heads gives what one device computes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.ops import attention
from jaxspeed.ops.attention import copies_of, plain, repeated_for_sharding
from jaxspeed.ops.mask import Mask
from jaxspeed.ops.per_device import over_batch_and_heads
from tests.ops.attention_reference import attention_and_gradients, seen
from tests.ops.meshes import simulated_mesh
from tests.support.covering import examples

HEAD_DIM, SEQ, BATCH = 4, 6, 4


def as_a_kernel(q, k, v):
    """The plain form, run as the kernels are."""
    k, v = repeated_for_sharding(q, k, v)
    return over_batch_and_heads(plain, q, k, v, None, mask=Mask(True, None), scale=0.5)


FORMS = {"plain": functools.partial(attention, scale=0.5), "kernel": as_a_kernel}


@settings(max_examples=examples(4, 8), deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)),
    parts=st.sampled_from([2, 4, 8]),
    kv_heads=st.integers(1, 6),
    more=st.integers(1, 2),
    even=st.booleans(),
)
def test_attention_with_any_heads_on_any_devices_equals_the_formula(
    form, parts, kv_heads, more, even
):
    """`even`: the devices divide the query heads, so that they are sharded."""
    heads = more * (math.lcm(kv_heads, parts) if even else kv_heads)
    rng = np.random.default_rng(heads)
    shapes = [(BATCH, SEQ, n, HEAD_DIM) for n in (heads, kv_heads, kv_heads, heads)]
    args = [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    def run(q, k, v, d_out):
        out, pullback = jax.vjp(FORMS[form], q, k, v)
        return out, *pullback(d_out)

    mesh = simulated_mesh(data=8 // parts, tensor=parts)

    def placed(x):
        over = "tensor" if x.shape[2] % parts == 0 else None
        return jax.device_put(x, NamedSharding(mesh, P("data", None, over)))

    with jax.set_mesh(mesh):
        found = jax.jit(run)(*map(placed, args))
    dense = seen(SEQ, SEQ, causal=True, window=None, segments=None)
    for x, y in zip(found, attention_and_gradients(*args, dense, 0.5), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@given(kv_heads=st.integers(1, 64), group=st.integers(1, 16), parts=st.integers(1, 64))
def test_heads_are_copied_as_often_as_it_takes_and_no_more(kv_heads, group, parts):
    heads = kv_heads * group
    copies = copies_of(heads, kv_heads, parts)
    assert bool(copies) == (heads % parts == 0)
    enough = [n for n in range(1, parts + 1) if kv_heads * n % parts == 0]
    assert copies in (0, enough[0])


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_each_device_has_the_key_heads_that_its_query_heads_read(kv_heads):
    """Query head h reads key head h // (heads / kv_heads), which is its own number here."""
    parts, heads = 4, 12
    number = jnp.broadcast_to(jnp.arange(kv_heads)[:, None], (4, 2, kv_heads, 8)).astype(float)
    given_to = []

    def spy(q, k, v, segments):
        given_to.append((q.shape, k.shape))
        of_each = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        return of_each.astype(q.dtype)

    with jax.set_mesh(simulated_mesh(data=2, tensor=parts)):

        def run(q, k):
            return over_batch_and_heads(spy, q, *repeated_for_sharding(q, k, k), None)

        read = jax.jit(run)(jnp.zeros((4, 2, heads, 8)), number)
    own = kv_heads * copies_of(heads, kv_heads, parts) // parts
    assert given_to == [((2, 2, heads // parts, 8), (2, 2, own, 8))]
    np.testing.assert_array_equal(read[0, 0, :, 0], np.arange(heads) // (heads // kv_heads))
