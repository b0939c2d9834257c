"""A tiny Llama on packed documents, and what trains it in plain JAX on one device."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

import jaxspeed
from jaxspeed import models

SAMPLES, SEQ, VOCAB, STEPS, SEED, RATE = 8, 32, 64, 2, 3, 0.5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 1024,
}

Arrays = dict[str, np.ndarray]


class Run(NamedTuple):
    losses: list[float]
    first: Arrays  # the parameters before the first step
    last: Arrays


def packed(seed: int, samples: int = SAMPLES, seq: int = SEQ) -> Arrays:
    """Tokens and targets of documents of odd lengths, which cross the borders of all shards."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (samples, seq + 1)).astype(np.int32)
    begins = rng.random((samples, seq + 1)) < 0.12
    segments = np.cumsum(begins, 1).astype(np.int32) + 1
    same = segments[:, 1:] == segments[:, :-1]
    return {
        "tokens": tokens[:, :-1],
        "targets": np.where(same, tokens[:, 1:], -100).astype(np.int32),
        "segment_ids": segments[:, :-1],
    }


def batches(**kwargs: Any) -> list[Arrays]:
    return [packed(step, **kwargs) for step in range(STEPS)]


def config(stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "model": {"family": "llama", "preset": "tiny", "config": SIZES},
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "run": {"seed": SEED, "compilation_cache": False},
        **more,
    }


def plain(given: list[Arrays], sizes: Mapping[str, Any] = SIZES, family: str = "llama") -> Run:
    """Training in plain JAX: p - RATE dL/dp, of each batch as one."""
    built = models.build(family, "tiny", dict(sizes))
    graph, params, rest = nnx.split(built.factory(nnx.Rngs(SEED)), nnx.Param, ...)

    def mean(params: Any, batch: Any) -> jax.Array:
        total, weight, *terms = built.loss(nnx.merge(graph, params, rest), batch)
        return total / weight + (terms[0] if terms else 0)  # the auxiliary term, of mixtures

    losses, first = [], flat(params)
    for batch in given:
        loss, grads = jax.jit(jax.value_and_grad(mean))(params, batch)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        losses.append(float(loss))
    return Run(losses, first, flat(params))


def flat(state: Any) -> Arrays:
    return {
        "/".join(map(str, keys)): np.asarray(v.get_value()) for keys, v in nnx.to_flat_state(state)
    }


def trained(given: list[Arrays], settings: Any) -> tuple[Any, Run]:
    """The engine, and its training."""
    engine = jaxspeed.initialize(config=settings)
    first = snapshot(engine)
    losses = [float(engine.train_batch(batch)["loss"]) for batch in given]
    return engine, Run(losses, first, snapshot(engine))


def snapshot(engine: Any) -> Arrays:
    return {path: np.array(x) for path, x in engine.parameters.items()}


def assert_equal(found: Run, expected: Run) -> None:
    """Losses to 1e-6, and the update of all parameters, and of each, to 1e-5 and rounding."""
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    assert found.last.keys() == expected.last.keys()
    errors, norms = [], []
    for path, value in expected.last.items():
        update = value - expected.first[path]
        error = np.linalg.norm(found.last[path] - found.first[path] - update)
        rounding = 2e-7 * np.linalg.norm(value)  # of the sum of a parameter and its update
        assert error <= 1e-5 * np.linalg.norm(update) + rounding, (path, error)
        errors.append(error)
        norms.append(np.linalg.norm(update))
    assert np.linalg.norm(errors) <= 1e-5 * np.linalg.norm(norms)
