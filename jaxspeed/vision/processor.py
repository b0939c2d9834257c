"""What images are to a model: tokens in a text, and patches in a batch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Expansion(NamedTuple):
    """What an image is in a text, and in a batch."""

    text: str  # in place of what a chat template writes
    tokens: int  # of `ImageProcessor.token` in it
    rows: int  # of patches


class ImageProcessor(Protocol):
    """Images as a model reads them.

    Attributes:
      marker: what a chat template writes for an image.
      token: the text of the token that stands for a row of an image's features.
      token_id: its id.
      patch: numbers of a patch.
    """

    marker: str
    token: str
    token_id: int

    @property
    def patch(self) -> int: ...

    def expansion(self, width: int, height: int) -> Expansion:
        """What an image of so many pixels is."""

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        """fp32 [rows, patch] of an image, uint8 [height, width, 3]."""

    def beside(
        self, batch: Mapping[str, np.ndarray], sizes: Sequence[Sequence[tuple[int, int]]]
    ) -> dict[str, np.ndarray]:
        """Further arrays that the model reads beside those of a batch.

        Args:
          sizes: (width, height) of the images of each sample.
        """
