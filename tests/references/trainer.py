"""Defaults of Hugging Face's Trainer, and its linear schedule."""

import tempfile
from typing import Any

import torch
from transformers import TrainingArguments, get_linear_schedule_with_warmup

NAMES = (
    *("optim", "lr_scheduler_type", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("warmup_steps", "max_grad_norm", "bf16", "fp16"),
)


def defaults() -> dict[str, Any]:
    """The arguments of a Trainer that its user does not set."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, use_cpu=True)
    values = {name: getattr(arguments, name) for name in NAMES}
    return {name: str(getattr(value, "value", value)) for name, value in values.items()}


def linear_rates(lengths: list[tuple[int, int]], lr: float, updates: int) -> list[list[float]]:
    """The rates of the updates, for each (total, warm-up) number of steps."""
    curves = []
    for total, warmup in lengths:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        schedule = get_linear_schedule_with_warmup(optimizer, warmup, total)
        curves.append([])
        for _ in range(updates):
            curves[-1].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    return curves
