"""What the process that compiles is given to do; it imports them by name."""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.config import Config
from jaxspeed.errors import PlacementError
from jaxspeed.train.build import build_program
from jaxspeed.train.phases import BATCH, METRICS, STATE, StepPhase
from jaxspeed.user_models.config_model import resolve_model
from tests.system import stacks

MLP: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model": {
        "family": "gpt2",
        "config": {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "vocab_size": 256,
            "max_position_embeddings": 32,
        },
    },
}
SEQUENCE = 32


def small(devices: Any, changes: Any = ()) -> Any:
    config = Config.load({**MLP, **dict(changes)})
    model, loss = resolve_model(config)
    program = build_program(config, model, loss, devices=devices)
    shape = (program.batch.train, SEQUENCE + 1)
    return program, {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}


def packed(devices: Any) -> Any:
    """Documents that share sequences of 256 tokens, in bf16: two heads of 64."""
    sizes = {**MLP["model"]["config"], "num_attention_heads": 2, "max_position_embeddings": 256}
    changes = {"model": {"family": "gpt2", "config": sizes}, "bf16": {"enabled": True}}
    program, batch = small(devices, changes.items())
    rows = jax.ShapeDtypeStruct((batch["tokens"].shape[0], 257), jnp.int32)
    return program, {"tokens": rows, "segment_ids": rows}


def huge(devices: Any) -> Any:
    """400 GB of a table, and nothing else worth the name."""
    program = build_program(
        stacks.config_of(0, mixed=False, optimizer={"type": "SGD", "params": {"lr": 1e-3}}),
        lambda rngs: stacks.LookedUp(8 * 10**8, 128, rngs),
        stacks.mean_square,
        devices=devices,
    )
    return program, {"ids": jax.ShapeDtypeStruct((1, SEQUENCE), jnp.int32)}


def refused(devices: Any) -> Any:
    raise PlacementError(f"no place for {len(devices)}")


def dies(devices: Any) -> Any:
    print("its last words", flush=True)
    os._exit(3)


def forever(devices: Any, told: str | None = None) -> Any:
    if told:
        Path(told).write_text(str(os.getpid()))
    time.sleep(600)


@dataclass(frozen=True)
class Changed:
    """`small` with other words in its config."""

    changes: Any

    def __call__(self, devices: Any) -> Any:
        return small(devices, self.changes)


def phased(devices: Any) -> Any:
    """`small` at stage 3, and a frozen model of twice the width that adds an array to batches."""
    stage_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
    program, batch = small(devices, {"zero_optimization": stage_3}.items())
    sizes = {**MLP["model"]["config"], "hidden_size": 256}
    changes = {"model": {"family": "gpt2", "config": sizes}, "zero_optimization": stage_3}
    teacher, _ = small(devices, changes.items())

    def scored(state: Any, batch: Any) -> Any:
        loss, _ = teacher.traced_loss(
            state.sources(teacher.table), state.variables, batch, state.step, 0, False
        )
        return {**batch, "score": loss.total * batch["tokens"][:, 0]}

    def phases(program: Any) -> Any:
        score = jax.jit(program.in_mesh(scored))
        names = (STATE, BATCH), (STATE, METRICS), (STATE,)
        return (
            StepPhase("score", score, ("teacher", BATCH), (BATCH,), mesh=program.mesh),
            StepPhase("note", lambda batch: batch, (BATCH,), ("noted",), shapes=lambda x: x),
            StepPhase("step", program.step, *names, mesh=program.mesh),
        )

    return replace(program, phases_of=phases, frozen={"teacher": teacher}), batch
