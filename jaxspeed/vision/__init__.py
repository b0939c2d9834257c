"""Images as data: opened, with all that may be wrong with them, and as a model reads them."""

from jaxspeed.vision.images import ImageSource, pixels_of, source_of
from jaxspeed.vision.processor import Expansion, ImageProcessor

__all__ = ["Expansion", "ImageProcessor", "ImageSource", "pixels_of", "source_of"]
