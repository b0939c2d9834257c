"""GPTs of 13 and 40 billion parameters on one device: what a step of Adam needs of its memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxspeed.models import gpt2

from jaxspeed.config import Config
from jaxspeed.train.build import build_program

SEQUENCE, MICRO_BATCH = 2048, 4
SIZES = {
    "13b": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40},
    "40b": {"hidden_size": 8192, "num_hidden_layers": 50, "num_attention_heads": 64},
}
CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "bf16": {"enabled": True},
    "parallel": {"remat": "full"},
    "zero_optimization": {
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    },
}


@dataclass(frozen=True)
class Large:
    """Builds it on the first of some devices."""

    size: str

    def __call__(self, devices: Sequence[Any]) -> tuple[Any, Any]:
        config = gpt2.Config(**SIZES[self.size], max_position_embeddings=SEQUENCE)
        model = lambda rngs: gpt2.build(config, rngs)  # noqa: E731
        program = build_program(Config.load(CONFIG), model, gpt2.loss, devices=devices[:1])
        shape = program.batch.train, SEQUENCE + 1
        return program, {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}

    def parameters(self) -> int:
        program, _ = self(jax.devices())
        return sum(math.prod(row.leaf.shape) for row in program.table)
