"""Programs whose collectives are known, to be compiled for any devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("pipe", "replica", "data", "seq", "expert", "tensor")


def mesh_of(devices: Sequence[jax.Device], **sizes: int) -> Mesh:
    shape = [sizes.get(axis, 1) for axis in AXES]
    grid = np.asarray(devices[: int(np.prod(shape))]).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def array(mesh: Mesh, shape: Sequence[int], spec: P, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, spec))


def constrain(x: Any, mesh: Mesh, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def compiled_text(function: Callable[..., Any], *args: Any) -> str:
    return jax.jit(function).lower(*args).compile().as_text()


def manual(mesh: Mesh, body: Callable[..., Any], rows: int = 64, cols: int = 32) -> str:
    """`body` on each device's own f32[rows, cols]; its result is kept whole on each device."""
    everything = P(AXES)
    function = jax.shard_map(
        body, mesh=mesh, in_specs=everything, out_specs=everything, check_vma=False
    )
    return compiled_text(function, array(mesh, (rows * mesh.size, cols), everything))


def zero2(mesh: Mesh, layers: int, micro_batches: int, width: int) -> str:
    """Scanned layers, weights cut over `tensor`, gradients accumulated cut over `data` as well."""

    def loss(w, x):
        return (lax.scan(lambda h, wi: (jnp.tanh(h @ wi), None), x, w)[0] ** 2).sum()

    def step(w, batches):
        def micro_batch(accumulated, x):
            value, gradient = jax.value_and_grad(loss)(w, x)
            return accumulated + constrain(gradient, mesh, None, "data", "tensor"), value

        zeros = constrain(jnp.zeros_like(w), mesh, None, "data", "tensor")
        with jax.named_scope("micro_batches"):
            gradient, losses = lax.scan(micro_batch, zeros, batches)
        return w - 0.1 * constrain(gradient, mesh, None, None, "tensor"), losses

    return compiled_text(
        step,
        array(mesh, (layers, width, width), P(None, None, "tensor")),
        array(mesh, (micro_batches, 64, width), P(None, "data")),
    )


def zero3_units(mesh: Mesh, layers: int, width: int) -> str:
    """Layers in a list, each gathered inside its own checkpoint, tied to its input."""

    def layer(x, w):
        x, w = lax.optimization_barrier((x, w))
        return jnp.tanh(x @ constrain(w, mesh))

    def loss(weights, x):
        for w in weights:
            x = jax.checkpoint(layer)(x, w)
        return (x.astype(jnp.float32) ** 2).sum()

    def step(weights, x):
        gradients = jax.grad(loss)(weights, x)
        return [w - 0.1 * constrain(g, mesh, "data") for w, g in zip(weights, gradients)]

    return compiled_text(
        step,
        [array(mesh, (width, width), P("data"), jnp.bfloat16)] * layers,
        array(mesh, (1024, width), P("data"), jnp.bfloat16),
    )


def reduced_once(mesh: Mesh, leaves: int, micro_batches: int, width: int) -> str:
    """Partial gradients accumulated on each data rank; one reduce-scatter after the loop."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    def partial_sums(weights, batches):
        def micro_batch(accumulated, x):
            return jax.tree.map(jnp.add, accumulated, jax.grad(loss)(weights, x)), None

        zeros = jax.tree.map(jnp.zeros_like, weights)
        with jax.named_scope("micro_batches"):
            sums, _ = lax.scan(micro_batch, zeros, batches)
        return jax.tree.map(lambda leaf: leaf[None], sums)

    def step(weights, batches):
        sums = jax.shard_map(
            partial_sums,
            mesh=mesh,
            in_specs=(P(), P(None, "data")),
            out_specs=P("data"),
            axis_names={"data"},
            check_vma=False,
        )(weights, batches)
        return jax.tree.map(lambda s: constrain(s.sum(0), mesh, "data"), sums)

    return compiled_text(
        step,
        [array(mesh, (width, width), P())] * leaves,
        array(mesh, (micro_batches, 64, width), P(None, "data")),
    )


def products(mesh: Mesh) -> str:
    """A batched product and its gradients, which XLA:TPU writes as dilated convolutions."""

    def loss(q, k):
        return jnp.sin(jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)).sum()

    one = array(mesh, (8, 128, 4, 64), P("data"), jnp.bfloat16)
    return compiled_text(jax.grad(loss, (0, 1)), one, one)


def offloaded(mesh: Mesh) -> Any:
    """A program with 1 MiB of its argument on the host of each device."""
    host = NamedSharding(mesh, P(AXES), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((8 * 512, 512), jnp.float32, sharding=host)
    device = NamedSharding(mesh, P(AXES), memory_kind="device")
    return jax.jit(lambda x: jax.device_put(x, device) * 2).lower(x).compile()
