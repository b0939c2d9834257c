"""Draw the loss curve of a run: as SVG by a template, as PNG by matplotlib."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from jaxspeed.metrics.format import loss_text

Losses = Sequence[tuple[int, float]]  # (step, loss)

_SIZE = (1280, 720)
_LEFT, _TOP, _RIGHT, _BOTTOM = 104, 104, 1236, 640  # the plot within the picture
_TRAIN, _TRAIN_EACH, _HELD_OUT, _LEVEL = "#1f5ca8", "#a8c8eb", "#d95f14", "#5a626c"
_SMOOTHED_FROM = 60  # number of steps from which a moving mean is drawn too
_TITLE_CHARACTERS = 64


def draw_loss(
    path: str | Path,
    train: Losses,
    held_out: Losses = (),
    title: str = "",
    *,
    loss_name: str = "loss",
    levels: Mapping[str, float] | None = None,
) -> None:
    """Draw training and held-out loss by step as an .svg, or as a .png, which needs matplotlib.

    A long training curve is drawn twice: each step's loss, pale, and its moving mean over 2% of the
    run. Losses that are not finite leave a gap. The scale covers the usual range, so a spike may
    leave the picture.

    Args:
      path: the file; its suffix is the format.
      train: (step, loss) in the order of steps.
      held_out: (step, loss) of evaluations.
      title: above the plot.
      loss_name: title of the vertical axis, for example "loss, nats per token".
      levels: losses to compare with, drawn as dashed lines with their names.
    """
    path = Path(path)
    levels = {name: loss for name, loss in (levels or {}).items() if math.isfinite(loss)}
    scale = _scale(train, held_out, levels)
    curves = _curves(train, held_out)
    title = title if len(title) <= _TITLE_CHARACTERS else title[:_TITLE_CHARACTERS] + "…"
    temporary = path.with_name(path.name + ".partial")
    if path.suffix == ".png":
        _write_png(temporary, scale, curves, levels, title, loss_name)
    else:
        temporary.write_text(_svg(scale, curves, levels, title, loss_name), encoding="utf-8")
    os.replace(temporary, path)


@dataclass(frozen=True)
class _Curve:
    """One line of the picture; its parts are separated by losses that are not finite."""

    kind: str
    color: str
    width: float
    parts: list[np.ndarray]  # [points, 2] of (step, loss)
    name: str = ""  # in the legend
    dots: bool = False


def _curves(train: Losses, held_out: Losses) -> list[_Curve]:
    curves = []
    if parts := _finite_parts(train):
        count = sum(map(len, parts))
        smooth = count >= _SMOOTHED_FROM
        if smooth:
            columns = [_per_column(part) for part in parts]
            curves.append(_Curve("each", _TRAIN_EACH, 1.4, columns))
            parts = [_smoothed(part, count // 50, part is parts[0]) for part in parts]
        name = f"training {loss_text(parts[-1][-1, 1])}"
        curves.append(_Curve("train", _TRAIN, 2.5, [_per_column(part) for part in parts], name))
    if parts := _finite_parts(held_out):
        name = f"held out {loss_text(parts[-1][-1, 1])}"
        few = sum(map(len, parts)) <= _SMOOTHED_FROM
        curves.append(_Curve("held-out", _HELD_OUT, 2.5, parts, name, dots=few))
    return curves


@dataclass(frozen=True)
class _Scale:
    """Scale from (step, loss) to pixels."""

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
    losses = np.array([loss for _, loss in (*train, *held_out) if math.isfinite(loss)] or [0.0])
    low, high = float(losses.min()), float(np.quantile(losses, 0.998))
    # The scale clips spikes; the first loss, where the run started, less readily.
    high = min(
        float(losses.max()), max(high + (high - low) / 3, min(losses[0], 3 * high - 2 * low))
    )
    compared = [loss for loss in levels.values() if math.isfinite(loss)]
    low, high = min(low, *compared, high), max(high, *compared, low)
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return _Scale((first, last if last > first else first + 1.0), (low - margin, high + margin))


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
    """The lowest and the highest point of each pixel column, if it has many."""
    columns = _RIGHT - _LEFT
    if len(part) <= 2 * columns:
        return part
    drawn = []
    for chunk in np.array_split(part, columns):
        where = sorted({int(chunk[:, 1].argmin()), int(chunk[:, 1].argmax())})
        drawn += [chunk[i] for i in where]
    return np.array(drawn)


# -- SVG ------------------------------------------------------------------------------------------

_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="20"
  font-family="system-ui, sans-serif" fill="none" stroke-linejoin="round" stroke-linecap="round">
<rect width="100%" height="100%" fill="#fff"/>
<clipPath id="plot"><rect x="{left}" y="{above}" width="{across}" height="{down}"/></clipPath>
<text x="44" y="46" font-size="28" font-weight="600" fill="#262a30">{title}</text>
<g fill="#6e747c">
<text x="44" y="82">{loss_name}</text>
<text x="{right}" y="{under}" text-anchor="end">step</text>
{labels}
</g>
<path stroke="#e7e9ec" d="{grid}"/>
<path stroke="#6e747c" d="{axis}"/>
<g clip-path="url(#plot)">
{lines}
</g>
<g fill="#262a30" text-anchor="end" stroke="#fff" stroke-width="5" paint-order="stroke">
{names}
</g>
<g>
{samples}
</g>
</svg>
"""


def _svg(
    scale: _Scale, curves: list[_Curve], levels: Mapping[str, float], title: str, loss_name: str
) -> str:
    labels, grid = [], []
    axis = [f"M{_LEFT} {_BOTTOM + 0.5}H{_RIGHT}"]
    for value, label in _ticks(*scale.losses, most=7, integer=False):
        y = round(float(scale.y(value))) + 0.5
        grid.append(f"M{_LEFT} {y}H{_RIGHT}")
        labels.append(f'<text x="{_LEFT - 14}" y="{y + 7}" text-anchor="end">{label}</text>')
    for value, label in _ticks(*scale.steps, most=8, integer=True):
        x = round(float(scale.x(value))) + 0.5
        axis.append(f"M{x} {_BOTTOM}v6")
        labels.append(f'<text x="{x}" y="{_BOTTOM + 30}" text-anchor="middle">{label}</text>')
    lines, names, samples = [], [], []
    legend = [(curve.name, curve.color, 3.0, "", curve.dots) for curve in curves if curve.name]
    for name, loss in levels.items():
        y = round(float(scale.y(loss))) + 0.5
        style = f'stroke="{_LEVEL}" stroke-width="1.6" stroke-dasharray="7 6"'
        lines.append(f'<path class="level" {style} d="M{_LEFT} {y}H{_RIGHT}"/>')
        legend.append((f"{name} {loss_text(loss)}", _LEVEL, 2.0, ' stroke-dasharray="7 6"', False))
    for curve in curves:
        style = f'class="{curve.kind}" stroke="{curve.color}" stroke-width="{curve.width}"'
        for part in curve.parts:
            places = scale.points(part).round(1).tolist()
            # A line of one point has no length, and so no caps.
            points = " ".join(f"{x},{y}" for x, y in places * (1 + (len(places) == 1)))
            lines.append(f'<polyline {style} points="{points}"/>')
            lines += [_dot(x, y, curve.color) for x, y in places] * curve.dots
    # In the upper right corner: a loss falls to the lower right. Its text ends beside its sample.
    for row, (name, color, width, dashes, dots) in enumerate(legend):
        y = _TOP + 25 + 30 * row
        names.append(f'<text x="{_RIGHT - 54}" y="{y + 7}">{_text(name)}</text>')
        samples.append(f'<path stroke="{color}" stroke-width="{width}"{dashes} '
                       f'd="M{_RIGHT - 42} {y}h34"/>')  # fmt: skip
        samples += [_dot(_RIGHT - 25, y, color)] * dots
    return _SVG.format(
        width=_SIZE[0],
        height=_SIZE[1],
        left=_LEFT,
        right=_RIGHT,
        above=_TOP - 8,
        under=_BOTTOM + 64,
        across=_RIGHT - _LEFT + 8,
        down=_BOTTOM - _TOP + 9,
        title=_text(title),
        loss_name=_text(loss_name),
        grid="".join(grid),
        axis="".join(axis),
        labels="\n".join(labels),
        lines="\n".join(lines),
        names="\n".join(names),
        samples="\n".join(samples),
    )


def _dot(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x}" cy="{y}" r="5.2" fill="{color}" stroke="#fff" stroke-width="1.6"/>'


def _text(text: str) -> str:
    """Text that XML can hold: no control characters, nor halves of surrogate pairs."""
    return escape("".join(c if c.isprintable() else "\ufffd" for c in text))


# -- PNG ------------------------------------------------------------------------------------------


def _write_png(
    path: Path,
    scale: _Scale,
    curves: list[_Curve],
    levels: Mapping[str, float],
    title: str,
    loss_name: str,
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 7.2), dpi=100, layout="constrained")
    axes = figure.subplots()
    for name, loss in levels.items():
        axes.axhline(loss, color=_LEVEL, dashes=(5, 4), label=f"{name} {loss_text(loss)}")
    for curve in curves:
        # NaN separates the parts.
        points = np.concatenate([p for part in curve.parts for p in (part, [[np.nan] * 2])])
        style = {"marker": "o"} if curve.dots else {"linewidth": curve.width}
        axes.plot(*points.T, color=curve.color, label=curve.name or None, **style)
    axes.set(xlim=scale.steps, ylim=scale.losses, xlabel="step", ylabel=loss_name)
    axes.set_title(title, loc="left", parse_math=False)
    axes.grid(axis="y", alpha=0.3)
    if levels or curves:
        axes.legend(loc="upper right")
    figure.savefig(path, format="png")
