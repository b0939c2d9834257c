"""Images as data: opened with all that may be wrong with them, and processed into patches."""

from jaxspeed.vision.images import ImageSource, pixels_of, source_of
from jaxspeed.vision.processors import Expansion, FixedImages, ImageProcessor

__all__ = [
    "Expansion",
    "FixedImages",
    "ImageProcessor",
    "ImageSource",
    "pixels_of",
    "source_of",
]
