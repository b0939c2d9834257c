"""Pipelines of models that were written without a thought of them train as plain JAX.

Lists of blocks in nnx and Linen, functions over lists of dicts, lists of layers, recomputed blocks,
blocks that hand on several arrays or read something that is not theirs. Each model is trained at
one point, but those that another one holds in it; with `full` at every pipe x stage.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import LayerSpec, PipelineModule, TiedLayerSpec
from tests.support import reference
from tests.support.awkward.base import WIDTH
from tests.train.cases import Case, family, regression, squared_error, vectors, weighted_error
from tests.train.parity import (
    assert_loss_fell,
    assert_losses_equal,
    leaf_differences,
    plain,
    run,
    whole_difference,
)

LAYERS, VOCAB, SEQ = 5, 16, 6  # 5 layers: neither 2 nor 4 stages have equally many
KEYS = ("k_proj/bias",)


# -- nnx ------------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(jax.nn.gelu(self.up(self.norm(x)))))


class Net(nnx.Module):
    """A list of blocks, as anyone writes it, between two layers of its own."""

    block = Block

    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([self.block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def through_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, x):
        return self.head(self.through_blocks(self.first(x)))


class Stacked(Net):
    """Plain linear layers, with what follows each outside of them."""

    @staticmethod
    def block(rngs):
        return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def through_blocks(self, x):
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return x


class Dropping(Net):
    block = functools.partial(Block, rate=0.1)


class Recomputed(Net):
    def through_blocks(self, x):
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return x


class RecomputedBlock(Block):
    @nnx.remat
    def __call__(self, x):
        return super().__call__(x)


class RecomputedClass(Net):
    block = RecomputedBlock


class ScaledBlock(Block):
    """Reads constants of its own inside of a jit: its program's text is every other block's."""

    def __init__(self, rngs, scale):
        super().__init__(rngs)
        self.scale = scale

    def __call__(self, x):
        scale = np.full(2 * WIDTH, self.scale, np.float32)
        h = self.up(self.norm(x))
        return x + self.down(jax.jit(lambda h: jnp.tanh(h * scale))(h))


class OwnConstants(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.blocks = nnx.List([ScaledBlock(rngs, 1.0 + i / 4) for i in range(LAYERS)])


class BiasedBlock(nnx.Module):
    """Reads a table of the whole model, as T5's blocks read relative positions."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, table):
        return x + jnp.tanh(self.up(x) + table[None, 0]) * jnp.tanh(x @ table)


class SharedTable(Net):
    block = BiasedBlock

    def __init__(self, rngs):
        super().__init__(rngs)
        self.table = nnx.Param(0.3 * jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

    def through_blocks(self, x):
        for block in self.blocks:
            x = block(x, self.table[...])
        return x


class SharedTableAndHead(SharedTable):
    """The same table is the head's, and the first layer's."""

    def __call__(self, x):
        return self.head(self.through_blocks(self.first(x @ self.table[...]))) @ self.table[...]


class PricedBlock(Block):
    """Passes a price of all samples in addition to its activations, as routed experts do."""

    def __call__(self, x, price, share=0.1):
        y = super().__call__(x)
        return y, price + share * jnp.mean((y - x) ** 2)


class Priced(Net):
    block = PricedBlock

    def __call__(self, x):
        x, price = self.first(x), 0.01 * jnp.mean(x**2)
        for block in self.blocks:
            x, price = block(x, price)
        return self.head(x), price


def priced_error(model, batch):
    y, price = model(batch["x"])
    return jnp.mean((y - batch["y"]) ** 2) + price


class WeighingBlock(Block):
    """Passes a penalty of each sample, before its activations."""

    def __call__(self, penalty, x):
        y = super().__call__(x)
        return penalty + 0.1 * jnp.mean((y - x) ** 2, axis=-1), y


class Weighing(Net):
    block = functools.partial(WeighingBlock, rate=0.1)

    def __call__(self, x):
        penalty, x = jnp.mean(x**2, axis=-1), self.first(x)
        for block in self.blocks:
            penalty, x = block(penalty, x)
        return self.head(x), penalty


class PricedFromZero(Net):
    """The price starts from a number, and each block is given a share that is another."""

    block = PricedBlock

    def __call__(self, x):
        x, price = self.first(x), 0.0
        for i, block in enumerate(self.blocks):
            x, price = block(x, price, 0.05 * (i + 1))
        return self.head(x), price


class ReadingBlock(nnx.Module):
    """Reads a table that is not its own and constants that are, and passes a price."""

    def __init__(self, rngs, scale):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scale = scale

    def __call__(self, x, price, table, share):
        scale = np.full(WIDTH, self.scale, np.float32)
        h = jax.jit(lambda h: jnp.tanh(h * scale))(self.up(x) + table[None, 0])
        y = x + h * jnp.tanh(x @ table)
        return y, price + share * jnp.mean((y - x) ** 2)


class Reading(Net):
    """What blocks may have in addition, all at once."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.blocks = nnx.List([ReadingBlock(rngs, 1.0 + i / 4) for i in range(LAYERS)])
        self.table = nnx.Param(0.3 * jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x):
        x, price = self.first(x @ self.table[...]), 0.0
        for i, block in enumerate(self.blocks):
            x, price = block(x, price, self.table[...], 0.05 * (i + 1))
        return self.head(x) @ self.table[...], price


def penalized_error(model, batch):
    y, penalty = model(batch["x"])
    error = jnp.mean((y - batch["y"]) ** 2, axis=-1) + penalty
    return jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"])


class TwoLists(nnx.Module):
    """Of two lists of one size a pattern selects the blocks; without one it is the first."""

    def __init__(self, rngs):
        self.encoder = nnx.List([Block(rngs, 0.1) for _ in range(4)])
        self.decoder = nnx.List([Block(rngs) for _ in range(4)])

    def __call__(self, x):
        for block in self.encoder:
            x = block(x)
        x = jnp.sin(x)
        for block in self.decoder:
            x = block(x)
        return x


# -- Linen ----------------------------------------------------------------------------------------


class LinenBlock(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        hidden = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(nn.Dropout(self.rate, deterministic=not train)(hidden))


class LinenNet(nn.Module):
    rate: float = 0.0
    block: Any = LinenBlock

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(WIDTH)(x)
        for i in range(LAYERS):
            x = self.block(self.rate, name=f"block_{i}")(x, train)
        return nn.Dense(WIDTH, name="head")(x)


class StackedLinen(nn.Module):
    """Plain dense layers, with an activation outside of them."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(WIDTH, name="first")(x)
        for i in range(LAYERS):
            x = jnp.tanh(nn.Dense(WIDTH, name=f"block_{i}")(x))
        return nn.Dense(WIDTH, name="head")(x)


def linen(rate, loss, block=LinenBlock):
    example = vectors(np.random.default_rng(0), 4)
    net = LinenNet(rate, block) if block else StackedLinen()
    plain = lambda: reference.LinenReference(net, example["x"])  # noqa: E731
    return Case(net, loss, vectors, plain, example=example)


# -- functions ------------------------------------------------------------------------------------


def pair_init(key):
    def layer(key):
        a, b = jax.random.split(key)
        return {
            "up": jax.random.normal(a, (WIDTH, 2 * WIDTH)) * WIDTH**-0.5,
            "bias": jnp.zeros(2 * WIDTH),
            "down": jax.random.normal(b, (2 * WIDTH, WIDTH)) * (2 * WIDTH) ** -0.5,
        }

    *keys, last = jax.random.split(key, LAYERS + 1)
    head = jax.random.normal(last, (WIDTH, WIDTH)) * WIDTH**-0.5
    return {"layers": [layer(k) for k in keys], "head": head}


@jaxspeed.unit
def pair_layer(params, x):
    return x + jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def pair_apply(params, x):
    for layer in params["layers"]:
        x = pair_layer(layer, x)
    return x @ params["head"]


def recomputed_pair_apply(params, x):
    for layer in params["layers"]:
        x = jax.checkpoint(pair_layer)(layer, x)
    return x @ params["head"]


def nameless_pair_apply(params, x):
    half = jaxspeed.unit(lambda layer, x: x + jnp.tanh(x @ layer["up"]) @ layer["down"])
    whole = jaxspeed.unit(lambda layer, x: half(layer, x) + jnp.mean(layer["bias"]))
    for layer in params["layers"]:
        x = whole(layer, x)
    return x @ params["head"]


def pair(apply):
    plain = lambda: reference.PairReference(pair_init, apply)  # noqa: E731
    return Case((pair_init, apply), weighted_error, vectors, plain)


# -- lists of layers ------------------------------------------------------------------------------


class Wide(nnx.Module):
    """The other of two kinds of block that take turns."""

    def __init__(self, *, rngs):
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.sin(self.up(x)))


class Layer(Block):
    def __init__(self, rate, *, rngs):
        super().__init__(rngs, rate)


def attend(embed, x):
    return embed.attend(x)


def tied_module():
    return PipelineModule(
        [
            TiedLayerSpec("embed", nnx.Embed, VOCAB, WIDTH),
            *[LayerSpec(Layer, 0.1) for _ in range(LAYERS)],
            lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs),
            TiedLayerSpec("embed", nnx.Embed, VOCAB, WIDTH, forward_fn=attend),
        ]
    )


def turns_module():
    return PipelineModule(
        [
            LayerSpec(nnx.Linear, WIDTH, WIDTH),
            *[LayerSpec(Layer, 0.1), jnp.tanh, LayerSpec(Wide)] * LAYERS,
            LayerSpec(nnx.Linear, WIDTH, WIDTH),
        ]
    )


def tokens(rng, samples):
    """Each token is the one before plus three; some samples are not counted."""
    text = (rng.integers(0, VOCAB, (samples, 1)) + 3 * np.arange(SEQ + 1)) % VOCAB
    counted = (rng.random((samples, SEQ)) < 0.7) & (rng.random((samples, 1)) < 0.7)
    return {"tokens": text.astype(np.int32), "counted": counted.astype(np.float32)}


def next_token(model, batch):
    text = batch["tokens"]
    shares = jax.nn.log_softmax(model(text[:, :-1]))
    right = jnp.take_along_axis(shares, text[:, 1:, None], axis=-1)[..., 0]
    return -jnp.sum(right * batch["counted"]), jnp.sum(batch["counted"])


def layers_case(module, loss, sample, rates=(1e-2, 0.1)):
    return Case(module, loss, sample, lambda: reference.NnxReference(module), rates=rates)


# -- packed batches -------------------------------------------------------------------------------


def packed(rng, samples):
    """Two documents per sequence, each with positions from 0."""
    length = 9
    cut = rng.integers(2, length - 2, (samples, 1))
    at = np.arange(length)[None]
    start = rng.integers(0, 32, (samples, 2))
    second = at >= cut
    text = (np.where(second, start[:, 1:], start[:, :1]) + 3 * at) % 32
    return {
        "tokens": text.astype(np.int32),
        "segment_ids": second.astype(np.int32),
        "positions": np.where(second, at - cut, at).astype(np.int32),
    }


def packed_family(name, **more):
    sizes = {
        "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "vocab_size": 32, "max_position_embeddings": 16, "initializer_range": 0.2,
    }  # fmt: skip
    return family(name, packed, KEYS, **sizes, **more)


# -- all of them ----------------------------------------------------------------------------------

ENCODER: dict[str, Any] = {"units": ["encoder/*"]}
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "a list": (regression(Net, squared_error), {}),
    "activations between": (regression(Stacked, squared_error), {}),
    "activations between, linen": (linen(0.0, squared_error, None), {}),
    "a list that drops": (regression(Dropping, weighted_error), {}),
    "recomputed calls": (regression(Recomputed, weighted_error), {}),
    "recomputed class": (regression(RecomputedClass, weighted_error), {}),
    "a table that all read": (regression(SharedTable, weighted_error), {}),
    "a table that all and the head read": (regression(SharedTableAndHead, squared_error), {}),
    "a price that travels": (regression(Priced, priced_error), {}),
    "a price from zero": (regression(PricedFromZero, priced_error), {}),
    "penalties that travel": (regression(Weighing, penalized_error), {}),
    "the other of two lists": (regression(TwoLists, weighted_error, rates=(1e-2, 0.02)), ENCODER),
    "linen": (linen(0.0, squared_error), {}),
    "linen that drops": (linen(0.1, weighted_error), {}),
    "linen that drops, recomputed": (
        linen(0.1, weighted_error, nn.remat(LinenBlock, static_argnums=2)),
        {},
    ),
    "a pair": (pair(pair_apply), {}),
    "a pair of lambdas": (pair(nameless_pair_apply), {}),
    "a pair, recomputed": (pair(recomputed_pair_apply), {}),
    "layers, tied": (layers_case(tied_module(), next_token, tokens), {}),
    "layers that take turns": (
        layers_case(turns_module(), weighted_error, vectors, (1e-2, 0.02)),
        {},
    ),
    "packed gpt2": (packed_family("gpt2", dropout=0.1), {}),
    "packed llama": (packed_family("llama", num_key_value_heads=1, intermediate_size=24), {}),
    "constants of its own": (regression(OwnConstants, squared_error), {}),
    "a table, a price and constants": (regression(Reading, priced_error), {}),
}
POINTS = [(2, 3), (4, 0), (2, 0), (4, 3)]  # (pipe, stage)
# All that these have, others have too.
IN_FULL = {
    "a list",
    "activations between, linen",
    "a list that drops",
    "recomputed calls",
    "recomputed class",
    "a table that all read",
    "a table that all and the head read",
    "a price that travels",
    "a price from zero",
    "constants of its own",
    "penalties that travel",
    "the other of two lists",
    "linen that drops",
    "linen that drops, recomputed",
    "a pair",
    "a pair of lambdas",
    "layers that take turns",
    "layers, tied",  # test_pipeline_module.py has them
    "packed gpt2",
}
SCHEDULES = ("interleaved", "1f1b", "gpipe")
RECOMPUTES, GATHERS = ("stage", "layers", "save"), ("tick", "step")


def grid():
    """One of the first two points of a model always runs; all other settings go round."""
    for i, name in enumerate(CASES):
        for j, (pipe, stage) in enumerate(POINTS):
            schedule = SCHEDULES[(i + j) % 3] if pipe == 2 else SCHEDULES[1 + (i + j) % 2]
            words = {
                "pipeline_schedule": schedule,
                "pipeline_recompute": RECOMPUTES[(i + 2 * j) % 3],
                "pipeline_gather": GATHERS[(i + j) % 2],
            }
            title = f"{name}-pipe{pipe}-stage{stage}-{'-'.join(words.values())}"
            always = j == i // 2 % 2 and name not in IN_FULL
            marks = [] if always else [pytest.mark.full]
            yield pytest.param(name, pipe, stage, words, id=title.replace(" ", "_"), marks=marks)


@functools.lru_cache(maxsize=2)
def on_one_device(name, micro, ranks):
    return plain(CASES[name][0], micro, "sgd", ranks=ranks)


@pytest.mark.default_cases("activations_between-pipe2-stage3-1f1b-layers-step")
@pytest.mark.parametrize(("name", "pipe", "stage", "words"), [*grid()])
def test_it_trains_as_plain_jax(name, pipe, stage, words):
    case, parallel = CASES[name]
    mesh = {"pipe": pipe, "data": 8 // pipe}
    ours = run(case, stage, 4, "sgd", mesh=mesh, parallel={**parallel, **words})
    reference = on_one_device(name, 4, 8 // pipe)
    assert_losses_equal(ours, reference, 1e-5)
    np.testing.assert_allclose(ours.norms, reference.norms, rtol=1e-5)
    assert_loss_fell(ours)
    assert whole_difference(case, ours, reference) <= 1e-5
    assert max(leaf_differences(case, ours, reference).values()) <= 1e-5


def test_a_pattern_selects_the_list_of_blocks():
    stacks = {
        str(parallel): run(
            CASES["the other of two lists"][0],
            accumulation=2,
            steps=0,
            mesh={"pipe": 2, "data": 4},
            parallel=parallel,
        ).engine.program.table.stack
        for parallel in ({}, ENCODER)
    }
    names = [{name.split("/")[0] for name in stack.leaves} for stack in stacks.values()]
    assert names == [{"decoder"}, {"encoder"}]
