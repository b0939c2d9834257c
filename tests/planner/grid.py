"""The configs on which the estimate is held against the TPU's compiler."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.config import Config
from jaxspeed.hardware.targets import Target, target_of
from jaxspeed.objective.config_model import resolve_model
from jaxspeed.planner.trace import Step, read_step
from jaxspeed.planner.trace.traced_step import as_on, with_overlap
from jaxspeed.train.build import build_program
from tests.planner import mixer

GPT2 = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "vocab_size": 16384,
    "max_position_embeddings": 1024,
}
LLAMA = {**GPT2, "intermediate_size": 2816, "num_key_value_heads": 4}
MIXER = {"width": 1024, "tokens": 512, "depth": 12}
CPU = {"device": "cpu"}
V5P, V5E = "v5p:2x2x1", "v5e:2x4"


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "stage3_param_persistence_threshold": 0, **more}


def parallel(**words: Any) -> dict[str, Any]:
    return {"parallel": words}


def stages(pipe: int, *, tensor: int = 1, **more: Any) -> dict[str, Any]:
    return {"mesh": {"pipe": pipe, "tensor": tensor}, "gradient_accumulation_steps": 8, **more}


SEQUENCE = {"sequence_parallel_activations": True}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 0": (V5P, {"zero_optimization": zero(0)}),
    "stage 1": (V5P, {"zero_optimization": zero(1)}),
    "stage 2": (V5P, {"zero_optimization": zero(2)}),
    "stage 3": (V5P, {"zero_optimization": zero(3)}),
    "stage 3, 8 devices, full": (V5E, {"zero_optimization": zero(3), **parallel(remat="full")}),
    "tensor 2, stage 1": (V5P, {"mesh": {"tensor": 2}, "zero_optimization": zero(1)}),
    "tensor 4": (V5P, {"mesh": {"tensor": 4}}),
    "tensor 2, sequence parallel, stage 3": (
        V5P,
        {"mesh": {"tensor": 2}, "zero_optimization": zero(3), **parallel(**SEQUENCE)},
    ),
    "tensor 4, sequence parallel, full": (
        V5E,
        {"mesh": {"tensor": 4}, **parallel(remat="full", **SEQUENCE)},
    ),
    "pipe 2": (V5P, stages(2)),
    "pipe 2, stage 3": (V5P, stages(2, zero_optimization=zero(3))),
    "pipe 4, gpipe": (V5P, stages(4, **parallel(pipeline_schedule="gpipe"))),
    "pipe 2, tensor 2, layers": (
        V5P,
        stages(2, tensor=2, **parallel(pipeline_recompute="layers")),
    ),
    "pipe 2, interleaved": (V5P, stages(2, **parallel(pipeline_schedule="interleaved"))),
    "full": (V5P, parallel(remat="full")),
    "dots": (V5P, {"zero_optimization": zero(2), **parallel(remat="dots")}),
    "attention, stage 3": (V5P, {"zero_optimization": zero(3), **parallel(remat="attention")}),
    "every 4": (V5P, {"zero_optimization": zero(1), **parallel(remat={"every_n": 4})}),
    "budget": (V5P, {"zero_optimization": zero(3), **parallel(remat={"budget": "1 GB"})}),
    "host activations": (V5P, {"activation_checkpointing": {"cpu_checkpointing": True}}),
    "host optimizer": (
        V5P,
        {"zero_optimization": zero(1, offload_optimizer=CPU), **parallel(remat="full")},
    ),
    "host optimizer and parameters, stage 3": (
        V5P,
        {
            "zero_optimization": zero(3, offload_optimizer=CPU, offload_param=CPU),
            **parallel(remat="full"),
        },
    ),
    "4 micro-batches": (V5P, {"gradient_accumulation_steps": 4}),
    "4 micro-batches, stage 2": (
        V5P,
        {"gradient_accumulation_steps": 4, "zero_optimization": zero(2)},
    ),
    "4 micro-batches, stage 3, full": (
        V5P,
        {
            "gradient_accumulation_steps": 4,
            "zero_optimization": zero(3),
            **parallel(remat="full"),
        },
    ),
    "fp32, stage 3": (V5P, {"bf16": {"enabled": False}, "zero_optimization": zero(3)}),
    "fp32": (V5P, {"bf16": {"enabled": False}}),
}
OF_MIXER = (
    "stage 0",
    "stage 1",
    "stage 2",
    "stage 3",
    "stage 3, 8 devices, full",
    "full",
    "4 micro-batches",
    "4 micro-batches, stage 3, full",
    "fp32",
)


@dataclass(frozen=True)
class Point:
    """One config, compiled for one TPU."""

    name: str
    target: str
    config: dict[str, Any]
    seq: int  # 0: of the tests' own model, which has no tokens

    def step(self, target: Target | None = None) -> Step:
        """Its step as `jaxspeed plan` traces it, for its own target by default."""
        chip = (target or target_of(self.target)).chip
        with as_on(chip.platform, chip.capability):
            program, batch = self.program(jax.devices(), chip.platform)
            return read_step(program, batch, chip.platform)

    def program(self, devices: Any, platform: str | None = None) -> tuple[Any, Any]:
        """(the program on so many of the devices as the target has, a batch's shapes).

        As for a platform that is not the devices', where one is given.
        """
        config = Config.load(self.config)
        config = with_overlap(config, platform) if platform else config
        model, loss = resolve_model(config, loss_fn=None if self.seq else mixer.loss)
        count = target_of(self.target).count
        program = build_program(config, model, loss, devices=devices[:count])
        return program, program.abstract_batch(self._batch(program.batch.train))

    def _batch(self, samples: int) -> dict[str, jax.ShapeDtypeStruct]:
        if self.seq:
            return {"tokens": jax.ShapeDtypeStruct((samples, self.seq + 1), jnp.int32)}
        sizes = self.config["model"]["config"]
        shape = (samples, sizes["tokens"], sizes["width"])
        return {
            "x": jax.ShapeDtypeStruct(shape, jnp.float32),
            "y": jax.ShapeDtypeStruct((samples, 16), jnp.float32),
        }


def points() -> Iterator[Point]:
    for family, sizes in (("llama", LLAMA), ("gpt2", GPT2)):
        for i, (name, (target, more)) in enumerate(WAYS.items()):
            # No kernel of the TPU takes 960 tokens; every third runs with one.
            seq = 1024 if i % 3 == 0 else 960
            model = {"model": {"family": family, "config": sizes}}
            yield Point(f"{family}: {name}", target, {**model, **_COMMON, **more}, seq)
    for name in OF_MIXER:
        target, more = WAYS[name]
        model = {"model": {"factory": "tests.planner.mixer:Mixer", "config": MIXER}}
        yield Point(f"mixer: {name}", target, {**model, **_COMMON, **more}, 0)


_COMMON = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "gradient_clipping": 1.0,
}
