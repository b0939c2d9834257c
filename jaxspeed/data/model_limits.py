"""Limits of a model for its data: kind of samples, sequence length, vocabulary size."""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["tokens", "images"]


@dataclass(frozen=True)
class ModelLimits:
    """Shapes and ranges that a model can read; None is unknown, and no limit."""

    sample: Kind | None = None
    seq_len: int | None = None  # number of positions
    vocab_size: int | None = None
    image_shape: tuple[int, int, int] | None = None  # height, width, channels
    classes: int | None = None


def limits_of(sizes: Any) -> ModelLimits:
    """Read the limits from a family's Config by field names; of None, none."""

    def size(name: str) -> int | None:
        return getattr(sizes, name, None)

    image = size("image_size")
    if image is not None:
        return ModelLimits(
            sample="images",
            image_shape=(image, image, size("num_channels") or 3),
            classes=size("num_classes"),
        )
    if size("vocab_size") is not None:
        return ModelLimits("tokens", size("max_position_embeddings"), size("vocab_size"))
    return ModelLimits()
