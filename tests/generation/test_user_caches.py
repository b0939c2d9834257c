"""Models of users: caches in nnx.Cache and in Linen's collection `cache`; others recompute."""

import dataclasses
import logging
from itertools import product

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed.generation import Generator, Request, Sampling
from tests.support.covering import covering

VOCAB, WIDTH, LENGTH = 64, 32, 48
PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


def causal(x):
    return nn.make_causal_mask(jnp.ones(x.shape[:2]))


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = None if self.attention.decode else causal(x)
        x = x + self.attention(x, mask=mask)
        return x + nnx.gelu(self.mlp(x))


class NnxModel(nnx.Module):
    """Flax's own attention, without positions: the mask alone orders the tokens."""

    def __init__(self, rngs, stacked=False):
        init = nnx.initializers.normal(1.0)
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=init, rngs=rngs)
        make = nnx.vmap(NnxLayer, in_axes=0, out_axes=0)
        rngs_of = nnx.split_rngs(splits=2)
        self.stacked = stacked
        layers = rngs_of(make)(rngs) if stacked else nnx.List([NnxLayer(rngs) for _ in range(2)])
        self.layers = layers
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.stacked:
            x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )
        else:
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class OwnCache(nnx.Module):
    """An exponential average over the tokens before, whose cache is its state."""

    average = None

    def __init__(self, rngs):
        init = nnx.initializers.normal(1.0)
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=init, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def init_cache(self, rows, length, dtype):
        self.average = nnx.Cache(jnp.zeros((rows, WIDTH), dtype))

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.average is None:
            powers = jnp.tril(0.5 ** (jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])))
            return self.head(jnp.tanh(jnp.einsum("st,bte->bse", powers.astype(x.dtype), x)))
        self.average[...] = 0.5 * self.average[...] + x[:, 0]
        return self.head(jnp.tanh(self.average[...][:, None]))


class WithoutCache(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.normal(1.0)
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=init, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(jnp.cumsum(x, axis=1))


class LinenModel(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, embedding_init=nn.initializers.normal(1.0))(tokens)
        place = self.variable("cache", "place", lambda: jnp.zeros((), jnp.int32))  # as in lm1b
        table = self.param("positions", nn.initializers.normal(1.0), (LENGTH, WIDTH))
        if self.decode and not self.is_initializing() and self.has_variable("cache", "started"):
            x = x + table[place.value]
            place.value += 1
        else:
            x = x + table[: tokens.shape[1]]
        if self.decode:
            self.variable("cache", "started", lambda: jnp.zeros(()))
        for _ in range(2):
            attention = nn.MultiHeadDotProductAttention(4, decode=self.decode)
            x = x + attention(x, mask=None if self.decode else causal(x))
            x = x + nn.gelu(nn.Dense(WIDTH)(x))
        return nn.Dense(VOCAB)(x)


@dataclasses.dataclass(frozen=True)
class LinenConfig:
    decode: bool = False
    dropout: float = 0.5


class LinenByConfig(nn.Module):
    config: LinenConfig

    @nn.compact
    def __call__(self, tokens, train=False):
        decode = self.config.decode
        x = nn.Embed(VOCAB, WIDTH, embedding_init=nn.initializers.normal(1.0))(tokens)
        x = nn.Dropout(self.config.dropout, deterministic=not train)(x)
        attention = nn.MultiHeadDotProductAttention(4, decode=decode)
        x = x + attention(x, mask=None if decode else causal(x))
        return nn.Dense(VOCAB)(x)


class LinenByArgument(nn.Module):
    @nn.compact
    def __call__(self, tokens, decode=False):
        x = nn.Embed(VOCAB, WIDTH, embedding_init=nn.initializers.normal(1.0))(tokens)
        attention = nn.MultiHeadDotProductAttention(4, decode=decode)
        x = x + attention(x, mask=None if decode else causal(x))
        return nn.Dense(VOCAB)(x)


def loss(model, batch):
    logits = model(batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return losses.mean()


MODELS = {
    "nnx": lambda rngs: NnxModel(rngs),
    "nnx, stacked": lambda rngs: NnxModel(rngs, stacked=True),
    "nnx, own cache": lambda rngs: OwnCache(rngs),
    "Linen, field": LinenModel(),
    "Linen, config": LinenByConfig(LinenConfig()),
    "Linen, argument": LinenByArgument(),
}
ZERO3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
PLACEMENTS = {"one device": (1, {}), "ZeRO 3, bf16": (4, {**ZERO3, "bf16": {"enabled": True}})}


def engine_of(model, placement="one device", **more):
    devices, sections = PLACEMENTS[placement]
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "run": {"compilation_cache": False},
        **sections,
        **more,
    }
    example = {"tokens": np.zeros((4, LENGTH), np.int32)}
    return jaxspeed.initialize(
        model, loss, config, example_batch=example, devices=jax.devices()[:devices]
    )


def tokens_of(generator, engine, **options):
    request = Request(PROMPTS, 20, Sampling(0), context=LENGTH, **options)
    return [each.tokens for each in generator.start(engine.state, request).finish()]


DEFAULT = [*zip(MODELS, 3 * list(PLACEMENTS), strict=True)]  # by turns


@pytest.mark.default_cases("nnx, own cache-one device")
@pytest.mark.parametrize(("name", "placement"), covering(product(MODELS, PLACEMENTS), DEFAULT))
def test_tokens_are_those_without_a_cache(name, placement, caplog):
    engine = engine_of(MODELS[name], placement)
    with caplog.at_level(logging.WARNING, "jaxspeed"):
        generator = Generator(engine.program)
        found = tokens_of(generator, engine)
    assert "keeps no key-value cache" not in caplog.text
    (programs,) = generator._programs.values()
    assert programs.cached is not None
    assert found == tokens_of(Generator(engine.program, cache=False), engine)
    assert len({token for row in found for token in row}) > 5


def test_a_model_without_a_cache_recomputes_and_says_so(caplog):
    def init(key):
        return {"table": jax.random.normal(key, (VOCAB, VOCAB))}

    def apply(params, tokens):
        return jnp.cumsum(params["table"][tokens], axis=1)

    def last_logits(parameters, text):
        """Of the token after the text, by NumPy in fp64."""
        found = {path: np.asarray(x, np.float64) for path, x in parameters.items()}
        if "table" in found:
            return found["table"][text].sum(0)
        head = found["head/kernel"], found["head/bias"]
        return found["embed/embedding"][text].sum(0) @ head[0] + head[1]

    for model in (lambda rngs: WithoutCache(rngs), (init, apply)):
        caplog.clear()
        engine = engine_of(model)
        found = engine.generate(PROMPTS, 6, temperature=0)
        engine.generate(PROMPTS, 6, temperature=0)
        assert caplog.text.count("keeps no key-value cache") == 1
        for prompt, each in zip(PROMPTS, found, strict=True):
            text = list(prompt)
            for _ in range(6):
                text.append(int(last_logits(engine.parameters, text).argmax()))
            assert each.tokens == tuple(text[len(prompt) :])


def test_a_text_that_outgrows_the_context_begins_anew_in_the_cache():
    engine = engine_of(MODELS["nnx"])
    request = Request([*PROMPTS, [3] * 40], 30, Sampling(0), context=16)
    found = Generator(engine.program).start(engine.state, request).finish()
    assert found == Generator(engine.program, cache=False).start(engine.state, request).finish()


def test_a_model_that_returns_no_logits_is_refused():
    def apply(params, tokens):
        return params[tokens].sum()

    engine = engine_of((lambda key: jnp.ones((VOCAB, 4)), apply))
    with pytest.raises(jaxspeed.JaxspeedError, match="a language model returns logits"):
        engine.generate(PROMPTS, 2)
