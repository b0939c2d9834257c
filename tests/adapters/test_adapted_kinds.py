"""Weights of all kinds, with DoRA and dropout, on any mesh: a plain loop of JAX and Optax.

One model has a table that is the head too, a convolution, and rematerialized layers in a scan. The
plain loop merges each weight by the definition of DoRA, and draws dropout's masks from the keys
that an adapter has: of the weight's path, the step, the micro-batch, the layer and the product.
"""

import itertools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

from tests.adapters.lora_loop import DECAY, LR, SEED, AdaptedCase, split_of
from tests.support.covering import covering

WIDTH, VOCAB, LENGTH, STEPS, MICRO_BATCHES = 8, 16, 4, 3, 2
RATE, SCALE = 0.25, 1.5
# The stacked dims and the inputs of each weight, and the number of its product in the program.
TABLE, CONV, UP, DOWN = "embed/embedding", "conv/kernel", "up", "down"
ROLES = {TABLE: (0, 1, 0), CONV: (0, 2, 1), UP: (1, 1, 2), DOWN: (1, 1, 3)}


class Kinds(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, 3, use_bias=False, rngs=rngs)
        draw = nnx.initializers.normal(0.5)
        names = ("layers", "embed", "mlp")
        self.up = nnx.Param(draw(rngs.params(), (2, WIDTH, 12)), logical_axes=names)
        self.down = nnx.Param(
            draw(rngs.params(), (2, 12, WIDTH)), logical_axes=("layers", "mlp", "embed")
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        @jax.checkpoint
        def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            up, down = layer
            return x + jnp.tanh(x @ up) @ down, None

        x = self.conv(self.embed(ids))
        return self.embed.attend(lax.scan(block, x, (self.up[...], self.down[...]))[0])


def cross_entropy(model: Any, ids: Any) -> jax.Array:
    logits = model(ids[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def sample(rng: np.random.Generator, count: int) -> Any:
    return rng.integers(0, VOCAB, (count, LENGTH + 1)).astype(np.int32)


TARGETS = {"target_modules": [TABLE, CONV, UP, DOWN]}
CASE = AdaptedCase(Kinds, cross_entropy, sample, lambda values: values, TARGETS)


# -- the plain loop --------------------------------------------------------------------------------


def adapted(
    function: Callable[[Any, Any], Any], x: Any, path: str, values: Mapping[str, Any], key: Any
) -> Any:
    """A product with an adapted weight; `values` are those of one layer, `key` is None for none."""
    w, a, b = (values[name] for name in (path, f"lora/{path}/A", f"lora/{path}/B"))
    inputs = tuple(range(ROLES[path][1]))
    change = SCALE * (a.reshape(-1, a.shape[-1]) @ b).reshape(w.shape)
    ratio: Any = 1
    if f"lora/{path}/magnitude" in values:
        norm = jnp.sqrt(jnp.sum((w + change) ** 2, inputs))
        ratio = values[f"lora/{path}/magnitude"] / lax.stop_gradient(norm)
    if key is None:
        return function(x, ratio * (w + change))
    kept = jax.random.bernoulli(jax.random.fold_in(key, ROLES[path][2]), 1 - RATE, x.shape)
    dropped = jnp.where(kept, x / (1 - RATE), 0)
    return function(x, w) + function(dropped, (ratio - 1) * w + ratio * change)


def convolve(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


def plain_loss(values: Mapping[str, Any], ids: Any, key: Any) -> Any:
    def key_of(path: str, layer: int | None = None) -> Any:
        if key is None:
            return None
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        return own if layer is None else jax.random.split(own, 2)[layer]

    x = adapted(lambda ids, w: w[ids], ids[:, :-1], TABLE, values, None)
    x = adapted(convolve, x, CONV, values, key_of(CONV))
    for layer in range(2):
        own = {p: v[layer] if "up" in p or "down" in p else v for p, v in values.items()}
        up = adapted(jnp.matmul, x, UP, own, key_of(UP, layer))
        x = x + adapted(jnp.matmul, jnp.tanh(up), DOWN, own, key_of(DOWN, layer))
    logits = adapted(lambda x, w: x @ w.T, x, TABLE, values, None)
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def micro_batches(batch: Any, ranks: int) -> list[Any]:
    """Each has a slice of every rank's own part."""
    parts = batch.reshape(ranks, MICRO_BATCHES, -1, *batch.shape[1:])
    return [parts[:, i].reshape(-1, *batch.shape[1:]) for i in range(MICRO_BATCHES)]


def train_plainly(values: Any, batches: Any, ranks: int, has_dropout: bool) -> tuple[Any, Any]:
    base, own = split_of(values)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LR, weight_decay=DECAY))

    @jax.jit
    def update(own: Any, state: Any, number: Any, batch: Any) -> Any:
        def loss(own: Any) -> Any:
            found = []
            for i, ids in enumerate(micro_batches(batch, ranks)):
                of_step = jax.random.fold_in(jax.random.key(SEED), number)
                key = jax.random.fold_in(of_step, i) if has_dropout else None
                found.append(plain_loss({**base, **own}, ids, key))
            return sum(found) / MICRO_BATCHES

        found, grads = jax.value_and_grad(loss)(own)
        updates, state = optimizer.update(grads, state, own)
        return optax.apply_updates(own, updates), state, found

    state, losses = optimizer.init(own), []
    for number, batch in enumerate(batches):
        own, state, loss = update(own, state, number, batch)
        losses.append(float(loss))
    return losses, own


SETTINGS = {
    "lora": {},
    "dora": {"use_dora": True},
    "dropout": {"lora_dropout": RATE},
    "dora with dropout": {"use_dora": True, "lora_dropout": RATE},
}
ALL = list(itertools.product(SETTINGS, range(4), (1, 2), (1, 2)))
COVERING = [
    ("dora with dropout", 3, 1, 2),
    ("dora", 2, 2, 1),
    ("lora", 1, 1, 2),
]  # the last: unlike stages


@pytest.mark.default_cases("lora-1-1-2")
@pytest.mark.parametrize("setting, stage, tensor, pipe", covering(ALL, COVERING))
def test_weights_of_all_kinds_train_as_in_a_plain_loop(setting, stage, tensor, pipe):
    engine = CASE.engine(stage, tensor, pipe, lora=SETTINGS[setting])
    start = {path: np.asarray(x) for path, x in engine.parameters.items()}
    adapters = split_of(start)[1]
    assert {path.split("/")[-1] for path in adapters} >= {"A", "B"}
    batches = CASE.batches(STEPS)
    losses = [float(engine.train_batch(batch)["loss"]) for batch in batches]
    ranks = 8 // tensor // pipe
    expected, own = train_plainly(start, batches, ranks, "dropout" in setting)
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)
    trained = split_of(engine.parameters)[1]
    assert trained.keys() == own.keys()
    for path, value in trained.items():
        np.testing.assert_allclose(value, own[path], rtol=1e-5, atol=1e-5, err_msg=path)
