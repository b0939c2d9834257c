"""Adapted layers equal PEFT's: results, gradients, DoRA's magnitudes, the start of training."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxspeed.adapters.products import (
    Factors,
    adapted,
    dims_of,
    factor_shapes,
    initialized,
    norms,
    squared_norms,
)

KEY = jax.random.key(3)
IDS = np.random.default_rng(0).integers(0, 40, (3, 6))


class Layer(NamedTuple):
    """A layer of torch, its input, and the equation that reads its weight as torch holds it.

    Attributes:
      bias: the shape of the bias beside the equation's result.
    """

    name: str
    arguments: dict[str, Any]
    x: np.ndarray
    function: Callable[[Any, Any], Any]
    bias: tuple[int, ...] = ()


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def convolve(**how: Any) -> Callable[[Any, Any], Any]:
    def run(x: Any, weight: Any) -> Any:
        numbers = ("NCHW", "OIHW", "NCHW") if x.ndim == 4 else ("NCH", "OIH", "NCH")
        return lax.conv_general_dilated(x, weight, dimension_numbers=numbers, **how)

    return run


def look_up(ids: Any, weight: Any) -> Any:
    numbers = lax.GatherDimensionNumbers((2,), (0,), (0,))
    return lax.gather(weight, ids[..., None], numbers, (1, weight.shape[1]))


LAYERS = {
    "linear": Layer(
        "Linear", {"in_features": 12, "out_features": 10}, numbers(3, 6, 12),
        lambda x, weight: lax.dot_general(x, weight, (((2,), (1,)), ((), ()))),
        bias=(10,),
    ),
    "embedding": Layer("Embedding", {"num_embeddings": 40, "embedding_dim": 10}, IDS, look_up),
    "conv2d": Layer(
        "Conv2d",
        {
            "in_channels": 6, "out_channels": 10, "kernel_size": (3, 2), "stride": (2, 1),
            "padding": (1, 0),
        },
        numbers(2, 6, 7, 8),
        convolve(window_strides=(2, 1), padding=((1, 1), (0, 0))),
        bias=(10, 1, 1),
    ),
    "conv1d": Layer(
        "Conv1d", {"in_channels": 6, "out_channels": 10, "kernel_size": 3, "bias": False},
        numbers(2, 6, 9),
        convolve(window_strides=(1,), padding=((0, 0),)),
    ),
}  # fmt: skip
CONFIGS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dropout": {"lora_dropout": 0.25},
    "dora with dropout": {"use_dora": True, "lora_dropout": 0.25},
}
RANK, ALPHA = 4, 6


def equation(layer: Layer, weight: np.ndarray) -> tuple[Any, int, int]:
    """(the equation that reads the weight, its place among the operands, that of the input)"""
    given = [jax.ShapeDtypeStruct(x.shape, jnp.asarray(x).dtype) for x in (layer.x, weight)]
    jaxpr = jax.make_jaxpr(layer.function)(*given).jaxpr
    place = [v is jaxpr.invars[1] for v in jaxpr.eqns[-1].invars].index(True)
    return jaxpr.eqns[-1], place, 1 - place


def of_peft(values: dict[str, Any]) -> tuple[Factors, np.ndarray]:
    """(factors, weight) by PEFT's names; its factors are [rank, *inputs] and [outputs, rank]."""
    by_kind = {
        name.removesuffix(".weight").removesuffix(".default"): x for name, x in values.items()
    }
    a = next(x for name, x in by_kind.items() if name in ("lora_A", "lora_embedding_A"))
    b = next(x for name, x in by_kind.items() if name in ("lora_B", "lora_embedding_B"))
    magnitude = by_kind.get("lora_magnitude_vector")
    return Factors(
        np.moveaxis(a, 0, -1),
        b.reshape(b.shape[0], -1).T,
        None if magnitude is None else magnitude.reshape(-1),
    ), by_kind.get("base_layer")


CASES = [
    (layer, config)
    for layer in LAYERS
    for config in CONFIGS
    if not (layer == "embedding" and "dropout" in config)
]


@pytest.mark.default_cases(every=7)
@pytest.mark.parametrize(("layer", "config"), CASES)
def test_both_passes_equal_pefts(layer, config, references):
    about, how = LAYERS[layer], {"r": RANK, "lora_alpha": ALPHA, **CONFIGS[config]}
    scale = ALPHA / (RANK**0.5 if how.get("use_rslora") else RANK)
    rate = how.get("lora_dropout", 0.0)
    start = references.call(
        "adapters.initial", layer=about.name, arguments=about.arguments, config=how
    )
    values = {
        name: x if name.startswith("base") else x + numbers(*x.shape) / 8
        for name, x in start.items()
    }
    factors, weight = of_peft(values)
    eqn, place, other = equation(about, weight)
    dims = dims_of(eqn, place)
    assert dims is not None
    assert [x.shape for x in factors[:2]] == [*factor_shapes(weight.shape, dims, RANK)]
    if factors.magnitude is not None:
        first, _ = of_peft(start)
        np.testing.assert_allclose(norms(weight, dims, first, scale), first.magnitude, rtol=1e-5)
    operands = list(eqn.invars)
    operands[place], operands[other] = (
        weight,
        about.x[..., None] if layer == "embedding" else about.x,
    )
    kept = np.asarray(jax.random.bernoulli(KEY, 1 - rate, about.x.shape))
    bias = values["base_layer.bias"].reshape(about.bias) if about.bias else 0

    def ours(x: Any, factors: Factors) -> Any:
        given = [jnp.asarray(x) for x in operands]
        if x is not None:
            given[other] = x
        if factors.magnitude is not None:
            factors = factors._replace(squares=squared_norms(weight, dims))
        y = adapted(eqn, given, place, dims, factors, scale, dropout=rate, key=KEY)
        return y + bias

    x = about.x if about.x.dtype == np.float32 else None
    found, pull = jax.vjp(ours, x, factors)
    cotangent = numbers(*found.shape)
    result, gradients = references.call(
        "adapters.both_passes", layer=about.name, arguments=about.arguments, config=how,
        values=values, x=about.x, kept=kept, cotangent=cotangent,
    )  # fmt: skip
    wanted = gradients.pop("x", None), of_peft(gradients)[0]

    def close(mine: Any, good: Any) -> None:
        np.testing.assert_allclose(mine, good, rtol=0, atol=1e-5 * np.abs(good).max())

    close(found, result)
    jax.tree.map(close, pull(jnp.asarray(cotangent)), wanted)


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("how", [True, False, "gaussian"])
@pytest.mark.parametrize("layer", ["linear", "embedding", "conv2d"])
def test_the_start_of_training_is_distributed_as_pefts(layer, how, references):
    large = {
        "linear": {"in_features": 300, "out_features": 400},
        "embedding": {"num_embeddings": 500, "embedding_dim": 400},
        "conv2d": {"in_channels": 100, "out_channels": 600, "kernel_size": (2, 3)},
    }
    config = {"r": 16, "init_lora_weights": how}
    about = LAYERS[layer]
    values = references.call(
        "adapters.initial", layer=about.name, arguments=large[layer], config=config
    )
    wanted, weight = of_peft(values)
    x = about.x if layer != "conv2d" else numbers(1, 100, 7, 8)
    x = numbers(1, 2, 300) if layer == "linear" else x
    eqn, place, _ = equation(about._replace(x=x), weight)
    dims = dims_of(eqn, place)
    found = jax.jit(lambda key: initialized(key, weight.shape, dims, 16, how))(KEY)
    for mine, good in zip(found, wanted[:2], strict=True):
        assert mine.shape == good.shape
        # Of a uniform distribution these are its limits, of a normal one the tails.
        for quantile in (0, 0.001, 0.25, 0.75, 0.999, 1):
            near = 0.25 if quantile in (0, 1) else 0.1
            np.testing.assert_allclose(
                np.quantile(mine, quantile), np.quantile(good, quantile), rtol=near
            )
        np.testing.assert_allclose(np.std(mine), np.std(good), rtol=0.03)
