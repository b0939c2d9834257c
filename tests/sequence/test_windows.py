"""Operations with windows along the sequence equal one device's, over axes beside `seq` too.

XLA's own partitioning is wrong for some (`known_jax_bugs.programs`), and right for the others that
mix positions, which jaxspeed leaves to it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxspeed
from jaxspeed.hlo.cost import cost
from jaxspeed.hlo.parser import parse
from jaxspeed.hlo.sequence_exchanges import sequence_exchanges
from jaxspeed.placement.constrain import constrain
from jaxspeed.tensor_parallel import ActivationLayout, insert_constraints
from tests.sequence.programs import Sharded, assert_as_on_one_device, mesh_of
from tests.support.covering import covering

BATCH, SEQ, WIDTH = 4, 16, 4
NWC = ("NWC", "WIO", "NWC")

Mix = Callable[[Any, jax.Array], jax.Array]  # (parameters, [batch, seq, width]) -> the same


def loss_of(mix: Mix) -> Callable[..., jax.Array]:
    """A loss in which an operation stands between products of tokens."""

    def loss(p: Any, batch: Any) -> jax.Array:
        x = jnp.tanh(batch["x"] @ p["into"])
        y = jnp.tanh(mix(p, x))
        return jnp.sum(jnp.square(y @ p["out"] - batch["y"][:, : y.shape[1]]))

    return loss


def values() -> tuple[dict[str, jax.Array], dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shapes = {"into": (WIDTH, WIDTH), "kernel": (3, WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    params = {k: jnp.asarray(rng.normal(size=s) / 2, jnp.float32) for k, s in shapes.items()}
    return params, {
        key: rng.normal(size=(BATCH, length, WIDTH)).astype(np.float32)
        for key, length in (("x", SEQ), ("y", 3 * SEQ))
    }


def conv(padding: Any, **how: Any) -> Mix:
    def mix(p: Any, x: jax.Array) -> jax.Array:
        strides = how.get("window_strides", (1,))
        rest = {key: value for key, value in how.items() if key != "window_strides"}
        return lax.conv_general_dilated(
            x, p["kernel"], strides, padding, dimension_numbers=NWC, **rest
        )

    return mix


def grouped(p: Any, x: jax.Array) -> jax.Array:
    how = {"dimension_numbers": NWC, "feature_group_count": 2}
    return lax.conv_general_dilated(x, p["kernel"][:, :2], (1,), [(2, 0)], **how)


def pooled(function: Any, start: float, size: int, stride: int, padding: tuple[int, int]) -> Mix:
    def mix(p: Any, x: jax.Array) -> jax.Array:
        padded = [(0, 0), padding, (0, 0)]
        return lax.reduce_window(x, start, function, (1, size, 1), (1, stride, 1), padded)

    return mix


def largest(padding: tuple[int, int], size: int = 3, stride: int = 1) -> Mix:
    return pooled(lax.max, -np.inf, size, stride, padding)


def image(p: Any, x: jax.Array) -> jax.Array:
    """Windows along the sequence and along features."""
    kernel = jnp.stack([p["kernel"][..., :1], p["kernel"][..., 1:2]], -1)[:, :2]
    how = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    return lax.conv_general_dilated(x[..., None], kernel, (1, 1), [(1, 1), (1, 0)], **how).sum(-1)


def of_a_table(p: Any, x: jax.Array) -> jax.Array:
    """A convolution of a table of positions."""
    table = jnp.sin(jnp.arange(x.shape[1])[:, None] * p["into"][0])[None]
    return x + conv("SAME")(p, table)


def its_gradient(p: Any, x: jax.Array) -> jax.Array:
    """The derivatives of a convolution and of maxima, in a loss."""

    def energy(x: jax.Array, p: Any) -> jax.Array:
        return jnp.sum(jnp.tanh(largest((2, 0))(p, conv("SAME")(p, x))) ** 2)

    by_x, by_p = jax.grad(energy, (0, 1))(x, p)
    return by_x + 1e-2 * jnp.tanh(jnp.sum(by_p["kernel"] ** 2)) * x


@jax.custom_vjp
def own(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return conv("SAME")({"kernel": kernel}, x)


own.defvjp(lambda x, w: jax.vjp(own.fun, x, w), lambda pull, ct: pull(jnp.clip(ct, -0.5, 0.5)))


@jax.custom_vjp
def backwards(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Its backward pass alone has windows."""
    return x * kernel[0, 0]


def of_backwards(kept: Any, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, pull = jax.vjp(lambda kernel: conv("SAME")({"kernel": kernel}, kept[0]), kept[1])
    return ct * kept[1][0, 0], pull(ct)[0]


backwards.defvjp(lambda x, kernel: (x * kernel[0, 0], (x, kernel)), of_backwards)


DIMS = {"x": 1, "y": 1}
MIXES: dict[str, Mix] = {
    "causal": conv([(2, 0)]),
    "SAME": conv("SAME"),
    "VALID": conv("VALID"),
    "dilated": conv([(4, 0)], rhs_dilation=(2,)),
    "strided": conv("SAME", window_strides=(2,)),
    "strided VALID": conv("VALID", window_strides=(3,)),
    "shifted": conv([(-1, 3)]),
    "longer than a shard": conv([(10, 0)], rhs_dilation=(5,)),
    "transposed": conv([(2, 1)], lhs_dilation=(2,)),
    "grouped": grouped,
    "image": image,
    "table": of_a_table,
    "gradient": its_gradient,
    "own derivative": lambda p, x: own(x, p["kernel"]),
    "backward pass": lambda p, x: backwards(x, p["kernel"]),
    "twice VALID": lambda p, x: conv("VALID")(p, jnp.tanh(conv("VALID")(p, x))),
    "maxima": largest((2, 0)),
    "maxima VALID": largest((0, 0)),
    "minima SAME": pooled(lax.min, np.inf, 3, 1, (1, 1)),
    "maxima of 4 at 2": largest((1, 1), 4, 2),
    "maxima apart": largest((0, 0), 2, 2),
    # Left to XLA.
    "means": pooled(lax.add, 0.0, 3, 1, (1, 1)),
    "means of 3 at 2": pooled(lax.add, 0.0, 3, 2, (1, 1)),
    "cumsum": lambda p, x: jnp.cumsum(x, 1),
    "cumprod": lambda p, x: jnp.cumprod(x, 1),
    "cummax": lambda p, x: lax.cummax(x, 1),
    "cumlogsumexp": lambda p, x: lax.cumlogsumexp(x, 1, reverse=True),
    "roll": lambda p, x: jnp.roll(x, 1, 1),
    "sort": lambda p, x: jnp.sort(x, 1),
    "flip": lambda p, x: jnp.flip(x, 1),
    "shift": lambda p, x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1],
    "write": lambda p, x: x.at[:, 5].multiply(3.0),
    "update": lambda p, x: lax.dynamic_update_slice(x, 2 * x[:, :6], (0, 3, 0)),
    "read": lambda p, x: x + x[:, (7 * jnp.arange(x.shape[1])) % x.shape[1]],
    "taps": lambda p, x: sum(jnp.roll(x, i, 1) @ p["kernel"][i] for i in range(3)),
}

AXES = ("pipe", "replica", "data", "expert", "tensor")
MESHES: list[dict[str, int]] = [
    {"seq": 4},
    *({"seq": 2, axis: 2} for axis in AXES),
    {"seq": 2, "tensor": 4},
    *({"seq": 2, a: 2, b: 2} for i, a in enumerate(AXES) for b in AXES[i + 1 :]),
]
BESIDE = {"data": 2, "seq": 2, "tensor": 2}
POINTS = [(name, mesh) for name in MIXES for mesh in MESHES]
ALWAYS = [
    ("causal", BESIDE),
    ("VALID", BESIDE),
    ("strided", {"seq": 2, "pipe": 2}),
    ("table", {"seq": 2, "data": 2}),
    ("gradient", BESIDE),
    ("own derivative", BESIDE),
    ("backward pass", BESIDE),
    ("maxima", {"seq": 4}),
    ("means", BESIDE),
    ("cummax", BESIDE),
    ("update", {"seq": 4}),
]


@pytest.mark.parametrize(("name", "mesh"), covering(POINTS, ALWAYS))
def test_windows_over_the_sequence_equal_one_device(name, mesh):
    loss = loss_of(MIXES[name])
    assert_as_on_one_device(Sharded(loss, *values(), mesh_of(**mesh), dims=DIMS), loss)


@pytest.mark.parametrize("name", ["causal", "maxima"])
def test_each_device_computes_its_positions(name):
    """And gathers none: the positions of neighbours are sent."""
    params, batch = values()
    batch["y"] = batch["y"][:, :SEQ]
    loss = loss_of(MIXES[name])
    sharded = Sharded(loss, params, batch, mesh_of(seq=4), dims=DIMS)
    text = sharded.compiled.as_text()
    alone = jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile().as_text()
    assert cost(parse(text)).flops < 0.35 * cost(parse(alone)).flops
    assert "collective-permute" in text
    assert sequence_exchanges(text, sharded.mesh, [x.size for x in params.values()]) == ()


def maxima_of_features(p: Any, x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -np.inf, lax.max, (1, 1, 3), (1, 1, 1), "SAME")


def over_features(p: Any, x: jax.Array) -> jax.Array:
    kernel = jnp.moveaxis(p["kernel"][:, :1, :2], 0, 1)[..., None, :]
    how = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    return lax.conv_general_dilated(x[..., None], kernel, (1, 1), "SAME", **how).sum(-1)


COLUMNS, ROWS = {"into": P(None, "tensor")}, {"out": P("tensor", None)}
# What `tensor` shards, with or without sequences.
FEATURES: dict[str, tuple[Mix, dict[str, P], dict[str, int]]] = {
    "columns": (MIXES["VALID"], {"kernel": P(None, None, "tensor"), **ROWS}, BESIDE),
    "rows": (MIXES["strided"], {**COLUMNS, "kernel": P(None, "tensor")}, BESIDE),
    "groups": (grouped, {**COLUMNS, "kernel": P(None, None, "tensor"), **ROWS}, BESIDE),
    "maxima": (MIXES["maxima"], {**COLUMNS, **ROWS}, BESIDE),
    "derivatives": (its_gradient, {**COLUMNS, "kernel": P(None, "tensor")}, BESIDE),
    "maxima of features": (maxima_of_features, COLUMNS, {"data": 2, "tensor": 2}),
    "over features": (over_features, COLUMNS, {"data": 2, "tensor": 2, "pipe": 2}),
    "groups beside pipe": (grouped, {}, {"data": 2, "pipe": 2}),
}


@pytest.mark.parametrize(
    "name", covering(FEATURES, ["columns", "groups", "maxima of features", "groups beside pipe"])
)
def test_windows_of_sharded_features_equal_one_device(name):
    mix, specs, mesh = FEATURES[name]
    loss, dims = loss_of(mix), DIMS if "seq" in mesh else {}
    sharded = Sharded(loss, *values(), mesh_of(**mesh), specs, dims=dims)
    assert_as_on_one_device(sharded, loss)


# -- positions sharded over `tensor`, by parallel.sequence_parallel_activations --------------------

BETWEEN = [
    (name, mesh)
    for name in ("causal", "maxima", "gradient", "own derivative", "grouped", "means")
    for mesh in ({"data": 2, "tensor": 2}, {"data": 2, "tensor": 2, "pipe": 2}, BESIDE)
]


@pytest.mark.parametrize(
    ("name", "mesh"), covering(BETWEEN, [("maxima", {"data": 2, "tensor": 2})])
)
def test_windows_between_sharded_products_equal_one_device(name, mesh):
    def loss(p: Any, batch: Any) -> jax.Array:
        x = jnp.tanh(batch["x"] @ p["up"]) @ p["down"]
        y = jnp.tanh(MIXES[name](p, x) @ p["up"]) @ p["down"]
        return jnp.sum(jnp.square(y - batch["y"][:, : y.shape[1]]))

    params, batch = values()
    params |= {"up": jnp.tile(params["into"], (1, 2)), "down": jnp.tile(params["out"], (2, 1))}
    specs = {"up": P(None, "tensor"), "down": P("tensor", None)}
    layout = ActivationLayout(sequence_parallel=True)
    dims = DIMS if "seq" in mesh else {}
    sharded = Sharded(loss, params, batch, mesh_of(**mesh), specs, layout, dims=dims)
    assert_as_on_one_device(sharded, loss)


def is_right(name: str) -> bool:
    loss = loss_of(MIXES[name])
    try:
        assert_as_on_one_device(Sharded(loss, *values(), mesh_of(**BESIDE), dims=DIMS), loss)
    except AssertionError:
        return False
    return True


def test_without_the_constraint_derivatives_of_windows_are_wrong(monkeypatch):
    def kept(x: jax.Array, at: Any, site: str) -> jax.Array:
        return x if site == "windows" else constrain(x, at, site)

    monkeypatch.setattr(insert_constraints, "constrain", kept)
    assert not is_right("gradient")


def test_what_neighbours_send_is_missed(monkeypatch):
    monkeypatch.setattr(lax, "ppermute", lambda x, *args: jnp.zeros_like(x))
    assert not is_right("causal")


# -- an ordinary model, through the engine ---------------------------------------------------------

VOCAB, RATE = 16, 0.1


class Convolved(nnx.Module):
    """A language model that mixes its tokens by convolutions and pooling alone."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, 8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.down = nnx.Conv(8, 8, (4,), strides=4, rngs=rngs)
        self.head = nnx.Linear(8, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + jnp.repeat(self.head(self.down(x)), 4, axis=1)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(8, 8, (3,), padding="CAUSAL", rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3,), kernel_dilation=2, feature_group_count=8, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + jax.nn.gelu(self.depthwise(self.conv(x)))
        x = x + nnx.max_pool(x, (3,), (1,), "SAME")
        return x + self.down(jax.nn.gelu(self.up(x)))


def next_token_loss(model: Convolved, batch: Any) -> jax.Array:
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


ENGINES = [
    (stage, mesh, dtype)
    for stage in (0, 1, 3)
    for mesh in (BESIDE, {"replica": 2, "seq": 4}, {"pipe": 2, "seq": 2, "tensor": 2})
    for dtype in ("fp32", "bf16")
]


@pytest.mark.parametrize(("stage", "mesh", "dtype"), covering(ENGINES, [(3, BESIDE, "fp32")]))
def test_a_model_with_convolutions_trains_as_in_plain_flax(stage, mesh, dtype):
    rng = np.random.default_rng(1)
    steps = rng.integers(0, VOCAB, (2, 2, 8, SEQ)).astype(np.int32)
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": mesh.get("pipe", 1),
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "mesh": {"data": -1, **mesh},
        "bf16": {"enabled": dtype == "bf16"},
        "run": {"seed": 3, "compilation_cache": False},
    }
    example = dict.fromkeys(("tokens", "targets"), steps[0, 0])
    engine = jaxspeed.initialize(Convolved, next_token_loss, config=config, example_batch=example)
    model = Convolved(nnx.Rngs(3))
    start = {"/".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model))}
    for path, value in engine.parameters.items():
        np.testing.assert_allclose(value, start[path].get_value(), rtol=1e-6, atol=1e-6)
    tolerance = 1e-5 if dtype == "fp32" else 0.03
    for tokens, targets in steps:
        batch = {"tokens": tokens, "targets": targets}
        loss, grads = nnx.jit(nnx.value_and_grad(next_token_loss))(model, batch)
        nnx.update(model, jax.tree.map(lambda p, g: p - RATE * g, nnx.state(model), grads))
        np.testing.assert_allclose(engine.train_batch(batch)["loss"], loss, rtol=tolerance)
    wanted = {"/".join(map(str, p)): v for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    for path, value in engine.parameters.items():
        np.testing.assert_allclose(
            value, wanted[path].get_value(), rtol=tolerance, atol=tolerance, err_msg=path
        )
