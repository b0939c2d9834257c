"""torch's optimizers."""

from typing import Any

import torch


def updated(
    optimizer: str,
    arguments: dict[str, Any],
    leaves: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    """The leaves after one step per list of gradients."""
    parameters = [torch.nn.Parameter(leaf) for leaf in leaves]
    reference = getattr(torch.optim, optimizer)(parameters, **arguments)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient
        reference.step()
    return parameters
