"""transformers' logits processors."""

import torch
from transformers.generation import logits_process


def processed(
    processor: str, value: float, text: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """The logits that follow `text`, after one processor."""
    return getattr(logits_process, processor)(value)(text, logits)
