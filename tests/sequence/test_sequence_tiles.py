"""Sequence tiles: the same numbers, in loops over tiles, with weights gathered once.

The reference is the same loss in plain JAX on one device, written here.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxspeed
from tests.support.covering import covering

EMBED, MLP, VOCAB, SEQ, BATCH, LAYERS = 16, 48, 40, 24, 8, 2
STEPS, LR = 2, 0.1
SPECS = {"autotp_size": 2}


def init(key: jax.Array) -> Any:
    keys = iter(jax.random.split(key, 6 * LAYERS + 2))

    def weight(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    def layer() -> dict[str, jax.Array]:
        return {
            "scale": jnp.ones(EMBED),
            "qkv": weight(EMBED, 3, EMBED),
            "out": weight(EMBED, EMBED),
            "gate": weight(EMBED, MLP),
            "up": weight(EMBED, MLP),
            "down": weight(MLP, EMBED),
        }

    layers = [layer() for _ in range(LAYERS)]
    return {"table": weight(VOCAB, EMBED), "layers": layers, "head": weight(EMBED, VOCAB)}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def layer(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = jnp.einsum("bse,eto->tbso", norm(x, p["scale"]), p["qkv"])
    scores = jnp.einsum("bqe,bke->bqk", q, k) / EMBED**0.5
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    x = x + jnp.einsum("bqk,bke->bqe", jax.nn.softmax(scores), v) @ p["out"]
    y = norm(x, p["scale"])
    hidden = jax.nn.relu(y @ p["gate"]) * jax.nn.silu(y @ p["up"])
    return x + hidden @ p["down"]


def hidden(params: Any, tokens: jax.Array, layer: Any) -> jax.Array:
    x = params["table"][tokens]
    for p in params["layers"]:
        x = layer(p, x)
    return x


def total(params: Any, batch: Any, layer: Any) -> Any:
    tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    logits = hidden(params, tokens, layer) @ params["head"]
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -found.sum(), jnp.asarray(found.size, jnp.float32)


def apply(params: Any, batch: Any) -> Any:
    return total(params, batch, jaxspeed.unit(layer))


def batch(seed: int) -> Any:
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (BATCH, SEQ + 1), np.int32)
    return {"tokens": tokens}


def loss(model: Any, batch: Any) -> Any:
    return model(batch)


def engine(tiles: Any, stage: int = 0, **sections: Any) -> Any:
    parallel = {"sequence_tiles": tiles, **sections.pop("parallel", {})}
    accumulation = sections.pop("accumulation", 1)
    model = init, sections.pop("model", apply)
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "run": {"seed": 3},
        "parallel": parallel,
        **sections,
    }
    return jaxspeed.initialize(model, loss, config, optax.sgd(LR), example_batch=batch(0))


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], Any]:
    """The losses and last parameters of plain Optax on one device."""

    def forward(params: Any, batch: Any) -> Any:
        found, weight = total(params, batch, layer)
        return found / weight

    params = jax.jit(init)(jax.random.key(3))
    found = []
    for seed in range(STEPS):
        value, grads = jax.jit(jax.value_and_grad(forward))(params, batch(seed))
        params = jax.tree.map(lambda p, g: p - LR * g, params, grads)
        found.append(float(value))
    return found, params


WAYS: dict[str, dict[str, Any]] = {
    "4 tiles": {"tiles": 4, "mesh": {"data": 8}},
    "5 uneven tiles": {"tiles": 5, "mesh": {"data": 8}},
    "remat": {"tiles": 4, "mesh": {"data": 8}, "parallel": {"remat": "full"}},
    "tensor 2": {"tiles": 3, "mesh": {"data": 4, "tensor": 2}, "tensor_parallel": SPECS},
    "seq 2": {"tiles": 3, "mesh": {"data": 4, "seq": 2}},
    "seq 2, tensor 2": {
        "tiles": 3,
        "mesh": {"data": 2, "seq": 2, "tensor": 2},
        "tensor_parallel": SPECS,
        "accumulation": 2,
    },
    "pipe 2": {"tiles": 4, "mesh": {"pipe": 2, "data": 4}, "accumulation": 2},
}
POINTS = [*itertools.product((0, 1, 2, 3), WAYS)]
ALWAYS = [(3, "4 tiles"), (0, "5 uneven tiles"), (3, "remat"), (1, "seq 2, tensor 2")]
ALWAYS += [(3, "seq 2"), (1, "pipe 2")]


@pytest.mark.default_cases("3-remat")
@pytest.mark.parametrize(("stage", "way"), covering(POINTS, ALWAYS))
def test_the_numbers_are_those_without_tiles(stage: int, way: str, plain: Any) -> None:
    run = engine(stage=stage, **WAYS[way])
    losses = [float(run.train_batch(batch(seed))["loss"]) for seed in range(STEPS)]
    np.testing.assert_allclose(losses, plain[0], rtol=1e-6)
    parts = jax.tree_util.tree_leaves_with_path(plain[1])
    theirs = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in parts}
    assert run.parameters.keys() == theirs.keys()
    for path, ours in run.parameters.items():
        np.testing.assert_allclose(ours, theirs[path], rtol=1e-5, atol=1e-6)


@pytest.mark.sampled  # tests/train/test_random_losses.py has the claim by default
def test_writes_at_positions_train_and_evaluate_as_without_tiles() -> None:
    def written(p: Any, x: jax.Array) -> jax.Array:
        x = layer(p, x).at[:, 13].multiply(3.0)
        return x + jax.nn.relu(
            jax.lax.dynamic_update_slice(x, x[:, :2], (0, 7, 0)) @ p["qkv"][:, 0]
        )

    def own(params: Any, batch: Any) -> Any:
        return total(params, batch, jaxspeed.unit(written))

    def plainly(params: Any) -> Any:
        found, weight = total(params, batch(0), written)
        return found / weight

    run = engine(4, mesh={"data": 8}, model=own)
    params = jax.jit(init)(jax.random.key(3))
    value, grads = jax.jit(jax.value_and_grad(plainly))(params)
    np.testing.assert_allclose(run.eval_batch(batch(0))["loss"], value, rtol=1e-6)
    np.testing.assert_allclose(run.train_batch(batch(0))["loss"], value, rtol=1e-6)
    after = jax.tree.map(lambda p, g: p - LR * g, params, grads)
    np.testing.assert_allclose(run.eval_batch(batch(0))["loss"], plainly(after), rtol=1e-6)
