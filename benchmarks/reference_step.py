"""Hand-written reference: one jitted Optax step for a Flax NNX model.

The yardstick of `step_overhead.py`. It uses nothing of jaxspeed but the model that is trained, and
it is not to be changed once figures have been taken against it.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]


def optimizer(learning_rate: float, clip: float) -> optax.GradientTransformation:
    """AdamW with clipping by the global norm."""
    return optax.chain(
        optax.clip_by_global_norm(clip), optax.adamw(learning_rate, weight_decay=0.0)
    )


def single_device(
    factory: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: Callable[[Any, Any], tuple[jax.Array, jax.Array]],
    tx: optax.GradientTransformation,
    accumulation: int = 1,
) -> tuple[Any, Step]:
    """(state, step) on the default device."""
    graph, params, rest = nnx.split(factory(nnx.Rngs(0)), nnx.Param, ...)
    state = (params, tx.init(params))
    step = _step(graph, rest, loss_fn, tx, accumulation)
    return state, jax.jit(step, donate_argnums=0)


def data_parallel(
    factory: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: Callable[[Any, Any], tuple[jax.Array, jax.Array]],
    tx: optax.GradientTransformation,
    devices: list[jax.Device],
    accumulation: int = 1,
    shard_state: bool = False,
) -> tuple[Any, Step, NamedSharding]:
    """(state, step, sharding of a batch) with the batch sharded over the devices.

    With `shard_state`, parameters and moments are sharded as well, each on its last dim that
    divides, and XLA gathers them (FSDP as `jax.jit` gives it).
    """
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices, axis_types=(AxisType.Auto,))
    graph, params, rest = nnx.split(factory(nnx.Rngs(0)), nnx.Param, ...)
    state = (params, tx.init(params))
    shardings = jax.tree.map(lambda x: _sharding(mesh, x, shard_state), state)
    replicated = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(
        _step(graph, rest, loss_fn, tx, accumulation),
        donate_argnums=0,
        out_shardings=(shardings, replicated),
    )
    return (
        jax.device_put(state, shardings),
        step,
        NamedSharding(mesh, PartitionSpec("data")),
    )


# Megatron's sharding of GPT-2, by hand: the dim of each parameter sharded over `tensor`.
MEGATRON = {
    ("q_proj", "kernel"): 2,  # [layers, embed, heads, head_dim]
    ("k_proj", "kernel"): 2,
    ("v_proj", "kernel"): 2,
    ("q_proj", "bias"): 1,
    ("k_proj", "bias"): 1,
    ("v_proj", "bias"): 1,
    ("o_proj", "kernel"): 1,  # [layers, heads, head_dim, embed]
    ("up", "kernel"): 2,  # [layers, embed, mlp]
    ("up", "bias"): 1,
    ("down", "kernel"): 1,  # [layers, mlp, embed]
    ("embed", "table"): 0,  # [vocab, embed]
}


def tensor_parallel(
    factory: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: Callable[[Any, Any], tuple[jax.Array, jax.Array]],
    tx: optax.GradientTransformation,
    devices: list[jax.Device],
    tensor: int,
) -> tuple[Any, Step, NamedSharding]:
    """GPT-2 on data x tensor: weights sharded by hand (`MEGATRON`), the rest left to XLA."""
    kinds = (AxisType.Auto, AxisType.Auto)
    shape = (len(devices) // tensor, tensor)
    mesh = jax.make_mesh(shape, ("data", "tensor"), devices=devices, axis_types=kinds)
    graph, params, rest = nnx.split(factory(nnx.Rngs(0)), nnx.Param, ...)
    state = (params, tx.init(params))

    def place(keys: Any, x: jax.Array) -> NamedSharding:
        names = [str(getattr(key, "key", "")) for key in keys]
        dim = next((MEGATRON[p] for p in itertools.pairwise(names) if p in MEGATRON), None)
        spec = ["tensor" if d == dim else None for d in range(x.ndim)]
        return NamedSharding(mesh, PartitionSpec(*spec))

    shardings = jax.tree.map_with_path(place, state)
    replicated = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(
        _step(graph, rest, loss_fn, tx, 1), donate_argnums=0, out_shardings=(shardings, replicated)
    )
    return jax.device_put(state, shardings), step, NamedSharding(mesh, PartitionSpec("data"))


def _sharding(mesh: Mesh, x: jax.Array, sharded: bool) -> NamedSharding:
    spec: list[str | None] = [None] * x.ndim
    if sharded:
        for dim in reversed(range(x.ndim)):
            if x.shape[dim] % mesh.size == 0 and (dim or x.ndim == 1):
                spec[dim] = "data"
                break
    return NamedSharding(mesh, PartitionSpec(*spec))


def _step(graph: Any, rest: Any, loss_fn: Any, tx: Any, accumulation: int) -> Step:
    def loss(params: Any, batch: Any) -> jax.Array:
        total, weight = loss_fn(nnx.merge(graph, params, rest), batch)
        return total / weight

    def gradients(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        if accumulation == 1:
            return jax.value_and_grad(loss)(params, batch)

        def body(carry: Any, micro: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, micro)
            return jax.tree.map(lambda a, b: a + b / accumulation, carry, (value, grads)), None

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1)

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return jax.lax.scan(body, zero, jax.tree.map(split, batch))[0]

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        params, opt_state = state
        value, grads = gradients(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": value, "grad_norm": optax.global_norm(grads)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    return step
