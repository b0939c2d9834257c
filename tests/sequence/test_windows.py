"""Operations with windows along the sequence equal one device's, over axes beside `seq` too.

XLA's own partitioning is wrong for some (`known_jax_bugs.programs`), and right for the others that
are here, which jaxspeed leaves to it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

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
    ("maxima", {"seq": 4}),
    ("means", BESIDE),
    ("cummax", BESIDE),
]


@pytest.mark.parametrize(("name", "mesh"), covering(POINTS, ALWAYS))
def test_windows_over_the_sequence_equal_one_device(name, mesh):
    loss = loss_of(MIXES[name])
    assert_as_on_one_device(Sharded(loss, *values(), mesh_of(**mesh), dims=DIMS), loss)
