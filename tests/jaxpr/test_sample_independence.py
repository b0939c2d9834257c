"""What is proved of random losses holds in float64, and each form of mixing is found."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxspeed import ops
from jaxspeed.jaxpr import sample_independence
from jaxspeed.traced_loss.by_parts import by_parts
from jaxspeed.traced_loss.loss import parse_loss
from jaxspeed.traced_loss.loss_program import LossProgram
from tests.support import covering

# Traces are of so many samples and of twice as many, as halves and whole of the batches are.
SAMPLES, SEQ, WIDTH, CLASSES = 4, 3, 4, 5
W = np.random.default_rng(0).normal(size=(WIDTH, WIDTH))
KEY = jax.random.key(0)
ORDER = np.arange(64.0)


def cross_entropy(x, y):
    logits = x @ jnp.eye(WIDTH, CLASSES, dtype=x.dtype)
    target = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - target


# (x [samples, seq, width], y [samples, seq]) -> x. Each sample alone:
APART = {
    "tanh": lambda x, y: jnp.tanh(x),
    "product": lambda x, y: x @ W,
    "softmax": lambda x, y: jax.nn.softmax(x, -1),
    "centred": lambda x, y: x - x.mean((1, 2), keepdims=True),
    "cumulative": lambda x, y: jnp.cumsum(x, 1),
    "sorted": lambda x, y: jnp.sort(x, 1)[:, ::-1],
    "positions": lambda x, y: x + jnp.arange(SEQ)[:, None],
    "merged": lambda x, y: jnp.sin(x.reshape(-1, WIDTH)).reshape(x.shape),
    "transposed": lambda x, y: (x.transpose(1, 2, 0) * 2.0).transpose(2, 0, 1),
    "attention": lambda x, y: jnp.where(
        jnp.tril(jnp.ones((SEQ, SEQ), bool)), x @ x.swapaxes(1, 2), -9.0
    ) @ x,
    "vmap": lambda x, y: jax.vmap(lambda x: x / (1.0 + jnp.abs(x).max()))(x),
    "map": lambda x, y: lax.map(jnp.sin, x),
    "scan over positions": lambda x, y: lax.scan(
        lambda c, t: (jnp.tanh(c + t), c), jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1)
    )[1].swapaxes(0, 1),
    "remat": lambda x, y: jax.checkpoint(jnp.cos)(x),
    "numbered": lambda x, y: x * x[jnp.arange(len(x)), 0, y[:, 0] % WIDTH][:, None, None],
    "one-hot": lambda x, y: x + jax.nn.one_hot(y, WIDTH),
    "lookup": lambda x, y: x + jnp.asarray(W)[y % WIDTH],
    "joined": lambda x, y: jnp.concatenate([x, x], 1)[:, SEQ:],
    "stacked": lambda x, y: jnp.stack([x, -x]).max(0),
    "solved": lambda x, y: jnp.linalg.cholesky(
        jnp.einsum("bsd,bse->bde", x, x) + jnp.eye(WIDTH)
    )[:, :SEQ],
    "system": lambda x, y: jnp.linalg.solve(
        jnp.einsum("bsd,bse->bde", x, x) + jnp.eye(WIDTH), x.swapaxes(1, 2)
    ).swapaxes(1, 2),
    "inverse": lambda x, y: jnp.linalg.inv(x @ x.swapaxes(1, 2) + jnp.eye(SEQ)) @ x,
    "convolution": lambda x, y: lax.conv_general_dilated(
        x, jnp.asarray(W)[None] + jnp.zeros((3, 1, 1)), (1,), "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    ),
    "branch": lambda x, y: jax.vmap(lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x))(x),
    "loop": lambda x, y: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x + i), x),
    "loop of each": lambda x, y: jax.vmap(
        lambda x: lax.while_loop(lambda x: x.max() > 0.5, lambda x: x / 2, x)
    )(x),
    "gradient of each": lambda x, y: jax.vmap(
        jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (None, 0)
    )(W, x)[:, :SEQ],
    "gradient of a sum": lambda x, y: jax.grad(lambda x: jnp.tanh(x @ W).sum())(x),
    "tangent": lambda x, y: jax.jvp(lambda x: jnp.tanh(x @ W), (x,), (jnp.ones_like(x),))[1],
    "written at a position": lambda x, y: lax.dynamic_update_slice(
        x, jnp.zeros((len(x), 1, WIDTH), x.dtype), (0, 1, 0)
    ),
    "scaled alike": lambda x, y: x * (jnp.ones(x.shape) * jnp.asarray(W)[0, :1]),
    "chosen alike": lambda x, y: x * jnp.repeat(W[:1], len(x), 0).argmax(-1)[:, None, None],
}  # fmt: skip
# An element depends on other samples, on their number, or on its own.
MIXING = {
    "in-batch negatives": lambda x, y: x + jax.nn.softmax(x[:, 0] @ x[:, 0].T)[:, :1, None],
    "roll": lambda x, y: x * jnp.roll(x, 1, 0),
    "flip": lambda x, y: x * jnp.flip(x, 0),
    "cumsum": lambda x, y: x * jnp.cumsum(x, 0),
    "sort": lambda x, y: x * jnp.sort(x, 0),
    "median": lambda x, y: x - jnp.median(x, 0),
    "segment_sum": lambda x, y: x * jax.ops.segment_sum(x, y[:, 0], CLASSES)[y[:, 0]],
    "logsumexp": lambda x, y: x - jax.nn.logsumexp(x, 0),
    "arange": lambda x, y: x * jnp.arange(len(x))[:, None, None],
    "counted": lambda x, y: x * jnp.cumsum(jnp.ones(len(x)))[:, None, None],
    "marked": lambda x, y: x * jnp.zeros(len(x)).at[0].set(1.0)[:, None, None],
    "padded": lambda x, y: x * jnp.pad(jnp.ones(len(x) - 1), (1, 0))[:, None, None],
    "number": lambda x, y: x * (len(x) - 1),
    "constant": lambda x, y: x * ORDER[: len(x), None, None],
    "convolution": lambda x, y: x + lax.conv_general_dilated(
        x.swapaxes(0, 1), jnp.asarray(W)[None] + jnp.zeros((3, 1, 1)), (1,), "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    ).swapaxes(0, 1),
    "normalized": lambda x, y: (x - x.mean(0)) / (x.std(0) + 0.1),
    "mean": lambda x, y: x - x.mean(),
    "first": lambda x, y: x * x[:1],
    "set": lambda x, y: x.at[0].set(0.0),
    "halves": lambda x, y: jax.nn.softmax(x.reshape(2, -1), -1).reshape(x.shape),
    "count": lambda x, y: x / len(x),
    "running": lambda x, y: lax.scan(lambda c, x: (c + x, c), jnp.zeros_like(x[0]), x)[1],
    "twice": lambda x, y: x + lax.scan(
        lambda c, x: ((c[0] + x, c[1] + c[0]), None), (0 * x[0], 0 * x[0]), x
    )[0][1],
    "decayed": lambda x, y: x + lax.scan(
        lambda c, x: (0.9 * c + x, None), jnp.zeros_like(x[0]), x
    )[0],
    "permuted": lambda x, y: x * x[jax.random.permutation(KEY, len(x))],
    "largest": lambda x, y: x / jnp.abs(x).max(),
    "until all": lambda x, y: lax.while_loop(lambda x: x.max() > 0.5, lambda x: x / 2, x),
    "others' positions": lambda x, y: x + jnp.tile(jnp.arange(len(x)), SEQ).reshape(x.shape[:2])[
        ..., None
    ],
    "branch": lambda x, y: x / 2 if len(x) > SAMPLES else x,
    "written": lambda x, y: lax.dynamic_update_slice(x, jnp.ones_like(x[:1]), (0, 0, 0)),
    "written last": lambda x, y: lax.dynamic_update_slice(x, 0 * x[:1], (len(x) - 1, 0, 0)),
    "rows of a number": lambda x, y: x * lax.dynamic_slice_in_dim(x, 0, SAMPLES).sum(0),
    "position by number": lambda x, y: x * jnp.tile(x, (1, 4, 1))[:, len(x) : len(x) + 1],
    "chosen by number": lambda x, y: x * jnp.eye(len(x), WIDTH).argmax(-1)[:, None, None],
    "dim by number": lambda x, y: x * jnp.cumsum(x, 1 if len(x) > SAMPLES else 2),
    "last number": lambda x, y: x * jnp.arange(len(x))[::-1][0],
    "ones but one": lambda x, y: x * jnp.ones(len(x))[1:].sum() / len(x),
    "product": lambda x, y: x * jnp.prod(jnp.full(len(x), 1.5)),
    "degrees": lambda x, y: (x / len(x)).at[jnp.arange(len(x)), 0].add(1.0) * len(x),
    "solved together": lambda x, y: x * jnp.linalg.solve(
        x[:, 0].T @ x[:, 0] + jnp.eye(WIDTH), jnp.asarray(W)[0]
    ),
}  # fmt: skip
# (x, y, mask of positions [samples, seq]) -> what a loss function returns. Sums:
SUMS = {
    "tokens": lambda x, y, m: (cross_entropy(x, y).sum(), jnp.float32(y.size)),
    "ones": lambda x, y, m: (cross_entropy(x, y).sum(), jnp.ones(len(y)).sum()),
    "mask": lambda x, y, m: ((cross_entropy(x, y) * m).sum(), m.sum()),
    "mean": lambda x, y, m: cross_entropy(x, y).mean(),
    "flat": lambda x, y, m: (
        (cross_entropy(x.reshape(-1, WIDTH), y.reshape(-1)) * m.reshape(-1)).sum(), m.sum()
    ),
    "stack": lambda x, y, m: tuple(jnp.stack([cross_entropy(x, y) * m, m]).sum((1, 2))),
    "scan": lambda x, y, m: (
        lax.scan(lambda c, xs: (c + cross_entropy(*xs).sum(), None), x.sum() * 0, (x, y))[0]
        if False else
        lax.scan(
            lambda c, xs: (c + cross_entropy(*xs).sum(), None), jnp.zeros((), x.dtype), (x, y)
        )[0],
        float(len(x)),
    ),
    "penalty of each": lambda x, y, m: (
        cross_entropy(x, y).sum() + m.sum() * (W**2).sum(), m.sum()
    ),
    "segments": lambda x, y, m: (
        jax.ops.segment_sum(cross_entropy(x, y).sum(1), y[:, 0], CLASSES).sum(), m.sum()
    ),
    "accuracy": lambda x, y, m: (
        (cross_entropy(x, y) * m).sum(), m.sum(),
        {"accuracy": 100 * ((x.argmax(-1) == y) * m).sum() / m.sum()},
    ),
    "guarded": lambda x, y, m: (
        (cross_entropy(x, y) * m).sum(), m.sum(),
        {"a": (x[..., 0] * m).sum() / jnp.maximum(m.sum(), 1e-9),
         "b": 1 - jnp.where(m.sum() > 0, (x[..., 0] * m).sum() / m.sum(), 0.0)},
    ),
    "alignments": lambda x, y, m: (
        optax.ctc_loss(
            x @ jnp.eye(WIDTH, CLASSES), 0 * m, jnp.maximum(y[:, :2], 1), jnp.zeros((len(y), 2))
        ).sum(), float(len(x))
    ),
    "mean metric": lambda x, y, m: (cross_entropy(x, y).sum(), float(y.size), {"a": x.mean()}),
}  # fmt: skip
# Other numbers than those of the parts:
NO_SUMS = {
    "masked mean": lambda x, y, m: (cross_entropy(x, y) * m).sum() / m.sum(),
    "bounded weight": lambda x, y, m: ((cross_entropy(x, y) * m).sum(), jnp.maximum(m.sum(), 2.0)),
    "penalty": lambda x, y, m: (cross_entropy(x, y).sum() + (W**2).sum(), m.sum()),
    "sum over one": lambda x, y, m: (cross_entropy(x, y).sum(), 1.0),
    "root": lambda x, y, m: (jnp.sqrt(jnp.square(x).sum()), m.sum()),
    "largest": lambda x, y, m: (x.max(), m.sum()),
    "truncated": lambda x, y, m: ((9 * x.sum()).astype(int).astype(float), m.sum()),
    "whether any": lambda x, y, m: (x.sum(), m.sum().astype(bool).astype(float)),
    "last": lambda x, y, m: (
        lax.scan(lambda c, x: (x.sum(), None), jnp.zeros((), x.dtype), x)[0],
        m.sum(),
    ),
}
NO_AVERAGES = {
    "sum": lambda x, y, m: (x.sum(), m.sum(), {"a": x.sum()}),
    "mean": lambda x, y, m: (x.sum(), m.sum(), {"a": x.mean()}),
    "largest": lambda x, y, m: (x.sum(), m.sum(), {"a": x.max()}),
    "another mask": lambda x, y, m: (
        x.sum(),
        m.sum(),
        {"a": (x[..., 0] * m).sum() / (1 - m).sum()},
    ),
    "perplexity": lambda x, y, m: (
        x.sum(),
        m.sum(),
        {"a": jnp.exp((x[..., 0] * m).sum() / m.sum())},
    ),
}


def batch(seed, empty):
    """Twice SAMPLES; a half whose mask is empty, or not."""
    rng, count = np.random.default_rng(seed), 2 * SAMPLES
    mask = rng.integers(0, 2, (count, SEQ)).astype(float)
    mask[-1, -1] = 1
    if empty:
        mask[:SAMPLES] = 0
    x = rng.normal(size=(count, SEQ, WIDTH))
    return {"x": x, "y": rng.integers(0, CLASSES, (count, SEQ)), "m": mask}


def verdict(function, parts=1, differentiated=True):
    """What is proved of a function of a batch, of twice SAMPLES if there is one part."""

    def trace(shapes):
        def loss(batch):
            return parse_loss(function(batch["x"], batch["y"], batch["m"]))[0], {}

        closed, (found, _) = jax.make_jaxpr(loss, return_shape=True)(shapes)
        tree = jax.tree.structure((found, {}))
        return LossProgram(closed, {}, closed.jaxpr.invars, tree)

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((SAMPLES, *x.shape[1:]), x.dtype), batch(0, False)
    )
    return by_parts(trace, shapes, parts, differentiated)


def average(losses):
    """(sum over weight, metrics) of the parts' losses."""
    weight = sum(loss.weight for loss in losses)
    names = losses[0].metrics
    metrics = {
        n: sum(x.metrics[n].value * x.weight for x in losses if x.weight) / weight for n in names
    }
    return sum(loss.total for loss in losses) / weight, metrics


def differs(function, given):
    """(whether the loss of a batch is another one than that of its halves, which metrics are)."""
    with jax.enable_x64(True):

        def loss(rows):
            part = {name: jnp.asarray(x[rows]) for name, x in given.items()}
            return parse_loss(function(part["x"], part["y"], part["m"]))[0]

        whole, metrics = average([loss(slice(None))])
        parts, of_parts = average([loss(slice(SAMPLES)), loss(slice(SAMPLES, None))])

        def unlike(a, b):
            return not np.allclose(a, b, rtol=1e-6, atol=1e-9)

        return unlike(whole, parts), {n for n in metrics if unlike(metrics[n], of_parts[n])}


@st.composite
def losses(draw):
    names = draw(st.lists(st.sampled_from([*APART, *MIXING]), max_size=3))
    steps = [draw(st.sampled_from([d[n] for d in (APART, MIXING) if n in d])) for n in names]
    end = draw(st.sampled_from([*SUMS.values(), *NO_SUMS.values(), *NO_AVERAGES.values()]))

    def function(x, y, m):
        for step in steps:
            x = step(x, y)
        return end(x, y, m)

    is_apart = all(step in APART.values() for step in steps)
    return function, is_apart, end


@settings(max_examples=300 if covering.is_full else 40, deadline=None)
@given(losses(), st.integers(0, 9), st.booleans())
def test_what_is_proved_equals_the_sum_of_the_parts(made, seed, empty):
    function, is_apart, end = made
    found = verdict(function)
    unlike, metrics = differs(function, batch(seed, empty))
    assert found.mixes or not unlike
    assert found.mixes or metrics <= found.mixing_metrics.keys()
    if is_apart and end in SUMS.values():
        assert found.not_once is None


@pytest.mark.parametrize("name", APART)
def test_a_sample_alone_is_proved(name):
    assert verdict(lambda x, y, m: SUMS["mask"](APART[name](x, y), y, m)).not_once is None


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("name", MIXING)
def test_each_form_of_mixing_is_found(name):
    def function(x, y, m):
        return SUMS["mask"](MIXING[name](x, y), y, m)

    assert verdict(function).mixes
    assert any(differs(function, batch(seed, False))[0] for seed in range(5))


@pytest.mark.parametrize("name", [*APART, *SUMS])
def test_a_part_of_one_sample_is_proved(name):
    """One of four: its dims of size 1 are traced otherwise."""

    def function(x, y, m):
        return SUMS["mask"](APART[name](x, y), y, m) if name in APART else SUMS[name](x, y, m)

    assert verdict(function, parts=SAMPLES).not_once is None


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_trace_that_runs_is_read(count):
    """A branch on the number of samples of a part, or of the whole, is another computation."""

    def function(x, y, m):
        return x.sum() * (10 if len(x) == count else 1), m.sum()

    assert verdict(function, parts=SAMPLES // count if count < SAMPLES else 2).mixes
    assert not verdict(lambda x, y, m: (x.sum() * (1 if len(x) else 10), m.sum()), 4).mixes


def squared(x):
    return x[:, :SEQ, :SEQ]


# Of operations that differ in their dims, columns, windows or numbers alone.
UNLIKE = {
    "sums": (lambda x, y: squared(x).sum(1), lambda x, y: squared(x).sum(2)),
    "products": (
        lambda x, y: squared(x) @ squared(x),
        lambda x, y: squared(x) @ squared(x).swapaxes(1, 2),
    ),
    "order": (
        lambda x, y: jnp.einsum("bij,bjk->bik", squared(x), squared(x) ** 2) * W[:SEQ, :SEQ],
        lambda x, y: jnp.einsum("bij,bjk->bki", squared(x), squared(x) ** 2) * W[:SEQ, :SEQ],
    ),
    "transposed": (
        lambda x, y: squared(x) * squared(x).transpose(0, 2, 1),
        lambda x, y: squared(x) * squared(x).transpose(0, 1, 2),
    ),
    "columns": (
        lambda x, y: x[jnp.arange(len(x)), y[:, 0] % SEQ, y[:, 1] % SEQ],
        lambda x, y: x[jnp.arange(len(x)), y[:, 1] % SEQ, y[:, 0] % SEQ],
    ),
    "indexed dim": (
        lambda x, y: squared(x)[jnp.arange(len(x)), y[:, 0] % SEQ] * W[0, :SEQ],
        lambda x, y: squared(x)[jnp.arange(len(x)), :, y[:, 0] % SEQ] * W[0, :SEQ],
    ),
    "written": (
        lambda x, y: squared(x).at[jnp.arange(len(x)), y[:, 0] % SEQ].set(0.0),
        lambda x, y: squared(x).at[jnp.arange(len(x)), :, y[:, 0] % SEQ].set(0.0),
    ),
    "constants": (lambda x, y: x @ W, lambda x, y: x @ W.T),
    "numbers": (lambda x, y: x * 2.0, lambda x, y: x * 2.5),
    "softmax": (lambda x, y: jax.nn.softmax(x, 1), lambda x, y: jax.nn.softmax(x, 2)),
    "slices": (lambda x, y: x[:, :SEQ - 1], lambda x, y: x[:, 1:]),
    "operands": (lambda x, y: x - jnp.sin(x), lambda x, y: jnp.sin(x) - x),
    "body": (lambda x, y: jax.checkpoint(jnp.sin)(x), lambda x, y: jax.checkpoint(jnp.cos)(x)),
    "derivative": (
        lambda x, y: by_gradient(lambda g, x: 2 * g)(x),
        lambda x, y: by_gradient(lambda g, x: 3 * g)(x),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_another_computation_of_one_sample_is_found(name):
    one, other = UNLIKE[name]

    def found(one, other):
        def function(x, y, m):
            return (one if len(x) == 1 else other)(x, y).sum(), m.sum()

        return verdict(function, parts=SAMPLES).mixes

    for first, second in ((one, other), (other, one)):
        assert "of 1 sample than of 4" in found(first, second)
        assert found(first, first) is None


def test_a_weight_of_one_sample_that_is_that_of_the_whole_is_found():
    def function(x, y, m):
        return x.sum(), float(SAMPLES if len(x) == 1 else len(x))

    assert verdict(function, parts=SAMPLES).mixes


# -- derivatives of a model's own ------------------------------------------------------------------


def by_gradient(backward):
    """The identity, with this derivative; it gets (gradient, x)."""
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, x), lambda x, g: (backward(g, x),))
    return function


def by_tangent(rule):
    function = jax.custom_jvp(lambda x: x)
    function.defjvp(lambda x, t: (x[0], rule(t[0], x[0])))
    return function


BACKWARD = {
    "centred": lambda g, x: g - g.mean(0),
    "rolled": lambda g, x: jnp.roll(g, 1, 0),
    "flipped": lambda g, x: g[::-1],
    "written": lambda g, x: lax.dynamic_update_slice(g, 0 * g[:1], (0, 0, 0)),
    "of another": lambda g, x: g * x[:1],
}
NOT_LINEAR = {
    "clipped": lambda g, x: jnp.clip(g, -0.02, 0.02),
    "normalized": lambda g, x: g / jnp.linalg.norm(g),
    "added": lambda g, x: g + 0.01 * x,
    "by number": lambda g, x: g * len(x),
    "branch": lambda g, x: g if len(x) > SAMPLES else 2 * g,
}
OWN = {
    "centred": lambda g, x: g - g.mean((1, 2), keepdims=True),
    "rolled": lambda g, x: jnp.roll(g, 1, 1),
    "gated": lambda g, x: jnp.where(x > 0, g, 0.0),
    "of its own": lambda g, x: g * x[:, :1],
    "multiplied at a position": lambda g, x: g.at[:, 1].multiply(0.5),
    "normalized": lambda g, x: g / jnp.linalg.norm(x, axis=-1, keepdims=True),
}


def gradient_differs(function, batch):
    """Whether the gradient of a mean is another one than the mean of the halves' gradients."""
    x = jnp.asarray(batch["x"], jnp.float32)

    def gradient(w, x):
        return jax.grad(lambda w: jnp.square(function(x * w)).mean())(w)

    w = jnp.ones(WIDTH)
    halves = (gradient(w, x[:SAMPLES]) + gradient(w, x[SAMPLES:])) / 2
    return not np.allclose(gradient(w, x), halves, rtol=1e-5)


def of_function(function):
    return lambda x, y, m: (jnp.square(function(x)).sum(), jnp.float32(x.size))


@pytest.mark.parametrize("name", [*BACKWARD, *NOT_LINEAR])
def test_a_derivative_that_mixes_samples_is_found(name):
    functions = [by_gradient((BACKWARD | NOT_LINEAR)[name])]
    functions += [by_tangent(BACKWARD[name])] if name in BACKWARD else []
    for function in functions:
        assert gradient_differs(function, batch(0, False))
        for parts in (1, 2) if name != "branch" else (1,):  # of SAMPLES
            assert verdict(of_function(function), parts).mixes
            assert verdict(lambda x, y, m, f=function: (f(x).sum(), m.sum()), parts).mixes


@pytest.mark.parametrize("name", OWN)
def test_a_derivative_of_each_sample_is_proved(name):
    for function in (by_gradient(OWN[name]), by_tangent(OWN[name])):
        assert not gradient_differs(function, batch(0, False))
        for parts in (1, 2, 4):
            assert verdict(of_function(function), parts).not_once is None


@pytest.mark.parametrize("parts", [1, 2, SAMPLES])
def test_a_rule_that_calls_its_function_is_proved(parts):
    function = jax.custom_jvp(lambda x: jnp.log1p(jnp.exp(x)))
    function.defjvp(lambda x, t: (function(*x), jax.nn.sigmoid(x[0]) * t[0]))
    assert verdict(of_function(function), parts).not_once is None


def test_a_forward_rule_may_call_its_function():
    function = jax.custom_vjp(jnp.sin)
    function.defvjp(lambda x: (function(x), x), lambda x, g: (g * jnp.cos(x),))
    for parts in (1, 2, 4):
        assert verdict(of_function(function), parts).not_once is None


def test_derivatives_of_parameters_have_to_be_linear_in_sums():
    for rule, mixes in ((jnp.tanh, True), (lambda g: g / 2, False), (lambda g: g + 1, True)):
        function = by_gradient(lambda g, w, rule=rule: rule(g))
        found = verdict(lambda x, y, m, f=function: ((x * f(jnp.asarray(W)[0])).sum(), m.sum()))
        assert bool(found.mixes) is mixes


def test_a_derivative_is_not_read_where_nothing_is_differentiated():
    loss = of_function(by_gradient(BACKWARD["centred"]))
    assert verdict(loss, differentiated=False).mixes is None


LIBRARIES = {
    "silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu, "softplus": jax.nn.softplus,
    "softmax": jax.nn.softmax, "logaddexp": lambda x: jnp.logaddexp(x, -x), "sinc": jnp.sinc,
    "slogdet": lambda x: jnp.linalg.slogdet(jnp.einsum("bsd,bse->bde", x, x) + jnp.eye(WIDTH))[1],
    "norm": lambda x: ops.rms_norm(x.astype(jnp.bfloat16), jnp.ones(WIDTH, jnp.bfloat16), eps=0.1),
    "attention": lambda x: ops.attention(*[x[:, :, None]] * 3, causal=True),
    "sigmoid": lambda x: optax.sigmoid_binary_cross_entropy(x, jnp.ones_like(x)),
    "sparsemax": lambda x: optax.losses.multiclass_sparsemax_loss(
        x[:, 0], jnp.zeros(len(x), int)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARIES)
def test_derivatives_of_libraries_are_proved(name):
    for parts in (1, 4):
        found = verdict(lambda x, y, m: (LIBRARIES[name](x).sum(), float(len(x))), parts)
        assert found.not_once is None


@pytest.mark.parametrize("sinks", [None, jnp.ones(2)])
def test_the_derivative_of_attention_is_right_and_not_traced(sinks, monkeypatch):
    def loss(x, y, m):
        q = jnp.tile(x, (1, 64, 1))[:, :, None] * jnp.ones((2, 1))
        out = ops.attention(q, q, q, causal=True, sinks=sinks, implementation="row_blocks")
        return out.sum(), float(len(x))

    with monkeypatch.context() as patched:
        patched.setattr(sample_independence, "derivative", None)
        assert verdict(loss).not_once is None
    monkeypatch.setattr(sample_independence, "TWO_PASSES", None)  # like any other function
    assert verdict(loss).not_once is None


def test_a_map_in_batches_is_refused_with_its_reason():
    found = verdict(lambda x, y, m: (lax.map(jnp.sin, x, batch_size=3).sum(), m.sum()))
    assert "as lax.map with a batch_size: not proved" in found.mixes


# -- sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_no_sum_is_found(name):
    assert verdict(NO_SUMS[name]).mixes
    given = [batch(seed, empty) for seed in range(10) for empty in (True, False)]
    assert any(differs(NO_SUMS[name], each)[0] for each in given)


@pytest.mark.parametrize("name", NO_AVERAGES)
def test_a_metric_that_is_no_average_is_found(name):
    found = verdict(NO_AVERAGES[name])
    assert found.mixes is None and found.mixing_metrics.keys() == {"a"}
    assert any(differs(NO_AVERAGES[name], batch(seed, False))[1] for seed in range(5))


@pytest.mark.parametrize(
    ("drawn", "along_samples"),
    [
        (lambda x: jax.random.bernoulli(KEY, 0.5, x.shape), True),
        (lambda x: jax.random.bernoulli(KEY, 0.5, x.shape[1:]), False),
        (lambda x: jax.random.normal(KEY, (len(x), 1, 1)), True),
        (lambda x: jax.vmap(lambda k: jax.random.normal(k, x.shape[1:]))(
            jax.random.split(KEY, len(x))), True),
        (lambda x: jax.random.normal(jax.random.PRNGKey(3), x.shape), True),
    ],
)  # fmt: skip
def test_draws_along_samples_are_noted(drawn, along_samples):
    found = verdict(lambda x, y, m: ((x * drawn(x)).sum(), m.sum()))
    assert found.mixes is None
    assert found.draws is along_samples


def test_a_reason_names_the_operation_and_its_line():
    def function(x, y, m):
        x = x * x[:1]
        return x.sum(), m.sum()

    line = function.__code__.co_firstlineno + 1
    place = rf"test_sample_independence.py, line {line}"
    assert (
        verdict(function).mixes == f"the loss's sum mixes samples (a slice mixes samples ({place}))"
    )
