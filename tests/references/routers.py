"""transformers' routers of mixtures of experts."""

import importlib
from typing import Any

import torch
import transformers

# By model: (name of the configuration and of the router's class, without "Config").
ROUTERS = {
    "mixtral": ("Mixtral", "MixtralTopKRouter"),
    "qwen3_moe": ("Qwen3Moe", "Qwen3MoeTopKRouter"),
    "deepseek_v2": ("DeepseekV2", "DeepseekV2TopkRouter"),
    "deepseek_v3": ("DeepseekV3", "DeepseekV3TopkRouter"),
    "gpt_oss": ("GptOss", "GptOssTopKRouter"),
}


def routed(
    model: str,
    fields: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    x: torch.Tensor,
    slope: torch.Tensor,
) -> list[torch.Tensor]:
    """(chosen experts, their weights, gradients of sum(weights slope) to x and the router)."""
    configuration, name = ROUTERS[model]
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    router = getattr(module, name)(getattr(transformers, f"{configuration}Config")(**fields))
    router.load_state_dict(tensors)
    x = x.clone().requires_grad_()
    _, weights, experts = router(x.flatten(0, 1))
    experts, order = experts.sort(-1)
    weights = weights.gather(-1, order)
    (weights * slope.reshape(weights.shape)).sum().backward()
    shape = slope.shape
    return [experts.reshape(shape), weights.reshape(shape), x.grad, router.weight.grad]


def balancing_loss(logits: list[torch.Tensor], experts: int, k: int) -> float:
    """Mixtral's auxiliary loss of the logits of all layers."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return float(load_balancing_loss_func(tuple(logits), experts, k))
