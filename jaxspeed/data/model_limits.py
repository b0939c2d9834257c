"""Limits of a model for its data: kind of samples, sequence length, vocabulary size."""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["tokens", "images"]


@dataclass(frozen=True)
class Facts:
    """What a model reads; None is unknown, and asks nothing of the data."""

    sample: Kind | None = None
    seq_len: int | None = None  # the positions that it has
    vocab_size: int | None = None
    image_shape: tuple[int, int, int] | None = None  # height, width, channels
    classes: int | None = None


def facts(sizes: Any) -> Facts:
    """Read from a family's Config, by the names that its fields have; of None, nothing."""

    def size(name: str) -> int | None:
        return getattr(sizes, name, None)

    image = size("image_size")
    if image is not None:
        return Facts(
            sample="images",
            image_shape=(image, image, size("num_channels") or 3),
            classes=size("num_classes"),
        )
    if size("vocab_size") is not None:
        return Facts("tokens", size("max_position_embeddings"), size("vocab_size"))
    return Facts()
