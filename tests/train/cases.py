"""The models that parity is proven on: each with its loss, its batches and its plain reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxspeed
from jaxspeed import models
from tests.support import awkward, reference
from tests.support.awkward.base import WIDTH

RANKS = 8
MICRO = 2  # samples of a rank in one micro-batch
STEPS = 10
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
VOCAB, SEQ = 32, 8


@dataclass(frozen=True)
class Case:
    """One model to train, and how plain JAX trains it."""

    model: Any  # what `initialize` is given
    loss: Callable[[Any, Any], Any]
    sample: Callable[[np.random.Generator, int], Any]  # (rng, samples) -> batch
    plain: Callable[[], Any]  # the model as the reference has it
    rates: tuple[float, float] = (1e-2, 0.1)  # learning rates of Adam and SGD
    zero: tuple[str, ...] = ()  # tails of the paths whose gradient is zero by symmetry
    example: Any = None  # of a batch, where the model is made from one

    def batches(self, accumulation: int, steps: int = STEPS, seed: int = 0) -> list[Any]:
        rng = np.random.default_rng(seed)
        return [self.sample(rng, RANKS * MICRO * accumulation) for _ in range(steps)]

    def optimizer(self, name: str) -> optax.GradientTransformation:
        adam, sgd = self.rates
        return optax.adam(adam) if name == "adam" else optax.sgd(sgd, momentum=0.9)

    def has_gradient(self, path: str) -> bool:
        """False for a leaf whose gradient is zero but for rounding."""
        return not path.endswith(self.zero) if self.zero else True


# -- batches --------------------------------------------------------------------------------------


def language(rng: np.random.Generator, samples: int) -> dict[str, np.ndarray]:
    """Each token is the one before plus three, with some noise; a third of the targets is masked,
    and of some samples all, so that micro-batches and ranks weigh differently, some nothing."""
    start = rng.integers(0, VOCAB, (samples, 1))
    noise = rng.integers(0, VOCAB, (samples, SEQ + 1)) * (rng.random((samples, SEQ + 1)) < 0.1)
    tokens = (start + 3 * np.arange(SEQ + 1) + noise) % VOCAB
    mask = (rng.random((samples, SEQ)) < 0.67) & (rng.random((samples, 1)) < 0.8)
    return {"tokens": tokens.astype(np.int32), "mask": mask.astype(np.int32)}


def cloze(rng: np.random.Generator, samples: int) -> dict[str, np.ndarray]:
    """As `language`, with tokens within replaced by 0, which are to be predicted."""
    tokens = language(rng, samples)["tokens"][:, :SEQ]
    chosen = rng.random(tokens.shape) < 0.3
    labels = np.where(chosen, tokens, -100)
    return {"tokens": np.where(chosen, 0, tokens), "labels": labels.astype(np.int32)}


def pairs(rng: np.random.Generator, samples: int) -> dict[str, np.ndarray]:
    """Each target is the input plus one; inputs have padding, and of some samples none counts."""
    inputs = rng.integers(1, VOCAB, (samples, SEQ))
    mask = np.arange(SEQ) < rng.integers(2, SEQ + 1, (samples, 1))
    targets = (inputs + 1) % VOCAB
    targets = np.where(mask & (rng.random((samples, 1)) < 0.9), targets, -100)[:, : SEQ - 2]
    found = {"inputs": inputs, "mask": mask, "targets": targets}
    return {name: x.astype(np.int32) for name, x in found.items()}


def sequences(rng: np.random.Generator, samples: int) -> dict[str, np.ndarray]:
    """The label is the last token's, before padding of 0, by its range in the vocabulary."""
    tokens = rng.integers(1, VOCAB, (samples, SEQ))
    ends = rng.integers(1, SEQ + 1, (samples, 1))
    tokens[np.arange(SEQ) >= ends] = 0
    labels = np.take_along_axis(tokens, ends - 1, axis=1)[:, 0] * 4 // VOCAB
    return {"tokens": tokens.astype(np.int32), "labels": labels.astype(np.int32)}


def topics(rng: np.random.Generator, samples: int) -> dict[str, np.ndarray]:
    """All tokens of a sample but its padding are of one range of the vocabulary, the label."""
    labels = rng.integers(0, 4, samples)
    mask = np.arange(SEQ) < rng.integers(2, SEQ + 1, (samples, 1))
    tokens = np.where(
        mask, labels[:, None] * VOCAB // 4 + rng.integers(0, VOCAB // 4, mask.shape), 0
    )
    found = {"tokens": tokens, "mask": mask, "labels": labels}
    return {name: x.astype(np.int32) for name, x in found.items()}


def pictures(rng: np.random.Generator, samples: int) -> dict[str, np.ndarray]:
    """The label is the colour that is brighter, or that none is."""
    labels = rng.integers(0, 4, samples)
    colours = np.vstack([2 * np.eye(3), np.zeros(3)])
    images = rng.normal(size=(samples, 8, 8, 3)) + colours[labels][:, None, None]
    return {"images": images.astype(np.float32), "labels": labels.astype(np.int32)}


def vectors(rng: np.random.Generator, samples: int) -> dict[str, np.ndarray]:
    """y is a fixed turn of x."""
    x = rng.normal(size=(samples, WIDTH)).astype(np.float32)
    weight = rng.integers(0, 4, samples).astype(np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1), "weight": weight}


# -- losses ---------------------------------------------------------------------------------------


def errors(model: Any, batch: Any) -> jax.Array:
    """[samples], in fp32 at least, as a loss should be."""
    error = model(batch["x"]) - batch["y"]
    error = error.astype(jnp.promote_types(error.dtype, jnp.float32))
    return jnp.mean(error**2, axis=-1)


def squared_error(model: Any, batch: Any) -> jax.Array:
    """A scalar."""
    return jnp.mean(errors(model, batch))


def weighted_error(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """(sum, weight), with samples that weigh 0 to 3."""
    return jnp.sum(errors(model, batch) * batch["weight"]), jnp.sum(batch["weight"])


# -- models ---------------------------------------------------------------------------------------


class LinenNet(nn.Module):
    """Dropout, batch statistics and unlike layers, in Linen."""

    @nn.compact
    def __call__(self, x, train: bool):
        for width in (16, 24):
            hidden = nn.gelu(nn.Dense(width)(x))
            hidden = nn.Dropout(0.1, deterministic=not train)(hidden)
            x = x + nn.Dense(x.shape[-1])(hidden)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(WIDTH)(x)


def pair_init(key: jax.Array) -> dict[str, Any]:
    width = WIDTH
    keys = jax.random.split(key, 7)
    layer = lambda a, b: {  # noqa: E731
        "up": jax.random.normal(a, (width, 2 * width)) * width**-0.5,
        "bias": jnp.zeros(2 * width),
        "down": jax.random.normal(b, (2 * width, width)) * (2 * width) ** -0.5,
    }
    layers = [layer(keys[2 * i], keys[2 * i + 1]) for i in range(3)]
    return {"layers": layers, "head": jax.random.normal(keys[6], (width, width)) * width**-0.5}


@jaxspeed.unit
def pair_layer(params: dict[str, Any], x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def pair_apply(params: dict[str, Any], x: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = pair_layer(layer, x)
    return x @ params["head"]


def family(name: str, sample: Any, zero: tuple[str, ...] = (), **sizes: Any) -> Case:
    built = models.build(name, None, {**SIZES, **sizes})
    plain = lambda: reference.NnxReference(built.factory)  # noqa: E731
    return Case(built.factory, built.loss, sample, plain, zero=zero)


def regression(model: type[nnx.Module], loss: Any, zero: tuple[str, ...] = (), **more: Any) -> Case:
    plain = lambda: reference.NnxReference(model)  # noqa: E731
    return Case(model, loss, vectors, plain, zero=zero, **more)


# Attention's scores are softmaxed: a constant added to all keys adds the same to all scores of a
# query, and changes nothing. BatchNorm takes away the mean: a constant before it changes nothing.
KEYS = ("k_proj/bias",)
EXAMPLE = vectors(np.random.default_rng(0), 4)
TEXT = {"vocab_size": VOCAB, "max_position_embeddings": SEQ, "initializer_range": 0.2}

CASES: dict[str, Case] = {
    "gpt2": family("gpt2", language, KEYS, **TEXT),
    "llama": family("llama", language, num_key_value_heads=1, intermediate_size=24, **TEXT),
    "vit": family(
        "vit", pictures, KEYS, image_size=8, patch_size=4, num_classes=4, initializer_range=0.2
    ),
    "linen": Case(
        LinenNet(),
        squared_error,
        vectors,
        lambda: reference.LinenReference(LinenNet(), EXAMPLE["x"]),
        zero=("Dense_3/bias",),
        example=EXAMPLE,
    ),
    "pair": Case(
        (pair_init, pair_apply),
        weighted_error,
        vectors,
        lambda: reference.PairReference(pair_init, pair_apply),
    ),
    "dropout": regression(awkward.Dropout, weighted_error, rates=(1e-2, 0.02)),
    "batch statistics": regression(awkward.BatchStatistics, squared_error, ("down/bias",)),
    "tied weights": regression(awkward.TiedWeights, weighted_error),
    "called twice": regression(awkward.CalledTwice, squared_error, ("down/bias",)),
    "unlike blocks": regression(
        awkward.UnlikeBlocks, weighted_error, ("blocks/1/down/bias",), rates=(1e-2, 0.01)
    ),
    "keyword arguments": regression(awkward.KeywordArguments, squared_error),
}
