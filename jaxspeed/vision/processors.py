"""From pixels to patches, by the settings in a folder's preprocessor_config.json.

Steps and numbers are those of the processors of transformers that use Pillow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxspeed.errors import PretrainedError

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
BILINEAR, BICUBIC = 2, 3  # Pillow's numbers of filters


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


@dataclass(frozen=True)
class FixedImages:
    """Images that all get the same size.

    Attributes:
      size: (height, width) to which an image is resized; of one number its shorter side is.
      crop: (height, width) of the middle that is left; None: all of it.
      padded: whether it is made square before, with its mean as the colour.
      before, after: texts around the tokens of an image.
    """

    marker: str
    token: str
    token_id: int
    tokens: int
    patch_size: int
    size: tuple[int, ...]
    crop: tuple[int, int] | None = None
    padded: bool = False
    resample: int = BICUBIC
    scale: float = 1 / 255
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    before: str = ""
    after: str = ""

    @property
    def patch(self) -> int:
        return self.patch_size**2 * 3

    @property
    def rows(self) -> int:
        """Patches of an image."""
        height, width = self.crop or (*self.size, *self.size)[:2]
        return (height // self.patch_size) * (width // self.patch_size)

    def expansion(self, width: int, height: int) -> Expansion:
        text = f"{self.before}{self.token * self.tokens}{self.after}"
        return Expansion(text, self.tokens, self.rows)

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        return patches_of(self.values(pixels), self.patch_size)

    def values(self, pixels: np.ndarray) -> np.ndarray:
        """fp32 [height, width, 3], normalized."""
        if self.padded:
            pixels = square(pixels, [int(x * 255) for x in self.mean])
        height, width = pixels.shape[:2]
        size = self.size
        if len(size) == 1:
            size = _by_short_side(height, width, size[0])
        pixels = resized(pixels, size, self.resample)
        pixels = pixels if self.crop is None else cropped(pixels, self.crop)
        return normalized(pixels, self.scale, self.mean, self.std)


def read_fixed(values: Mapping[str, Any] | None, default: FixedImages) -> FixedImages:
    """The processor of a preprocessor_config.json, or of the part of it in processor_config.json.

    Args:
      default: what it is without the file; what is in an image's text is always this one's.

    Raises:
      PretrainedError: it has steps that are not known, or another size than the model.
    """
    if values is None:
        return default
    on = {n: bool(values.get(f"do_{n}", n != "pad")) for n in ("resize", "rescale", "normalize")}
    kind = str(values.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
    known = ("", "CLIPImageProcessor", "LlavaImageProcessor", "SiglipImageProcessor")
    problems = [f"do_{name} is false" for name, is_on in on.items() if not is_on]
    if kind not in (*known, "Gemma3ImageProcessor"):
        problems.append(f"image_processor_type is {kind!r}")
    if values.get("do_pan_and_scan"):
        problems.append("do_pan_and_scan is true")
    try:
        size = _size(values["size"])
        crop: tuple[int, int] | None = None
        is_clip = kind in known[:3] and len(size) == 1
        if values.get("do_center_crop", is_clip):
            sides = _size(values["crop_size"])
            crop = sides[0], sides[-1]
        read = FixedImages(
            default.marker,
            default.token,
            default.token_id,
            default.tokens,
            default.patch_size,
            size,
            crop,
            bool(values.get("do_pad")) and kind == "LlavaImageProcessor",
            int(values.get("resample", default.resample)),
            float(values.get("rescale_factor", default.scale)),
            _three(values.get("image_mean", default.mean)),
            _three(values.get("image_std", default.std)),
            default.before,
            default.after,
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PretrainedError(
            f"preprocessor_config.json: {type(error).__name__}: {error}"
        ) from None
    if not problems and read.rows != default.rows:
        problems.append(f"images have {read.rows} patches, and the model reads {default.rows}")
    if problems:
        raise PretrainedError(f"preprocessor_config.json: {'; '.join(problems)}, not supported")
    return read


def _size(value: Any) -> tuple[int, ...]:
    """(height, width), or the shorter side alone."""
    if isinstance(value, Mapping):
        if value.get("shortest_edge") is not None:
            return (int(value["shortest_edge"]),)
        return int(value["height"]), int(value["width"])
    return (int(value),)


def _three(values: Any) -> tuple[float, ...]:
    read = tuple(float(x) for x in (values if isinstance(values, Sequence) else [values] * 3))
    if len(read) != 3:
        raise ValueError(f"{len(read)} numbers for 3 colours")
    return read


# -- steps -----------------------------------------------------------------------------------------


def _by_short_side(height: int, width: int, short: int) -> tuple[int, int]:
    """Sizes with this shorter side and the ratio of before."""
    if height <= width:
        return short, int(short * width / height)
    return int(short * height / width), short


def square(pixels: np.ndarray, colour: Sequence[int]) -> np.ndarray:
    """The image in the middle of a square of a colour."""
    height, width = pixels.shape[:2]
    side = max(height, width)
    padded = np.full((side, side, 3), colour, pixels.dtype)
    top, left = (side - height) // 2, (side - width) // 2
    padded[top : top + height, left : left + width] = pixels
    return padded


def resized(pixels: np.ndarray, size: Sequence[int], resample: int) -> np.ndarray:
    from PIL import Image

    height, width = size
    return np.asarray(Image.fromarray(pixels).resize((width, height), resample=resample))


def cropped(pixels: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """The middle; what an image lacks of it is black."""
    for dim, length in enumerate(size):
        there = pixels.shape[dim]
        start = (there - length) // 2 if there >= length else 0
        pixels = np.take(pixels, range(start, min(start + length, there)), axis=dim)
        if (lack := length - pixels.shape[dim]) > 0:
            edges = [(0, 0)] * 3
            edges[dim] = (-(-lack // 2), lack - -(-lack // 2))
            pixels = np.pad(pixels, edges)
    return pixels


def normalized(
    pixels: np.ndarray, scale: float, mean: Sequence[float], std: Sequence[float]
) -> np.ndarray:
    values = (pixels.astype(np.float64) * scale).astype(np.float32)
    return (values - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)


def patches_of(values: np.ndarray, size: int) -> np.ndarray:
    """[height, width, channels] as [patches, size * size * channels], row by row.

    Pixels beyond the last full patch are left out, as by a convolution.
    """
    rows, columns = values.shape[0] // size, values.shape[1] // size
    values = values[: rows * size, : columns * size]
    x = values.reshape(rows, size, columns, size, -1).swapaxes(1, 2)
    return np.ascontiguousarray(x.reshape(rows * columns, -1))
