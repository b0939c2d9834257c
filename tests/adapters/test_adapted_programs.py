"""The pass of adapters: a program, however it reads its weights, equals it with merged weights.

Programs here are plain JAX. The merged weights are those of the definition, in `einsum`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxspeed.adapters.adapt_loss import adapt_loss
from jaxspeed.adapters.adapter import Adapter
from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.weight_uses import WeightDims
from jaxspeed.ops import moe
from jaxspeed.placement.grad_barrier import grads_together
from tests.support.covering import covering

WIDTH, LAYERS = 6, 3
LETTERS = "abcdefgh"


def numbers(*shape: int) -> np.ndarray:
    rng = np.random.default_rng([*shape, 1])
    return (rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)).astype(np.float32) / 2


X = numbers(4, WIDTH)
IDS = np.array([[3, 0], [8, 5]], np.int32)


class Program(NamedTuple):
    """A loss of one weight and an input; the weight's dims by role, and how it may be read.

    Attributes:
      merges: the weight is read otherwise than by a product.
      merges_dora: and with DoRA, if each output's norm is not that of what is read.
    """

    loss: Callable[[Any, Any], Any]
    weight: np.ndarray
    dims: WeightDims
    x: Any = X
    merges: bool = False
    merges_dora: bool = False


def dims(stack: str, inputs: str, outputs: str, kind: Any = "product") -> WeightDims:
    stacked, contracted, rest = (tuple(map(int, each)) for each in (stack, inputs, outputs))
    return WeightDims(stacked, contracted, rest, kind)


PLAIN, STACKED = dims("", "0", "1"), dims("0", "1", "2")
SQUARE, STACK = numbers(WIDTH, WIDTH), numbers(LAYERS, WIDTH, WIDTH)
PROGRAMS: dict[str, Program] = {}


def program(name: str, *about: Any, **more: Any) -> Callable[[Any], Any]:
    def note(loss: Any) -> Any:
        PROGRAMS[name] = Program(loss, *about, **more)
        return loss

    return note


# -- one weight ------------------------------------------------------------------------------------

program("matmul", SQUARE, PLAIN)(lambda w, x: jnp.tanh(x @ w))
program("transposed", SQUARE, dims("", "1", "0"))(lambda w, x: jnp.tanh(x @ w.T))
program("on the left", SQUARE, dims("", "1", "0"))(lambda w, x: jnp.tanh(w @ x.T))
program("in a jit", SQUARE, PLAIN)(lambda w, x: jax.jit(lambda w: jnp.tanh(x @ w.T.T))(w))
program("cast", SQUARE, PLAIN)(
    lambda w, x: (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32) * 0 + x @ w
)
program("heads", SQUARE, PLAIN)(
    lambda w, x: jnp.tanh(jnp.einsum("bi,ihk->bhk", x, w.reshape(WIDTH, 2, WIDTH // 2)))
)
program("heads in front", numbers(2, WIDTH, 5), dims("", "1", "02"))(
    lambda w, x: jnp.tanh(jnp.einsum("bi,hik->bhk", x, w))
)
program("heads contracted", numbers(2, 3, 5), dims("", "01", "2"))(
    lambda w, x: jnp.tanh(jnp.einsum("bhk,hko->bo", x.reshape(4, 2, 3), w))
)
program("heads merged and contracted", numbers(2, 3, 5), dims("", "01", "2"))(
    lambda w, x: jnp.tanh(x @ w.reshape(WIDTH, 5))
)
program("fused", numbers(WIDTH, 9), PLAIN)(
    lambda w, x: sum(jnp.tanh(x @ part) * i for i, part in enumerate(jnp.split(w, 3, axis=1)))
)
program("columns", numbers(WIDTH, 9), PLAIN)(
    lambda w, x: jnp.tanh(x @ w[:, 1:4]) + (x @ w[:, ::3]) * 2
)
program("rows", numbers(WIDTH + 3, 4), PLAIN, merges_dora=True)(
    lambda w, x: jnp.tanh(x @ w[1 : WIDTH + 1])
)
program("table that is the head", numbers(9, WIDTH), dims("", "0", "1", "lookup"), IDS)(
    lambda w, ids: jnp.tanh(w[ids]) @ w.T
)
program("taken", numbers(9, WIDTH), dims("", "0", "1", "lookup"), IDS)(
    lambda w, ids: jnp.tanh(jnp.take(w, ids, axis=0))
)
program("one-hot", numbers(9, WIDTH), dims("", "0", "1"), IDS)(
    lambda w, ids: jnp.tanh(jax.nn.one_hot(ids, 9) @ w)
)
program("read twice", SQUARE, PLAIN)(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))
program("checkpoint", SQUARE, PLAIN)(jax.checkpoint(lambda w, x: jnp.tanh(x @ w)))
program("convolution", numbers(3, 2, 5), dims("", "01", "2", "convolution"), numbers(2, 7, 2))(
    lambda w, x: jnp.tanh(
        lax.conv_general_dilated(x, w, (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))
    )
)


@program("branches", SQUARE, PLAIN)
def _(w: Any, x: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: (x * 2) @ w.T.T, w)


@program("a branch without it", SQUARE, PLAIN)
def _(w: Any, x: Any) -> Any:
    return lax.switch(jnp.int32(x[0, 0] > 0), [lambda w: x, lambda w: x @ w], w)


# -- stacks ----------------------------------------------------------------------------------------


def layer(x: Any, w: Any) -> tuple[Any, None]:
    return jnp.tanh(x @ w), None


program("scan", STACK, STACKED)(lambda w, x: lax.scan(layer, x, w)[0])
program("scan in reverse", STACK, STACKED)(lambda w, x: lax.scan(layer, x, w, reverse=True)[0])
program("scan of checkpoints", STACK, STACKED)(
    lambda w, x: lax.scan(jax.checkpoint(layer), x, w)[0]
)
program("scan along the last dim", STACK.transpose(1, 2, 0), dims("2", "0", "1"))(
    lambda w, x: lax.scan(layer, x, jnp.moveaxis(w, -1, 0))[0]
)
program("scan of transposed", STACK, dims("0", "2", "1"))(
    lambda w, x: lax.scan(layer, x, w.swapaxes(1, 2))[0]
)
program("scan of constants", SQUARE, PLAIN)(
    lambda w, x: lax.scan(lambda x, _: layer(x, w), x, None, length=3)[0]
)
program("unrolled", STACK, STACKED)(lambda w, x: layer(layer(layer(x, w[0])[0], w[1])[0], w[-1])[0])
program("unrolled by dynamic numbers", STACK, STACKED)(
    lambda w, x: lax.fori_loop(
        0, LAYERS, lambda i, x: layer(x, lax.dynamic_index_in_dim(w, i, keepdims=False))[0], x
    )
)
program("vmap", STACK, STACKED)(lambda w, x: jax.vmap(lambda w: jnp.tanh(x @ w))(w))
program("vmap of both", STACK, STACKED, numbers(LAYERS, 4, WIDTH))(
    jax.vmap(lambda w, x: jnp.tanh(x @ w))
)
program("stages of layers", numbers(4, WIDTH, WIDTH), STACKED)(
    lambda w, x: lax.scan(lambda x, w: (lax.scan(layer, x, w)[0], None), x, w.reshape(2, 2, 6, 6))[
        0
    ]
)
program("tables", numbers(LAYERS, 9, WIDTH), dims("0", "1", "2", "lookup"), IDS)(
    lambda w, ids: lax.scan(lambda y, w: (y + jnp.tanh(w[ids]), None), jnp.zeros((2, 2, WIDTH)), w)[
        0
    ]
)
program("one layer's table", numbers(LAYERS, 9, WIDTH), dims("0", "1", "2", "lookup"), IDS)(
    lambda w, ids: jnp.tanh(w[1][ids])
)


@program("experts", numbers(LAYERS, 2, WIDTH, WIDTH), dims("01", "2", "3"))
def _(w: Any, x: Any) -> Any:
    def block(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.einsum("bi,eio->ebo", x, w)).sum(0), None

    return lax.scan(jax.checkpoint(block), x, w)[0]


@program("experts summed by a product", numbers(2, WIDTH, 5), dims("0", "1", "2"), merges_dora=True)
def _(w: Any, x: Any) -> Any:
    return jnp.tanh(jnp.einsum("bei,eio->bo", jnp.stack([x, 2 * x], 1), w))


@program("groups of rows", numbers(2, WIDTH, 5), dims("0", "1", "2"), merges_dora=True)
def _(w: Any, x: Any) -> Any:
    return jnp.tanh(lax.ragged_dot(x, w, np.array([1, 3], np.int32)))


@program("a mixture's rows", numbers(2, WIDTH, 5), dims("0", "1", "2"), merges_dora=True)
def _(w: Any, x: Any) -> Any:
    count = len(x)
    chosen = (np.arange(count) % 3 > 0).astype(np.int32).reshape(1, count, 1)
    nothing = jnp.zeros(1)
    routing = moe.Routing(
        chosen, jnp.ones(chosen.shape), jnp.zeros((1, 2)), jnp.zeros((1, 2)), nothing, nothing
    )
    return jnp.tanh(moe.mixture(x[None], routing, lambda rows: rows.product(w)))[0]


# -- other reads -----------------------------------------------------------------------------------

merging = partial(program, merges=True)
merging("penalty", SQUARE, PLAIN)(lambda w, x: x @ w + (w**2).sum())
merging("returned", SQUARE, PLAIN)(lambda w, x: jnp.tanh(w))
merging("scaled", SQUARE, PLAIN)(lambda w, x: jnp.tanh(x @ (w * 2)))
merging("dims of two roles", numbers(WIDTH, 3, 4), dims("", "0", "12"), numbers(5, 18))(
    lambda w, x: jnp.tanh(x @ w.reshape(18, 4))
)
program("carried", SQUARE, PLAIN)(
    lambda w, x: lax.scan(lambda c, _: ((c[0] @ c[1], c[1]), None), (x, w), None, length=2)[0][0]
)
merging("a while", SQUARE, PLAIN)(
    lambda w, x: (
        x
        + lax.stop_gradient(
            lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]
        )
    )
)


@jax.custom_vjp
def own_product(w: Any, x: Any) -> Any:
    return x @ w


own_product.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, g: (saved[1].T @ g, g @ saved[0].T))
merging("a derivative of its own", SQUARE, PLAIN)(lambda w, x: jnp.tanh(own_product(w, x)))
merging("a result of a derivative of its own", SQUARE, PLAIN)(
    lambda w, x: jnp.tanh(jnp.matmul(*grads_together(x, w)))
)

# -- the test --------------------------------------------------------------------------------------


def definition(w: Any, values: Mapping[str, Any], adapter: Adapter) -> Any:
    """(W + s A B), times m / ||W + s A B|| in DoRA."""
    of = adapter.dims
    stack, inputs, outputs, all_dims = (
        "".join(LETTERS[d] for d in each)
        for each in (of.stack, of.inputs, of.outputs, range(w.ndim))
    )
    scales = jnp.asarray(adapter.per_layer(adapter.scales)) if of.stack else adapter.scale
    a, b = values[adapter.leaf("A")], values[adapter.leaf("B")]
    if of.stack:
        used = np.arange(adapter.rank) < adapter.per_layer(adapter.ranks)[..., None]
        a = jnp.einsum(f"{stack}{inputs}r,{stack}r->{stack}{inputs}r", a, used)
    operands = f"{stack}{inputs}r,{stack}r{outputs},{stack}->{all_dims}"
    total = w + jnp.einsum(operands, a, b, scales)
    if not adapter.dora:
        return total
    norm = lax.stop_gradient(jnp.sqrt((total**2).sum(of.inputs, keepdims=True)))
    magnitude = jnp.einsum(
        f"{stack}{outputs}->{''.join(sorted(stack + outputs))}", values[adapter.leaf("magnitude")]
    )
    scaled = total * jnp.expand_dims(magnitude, of.inputs) / norm
    if not of.stack:
        return scaled
    on = jnp.einsum(f"{stack}->{stack}", adapter.per_layer(adapter.ranks) > 0)
    on = on.reshape([w.shape[d] if d in of.stack else 1 for d in range(w.ndim)])
    return jnp.where(on, scaled, w)


def adapted_function(
    about: Program, adapter: Adapter
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The adapted loss as a function of (weight, the adapter's values, x), and what it merges."""
    shapes = {path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in adapter.shapes.items()}
    closed = jax.make_jaxpr(lambda w, values, x: about.loss(w, x))(about.weight, shapes, about.x)
    paths = [adapter.path, *sorted(shapes)]
    parameters = dict(zip(paths, closed.jaxpr.invars, strict=False))
    found = adapt_loss(closed.jaxpr, parameters, {adapter.path: adapter}, None)
    run = jaxpr_as_fun(ClosedJaxpr(found.jaxpr, closed.consts))
    return lambda w, values, x: run(w, *(values[p] for p in sorted(values)), x)[0], found.merged


SETTINGS = ("lora", "dora", "lora of ranks", "dora of ranks")  # which layers of a stack may have
CASES = [
    (name, setting)
    for name, about in PROGRAMS.items()
    for setting in SETTINGS[: 4 if about.dims.stack else 2]
]
OF_PROGRAMS = [[case for case in CASES if case[0] == name] for name in PROGRAMS]
COVERING = [cases[i % len(cases)] for i, cases in enumerate(OF_PROGRAMS)]


@pytest.mark.default_cases(every=11)
@pytest.mark.parametrize(("name", "setting"), covering(CASES, COVERING))
def test_a_program_equals_it_with_merged_weights(name, setting):
    about = PROGRAMS[name]
    layers = about.weight.shape[about.dims.stack[0]] if about.dims.stack else 1
    ranks = (2, 0, 1, 2)[:layers] if "ranks" in setting else (2,)
    scales = (0.5, 1.0, 2.0, 0.25)[:layers] if "ranks" in setting else (0.5,)
    has_dora = "dora" in setting
    adapter = Adapter("w", about.weight.shape, about.dims, ranks, scales, dora=has_dora)
    values = {path: numbers(*shape) / 2 for path, shape in adapter.shapes.items()}
    ours, merged = adapted_function(about, adapter)
    merges = about.merges or (about.merges_dora and has_dora)
    assert merged == (("w",) if merges else ())

    def theirs(w: Any, values: Any, x: Any) -> Any:
        return about.loss(definition(w, values, adapter), x)

    result = jax.eval_shape(theirs, about.weight, values, about.x)
    cotangent = numbers(*result.shape)
    trained = (1, 2) if about.x.dtype == np.float32 else (1,)

    def both_passes(function: Any, *args: Any) -> Any:
        return jax.value_and_grad(lambda *a: (function(*a) * cotangent).sum(), trained)(*args)

    args = about.weight, values, about.x
    found, wanted = (jax.jit(partial(both_passes, f))(*args) for f in (ours, theirs))
    for mine, good in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, good, rtol=0, atol=2e-5 * max(1, np.abs(good).max()))


def test_a_convolution_of_groups_is_refused():
    how = {"dimension_numbers": ("NHC", "HIO", "NHC"), "feature_group_count": 2}
    about = Program(
        lambda w, x: lax.conv_general_dilated(x, w, (1,), "SAME", **how),
        numbers(3, 1, 4),
        dims("", "01", "2", "convolution"),
        numbers(2, 7, 2),
    )
    adapter = Adapter("conv/kernel", about.weight.shape, about.dims, (2,), (0.5,))
    with pytest.raises(ModelError, match=r"conv/kernel is .* with 2 groups .*exclude_modules"):
        adapted_function(about, adapter)
