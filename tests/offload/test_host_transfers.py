"""Host transfers, counted from traced programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.offload.host_transfers import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Argument,
    transfers_in,
)

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
SIZES = {"pipe": 1, "data": 4, "tensor": 2}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(1, 4, 2), tuple(SIZES))


def in_host(mesh, shape, *spec, dtype=jnp.float32):
    at = NamedSharding(mesh, P(*spec), memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(shape, dtype, sharding=at)


def here(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def of(function, *args, kinds=(), gradients=()):
    traced = jax.jit(function).trace(*args)
    named = [
        Argument(f"argument {i}", kind, x.sharding) if kind else None
        for i, (kind, x) in enumerate(zip(kinds or [None] * len(args), args, strict=True))
    ]
    return transfers_in(traced.jaxpr, named, gradients, ("data",), SIZES)


def test_a_loop_over_layers_transfers_each_shard_once(mesh):
    def forward(weights, x):
        return jax.lax.scan(lambda h, w: (h @ jax.device_put(w, DEVICE), None), x, weights)[0]

    weights = in_host(mesh, (6, 32, 32), None, "data", "tensor")
    found = of(forward, weights, here(mesh, (8, 32), "data"), kinds=(PARAMETERS, None))
    assert (
        found.to_device
        == {PARAMETERS: 6 * 32 * 32 * 4 // 8}
        == {PARAMETERS: found.fetched["argument 0"]}
    )
    assert found.to_host == found.stored == {}
    assert found.flops == 6 * 2 * 8 * 32 * 32 / 8


def test_loops_in_loops_multiply(mesh):
    def forward(weights, x):
        def micro(h, _):
            return jax.lax.scan(lambda h, w: (h + jax.device_put(w, DEVICE), None), h, weights)

        return jax.lax.scan(lambda h, n: (micro(h, n)[0], None), x, None, length=3)[0]

    found = of(forward, in_host(mesh, (5, 16)), here(mesh, (16,)), kinds=(PARAMETERS, None))
    assert found.to_device == {PARAMETERS: 3 * 5 * 16 * 4}


def test_an_array_updated_in_a_loop_leaves_as_it_came(mesh):
    at = NamedSharding(mesh, P(None, "data"), memory_kind="pinned_host")

    def update(moments):
        def body(i, m):
            piece = jax.device_put(
                jax.lax.dynamic_slice_in_dim(m, i, 1), at.with_memory_kind("device")
            )
            return jax.lax.dynamic_update_slice_in_dim(m, jax.device_put(0.9 * piece, at), i, 0)

        return jax.lax.fori_loop(0, 6, body, moments)

    found = of(update, in_host(mesh, (6, 64), None, "data"), kinds=(OPTIMIZER,))
    assert found.to_device == found.to_host == {OPTIMIZER: 6 * 64 * 4 // 4}
    assert found.fetched == found.stored == {"argument 0": 6 * 64 * 4 // 4}


def test_an_array_replaced_at_once_leaves_as_it_came(mesh):
    at = NamedSharding(mesh, P("data"), memory_kind="pinned_host")

    def update(moments):
        return jax.device_put(0.9 * jax.device_put(moments, at.with_memory_kind("device")), at)

    found = of(update, in_host(mesh, (64,), "data"), kinds=(OPTIMIZER,))
    assert found.fetched == found.stored == {"argument 0": 64 * 4 // 4}


def test_a_streamed_array_that_is_no_argument_is_a_gradient(mesh):
    at = NamedSharding(mesh, P("data"))

    def there_and_back(x):
        return jax.device_put(jax.device_put(jnp.sin(x), HOST), at)

    found = of(there_and_back, here(mesh, (8, 16), "data"))
    assert found.to_device == found.to_host == {GRADIENTS: 8 * 16 * 4 // 4}


def test_other_host_arrays_are_gradients_by_shape_or_activations(mesh):
    def there_and_back(x):
        away = jax.device_put(jnp.sin(x), HOST)
        return jax.device_put(away, DEVICE) * x

    x = here(mesh, (8, 16), "data")
    for gradients, kind in (((), ACTIVATIONS), (((8, 16),), GRADIENTS)):
        found = of(there_and_back, x, gradients=gradients)
        assert found.to_device == found.to_host == {kind: 8 * 16 * 4 // 4}


def test_activations_sharded_over_tensor_too_transfer_less(mesh):
    at = NamedSharding(mesh, P(P.UNCONSTRAINED, "tensor"))

    def there(x):
        return jax.device_put(jax.lax.with_sharding_constraint(x, at), HOST)

    assert of(there, here(mesh, (8, 16), "data")).to_host == {ACTIVATIONS: 8 * 16 * 4 // 8}


def test_transfers_inside_of_shard_map_are_per_device(mesh):
    def there(x):
        return jax.device_put(x, HOST)

    mapped = jax.shard_map(
        there, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    found = of(mapped, here(mesh, (8, 16), "data"))
    assert found.to_host == {ACTIVATIONS: 2 * 16 * 4}


def test_the_branch_that_transfers_most_counts(mesh):
    def either(flag, weights):
        def fetch(w):
            return jax.device_put(w, DEVICE).sum()

        return jax.lax.cond(flag, fetch, lambda w: fetch(w[:1]), weights)

    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    found = of(either, flag, in_host(mesh, (6, 64)), kinds=(None, PARAMETERS))
    assert found.to_device == {PARAMETERS: 6 * 64 * 4}


@pytest.mark.parametrize("again", [True, False])
def test_rematerialized_regions_of_the_backward_pass_are_counted(mesh, again):
    def loss(x):
        layer = jax.checkpoint(jnp.sin) if again else jnp.sin
        return jax.lax.scan(lambda h, _: (layer(h), None), x, None, length=4)[0].sum()

    assert of(jax.grad(loss), here(mesh, (8,))).regions == (4 if again else 0)
