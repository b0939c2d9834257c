"""The family `llama_classifier`: Llama's blocks with scores of the last token, in place of a head.

Any decoder is a classifier with `num_labels` in its config (`language.Decoder`); these are presets.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import language, llama
from .decoder import TINY


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes, with two labels by default."""

    num_labels: int | None = 2


PRESETS: dict[str, Config] = {
    "tiny": Config(**TINY, num_labels=3, pad_token_id=0),
    "tiny-reward": Config(**TINY, num_labels=1, pad_token_id=0),
}
build = llama.build
loss = language.classifier_loss
objective = language.objective
