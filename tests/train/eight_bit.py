"""A small language model, and training with 8-bit moments by definition: NumPy on one device."""

import argparse
import ast
import dataclasses
import functools
import inspect
import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspeed
from jaxspeed.quantization.maps import dynamic_map

LAYERS, WIDTH, MLP, VOCAB, SAMPLES = 2, 64, 72, 80, 16
BLOCK = 256
ENCODED = ("layers/up", "layers/down")  # 4,608 values in each layer
RATES = {"AdamW": 1e-3, "Adam": 1e-3, "Lion": 1e-4}
BETAS = {"AdamW": (0.9, 0.999), "Adam": (0.9, 0.999), "Lion": (0.9, 0.99)}
EPS, DECAY = 1e-8, 0.01
NAMES = {"up": ["layers", None, "mlp"], "down": ["layers", "mlp", None]}


def init(key: jax.Array) -> Any:
    keys = jax.random.split(key, 4)
    return {
        "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)),  # 5,120 values, and fp32 moments
        "layers": {
            "up": jax.random.normal(keys[1], (LAYERS, WIDTH, MLP)) / WIDTH**0.5,
            "down": jax.random.normal(keys[2], (LAYERS, MLP, WIDTH)) / MLP**0.5,
        },
        "head": jax.random.normal(keys[3], (WIDTH, 1)) / WIDTH**0.5,
    }


def fractions(seed: int, *shape: int) -> np.ndarray:
    """Multiples of 1/32 that are not zero, below one."""
    return (np.random.default_rng(seed).integers(-16, 16, shape) * 2 + 1).astype(np.float32) / 32


@jaxspeed.unit
def block(p: Any, x: jax.Array) -> jax.Array:
    """x  [samples, inputs and a sum]."""
    x, total = x[:, :WIDTH], x[:, WIDTH:]
    total += (x @ p["up"]) @ fractions(0, MLP, 1)
    total += (jnp.concatenate([x, x[:, : MLP - WIDTH]], 1) @ p["down"]) @ fractions(1, WIDTH, 1)
    return jnp.concatenate([jnp.roll(x, 1, 1), total], 1)


def apply(params: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """A sum that is linear in each parameter, so that no gradient is rounded on any mesh."""
    total = params["embed"][tokens] @ fractions(2, WIDTH, 1) + x @ params["head"]
    x = jnp.concatenate([x, total], 1)
    x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["layers"])
    return x[:, WIDTH]


def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    found = model(batch["x"], batch["tokens"])
    return (found * batch["y"]).sum(), jnp.asarray(found.size, found.dtype)


def batch(seed: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, VOCAB, SAMPLES).astype(np.int32)
    x, y = fractions(100 + seed, SAMPLES, WIDTH), fractions(200 + seed, SAMPLES)
    return {"x": x, "tokens": tokens, "y": y}


def engine(optimizer: str, stage: int = 0, offload: bool = False, **more: Any) -> Any:
    """`optimizer` is AdamW8bit, Lion8bit or a paged one; `more` are sections of the config."""
    devices = more.pop("devices", None)
    kind = optimizer.removeprefix("Paged").removesuffix("8bit")
    params = {"lr": RATES[kind], "betas": BETAS[kind], "weight_decay": DECAY}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero |= {"offload_optimizer": {"device": "cpu"}} if offload else {}
    config = {
        "train_batch_size": SAMPLES,
        "gradient_clipping": 0.0,
        "optimizer": {"type": optimizer, "params": params, **more.pop("optimizer_", {})},
        "zero_optimization": zero,
        "parallel": {"logical_axes": NAMES, **more.pop("parallel", {})},
        "run": {"seed": 3},
        **more,
    }
    return jaxspeed.initialize((init, apply), loss, config, devices=devices, example_batch=batch(0))


def coded(x: np.ndarray, signed: bool, stacked: bool = True) -> tuple[np.ndarray, ...]:
    """(codes, scales [layers, blocks], the values that they are), by definition."""
    layers = x.astype(np.float32).reshape(x.shape[0] if stacked else 1, -1)
    size = layers.shape[1]
    blocks = np.pad(layers, [(0, 0), (0, -size % BLOCK)]).reshape(len(layers), -1, BLOCK)
    scales = np.abs(blocks).max(-1)
    table, exact = dynamic_map(signed), (blocks / np.where(scales, scales, 1)[..., None])
    after = np.clip(np.searchsorted(table, exact), 1, 255)  # of the two values around it
    nearer = np.abs(exact - table[after - 1].astype(np.float64)) <= np.abs(
        table[after].astype(np.float64) - exact
    )
    codes = after - nearer

    def of_elements(x: np.ndarray, like: np.ndarray) -> np.ndarray:
        return x.reshape(len(layers), -1)[:, :size].reshape(like.shape)

    values = table[codes] * scales[..., None]
    return of_elements(codes, x), scales, of_elements(values, x)


@functools.cache
def by_definition(kind: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(parameters, moments as they are coded), by path, after some updates."""

    def mean(params: Any, given: Any) -> jax.Array:
        total, weight = loss(functools.partial(apply, params), given)
        return total / weight

    gradients = jax.jit(jax.grad(mean))
    keys = {"embed": 0, "layers/up": 0, "layers/down": 0, "head": 0}

    def flat(tree: Any) -> dict[str, np.ndarray]:
        values = {"embed": tree["embed"], "head": tree["head"]}
        values |= {f"layers/{name}": x for name, x in tree["layers"].items()}
        return {path: np.asarray(values[path]) for path in keys}

    def tree(params: dict[str, np.ndarray]) -> Any:
        layers = {name: params[f"layers/{name}"] for name in ("up", "down")}
        return {"embed": params["embed"], "head": params["head"], "layers": layers}

    first, rate, (b1, b2) = kind == "AdamW", RATES[kind], BETAS[kind]
    params = flat(init(jax.random.key(3)))
    moments = {
        f"{name}/{path}": np.zeros_like(x)
        for name in (("mu", "nu") if first else ("mu",))
        for path, x in params.items()
    }
    found: dict[str, Any] = {}
    for step in range(steps):
        for path, g in flat(gradients(tree(params), batch(step))).items():
            p, m = params[path], moments[f"mu/{path}"]
            if first:
                new = {
                    "mu": b1 * m + (1 - b1) * g,
                    "nu": b2 * moments[f"nu/{path}"] + (1 - b2) * g * g,
                }
                m_hat, v_hat = (
                    new["mu"] / (1 - b1 ** (step + 1)),
                    new["nu"] / (1 - b2 ** (step + 1)),
                )
                update = m_hat / (np.sqrt(v_hat) + EPS)
            else:
                update, new = np.sign(b1 * m + (1 - b1) * g), {"mu": b2 * m + (1 - b2) * g}
            params[path] = (p - rate * (update + DECAY * p)).astype(np.float32)
            for name, x in new.items():
                moments[f"{name}/{path}"] = x.astype(np.float32)
                if path in ENCODED:
                    found[f"{name}/{path}"] = coded(x, signed=name == "mu")
                    moments[f"{name}/{path}"] = found[f"{name}/{path}"][2]
    return params, found


def moments(made: Any) -> dict[str, Any]:
    """The stored moments, as `mu/PATH` and `nu/PATH`."""
    flat = made.program.layout.flat(made.state.opt)
    return {
        path.partition("/")[2]: x for path, x in flat.items() if "/mu/" in path or "/nu/" in path
    }


def assert_as_by_definition(made: Any, kind: str, steps: int) -> None:
    params, encoded = by_definition(kind, steps)
    for path, x in params.items():
        np.testing.assert_allclose(made.parameters[path], x, rtol=0, atol=1e-5, err_msg=path)
    stored = moments(made)
    assert {path for path, x in stored.items() if isinstance(x, dict)} == set(encoded)
    for path, (codes, scales, _) in encoded.items():
        found = np.asarray(stored[path]["codes"])[tuple(map(slice, codes.shape))].astype(int)
        apart = np.abs(found - codes)  # near ties, as moments are rounded otherwise
        assert apart.max() <= 1 and (apart > 0).sum() <= 3, path
        blocks = np.asarray(stored[path]["scales"])[:LAYERS].reshape(LAYERS, -1)
        np.testing.assert_allclose(blocks[:, : scales.shape[1]], scales, rtol=1e-4, err_msg=path)


def count(shape: tuple[int, ...]) -> tuple[int, int]:
    """(values, blocks of 256) of a stack."""
    return math.prod(shape), shape[0] * -(-math.prod(shape[1:]) // BLOCK)


def held_out_loss(optimizer: str, seed: int, steps: int = 300) -> float:
    """The loss of a small Llama on text that it was not trained on, after some steps."""
    text = "".join(inspect.getsource(m) for m in (argparse, ast, dataclasses, inspect, typing))
    tokens = np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32)
    train, held_out = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128}
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": optimizer, "params": {"lr": 3e-3, "weight_decay": 0.01}},
        "model": {"family": "llama", "config": {**sizes, **heads}},
        "run": {"seed": seed},
    }
    made = jaxspeed.initialize(config=config, devices=jax.devices()[:1])
    rng = np.random.default_rng(seed)

    def samples(of: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        starts = rng.integers(0, len(of) - 65, 16)
        return {"tokens": np.stack([of[start : start + 65] for start in starts])}

    for _ in range(steps):
        made.train_batch(samples(train, rng))
    fixed = np.random.default_rng(0)
    losses = [float(made.eval_batch(samples(held_out, fixed))["loss"]) for _ in range(16)]
    return float(np.mean(losses))
