"""torch's layers with PEFT's adapters."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn


class Masked(nn.Module):
    """Dropout of a given mask."""

    def __init__(self, kept: Tensor, rate: float) -> None:
        super().__init__()
        self.kept, self.rate = kept, rate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.kept / (1 - self.rate)


def _adapted(layer: str, arguments: dict[str, Any], config: dict[str, Any]) -> Any:
    """The only layer of a model, adapted."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": getattr(nn, layer)(**arguments)})
    return get_peft_model(model, LoraConfig(target_modules=["layer"], **config)).base_model.layer


def initial(layer: str, arguments: dict[str, Any], config: dict[str, Any]) -> dict[str, Tensor]:
    """The weight and what is trained, before training."""
    return dict(_adapted(layer, arguments, config).named_parameters())


def both_passes(
    layer: str,
    arguments: dict[str, Any],
    config: dict[str, Any],
    values: dict[str, Tensor],
    x: Tensor,
    kept: Tensor,
    cotangent: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(result, gradients of what is trained and of x)."""
    module = _adapted(layer, arguments, config)
    if rate := config.get("lora_dropout"):
        module.lora_dropout["default"] = Masked(kept, rate)
    parameters = dict(module.named_parameters())
    for name, value in values.items():
        parameters[name].data = value.reshape(parameters[name].shape)
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if x.is_floating_point():
        trained["x"] = x.requires_grad_()
    result = module(x)
    return result, dict(zip(trained, torch.autograd.grad(result, [*trained.values()], cotangent)))
