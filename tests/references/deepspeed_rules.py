"""DeepSpeed's reading of configs, its schedulers, loss scalers and elastic batches."""

import contextlib
import copy
import io
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import deepspeed.runtime.config as their_config
import torch
from deepspeed.elasticity import compute_elastic_config
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.fp16 import loss_scaler

Tree = dict[str, Any]


def _read(tree: Tree, ranks: int) -> Any:
    """DeepSpeed's own reading of a config on so many ranks; None if it refuses it."""
    world = SimpleNamespace(get_data_parallel_world_size=lambda: ranks)
    dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: ranks)
    with mock.patch.object(their_config, "dist", dist), contextlib.redirect_stdout(io.StringIO()):
        try:
            return their_config.DeepSpeedConfig(copy.deepcopy(tree), mpu=world)
        except (AssertionError, ValueError, TypeError):
            return None


def read(configs: list[tuple[Tree, int]]) -> list[Tree | None]:
    """What is read of each (config, ranks); None for one that is refused."""

    def values(config: Any) -> Tree:
        return {
            "batch": (
                config.train_batch_size,
                config.train_micro_batch_size_per_gpu,
                config.gradient_accumulation_steps,
            ),
            "gradient_clipping": config.gradient_clipping,
            "fp16": config.float16_config.enabled,
            "bf16": config.bfloat16_config.enabled,
            "stage": config.zero_optimization_stage,
        }

    return [config and values(config) for config in (_read(*each) for each in configs)]


def learning_rates(schedulers: list[tuple[Tree, float]], steps: int) -> list[list[float]]:
    """The learning rates of each (scheduler's section, base rate)."""
    found = []
    for section, base in schedulers:
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=base)
        scheduler = getattr(lr_schedules, section["type"])(optimizer, **section["params"])
        found.append([])
        for _ in range(steps):
            found[-1].append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    return found


def loss_scales(configs: list[Tree], overflows: list[list[bool]]) -> list[list[float] | None]:
    """The scale after each step that did or did not overflow; None for a config that is refused."""
    found: list[list[float] | None] = []
    dist = SimpleNamespace(get_rank=lambda: 1)
    for tree, steps in zip(configs, overflows, strict=True):
        if (config := _read(tree, 8)) is None:
            found.append(None)
            continue
        fp16 = config.float16_config
        with mock.patch.object(loss_scaler, "dist", dist):
            scaler = loss_scaler.CreateLossScaler(
                dtype=torch.half,
                static_loss_scale=fp16.loss_scale,
                dynamic_scaling=fp16.loss_scale == 0,
                dynamic_loss_args=fp16.dynamic_loss_scale_args(),
            )
            scaler.raise_error_at_min_scale = False
            scales = []
            for overflow in steps:
                scaler.update_scale(overflow)
                scales.append(float(scaler.loss_scale))
        found.append(scales)
    return found


def elastic_batches(
    sections: list[Tree], ranks: list[int]
) -> list[list[tuple[int, int, int] | None]]:
    """(batch, micro-batch, accumulation) of each section at each device count, if it is allowed."""

    def batch(section: Tree, count: int) -> tuple[int, int, int] | None:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                train, _, micro = compute_elastic_config(
                    {"elasticity": section}, deepspeed.__version__, world_size=count
                )
                return train, micro, train // (micro * count)
            except Exception as error:
                assert type(error).__module__.startswith(("deepspeed", "builtins")), error
                return None

    return [[batch(section, count) for count in ranks] for section in sections]
