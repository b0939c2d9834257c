"""Images of records: a path, bytes, or a form that OpenAI or Hugging Face has for them.

An image's header is read when its record is, so that what is missing or no image is named with its
record; its pixels are decoded ahead of the step that reads them.
"""

import base64
import binascii
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspeed.errors import DataError

# Formats that Pillow decodes itself: others run programs, or are documents.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MOST_PIXELS = 89_478_485  # from there on Pillow warns of a decompression bomb
LEAST_SIDE = 2  # pixels
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # of EXIF: width and height are exchanged


@dataclass(frozen=True)
class ImageSource:
    """An image that has not been decoded.

    Attributes:
      content: its file, or its bytes.
      where: the record that has it, in errors.
      width, height: in pixels, as it is shown.
    """

    content: Path | bytes
    where: str
    width: int
    height: int


def source_of(value: Any, where: str, folder: Path | None = None) -> ImageSource:
    """The image that a record has.

    Args:
      value: a path, which may be relative to `folder`; bytes; a `data:` URL; one of Pillow's
        images; or a mapping with one of these as `bytes`, `path`, `url`, `image` or `image_url`.

    Raises:
      DataError: it is no image, or one that is refused, without `where`.
    """
    content = _content(value, folder)
    try:
        with _opened(content) as image:
            width, height = image.size
            has_exif = image.format != "PNG" or "exif" in image.info  # or Pillow decodes it
            turned = has_exif and image.getexif().get(_ORIENTATION) in _TURNED
    except DataError:
        raise
    except Exception as error:  # Pillow has no base class of what a damaged header raises
        raise DataError(_problem(content, error)) from None
    if min(width, height) < LEAST_SIDE:
        raise DataError(f"{shown(content)} has {width} x {height} pixels, too few to show anything")
    width, height = (height, width) if turned else (width, height)
    return ImageSource(content, where, width, height)


def pixels_of(source: ImageSource) -> np.ndarray:
    """uint8 [height, width, 3], turned as EXIF says; of an animation the first frame.

    Raises:
      DataError: it cannot be decoded; names the record.
    """
    from PIL import ImageOps

    try:
        with _opened(source.content) as image:
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except DataError as error:
        raise DataError(f"data: {source.where}: {error}") from None
    except Exception as error:
        raise DataError(f"data: {source.where}: {_problem(source.content, error)}") from None


def digest_of(images: Iterable[Sequence[ImageSource]]) -> str:
    """What changes with the images of documents: their files' paths and sizes, or their bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for of_document in images:
        digest.update(b"document")
        for image in of_document:
            content = image.content
            if isinstance(content, Path):
                content = f"{content} {content.stat().st_size}".encode()
            digest.update(hashlib.blake2b(content).digest())
    return digest.hexdigest()


def shown(content: Path | bytes) -> str:
    return "an image in bytes" if isinstance(content, bytes) else f"the image {str(content)!r}"


def _opened(content: Path | bytes) -> Any:
    """The image, of which the header is read."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("images need the library Pillow; install jaxspeed[vision]") from None
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError:
        raise DataError(f"{shown(content)} has more than {MOST_PIXELS:,} pixels") from None
    width, height = image.size
    if width * height > MOST_PIXELS:
        image.close()
        raise DataError(
            f"{shown(content)} has {width:,} x {height:,} pixels; more than {MOST_PIXELS:,} are "
            "refused, as what is made to fill the memory has them"
        )
    return image


def _problem(content: Path | bytes, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{shown(content)} does not exist"
    if type(error).__name__ == "UnidentifiedImageError":
        return f"{shown(content)} is none of {', '.join(FORMATS)}"
    return f"{shown(content)} cannot be read: {error}"


def _content(value: Any, folder: Path | None) -> Path | bytes:
    if isinstance(value, Mapping):
        for name in ("bytes", "path", "image", "image_url", "url"):
            if value.get(name) is not None:
                return _content(value[name], folder)
        raise DataError(f"an image has the fields {', '.join(map(str, value)) or 'of nothing'}")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if hasattr(value, "save") and hasattr(value, "getbands"):  # Pillow's
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return buffer.getvalue()
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise DataError(f"an image is a {type(value).__name__}, not a path, bytes or a data URL")
    if value.startswith("data:"):
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except (binascii.Error, ValueError):
            raise DataError("an image's data URL has no base64") from None
    if value.startswith(("http://", "https://")):
        raise DataError(f"the image {value!r} is not downloaded: save it, and name its path")
    path = Path(value.removeprefix("file://")).expanduser()
    return path if folder is None or path.is_absolute() else folder / path
