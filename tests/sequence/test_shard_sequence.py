"""Sequences over the axis `seq`: the dims that are found, and programs that equal one device's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

from tests.sequence.programs import Sharded, assert_as_on_one_device, constrained, mesh_of
from tests.support import foreign_models
from tests.support.covering import covering

BATCH, SEQ, VOCAB, WIDTH, HEADS = 2, 32, 48, 16, 4


def tokens(length: int = SEQ + 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (BATCH, length)).astype(np.int32)


def weights(**shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    lse = jax.nn.logsumexp(logits, -1)
    return jnp.mean(lse - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0])


def language(mix: Callable[..., jax.Array], flat: bool = False) -> Callable[..., jax.Array]:
    """The loss of a language model of one layer, that `mix`es positions of [batch, seq, width]."""

    def loss(p: Any, batch: Any) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x = p["embed"][inputs]
        x = x + mix(p, x)
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        logits = x @ p["head"]
        if flat:
            return cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))
        return cross_entropy(logits, targets)

    return loss


PLAIN = {
    "embed": (VOCAB, WIDTH),
    "up": (WIDTH, 2 * WIDTH),
    "down": (2 * WIDTH, WIDTH),
    "head": (WIDTH, VOCAB),
}


def cumulative(p: Any, x: jax.Array) -> jax.Array:
    return jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]


def convolution(p: Any, x: jax.Array) -> jax.Array:
    """Causal, of all features."""
    dims = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, p["kernel"], (1,), [(3, 0)], dimension_numbers=dims)


def depthwise(p: Any, x: jax.Array) -> jax.Array:
    dims = ("NWC", "WIO", "NWC")
    kernel = p["kernel"][:, :1]
    return lax.conv_general_dilated(
        x, kernel, (1,), [(3, 0)], dimension_numbers=dims, feature_group_count=WIDTH
    )


def state_space(p: Any, x: jax.Array) -> jax.Array:
    """A linear recurrence over time, step by step."""

    def step(h: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = h * jax.nn.sigmoid(p["decay"]) + u
        return h, h * jax.nn.silu(u)

    _, y = lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
    return y.swapaxes(0, 1) @ p["out"]


def associative(p: Any, x: jax.Array) -> jax.Array:
    def join(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    decay = jnp.broadcast_to(jax.nn.sigmoid(p["decay"]), x.shape)
    return lax.associative_scan(join, (decay, x), axis=1)[1] @ p["out"]


def heads(x: jax.Array, w: jax.Array) -> jax.Array:
    return (x @ w).reshape(*x.shape[:2], HEADS, -1)


def relative(p: Any, x: jax.Array) -> jax.Array:
    """Attention with a bias by the distance of positions."""
    q, k, v = (heads(x, p[name]) for name in "qkv")
    distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
    bias = p["bias"][:, jnp.clip(distance, 0, 7)]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2 + bias
    scores = jnp.where(distance >= 0, scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["out"]


def chunked(p: Any, x: jax.Array) -> jax.Array:
    """Products within chunks of 4 positions."""
    y = x.reshape(BATCH, SEQ // 4, 4, WIDTH)
    return jnp.einsum("bncd,cm->bnmd", y, p["chunk"]).reshape(x.shape)


def dropout(p: Any, x: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    return jnp.where(kept, jnp.tanh(x @ p["out"]), 0)


def per_token(p: Any, x: jax.Array) -> jax.Array:
    """Samples and positions merged into one dim, as mixtures of experts do."""
    y = x.reshape(-1, WIDTH)
    return jax.nn.relu(y @ p["out"]).reshape(x.shape)


class Case(NamedTuple):
    loss: Callable[..., jax.Array]
    params: dict[str, jax.Array]
    batch: dict[str, np.ndarray]
    how: dict[str, Any]


def case(mix: Callable[..., jax.Array], flat: bool = False, **more: tuple[int, ...]) -> Case:
    return Case(language(mix, flat), weights(**PLAIN, **more), {"tokens": tokens()}, {})


SQUARE = (WIDTH, WIDTH)


def foreign(model: foreign_models.Foreign) -> Case:
    """A model of tests/support, of two samples."""
    batch = {name: x[:2] for name, x in model.batch.items()}
    if isinstance(model.model, nn.Module):
        params = model.model.init(jax.random.key(0), batch["tokens"][:, :-1])
        flat, tree = jax.tree.flatten(params)

        def bound(p: Any) -> Any:
            filled = jax.tree.unflatten(tree, [p[f"{i:03}"] for i in range(len(flat))])
            return lambda *args: model.model.apply(filled, *args)
    else:
        graph, state = nnx.split(model.model(nnx.Rngs(0)))
        flat, tree = jax.tree.flatten(state)

        def bound(p: Any) -> Any:
            filled = jax.tree.unflatten(tree, [p[f"{i:03}"] for i in range(len(flat))])
            return nnx.merge(graph, filled)

    def loss(p: Any, batch: Any) -> jax.Array:
        found = model.loss(bound(p), batch)
        return found[0] / found[1] if isinstance(found, tuple) else found

    return Case(loss, {f"{i:03}": x for i, x in enumerate(flat)}, batch, {})


def vit() -> Case:
    """Patches [batch, patches, pixels] and a class token."""

    def loss(p: Any, batch: Any) -> jax.Array:
        x = batch["patches"] @ p["patch"]
        first = jnp.broadcast_to(p["class"], (BATCH, 1, WIDTH))
        x = jnp.concatenate([first, x], axis=1) + p["places"]
        x = x + relative(p, x)
        return cross_entropy(x[:, 0] @ p["head"], batch["label"])

    shapes = {"q": SQUARE, "k": SQUARE, "v": SQUARE, "bias": (HEADS, 8), "out": SQUARE}
    params = weights(
        patch=(12, WIDTH),
        places=(SEQ + 1, WIDTH),
        head=(WIDTH, VOCAB),
        **shapes,
        **{"class": (16,)},
    )
    rng = np.random.default_rng(0)
    batch = {
        "patches": rng.normal(size=(BATCH, SEQ, 12)).astype(np.float32),
        "label": np.asarray([3, 5], np.int32),
    }
    return Case(loss, params, batch, {"dims": {"patches": 1}})


ATTENTION = {"q": SQUARE, "k": SQUARE, "v": SQUARE, "bias": (HEADS, 8), "out": SQUARE}
CASES: dict[str, Callable[[], Case]] = {
    "cumulative sum": lambda: case(cumulative),
    "convolution": lambda: case(convolution, kernel=(4, WIDTH, WIDTH)),
    "depthwise convolution": lambda: case(depthwise, kernel=(4, WIDTH, WIDTH)),
    "state-space scan": lambda: case(state_space, decay=(WIDTH,), out=SQUARE),
    "associative scan": lambda: case(associative, decay=(WIDTH,), out=SQUARE),
    "relative positions": lambda: case(relative, **ATTENTION),
    "chunks": lambda: case(chunked, chunk=(4, 4)),
    "dropout": lambda: case(dropout, out=SQUARE),
    "merged tokens": lambda: case(per_token, flat=True, out=SQUARE),
    "ViT with a class token": vit,
    "encoder and decoder": lambda: foreign(foreign_models.encoder_decoder(True)),
    "scan over layers": lambda: foreign(foreign_models.stacked()),
    "Linen": lambda: foreign(foreign_models.linen()),
}
MESHES = [{"seq": 4}, {"seq": 2}, {"data": 2, "seq": 4}]
POINTS = [(name, mesh) for mesh in MESHES for name in CASES]
ALWAYS = [
    (name, MESHES[0])
    for name in (
        "cumulative sum",
        "depthwise convolution",
        "state-space scan",
        "relative positions",
        "dropout",
        "merged tokens",
        "ViT with a class token",
        "encoder and decoder",
    )
]
# A table of positions, whose gradient is summed over samples, and padded.
ALWAYS.append(("encoder and decoder", MESHES[2]))


@pytest.mark.default_cases(every=9)
@pytest.mark.parametrize(("name", "mesh"), covering(POINTS, ALWAYS))
def test_a_model_equals_one_device(name, mesh):
    made = CASES[name]()
    sharded = Sharded(made.loss, made.params, made.batch, mesh_of(**mesh), **made.how)
    found = [spec for _, spec in constrained(sharded.program.closed.jaxpr)]
    assert any("seq" in str(spec) for spec in found)
    assert_as_on_one_device(sharded, made.loss)


def along_seq(name: str, **mesh: int) -> dict[tuple[int, ...], Any]:
    """{shape: spec} of what is sharded along its sequence."""
    made = CASES[name]()
    program = Sharded(made.loss, made.params, made.batch, mesh_of(**mesh), **made.how).program
    found = constrained(program.closed.jaxpr)
    return {shape: spec for shape, spec in found if "seq" in str(spec)}


def dims(found: dict[tuple[int, ...], Any]) -> set[tuple[tuple[int, ...], int]]:
    """(shape, its sharded dim)."""
    return {(shape, [*spec].index("seq")) for shape, spec in found.items() if "seq" in [*spec]}


# Shapes that are sharded along the sequence, and the dim.
FOUND = {
    "cumulative sum": {((2, 32, 16), 1), ((2, 32, 48), 1), ((2, 32), 1)},
    "convolution": {((2, 32, 16), 1), ((2, 32), 1)},
    "state-space scan": {((2, 32, 16), 1), ((32, 2, 16), 0)},
    "relative positions": {((2, 32, 16), 1), ((2, 4, 32, 32), 2)},
    "chunks": {((4, 2, 8, 16), 2), ((2, 32, 16), 1)},
    "ViT with a class token": {((2, 32, 16), 1), ((2, 33, 16), 1)},
    "encoder and decoder": {((2, 10, 32), 1), ((2, 11, 32), 1), ((2, 11, 64), 1)},
    "scan over layers": {((2, 11, 32), 1), ((2, 11, 64), 1)},
    "Linen": {((2, 11, 32), 1), ((2, 11, 64), 1)},
}


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("name", FOUND)
def test_sequence_dims_are_found(name):
    assert FOUND[name] <= dims(along_seq(name, seq=4))


def test_no_features_are_sharded_along_the_sequence():
    for name in FOUND:
        lengths = {"encoder and decoder": {10, 11, 12}, "scan over layers": {11, 12}}
        allowed = lengths.get(name, {8, 11, 12, 32, 33, 35})
        assert {shape[dim] for shape, dim in dims(along_seq(name, seq=4))} <= allowed, name


def test_merged_samples_and_positions_are_sharded_over_both():
    """Where a device has one sample; otherwise their shards are not adjacent."""
    found = along_seq("merged tokens", data=2, seq=4)
    assert found[BATCH * SEQ, WIDTH][0] == found[BATCH * SEQ, VOCAB][0] == ("data", "seq")
    assert (
        found[BATCH, SEQ, WIDTH][:2] == (("data",), "seq") or found[BATCH, SEQ, WIDTH][1] == "seq"
    )
    assert (BATCH * SEQ, WIDTH) not in along_seq("merged tokens", seq=4)


def test_random_numbers_are_drawn_along_the_sequence():
    assert ((BATCH, SEQ, WIDTH), 1) in dims(along_seq("dropout", seq=4))
