"""From pixels to patches, by the settings in a folder's preprocessor_config.json.

Steps and numbers are those of the processors of transformers that use Pillow.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxspeed.errors import DataError, PretrainedError
from jaxspeed.vision import Expansion

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
CLIPS = ("CLIPImageProcessor", "LlavaImageProcessor")
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers of filters
MOST_RATIO = 200  # of the sides of an image that keeps its proportions
MOST_SIDE = 4096  # pixels to which an image is resized before it is divided into tiles


class OfRows:
    """A processor whose patches are rows of an image or a tile, without further arrays."""

    patch_size: int

    @property
    def patch(self) -> int:
        return self.patch_size**2 * 3

    def beside(
        self, batch: Mapping[str, np.ndarray], sizes: Sequence[Sequence[tuple[int, int]]]
    ) -> dict[str, np.ndarray]:
        return {}


@dataclass(frozen=True)
class FixedImages(OfRows):
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


def read_settings[Processor: OfRows](
    values: Mapping[str, Any] | None,
    default: Processor,
    kinds: Sequence[str],
    more: Callable[[Mapping[str, Any], str], dict[str, Any]],
) -> Processor:
    """The processor of a preprocessor_config.json, or of the part of it in processor_config.json.

    Args:
      default: what it is without the file; what is in an image's text is always this one's.
      kinds: the types of processors that it is.
      more: further fields, from the settings and the type.

    Raises:
      PretrainedError: it has steps that are not known, or another size than the model.
    """
    if values is None:
        return default
    steps = ("resize", "rescale", "normalize")
    problems = [f"do_{name} is false" for name in steps if not values.get(f"do_{name}", True)]
    kind = str(values.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
    if kind not in ("", *kinds):
        problems.append(f"image_processor_type is {kind!r}")
    if values.get("do_pan_and_scan"):
        problems.append("do_pan_and_scan is true")
    d: Any = default
    try:
        read = replace(
            d,
            resample=int(values.get("resample", d.resample)),
            scale=float(values.get("rescale_factor", d.scale)),
            mean=_three(values.get("image_mean", d.mean)),
            std=_three(values.get("image_std", d.std)),
            **({} if problems else more(values, kind)),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PretrainedError(
            f"preprocessor_config.json: {type(error).__name__}: {error}"
        ) from None
    for name in ("patch_size", "merged", "rows", "side"):
        if (ours := getattr(d, name, None)) != (theirs := getattr(read, name, None)):
            problems.append(f"{name} is {theirs}, and the model's is {ours}")
    if problems:
        raise PretrainedError(f"preprocessor_config.json: {'; '.join(problems)}, not supported")
    result: Processor = read
    return result


def read_fixed(values: Mapping[str, Any] | None, default: FixedImages) -> FixedImages:
    """`read_settings` of images that all get one size."""

    def more(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
        size = _size(values["size"])
        crops = values.get("do_center_crop", len(size) == 1 and kind in ("", *CLIPS))
        sides = _size(values["crop_size"]) if crops else ()
        padded = bool(values.get("do_pad")) and kind == CLIPS[1]
        return {"size": size, "crop": (sides[0], sides[-1]) if crops else None, "padded": padded}

    kinds = (*CLIPS, "SiglipImageProcessor", "Gemma3ImageProcessor")
    return read_settings(values, default, kinds, more)


@dataclass(frozen=True)
class TiledImages(OfRows):
    """Images that are divided into square tiles, with a copy of all of it as the last one.

    Attributes:
      tokens: of a tile.
      side: of a tile, in pixels.
      longest: the longer side to which an image is resized before.
      divided: False: an image is resized to one tile.
    """

    marker: str
    token: str
    token_id: int
    tokens: int
    patch_size: int
    side: int
    longest: int
    divided: bool = True
    resample: int = LANCZOS
    scale: float = 1 / 255
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """(height, width) to which an image is resized, one after another."""
        ratio, long = width / height, self.longest
        if width >= height:
            width, height = long, _even(int(long / ratio))
        else:
            height, width = long, _even(int(long * ratio))
        if max(height, width) > MOST_SIDE:
            ratio = width / height
            if width >= height:
                width, height = MOST_SIDE, int(MOST_SIDE / ratio)
            else:
                height, width = MOST_SIDE, int(MOST_SIDE * ratio)
        height, width = max(height, 1), max(width, 1)
        first, ratio = (height, width), width / height
        if not self.divided:
            return [first, (self.side, self.side)]
        if width >= height:
            width = self._multiple(width)
            height = self._multiple(int(width / ratio))
        else:
            height = self._multiple(height)
            width = self._multiple(int(height * ratio))
        return [first, (height, width)]

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of tiles beside the last one; 0 where that is the only one."""
        rows, columns = (size // self.side for size in self.sizes(height, width)[-1])
        return (0, 0) if max(rows, columns) == 1 else (rows, columns)

    def expansion(self, width: int, height: int) -> Expansion:
        rows, columns = self.grid(height, width)
        of_tile, around = self.token * self.tokens, "<fake_token_around_image>"
        lines = (
            "".join(f"{around}<row_{r}_col_{c}>{of_tile}" for c in range(1, columns + 1)) + "\n"
            for r in range(1, rows + 1)
        )
        text = "".join(lines) + "\n" * bool(rows) + f"{around}<global-img>{of_tile}{around}"
        count = rows * columns + 1
        return Expansion(text, count * self.tokens, count * (self.side // self.patch_size) ** 2)

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        return np.concatenate([patches_of(x, self.patch_size) for x in self.values(pixels)])

    def values(self, pixels: np.ndarray) -> list[np.ndarray]:
        """fp32 [side, side, 3] of each tile, normalized."""
        rows, columns = self.grid(*pixels.shape[:2])
        for size in self.sizes(*pixels.shape[:2]):
            pixels = resized(pixels, size, self.resample)
        n = self.side
        tiles = [
            pixels[r * n : (r + 1) * n, c * n : (c + 1) * n]
            for r in range(rows)
            for c in range(columns)
        ]
        last = resized(pixels, (n, n), self.resample) if tiles else pixels
        return [normalized(tile, self.scale, self.mean, self.std) for tile in (*tiles, last)]

    def _multiple(self, size: int) -> int:
        return -(-size // self.side) * self.side


def read_tiled(values: Mapping[str, Any] | None, default: TiledImages) -> TiledImages:
    """`read_settings` of images that are divided into tiles."""

    def more(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
        side = values.get("max_image_size", {"longest_edge": default.side})["longest_edge"]
        divided = bool(values.get("do_image_splitting", True))
        return {"side": side, "longest": int(values["size"]["longest_edge"]), "divided": divided}

    kinds = ("SmolVLMImageProcessor", "Idefics3ImageProcessor")
    return read_settings(values, default, kinds, more)


@dataclass(frozen=True)
class NativeImages(OfRows):
    """Images that keep their proportions: about their size, within bounds of pixels.

    Attributes:
      merged: patches of a side of a square that is one token.
      least, most: pixels of an image.
    """

    marker: str
    token: str
    token_id: int
    patch_size: int
    merged: int = 2
    least: int = 56 * 56
    most: int = 28 * 28 * 1280
    resample: int = BICUBIC
    scale: float = 1 / 255
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(height, width) to which an image is resized: multiples of a square's side."""
        if max(width, height) > MOST_RATIO * min(width, height):
            raise DataError(
                f"an image of {width} x {height} pixels is more than {MOST_RATIO} times as long as "
                "wide"
            )
        n = self.patch_size * self.merged
        sides = [round(height / n) * n, round(width / n) * n]
        if math.prod(sides) > self.most:
            shrink = math.sqrt(height * width / self.most)
            sides = [max(n, math.floor(x / shrink / n) * n) for x in (height, width)]
        elif math.prod(sides) < self.least:
            grow = math.sqrt(self.least / (height * width))
            sides = [math.ceil(x * grow / n) * n for x in (height, width)]
        return sides[0], sides[1]

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of patches."""
        rows, columns = (side // self.patch_size for side in self.size(width, height))
        return rows, columns

    def expansion(self, width: int, height: int) -> Expansion:
        rows, columns = self.grid(width, height)
        count = rows * columns // self.merged**2
        return Expansion(self.token * count, count, rows * columns)

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        values, n = self.values(pixels), self.merged
        rows, columns = (side // self.patch_size for side in values.shape[:2])
        x = patches_of(values, self.patch_size)
        x = x.reshape(rows // n, n, columns // n, n, -1).swapaxes(1, 2)
        return np.ascontiguousarray(x.reshape(rows * columns, -1))

    def values(self, pixels: np.ndarray) -> np.ndarray:
        """fp32 [height, width, 3], normalized."""
        height, width = pixels.shape[:2]
        pixels = resized(pixels, self.size(width, height), self.resample)
        return normalized(pixels, self.scale, self.mean, self.std)

    def beside(
        self, batch: Mapping[str, np.ndarray], sizes: Sequence[Sequence[tuple[int, int]]]
    ) -> dict[str, np.ndarray]:
        """The places of patches, and the positions of tokens in rotations; see `QwenVL`."""
        tokens, rows = batch["tokens"], batch["image_rows"]
        places = np.full((*batch["patches"].shape[:2], 3), -1, np.int32)
        positions = np.empty((*tokens.shape, 3), np.int32)
        begins = np.zeros(tokens.shape, bool)
        if "segment_ids" in batch:
            begins[:, 1:] = np.diff(batch["segment_ids"], axis=1) != 0
        n = self.merged
        for sample, images in enumerate(sizes):
            of_images = [self._places(number, *size) for number, size in enumerate(images)]
            of_sample = np.concatenate([np.zeros((0, 3), np.int32), *of_images])
            places[sample, : len(of_sample)] = of_sample
            is_image = rows[sample] >= 0
            inside = np.zeros((tokens.shape[1], 3), np.int32)
            inside[is_image] = of_sample[:: n * n][rows[sample][is_image]]
            image = np.where(is_image, inside[:, 0], -1)
            inside = np.stack([np.zeros_like(image), *(inside[:, 1:] // n).T], axis=1)
            is_last = image != np.append(image[1:], -2)
            steps = np.where(is_image, is_last * (inside.max(axis=1) + 1), 1)
            before = np.cumsum(steps) - steps
            before -= np.maximum.accumulate(np.where(begins[sample], before, 0))
            positions[sample] = before[:, None] + inside
        return {"patch_places": places, "image_positions": positions}

    def _places(self, number: int, width: int, height: int) -> np.ndarray:
        """[rows, 3]: image, row and column of each patch, by squares."""
        rows, columns = self.grid(width, height)
        n = self.merged
        grid = np.stack(np.meshgrid(range(rows), range(columns), indexing="ij"), axis=-1)
        grid = grid.reshape(rows // n, n, columns // n, n, 2).swapaxes(1, 2).reshape(-1, 2)
        return np.concatenate([np.full((len(grid), 1), number), grid], axis=1).astype(np.int32)


def read_native(values: Mapping[str, Any] | None, default: NativeImages) -> NativeImages:
    """`read_settings` of images that keep their proportions."""

    def more(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
        size = values.get("size") or {}
        return {
            "patch_size": values.get("patch_size", default.patch_size),
            "merged": values.get("merge_size", default.merged),
            "least": int(values.get("min_pixels") or size.get("shortest_edge", default.least)),
            "most": int(values.get("max_pixels") or size.get("longest_edge", default.most)),
        }

    return read_settings(values, default, ("Qwen2VLImageProcessor",), more)


def _even(size: int) -> int:
    return size + size % 2


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
