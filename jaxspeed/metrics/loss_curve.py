"""Draw the loss curve of a run: `loss.png`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxspeed.metrics.canvas import Canvas, Color
from jaxspeed.metrics.format import loss_text
from jaxspeed.metrics.stroke_font import text_width

Losses = Sequence[tuple[int, float]]  # (step, loss)

_SIZE = (1280, 720)
_LEFT, _TOP, _RIGHT, _BOTTOM = 104, 104, 1236, 640  # the plot within the picture
_INK, _GREY, _GRID = (38, 42, 48), (110, 116, 124), (231, 233, 236)
_TRAIN, _TRAIN_EACH, _HELD_OUT, _LEVEL = (
    (31, 92, 168),
    (168, 200, 235),
    (217, 95, 20),
    (90, 98, 108),
)
_SMOOTHED_FROM = 60  # number of steps from which a moving mean is drawn too


def draw_loss(
    path: str | Path,
    train: Losses,
    held_out: Losses = (),
    title: str = "",
    *,
    loss_name: str = "loss",
    levels: Mapping[str, float] | None = None,
) -> None:
    """Draw training and held-out loss by step as a PNG.

    A long training curve is drawn twice: each step's loss, pale, and its moving mean over 2% of the
    run. Losses that are not finite leave a gap. The scale covers the usual range, so a spike may
    leave the picture.

    Args:
      path: the PNG file.
      train: (step, loss) in the order of steps.
      held_out: (step, loss) of evaluations.
      title: above the plot.
      loss_name: title of the vertical axis, for example "loss, nats per token".
      levels: losses to compare with, drawn as dashed lines with their names.
    """
    levels = dict(levels or {})
    picture = Canvas(*_SIZE)
    scale = _scale(train, held_out, levels)
    _axes(picture, scale, title, loss_name)
    legend = _draw_levels(picture, scale, levels)
    legend = _draw_train(picture, scale, train) + _draw_held_out(picture, scale, held_out) + legend
    _legend(picture, legend)
    picture.write_png(path)


@dataclass(frozen=True)
class _Scale:
    """From (step, loss) to pixels."""

    steps: tuple[float, float]
    losses: tuple[float, float]

    def x(self, step: float | np.ndarray) -> float | np.ndarray:
        first, last = self.steps
        return _LEFT + (step - first) / (last - first) * (_RIGHT - _LEFT)

    def y(self, loss: float | np.ndarray) -> float | np.ndarray:
        low, high = self.losses
        return _BOTTOM - (loss - low) / (high - low) * (_BOTTOM - _TOP)

    def points(self, losses: np.ndarray) -> np.ndarray:
        """[points, 2] of pixels; points far outside of the plot are clipped to just outside."""
        x, y = self.x(losses[:, 0]), self.y(losses[:, 1])
        return np.stack([x, np.clip(y, _TOP - 50, _BOTTOM + 50)], axis=1)


def _scale(train: Losses, held_out: Losses, levels: Mapping[str, float]) -> _Scale:
    steps = [float(step) for step, _ in (*train, *held_out)] or [0.0]
    first, last = min(steps), max(steps)
    first = 0.0 if first <= 0.05 * last else first
    each = np.array([loss for _, loss in (*train, *held_out) if math.isfinite(loss)] or [0.0])
    low, high = float(each.min()), float(np.quantile(each, 0.998))
    # The scale clips spikes; the first loss, where the run started, less readily.
    high = min(float(each.max()), max(high + (high - low) / 3, min(each[0], 3 * high - 2 * low)))
    compared = [loss for loss in levels.values() if math.isfinite(loss)]
    low, high = min(low, *compared, high), max(high, *compared, low)
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return _Scale((first, last if last > first else first + 1.0), (low - margin, high + margin))


# -- axes and legend ----------------------------------------------------------------------------


def _axes(picture: Canvas, scale: _Scale, title: str, loss_name: str) -> None:
    picture.text(_LEFT - 60, 46, _fitted(title, 20, _RIGHT - _LEFT + 60), _INK, 20, bold=True)
    picture.text(_LEFT - 60, 82, loss_name, _GREY, 14)
    picture.text(_RIGHT, _BOTTOM + 60, "step", _GREY, 14, align=1.0)
    for value, label in _ticks(*scale.losses, most=7, integer=False):
        y = round(float(scale.y(value))) + 0.5
        picture.stroke([_line(_LEFT, y, _RIGHT, y)], _GRID)
        picture.text(_LEFT - 14, y + 7, label, _GREY, 14, align=1.0)
    for value, label in _ticks(*scale.steps, most=8, integer=True):
        x = round(float(scale.x(value))) + 0.5
        picture.stroke([_line(x, _BOTTOM, x, _BOTTOM + 6)], _GREY)
        picture.text(x, _BOTTOM + 28, label, _GREY, 14, align=0.5)
    picture.stroke([_line(_LEFT, _BOTTOM + 0.5, _RIGHT, _BOTTOM + 0.5)], _GREY)


def _ticks(low: float, high: float, most: int, integer: bool) -> list[tuple[float, str]]:
    """Round values between low and high, with their labels."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * (1 - 1e-9))
    if integer:
        step = max(1.0, math.ceil(step))
    values = [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    if integer:
        return [(value, _step_text(value, step)) for value in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    digits += not math.isclose(step * 10**digits, round(step * 10**digits))
    return [(value, f"{value:.{digits}f}") for value in values]


def _step_text(value: float, step: float) -> str:
    """Values from 10000 on in thousands or millions, if the tick distance allows it."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if step >= size / 10 and value >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:.0f}"


def _fitted(text: str, size: float, width: float) -> str:
    """The text, truncated to the width."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text.rstrip() + "…"


@dataclass(frozen=True)
class _Entry:
    """A line of the legend."""

    text: str
    color: Color
    dashed: bool = False
    marker: bool = False


def _legend(picture: Canvas, entries: list[_Entry]) -> None:
    """Draw the legend in the upper right corner, on white: a loss falls to the lower right."""
    size, row, sample = 14.0, 30, 40
    width = max((text_width(entry.text, size) for entry in entries), default=0.0)
    left = _RIGHT - width - sample - 14
    if entries:
        middle = _TOP + 10 + row * len(entries) / 2
        area = [_line(left - 8, middle, _RIGHT - 4, middle)]
        clip = (left - 14, _TOP + 6, _RIGHT, _TOP + 14 + row * len(entries))
        picture.stroke(area, (255, 255, 255), row * len(entries) + 40, 0.88, clip)
    for number, entry in enumerate(entries):
        y = _TOP + 10 + row * (number + 0.5)
        if entry.dashed:
            picture.stroke(_dashes(left, y, left + sample - 10), entry.color, 2)
        else:
            picture.stroke([_line(left, y, left + sample - 10, y)], entry.color, 3)
        if entry.marker:
            picture.stroke([np.array([[left + sample / 2 - 5, y]])], entry.color, 9)
        picture.text(left + sample, y + 7, entry.text, _INK, size)


# -- the curves ---------------------------------------------------------------------------------

_PLOT = (_LEFT, _TOP - 8, _RIGHT + 8, _BOTTOM + 1)


def _draw_train(picture: Canvas, scale: _Scale, train: Losses) -> list[_Entry]:
    parts = _finite_parts(train)
    if not parts:
        return []
    count = sum(map(len, parts))
    smooth = count >= _SMOOTHED_FROM
    each = [scale.points(_per_column(part)) for part in parts]
    picture.stroke(each, _TRAIN_EACH if smooth else _TRAIN, 1.4 if smooth else 2.5, clip=_PLOT)
    last = parts[-1][-1, 1]
    if smooth:
        means = [_smoothed(part, count // 50, part is parts[0]) for part in parts]
        curves = [scale.points(_per_column(part)) for part in means]
        picture.stroke(curves, _TRAIN, 2.5, clip=_PLOT)
        last = means[-1][-1, 1]
    return [_Entry(f"training {loss_text(last)}", _TRAIN)]


def _draw_held_out(picture: Canvas, scale: _Scale, held_out: Losses) -> list[_Entry]:
    parts = _finite_parts(held_out)
    if not parts:
        return []
    curves = [scale.points(part) for part in parts]
    picture.stroke(curves, _HELD_OUT, 2.5, clip=_PLOT)
    if sum(map(len, parts)) <= _SMOOTHED_FROM:
        dots = [point[None] for curve in curves for point in curve]
        picture.stroke(dots, (255, 255, 255), 12, clip=_PLOT)
        picture.stroke(dots, _HELD_OUT, 9, clip=_PLOT)
    return [_Entry(f"held out {loss_text(parts[-1][-1, 1])}", _HELD_OUT, marker=True)]


def _draw_levels(picture: Canvas, scale: _Scale, levels: Mapping[str, float]) -> list[_Entry]:
    entries = []
    for name, loss in levels.items():
        if math.isfinite(loss):
            y = round(float(scale.y(loss))) + 0.5
            picture.stroke(_dashes(_LEFT, y, _RIGHT), _LEVEL, 1.6)
            entries.append(_Entry(f"{name} {loss_text(loss)}", _LEVEL, dashed=True))
    return entries


def _finite_parts(losses: Losses) -> list[np.ndarray]:
    """The runs of finite losses, each [points, 2]."""
    values = np.array(losses, float).reshape(-1, 2)
    finite = np.isfinite(values[:, 1])
    breaks = np.flatnonzero(finite[1:] != finite[:-1]) + 1
    parts = np.split(values, breaks)
    return [part for part in parts if len(part) and np.isfinite(part[0, 1])]


def _smoothed(part: np.ndarray, window: int, from_the_start: bool) -> np.ndarray:
    """The centered moving mean of up to `window` losses.

    At the start of the run the window is symmetric: the loss falls fast there, and the mean of a
    one-sided window would be too low.
    """
    count, half = len(part), window // 2
    sums = np.concatenate([[0.0], np.cumsum(part[:, 1])])
    at = np.arange(count)
    low = np.maximum(at - half, 0)
    high = np.minimum(at + (np.minimum(at, half) if from_the_start else half), count - 1) + 1
    return np.stack([part[:, 0], (sums[high] - sums[low]) / (high - low)], axis=1)


def _per_column(part: np.ndarray) -> np.ndarray:
    """If there are many points per pixel: the lowest and the highest of each pixel column."""
    columns = _RIGHT - _LEFT
    if len(part) <= 2 * columns:
        return part
    drawn = []
    for chunk in np.array_split(part, columns):
        where = sorted({int(chunk[:, 1].argmin()), int(chunk[:, 1].argmax())})
        drawn += [chunk[i] for i in where]
    return np.array(drawn)


def _line(x0: float, y0: float, x1: float, y1: float) -> np.ndarray:
    return np.array([[x0, y0], [x1, y1]])


def _dashes(left: float, y: float, right: float) -> list[np.ndarray]:
    return [_line(x, y, min(x + 7, right), y) for x in np.arange(left, right, 13)]
