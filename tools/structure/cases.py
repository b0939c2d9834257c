"""The configs and models whose compiled programs are recorded.

Sizes are small enough to compile each step in seconds on 8 simulated CPU devices, and every dim is
divisible by what it is sharded over unless padding is the point (the vocabulary of gpt2).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxspeed

DEVICES, SEQ = 8, 32
_LM = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQ,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {**_LM, "vocab_size": 250},
    "llama": {**_LM, "vocab_size": 256, "num_key_value_heads": 2, "intermediate_size": 128},
    "vit": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
        "num_classes": 16,
    },
    "mlp": {"input_size": 32, "hidden_size": 64, "num_hidden_layers": 4, "num_classes": 16},
}
WIDTH = 64  # of the Linen module and the pair


class LinenNet(nn.Module):
    """A model of unlike layers, with dropout and batch statistics."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for width in (64, 96):
            hidden = nn.Dropout(0.1, deterministic=not train)(nn.gelu(nn.Dense(width)(x)))
            x = x + nn.Dense(WIDTH)(hidden)
        return nn.Dense(WIDTH)(nn.BatchNorm(use_running_average=not train)(x))


def pair_init(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 7)
    up, down = (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)
    layers = [
        {"up": jax.random.normal(a, up) / 8, "down": jax.random.normal(b, down) / 11}
        for a, b in zip(keys[:3], keys[3:6])
    ]
    return {"layers": layers, "head": jax.random.normal(keys[6], (WIDTH, WIDTH)) / 8}


@jaxspeed.unit
def pair_layer(params: dict[str, Any], x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def pair_apply(params: dict[str, Any], x: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = pair_layer(layer, x)
    return x @ params["head"]


def squared_error(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


# Models that no config names: (what `initialize` is given, its loss).
OWN_MODELS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "linen": (LinenNet(), squared_error),
    "pair": ((pair_init, pair_apply), squared_error),
}


def batch_of(family: str, samples: int) -> dict[str, np.ndarray]:
    """A global batch; only its shapes and dtypes reach the program."""
    if family in ("gpt2", "llama"):
        return {"tokens": np.zeros((samples, SEQ + 1), np.int32)}
    if family == "vit":
        images = np.zeros((samples, 16, 16, 3), np.float32)
        return {"images": images, "labels": np.zeros(samples, np.int32)}
    if family == "mlp":
        return {"x": np.zeros((samples, 32), np.float32), "y": np.zeros(samples, np.int32)}
    return {
        "x": np.zeros((samples, WIDTH), np.float32),
        "y": np.zeros((samples, WIDTH), np.float32),
    }


@dataclass(frozen=True)
class Case:
    """One config. `tpu`: whether its program is compiled for a TPU v5e:2x4 as well."""

    name: str
    family: str
    stage: int = 0
    sizes: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    tpu: bool = False

    def config(self) -> dict[str, Any]:
        """The arguments of `jaxspeed.initialize`."""
        zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0, **self.zero}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0,
            "zero_optimization": zero,
            **self.keys,
        }
        if self.family in FAMILIES:
            sizes = {**FAMILIES[self.family], **self.sizes}
            config["model"] = {"family": self.family, "config": sizes}
        return config


BF16 = {"bf16": {"enabled": True}}
CPU = {"device": "cpu"}


def _accumulation(steps: int) -> dict[str, Any]:
    return {"gradient_accumulation_steps": steps}


def _parallel(mesh: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    return {**({"mesh": mesh} if mesh else {}), "parallel": keys}


def _pipeline(pipe: int, tensor: int = 1, **keys: Any) -> dict[str, Any]:
    return {**_accumulation(4), **_parallel({"pipe": pipe, "tensor": tensor}, **keys)}


CASES = (
    # ZeRO stages, accumulation, precision
    Case("gpt2, stage 0", "gpt2", 0),
    Case("gpt2, stage 1, 4 micro-batches", "gpt2", 1, keys=_accumulation(4), tpu=True),
    Case("gpt2, stage 2, bf16", "gpt2", 2, keys=BF16),
    Case("gpt2, stage 3, bf16", "gpt2", 3, keys=BF16, tpu=True),
    Case("vit, stage 2, fp16", "vit", 2, keys={"fp16": {"enabled": True}}),
    Case("mlp, stage 3, 2 micro-batches", "mlp", 3, keys=_accumulation(2)),
    Case("mlp, stage 1, 2 replicas", "mlp", 1, keys=_parallel({"replica": 2})),
    Case("linen, stage 3", "linen", 3),
    Case("pair, stage 3, bf16", "pair", 3, keys=BF16),
    # tensor parallelism
    Case("gpt2, tensor 2, stage 1", "gpt2", 1, keys=_parallel({"tensor": 2})),
    Case(
        "llama, tensor 2, sequence parallel, stage 3",
        "llama",
        3,
        keys={**BF16, **_parallel({"tensor": 2}, sequence_parallel_activations=True)},
        tpu=True,
    ),
    Case(
        "llama, tensor 4, ring overlap",
        "llama",
        keys=_parallel({"tensor": 4}, sequence_parallel_activations=True, tensor_overlap="ring"),
    ),
    Case("pair, tensor 2 inferred, stage 2", "pair", 2, keys=_parallel({"tensor": 2})),
    # pipelines
    Case("gpt2, pipe 2, 1f1b, stage 2", "gpt2", 2, keys=_pipeline(2)),
    Case("llama, pipe 4, stage 3", "llama", 3, keys={**BF16, **_pipeline(4)}, tpu=True),
    Case(
        "gpt2, pipe 2, tensor 2, interleaved",
        "gpt2",
        keys=_pipeline(2, 2, pipeline_schedule="interleaved"),
    ),
    Case(
        "vit, pipe 2, gpipe, layers",
        "vit",
        1,
        keys=_pipeline(2, pipeline_schedule="gpipe", pipeline_recompute="layers"),
    ),
    # rematerialization
    Case(
        "gpt2, stage 3, remat full, 2 micro-batches",
        "gpt2",
        3,
        keys={**BF16, **_accumulation(2), **_parallel(remat="full")},
        tpu=True,
    ),
    Case("llama, stage 3, remat dots", "llama", 3, keys=_parallel(remat="dots")),
    Case(
        "llama, stage 2, remat budget",
        "llama",
        2,
        keys=_parallel(remat={"budget": "200 kB"}),
        tpu=True,
    ),
    Case("gpt2, stage 1, remat every 2", "gpt2", 1, keys=_parallel(remat={"every_n": 2})),
    # offload
    Case(
        "gpt2, stage 1, host optimizer",
        "gpt2",
        1,
        zero={"offload_optimizer": CPU},
        keys=BF16,
        tpu=True,
    ),
    Case(
        "llama, stage 3, host optimizer and parameters, remat full",
        "llama",
        3,
        zero={"offload_optimizer": CPU, "offload_param": CPU},
        # Not for a TPU: libtpu 0.0.52 does not compile slices of so small arrays in host memory.
        keys={**BF16, **_parallel(remat="full")},
    ),
    Case(
        "llama, stage 2, host activations",
        "llama",
        2,
        keys={**BF16, "activation_checkpointing": {"cpu_checkpointing": True}},
        tpu=True,
    ),
    # other ways to reduce over data
    Case(
        "gpt2, stage 2, int8 ring",
        "gpt2",
        2,
        keys=_parallel(data_reduction="ring", ring_wire="int8"),
    ),
    Case(
        "mlp, parameter server, 2 servers",
        "mlp",
        keys=_parallel(data_reduction="parameter_server", servers=2),
    ),
)
