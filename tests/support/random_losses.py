"""Random small losses: what one computes is a `Loss`, drawn by a seed and printed readably.

A loss is a row of steps `[samples, SEQ, WIDTH] -> [samples, SEQ, WIDTH]` around the blocks of a
small nnx module, and a form in which it returns what it has of each token. Of each step and form is
known, by construction, whether it mixes samples: `Loss.is_sum` says whether the loss of a batch is
the sum over its samples, and so over parts of it. Nothing is drawn at random while it runs, so that
no number depends on how a batch is cut.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from tests.support.random_modules import Described

SEQ, WIDTH, HIDDEN, VOCAB = 12, 8, 12, 10
AT = 9  # a position, in the second half and in the last of two to four tiles

Arrays = dict[str, jax.Array]
Step = Callable[["Net", jax.Array, Arrays], jax.Array]


@dataclass(frozen=True, repr=False)
class Loss(Described):
    """A module and its loss.

    Attributes:
      steps: (before which block, or behind the last, the name of a step).
      form: what the loss returns: of SUMS or NO_SUMS.
      blocks: of BLOCKS.
    """

    steps: tuple[tuple[int, str], ...] = ()
    form: str = "tokens"
    blocks: tuple[str, ...] = ("mlp",)

    @property
    def is_sum(self) -> bool:
        return self.form in SUMS and not any(name in MIXING for _, name in self.steps)

    @property
    def is_weighted(self) -> bool:
        return self.form not in ALONE

    def module(self, rngs: nnx.Rngs) -> "Net":
        return Net(self.blocks, rngs)

    def __call__(self, net: "Net", batch: Arrays) -> Any:
        x = batch["x"] + net.embed(batch["t"])
        for place in range(len(self.blocks) + 1):
            for where, name in self.steps:
                if where == place:
                    x = STEPS[name](net, x, batch)
            if place < len(self.blocks):
                x = net.blocks[place](x)
        logits = net.head(x)
        each = jax.nn.logsumexp(logits, -1) - _of_targets(logits, batch["t"])
        return FORMS[self.form](net, x, each, batch)


def drawn(seed: int, pipeline: bool = False) -> Loss:
    """The loss of a seed; a pipeline needs a block for each of its two stages."""
    rng = random.Random(seed)
    blocks = tuple(rng.choice([*BLOCKS]) for _ in range(2 if pipeline else rng.choice((1, 1, 2))))
    kinds = rng.choices((APART, ALONG, WRITTEN, DERIVED), (4, 4, 2, 2), k=rng.choice((1, 2, 2, 3)))
    names = [rng.choice([*steps]) for steps in kinds]
    form = rng.choice([*SUMS])
    mixing = rng.random()
    if mixing < 0.25:
        names[rng.randrange(len(names))] = rng.choice([*MIXING])
    elif mixing < 0.4:
        form = rng.choice([*NO_SUMS])
    steps = sorted((rng.randint(0, len(blocks)), name) for name in names)
    return Loss(tuple(steps), form, blocks)


def simpler(loss: Loss) -> Iterator[Loss]:
    """Losses of less, the simplest first."""
    if len(loss.blocks) > 1:
        steps = tuple((min(place, 1), name) for place, name in loss.steps)
        yield from (replace(loss, blocks=(kind,), steps=steps) for kind in loss.blocks)
    for i in range(len(loss.steps)):
        yield replace(loss, steps=loss.steps[:i] + loss.steps[i + 1 :])
    if loss.form != "tokens":
        yield replace(loss, form="tokens")
    for i, kind in enumerate(loss.blocks):
        if kind != "mlp":
            yield replace(loss, blocks=(*loss.blocks[:i], "mlp", *loss.blocks[i + 1 :]))


def shrunk(loss: Loss, fails: Callable[[Loss], bool]) -> Loss:
    """A loss that still fails, none of whose simpler ones does."""
    while smaller := next(filter(fails, simpler(loss)), None):
        loss = smaller
    return loss


def batches(steps: int, samples: int) -> list[dict[str, np.ndarray]]:
    """Numbers and an integer for each token, a mask that some samples are without, and weights."""
    rng = np.random.default_rng(samples)

    def batch() -> dict[str, np.ndarray]:
        mask = rng.integers(0, 2, (samples, SEQ)) * rng.integers(0, 4, (samples, 1)).clip(max=1)
        mask[-1, -1] = 1
        return {
            "x": rng.normal(size=(samples, SEQ, WIDTH)).astype(np.float32),
            "t": rng.integers(0, VOCAB, (samples, SEQ), np.int32),
            "m": mask.astype(np.float32),
            "w": rng.uniform(0.5, 2, samples).astype(np.float32),
        }

    return [batch() for _ in range(steps)]


# -- the module ------------------------------------------------------------------------------------


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, hidden: int = HIDDEN) -> None:
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Gated(Mlp):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs, 2 * WIDTH)
        self.gate = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.up(x) * jax.nn.sigmoid(self.gate(x)))


class Attention(nnx.Module):
    """Causal, of one head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query, self.key, self.value = (
            nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(3)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = jnp.einsum("nqw,nkw->nqk", self.query(x), self.key(x)) / WIDTH**0.5
        scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e9)
        return x + jnp.einsum("nqk,nkw->nqw", jax.nn.softmax(scores), self.value(x))


BLOCKS: dict[str, Callable[[nnx.Rngs], Any]] = {
    "mlp": Mlp, "gated": Gated, "attention": Attention
}  # fmt: skip


class Net(nnx.Module):
    """The blocks, and what steps and forms read."""

    def __init__(self, blocks: tuple[str, ...], rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([BLOCKS[kind](rngs) for kind in blocks])
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.places = nnx.Param(jnp.linspace(-1, 1, SEQ * WIDTH).reshape(SEQ, WIDTH))
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)


def _of_targets(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]


# -- derivatives of its own ------------------------------------------------------------------------


def _identity(backward: Callable[[jax.Array, jax.Array], jax.Array]) -> Any:
    """The identity, whose gradient is backward(gradient, x)."""
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, x), lambda x, g: (backward(g, x),))
    return function


_faded = _identity(lambda g, x: g / (1 + x**2))
_silent_at = _identity(lambda g, x: g.at[:, AT].multiply(0))
_normed_over_tokens = _identity(lambda g, x: g / jnp.sqrt(1 + jnp.sum(x**2, (1, 2), keepdims=True)))
_centred_over_tokens = _identity(lambda g, x: g - g.mean(1, keepdims=True) / 2)
_centred = _identity(lambda g, x: g - g.mean(0) / 2)
_normed = _identity(lambda g, x: g / jnp.sqrt(1e-6 + jnp.mean(g**2)))
_by_number = _identity(lambda g, x: g / len(g))


@jax.custom_jvp
def _steep(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


_steep.defjvp(lambda xs, ts: (jnp.sin(xs[0]), 2 * jnp.cos(xs[0]) * ts[0]))


@jax.custom_jvp
def _tangent_over_tokens(x: jax.Array) -> jax.Array:
    return x


_tangent_over_tokens.defjvp(lambda xs, ts: (xs[0], ts[0] - ts[0].sum(1, keepdims=True) / 8))


@jax.custom_vjp
def _shifted(x: jax.Array) -> jax.Array:
    """Each token's own number and half of that before it."""
    return x + 0.5 * jnp.roll(x, 1, 1)


_shifted.defvjp(lambda x: (_shifted(x), None), lambda _, g: (g + 0.5 * jnp.roll(g, -1, 1),))


@jax.custom_jvp
def _tangent_of_all(x: jax.Array) -> jax.Array:
    return x


_tangent_of_all.defjvp(lambda xs, ts: (xs[0], ts[0] - ts[0].mean(0) / 2))

# -- steps -----------------------------------------------------------------------------------------


def _recurrent(x: jax.Array) -> jax.Array:
    """A scan over positions."""

    def step(h: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h / 2 + token)
        return h, h

    return lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def _solved(x: jax.Array) -> jax.Array:
    """Of each sample, a linear system of its own."""
    gram = jnp.einsum("nsw,nsv->nwv", x, x) + 4 * jnp.eye(WIDTH)
    return jnp.linalg.solve(gram, x.swapaxes(1, 2)).swapaxes(1, 2) * 4


def _inverse(x: jax.Array) -> jax.Array:
    gram = jnp.einsum("nsw,ntw->nst", x, x) + 4 * jnp.eye(SEQ)
    return 4 * jnp.linalg.inv(gram) @ x


def _conv(x: jax.Array) -> jax.Array:
    kernel = jnp.eye(WIDTH)[None] * jnp.array([0.5, 1.0, -0.5])[:, None, None]
    return lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def _gradient_of_mix(net: Net, x: jax.Array) -> jax.Array:
    """Of each sample, the gradient of a loss of its own with respect to parameters."""
    kernel = net.mix.kernel[...]
    grads = jax.vmap(jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)), (None, 0))(kernel, x)
    return x + x @ grads


def _lengths(b: Arrays) -> jax.Array:
    """[samples], of the batch's integers."""
    return b["t"][:, 0] % SEQ


# Of each token alone.
APART: dict[str, Step] = {
    "tanh": lambda net, x, b: jnp.tanh(x),
    "mix": lambda net, x, b: jnp.sin(net.mix(x)),
    "softmax": lambda net, x, b: x + jax.nn.softmax(x, -1),
    "norm": lambda net, x, b: x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 0.1),
    "merged": lambda net, x, b: net.mix(x.reshape(-1, WIDTH)).reshape(x.shape),
    "transposed": lambda net, x, b: jnp.sin(x.transpose(1, 2, 0)).transpose(2, 0, 1),
    "one-hot": lambda net, x, b: x + jax.nn.one_hot(b["t"], WIDTH),
    "lookup": lambda net, x, b: x + 0.5 * jnp.tanh(net.mix.kernel[...])[b["t"] % WIDTH],
    "masked": lambda net, x, b: jnp.where(b["m"][..., None] > 0, x, 0.5),
    "feature written": lambda net, x, b: x.at[..., 3].set(0.5),
    "feature of the token written": lambda net, x, b: jnp.put_along_axis(
        x, (b["t"] % WIDTH)[..., None], 0.5, axis=-1, inplace=False
    ),
    "features sorted": lambda net, x, b: jnp.sort(x, -1),
    "features rolled": lambda net, x, b: x + jnp.roll(x, 1, -1),
    "largest feature": lambda net, x, b: x - 0.5 * x.max(-1, keepdims=True),
    "top 2": lambda net, x, b: jnp.concatenate([x[..., :6], lax.top_k(x, 2)[0]], -1),
    "loop": lambda net, x, b: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x + i), x),
    "loop of each token": lambda net, x, b: jax.vmap(jax.vmap(lambda x: lax.while_loop(
        lambda c: jnp.abs(c[0]).max() > 0.5, lambda c: (c[0] / 2, c[1] + 0.1),
        (lax.stop_gradient(x), 0.0),
    )[1] + x))(x),
    "scan over layers": lambda net, x, b: lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([net.mix.kernel[...]] * 2)
    )[0],
    "remat": lambda net, x, b: jax.checkpoint(lambda x: jnp.sin(net.mix(x)))(x),
    "branch of each token": lambda net, x, b: jax.vmap(jax.vmap(
        lambda x: lax.cond(x.sum() > 0, jnp.sin, lambda x: x / 2, x)
    ))(x),
    "gradient of each token": lambda net, x, b: jax.vmap(jax.vmap(
        jax.grad(lambda x: jnp.sum(jnp.tanh(net.mix(x)) ** 2))
    ))(x),
    "tangent": lambda net, x, b: jax.jvp(
        lambda x: jnp.tanh(net.mix(x)), (x,), (jnp.ones_like(x),)
    )[1],
    "gelu, relu": lambda net, x, b: jax.nn.relu(jax.nn.gelu(x)) + jax.nn.silu(x),
}  # fmt: skip

# Of each sample alone, and not of each token.
ALONG: dict[str, Step] = {
    "cumsum": lambda net, x, b: jnp.cumsum(x, 1) / 2,
    "sorted": lambda net, x, b: jnp.sort(x, 1)[:, ::-1],
    "rolled": lambda net, x, b: x - 0.5 * jnp.roll(x, 1, 1),
    "flipped": lambda net, x, b: x + 0.5 * jnp.flip(x, 1),
    "shifted": lambda net, x, b: x + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1],
    "centred": lambda net, x, b: x - x.mean((1, 2), keepdims=True),
    "positions": lambda net, x, b: x + jnp.sin(jnp.arange(SEQ))[:, None],
    "table of positions": lambda net, x, b: x + jnp.sin(net.places[...]),
    "scaled by position": lambda net, x, b: x * jnp.linspace(0.5, 1.5, SEQ)[:, None],
    "recurrent": lambda net, x, b: _recurrent(x),
    "recurrent backward": lambda net, x, b: jnp.flip(_recurrent(jnp.flip(x, 1)), 1),
    "convolved": lambda net, x, b: _conv(x),
    "attended": lambda net, x, b: x + jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x,
    "linear attention": lambda net, x, b: x + jnp.einsum("nsw,ntw,ntv->nsv", x, x, x) / 50,
    "numbered position": lambda net, x, b: x + x[jnp.arange(len(x)), _lengths(b)][:, None],
    "order of its own": lambda net, x, b: jnp.take_along_axis(
        x, jnp.argsort(lax.stop_gradient(x[..., 0]), 1)[..., None], 1
    ),
    "segments": lambda net, x, b: x + 0.3 * jax.vmap(
        lambda x, t: jax.ops.segment_sum(x, t % 3, 3)[t % 3]
    )(x, b["t"]),
    "median": lambda net, x, b: x - jnp.median(x, 1, keepdims=True),
    "logsumexp": lambda net, x, b: x - jax.nn.logsumexp(x, 1, keepdims=True),
    "running maximum": lambda net, x, b: lax.cummax(x, axis=1),
    "associative scan": lambda net, x, b: lax.associative_scan(
        lambda a, c: (a[0] * c[0], c[0] * a[1] + c[1]), (jax.nn.sigmoid(x), x), axis=1
    )[1],
    "fourier": lambda net, x, b: jnp.fft.fft(x, axis=1).real / 3,
    "windows": lambda net, x, b: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1), "SAME"
    ),
    "solved": lambda net, x, b: _solved(x),
    "inverse": lambda net, x, b: x + _inverse(x),
    "cholesky": lambda net, x, b: x + jnp.linalg.cholesky(
        x @ x.swapaxes(1, 2) + 2 * jnp.eye(SEQ)
    ) @ x / 4,
    "map": lambda net, x, b: lax.map(lambda x: jnp.sin(x) - x.mean(), x),
    "map in batches": lambda net, x, b: lax.map(lambda x: x - x.mean(0), x, batch_size=2),
    "map in uneven batches": lambda net, x, b: lax.map(lambda x: x - x.mean(0), x, batch_size=3),
    "vmap": lambda net, x, b: jax.vmap(lambda x: x / (1.0 + jnp.abs(x).max()))(x),
    "branch of each": lambda net, x, b: jax.vmap(
        lambda x: lax.cond(x.sum() > 0, jnp.sin, lambda x: x / 2, x)
    )(x),
    "loop of each": lambda net, x, b: x * 0.5 + jax.vmap(lambda x: lax.while_loop(
        lambda x: x.max() > 0.5, lambda x: x / 2, x
    ))(lax.stop_gradient(x)),
    "gradient of each": lambda net, x, b: _gradient_of_mix(net, x),
    "gradient of a sum": lambda net, x, b: jax.grad(
        lambda x: jnp.sum(jnp.tanh(net.mix(x)).mean(1) ** 2)
    )(x) * 5,
    "remat of a sum": lambda net, x, b: jax.checkpoint(
        lambda x: x + jnp.sin(x).sum(1, keepdims=True) / 4
    )(x),
    "filter of the mask": lambda net, x, b: x - (x * b["m"][..., None]).sum(1, keepdims=True) / (
        1 + b["m"].sum(1)[:, None, None]
    ),
}  # fmt: skip

# Of each sample alone: what is written to some of its positions.
WRITTEN: dict[str, Step] = {
    "position set": lambda net, x, b: x.at[:, AT].set(0.5),
    "positions added": lambda net, x, b: x.at[:, 1:AT].add(1.0),
    "positions multiplied": lambda net, x, b: x.at[:, ::3].multiply(2.0),
    "position maxed": lambda net, x, b: x.at[:, jnp.array([1, AT])].max(0.3),
    "position of the sample set": lambda net, x, b: jax.vmap(lambda x, i: x.at[i].set(0.5))(
        x, _lengths(b)
    ),
    "slice updated": lambda net, x, b: lax.dynamic_update_slice(x, 2 * x[:, :2], (0, 3, 0)),
    "slice of the sample updated": lambda net, x, b: jax.vmap(
        lambda x, i: lax.dynamic_update_slice_in_dim(x, jnp.ones((2, WIDTH)), i, 0)
    )(x, _lengths(b)),
    "written in a loop": lambda net, x, b: lax.fori_loop(
        0, 3, lambda i, x: x.at[:, 2 * i].add(1.0), x
    ),
    "written by number": lambda net, x, b: x.at[jnp.arange(len(x)), _lengths(b)].multiply(0.5),
}  # fmt: skip

# Of each sample alone: what has a derivative of its own.
DERIVED: dict[str, Step] = {
    "faded gradient": lambda net, x, b: _faded(x),
    "steep gradient": lambda net, x, b: _steep(x),
    "silent gradient": lambda net, x, b: _silent_at(x),
    "gradient normed over tokens": lambda net, x, b: _normed_over_tokens(x),
    "gradient centred over tokens": lambda net, x, b: _centred_over_tokens(x),
    "tangent summed over tokens": lambda net, x, b: _tangent_over_tokens(x),
    "shift with a gradient": lambda net, x, b: _shifted(x),
}

# Of other samples too, or of their number.
MIXING: dict[str, Step] = {
    "negatives": lambda net, x, b: x + jax.nn.softmax(x[:, 0] @ x[:, 0].T)[:, :1, None],
    "samples rolled": lambda net, x, b: x + 0.5 * jnp.roll(x, 1, 0),
    "samples flipped": lambda net, x, b: x + 0.5 * jnp.flip(x, 0),
    "samples summed up": lambda net, x, b: jnp.tanh(jnp.cumsum(x, 0)),
    "samples sorted": lambda net, x, b: jnp.sort(x, 0),
    "less the mean": lambda net, x, b: x - x.mean(0),
    "normalized": lambda net, x, b: (x - x.mean((0, 1))) / (x.std((0, 1)) + 0.1),
    "classes of all": lambda net, x, b: x + 0.3 * jnp.tanh(
        jax.ops.segment_sum(x[:, 0], b["t"][:, 0], VOCAB)
    )[b["t"][:, 0]][:, None],
    "numbered": lambda net, x, b: x + jnp.sin(jnp.arange(len(x)))[:, None, None],
    "by the count": lambda net, x, b: x * (1 + 2 / len(x)),
    "less the first": lambda net, x, b: x - x[:1],
    "first set": lambda net, x, b: x.at[0].set(0.5),
    "first updated": lambda net, x, b: lax.dynamic_update_slice(
        x, jnp.full((1, SEQ, WIDTH), 0.5), (0, 0, 0)
    ),
    "last multiplied": lambda net, x, b: x.at[-1].multiply(2.0),
    "halves": lambda net, x, b: jax.nn.softmax(x.reshape(2, -1), -1).reshape(x.shape) * len(x),
    "carried": lambda net, x, b: lax.scan(
        lambda c, x: (jnp.tanh(c + x), c), jnp.zeros_like(x[0]), x
    )[1] + x,
    "permuted": lambda net, x, b: x + 0.5 * x[jax.random.permutation(jax.random.key(0), len(x))],
    "over the largest": lambda net, x, b: 2 * x / jnp.abs(x).max(),
    "until all": lambda net, x, b: x + lax.while_loop(
        lambda x: x.max() > 0.5, lambda x: x / 2, lax.stop_gradient(x)
    ),
    "solved together": lambda net, x, b: x + jnp.linalg.solve(
        x[:, 0].T @ x[:, 0] + jnp.eye(WIDTH), jnp.ones(WIDTH)
    ),
    "gradient centred": lambda net, x, b: _centred(x),
    "gradient normed": lambda net, x, b: _normed(x),
    "gradient by the count": lambda net, x, b: _by_number(x),
    "tangent of all": lambda net, x, b: _tangent_of_all(x),
    "branch on 1": lambda net, x, b: x / 2 if len(x) == 1 else x,
    "branch on 2": lambda net, x, b: jnp.tanh(x) if len(x) <= 2 else x,
    "branch on 4": lambda net, x, b: jnp.tanh(x) if len(x) <= 4 else x,
    "branch on 3": lambda net, x, b: x * 2 if len(x) % 3 else x,
}  # fmt: skip
STEPS = {**APART, **ALONG, **WRITTEN, **DERIVED, **MIXING}

# -- what is returned ------------------------------------------------------------------------------

Form = Callable[[Net, jax.Array, jax.Array, Arrays], Any]


def _of_gradients(net: Net, x: jax.Array, each: jax.Array, b: Arrays) -> Any:
    """With a penalty on the gradient with respect to each sample."""
    slopes = jax.grad(lambda x: jnp.tanh(net.mix(x)).mean((1, 2)).sum())(x)
    return (each.sum(1) + jnp.square(slopes).sum((1, 2))).sum(), float(len(x))


def _after_a_step(net: Net, x: jax.Array, each: jax.Array, b: Arrays) -> Any:
    """Of a head that took a step on the micro-batch."""

    def of(kernel: jax.Array) -> jax.Array:
        return jnp.square(x @ kernel - b["x"]).mean()

    kernel = net.mix.kernel[...]
    return of(kernel - 0.1 * jax.grad(of)(kernel)), 1.0


def _weights(net: Net, x: jax.Array) -> jax.Array:
    """[samples, SEQ], of parameters."""
    return jax.nn.sigmoid(net.mix(x)[..., 0])


def _gated_weights(net: Net, x: jax.Array, each: jax.Array, b: Arrays) -> Any:
    w = _weights(net, x)
    return (each * w).sum(), w.sum()


def _advantages(net: Net, x: jax.Array, each: jax.Array, b: Arrays) -> Any:
    reward = b["x"][:, 0, 0]
    advantage = (reward - reward.mean()) / (reward.std() + 0.1)
    return (each.mean(1) * (2 + advantage)).sum(), float(len(x))


def _stopped(net: Net, x: jax.Array, each: jax.Array, b: Arrays) -> Any:
    w = lax.stop_gradient(_weights(net, x))
    return (each * w).sum(), w.sum()


def _shown(net: Net, x: jax.Array, each: jax.Array, b: Arrays) -> Any:
    count = b["m"].sum()
    shown = {"first": (x[..., 0] * b["m"]).sum() / count, "each": (each * b["m"]).sum() / count}
    return (each * b["m"]).sum(), count, shown


def _scanned(net: Net, x: jax.Array, each: jax.Array, b: Arrays) -> Any:
    total, _ = lax.scan(lambda c, row: (c + row.sum(), None), jnp.zeros(()), each)
    return total, float(each.size)


def _of_lengths(net: Net, x: jax.Array, each: jax.Array, b: Arrays) -> Any:
    within = jnp.arange(SEQ) <= _lengths(b)[:, None]
    return jnp.where(within, each, 0).sum(), within.sum()


SUMS: dict[str, Form] = {
    "tokens": lambda net, x, each, b: (each.sum(), each.size),
    "mean": lambda net, x, each, b: each.mean(),
    "all by the mask": lambda net, x, each, b: (each.sum(), b["m"].sum()),
    "mean of means": lambda net, x, each, b: jax.vmap(jnp.mean)(each).mean(),
    "mask": lambda net, x, each, b: ((each * b["m"]).sum(), b["m"].sum()),
    "flat mask": lambda net, x, each, b: tuple(
        jnp.stack([each * b["m"], b["m"]]).reshape(2, -1).sum(1)
    ),
    "samples": lambda net, x, each, b: (each.mean(1).sum(), len(x)),
    "masked means": lambda net, x, each, b: (
        ((each * b["m"]).sum(1) / jnp.maximum(b["m"].sum(1), 1)).sum(), jnp.ones(len(x)).sum()
    ),
    "worst tokens": lambda net, x, each, b: (each.max(1).sum(), float(len(x))),
    "pooled": lambda net, x, each, b: (
        jnp.square(net.mix(x.mean(1)) - b["x"].mean(1)).sum(), len(x)
    ),
    "weights of samples": lambda net, x, each, b: (
        (each.mean(1) * b["w"]).sum(), b["w"].sum()
    ),
    "weights of tokens and samples": lambda net, x, each, b: (
        jnp.einsum("n,ns,ns->", b["w"], b["m"], each), (b["w"][:, None] * b["m"]).sum()
    ),
    "last token": lambda net, x, each, b: (each[:, -1].sum(), len(x)),
    "next tokens": lambda net, x, each, b: (
        jnp.square(x[:, :-1] - lax.stop_gradient(x[:, 1:])).mean(-1).sum(), each[:, 1:].size
    ),
    "lengths": _of_lengths,
    "scanned": _scanned,
    "of classes": lambda net, x, each, b: (
        (jax.ops.segment_sum(each.sum(1), b["t"][:, 0], VOCAB) * jnp.arange(1.0, VOCAB + 1)).sum(),
        float(each.size),
    ),
    "decay of each": lambda net, x, each, b: (
        (each * b["m"]).sum() + b["m"].sum() * jnp.square(net.mix.kernel[...]).sum(), b["m"].sum()
    ),
    "penalty on gradients": _of_gradients,
    "stopped weights": _stopped,
    "metrics": _shown,
}  # fmt: skip
NO_SUMS: dict[str, Form] = {
    "masked mean": lambda net, x, each, b: (each * b["m"]).sum() / (1 + b["m"].sum()),
    "bounded weight": lambda net, x, each, b: (
        (each * b["m"]).sum(), jnp.maximum(b["m"].sum(), 9.0)
    ),
    "trained weights": _gated_weights,
    "root": lambda net, x, each, b: (jnp.sqrt(jnp.square(x).sum()), b["m"].sum()),
    "largest": lambda net, x, each, b: (each.max(), 1.0),
    "number": lambda net, x, each, b: (each.sum(), float(len(x)) ** 2),
    "decay": lambda net, x, each, b: (
        each.sum() + jnp.square(net.mix.kernel[...]).sum(), b["m"].sum()
    ),
    "advantages": _advantages,
    "contrast": lambda net, x, each, b: (
        -jnp.diag(jax.nn.log_softmax(x[:, 0] @ b["x"][:, 0].T)).sum(), len(x)
    ),
    "ranked": lambda net, x, each, b: (
        jnp.square(jnp.sort(x, 0) - jnp.sort(b["x"], 0)).mean((1, 2)).sum(), len(x)
    ),
    "after a step": _after_a_step,
    "auxiliary": lambda net, x, each, b: (
        (each * b["m"]).sum(), b["m"].sum(), jnp.square(x.mean((0, 1))).sum()
    ),
    "auxiliary of a sum": lambda net, x, each, b: (
        each.sum(), float(each.size), jnp.square(x).mean()
    ),
}  # fmt: skip
FORMS = {**SUMS, **NO_SUMS}
ALONE = {"mean", "mean of means", "masked mean"}  # return no weight
