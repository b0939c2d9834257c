"""Engines on many meshes for one model, and what their states hold, read without the checkpoints'
own code."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxspeed
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.user_models.rng import is_key
from tests.engine import tiny

SAMPLES = 8
NAMES = {"wide/kernel": [None, "mlp"], "wide/bias": ["mlp"], "narrow/kernel": ["mlp", None]}


def scattered(key: Any, shape: Any, dtype: Any, **_: Any) -> jax.Array:
    """Numbers that look drawn. Draws compile several times as long, anew for each mesh."""
    k = jax.lax.iota(jnp.uint32, math.prod(shape)) + jnp.uint32(1)
    bits = k * k * jnp.uint32(2654435761)
    numbers = (bits >> 9).astype(dtype) / 2**22 - 1  # in [-1, 1)
    return (numbers * (3 / shape[0]) ** 0.5).reshape(shape)


class Awkward(nnx.Module):
    """Dims that eight devices do not divide, so that cuts are padded."""

    def __init__(self, rngs: nnx.Rngs):
        self.wide = nnx.Linear(tiny.FEATURES, 12, kernel_init=scattered, rngs=rngs)
        self.narrow = nnx.Linear(12, 7, kernel_init=scattered, rngs=rngs)
        self.head = nnx.Linear(7, 1, kernel_init=scattered, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.narrow(jnp.tanh(self.wide(x)))))


class Stateful(nnx.Module):
    """Dropout's keys and counters, and batch statistics."""

    def __init__(self, rngs: nnx.Rngs):
        self.input = nnx.Linear(tiny.FEATURES, 16, kernel_init=scattered, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(16, 1, kernel_init=scattered, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(self.input(x))))


def engine(stage: int = 0, model: Any = Awkward, devices: int = 8, **more: Any) -> Any:
    """An engine with Adam's moments; `more` are sections of the config."""
    config = {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "parallel": {"logical_axes": NAMES} if model is Awkward else {},
        "gradient_clipping": 1.0,
        **more,
    }
    return jaxspeed.initialize(model, tiny.squared_error, config, devices=jax.devices()[:devices])


def steps(engine: Any, first: int, count: int) -> list[float]:
    """Losses of these steps, each on its own batch."""
    return [
        float(engine.train_batch(tiny.batch(SAMPLES, seed=i))["loss"])
        for i in range(first, first + count)
    ]


def held(engine: Any) -> dict[str, np.ndarray]:
    """{name: logical value} of all that the next step depends on, as copies."""
    state, program = here(engine.state), engine.program
    opt = program.layout.logical(state.opt)
    return {
        name: np.array(jax.random.key_data(x) if is_key(x) else x)
        for name, x in {
            **{f"param {k}": v for k, v in engine.parameters.items()},
            **{f"opt {k}": v for k, v in flat_with_paths(opt).items()},
            **{f"ema {k}": v for k, v in averages(engine).items()},
            **{f"variable {k}": v for k, v in state.variables.items()},
            **{f"scale {k}": v for k, v in state.loss_scale._asdict().items()},
            "step": state.step,
            "skipped": state.skipped,
        }.items()
    }


def averages(engine: Any) -> dict[str, Any]:
    shapes = {row.path: row.leaf.shape for row in engine.program.table}
    return {k: v[tuple(map(slice, shapes[k]))] for k, v in here(engine.state.ema).items()}


def here(tree: Any) -> Any:
    """The tree with offloaded arrays on the devices."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), tree))


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)


def bytes_per_device(state: Any) -> dict[Any, int]:
    totals: dict[Any, int] = {}
    for leaf in jax.tree.leaves(state):
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        for shard in data.addressable_shards:
            totals[shard.device] = totals.get(shard.device, 0) + shard.data.nbytes
    return totals
