"""Antialiased strokes and text on a bitmap with NumPy, written as PNG with zlib."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np

from jaxspeed.metrics.stroke_font import text_strokes, text_width

Color = tuple[int, int, int]
Points = np.ndarray  # [points, 2], x to the right and y down, in pixels


class Canvas:
    """A bitmap; later drawings cover earlier ones."""

    def __init__(self, width: int, height: int, background: Color = (255, 255, 255)) -> None:
        self.width, self.height = width, height
        self._pixels = np.empty((height, width, 3), np.float32)
        self._pixels[:] = background

    def stroke(
        self,
        lines: list[Points],
        color: Color,
        width: float = 1.0,
        opacity: float = 1.0,
        clip: tuple[float, float, float, float] | None = None,
    ) -> None:
        """Draw lines with round ends as one shape: intersections are not darker.

        A pixel's coverage is computed from its distance to the line. `clip` is (left, top, right,
        bottom).
        """
        covered = np.zeros((self.height, self.width), np.float32)
        for line in lines:
            ends = line[1:] if len(line) > 1 else line  # one point is a dot
            for a, b in zip(line, ends):
                self._cover(covered, a, b, width / 2)
        if clip is not None:
            left, top, right, bottom = (round(side) for side in clip)
            inside = np.zeros_like(covered)
            inside[top:bottom, left:right] = covered[top:bottom, left:right]
            covered = inside
        rows, columns = np.nonzero(covered)
        share = (opacity * covered[rows, columns])[:, None]
        mixed = (1 - share) * self._pixels[rows, columns] + share * np.asarray(color, np.float32)
        self._pixels[rows, columns] = mixed

    def _cover(self, covered: np.ndarray, a: np.ndarray, b: np.ndarray, radius: float) -> None:
        """Add the coverage of one line segment, computed for the pixels around it only."""
        reach = radius + 1
        left, top = np.floor(np.minimum(a, b) - reach).astype(int)
        right, bottom = np.ceil(np.maximum(a, b) + reach).astype(int)
        left, top = max(left, 0), max(top, 0)
        right, bottom = min(right, self.width), min(bottom, self.height)
        if left >= right or top >= bottom:
            return
        x = np.arange(left, right) + 0.5 - a[0]  # pixel centers
        y = (np.arange(top, bottom) + 0.5 - a[1])[:, None]
        along = b - a
        length = float(along @ along)
        t = np.clip((x * along[0] + y * along[1]) / length, 0, 1) if length else 0.0
        distance = np.hypot(x - t * along[0], y - t * along[1])
        window = covered[top:bottom, left:right]
        np.maximum(window, np.clip(radius + 0.5 - distance, 0, 1), out=window)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        color: Color,
        size: float = 14.0,
        bold: bool = False,
        align: float = 0.0,
    ) -> None:
        """Draw text with its baseline at y; `size` is the cap height, `align` 0 left to 1 right."""
        x -= align * text_width(text, size)
        self.stroke(text_strokes(text, x, y, size), color, size * (0.165 if bold else 0.12))

    def write_png(self, path: str | Path) -> None:
        """Write to a temporary file and rename it: no reader sees a partial picture."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_bytes(png(np.clip(self._pixels + 0.5, 0, 255).astype(np.uint8)))
        os.replace(temporary, path)


def png(pixels: np.ndarray) -> bytes:
    """[height, width, 3] of uint8 as a PNG file (RFC 2083): 8 bits, no filter."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with its filter, 0
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", header),
            (b"IDAT", zlib.compress(rows.tobytes(), 9)),
            (b"IEND", b""),
        )
    )
