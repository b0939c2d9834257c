"""Limits of a model for its data: kind of samples, sequence length, vocabulary size."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["tokens", "images"]
_ARRAYS: dict[Kind, set[str]] = {
    "tokens": {"tokens", "targets", "segment_ids", "positions", "mask"},
    "images": {"images", "labels"},
}


@dataclass(frozen=True)
class ModelLimits:
    """Shapes and ranges that a model can read; None is unknown, and no limit.

    `targets` is whether samples of tokens are inputs and targets [seq], which an axis can shard
    evenly and a loss can mask, instead of tokens [seq + 1].
    """

    sample: Kind | None = None
    seq_len: int | None = None  # number of positions
    vocab_size: int | None = None
    image_shape: tuple[int, int, int] | None = None  # height, width, channels
    classes: int | None = None
    targets: bool = False

    def with_arrays(self, names: Collection[str]) -> "ModelLimits":
        """The limits for batches of these arrays.

        Samples with arrays that those of the model's kind lack are read as the source has them.
        """
        alike = self.sample is not None and names and set(names) <= _ARRAYS[self.sample]
        return self if alike else replace(self, sample=None)


def limits_of(sizes: Any, targets: bool = False) -> ModelLimits:
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
        limits = size("max_position_embeddings"), size("vocab_size")
        corrupts = size("corrupts_inputs")  # None: a decoder
        if corrupts is False:  # samples have labels
            return ModelLimits(None, *limits)
        return ModelLimits("tokens", *limits, targets=targets or bool(corrupts))
    return ModelLimits()
