"""The loss picture and the sparkline: what is drawn is where the numbers are."""

import math
import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.metrics import draw_loss, loss_curve, sparkline
from jaxspeed.metrics.format import clock_text, count_text, duration_text, loss_text

pytestmark = pytest.mark.fast
LEFT, TOP, RIGHT, BOTTOM = 104, 104, 1236, 640
SVG = "{http://www.w3.org/2000/svg}"


def drawn(folder, *args, **how):
    """The picture taken apart: lines by kind, each [[points, 2] a part]; dots; texts."""
    draw_loss(folder / "loss.svg", *args, **how)
    assert [p.name for p in folder.iterdir()] == ["loss.svg"]
    root = ET.parse(folder / "loss.svg").getroot()
    assert root.get("viewBox") == "0 0 1280 720"
    lines = {}
    for line in root.iter(SVG + "polyline"):
        points = [[float(x) for x in point.split(",")] for point in line.get("points").split()]
        lines.setdefault(line.get("class"), []).append(np.array(points))
    return SimpleNamespace(
        lines=lines,
        dots=[(float(e.get("cx")), float(e.get("cy"))) for e in root.iter(SVG + "circle")],
        levels=[e.get("d") for e in root.iter(SVG + "path") if e.get("class") == "level"],
        texts=[e.text for e in root.iter(SVG + "text")],
    )


def test_a_straight_loss_is_a_straight_line_across_the_plot(tmp_path):
    found = drawn(tmp_path, [(s, 4 - 3 * s / 40) for s in range(41)], title="a <b> & \x00")
    ((x, y),) = (part.T for part in found.lines["train"])
    assert x == pytest.approx(np.linspace(LEFT, RIGHT, 41), abs=0.06)
    # y grows downwards: the loss fell by 92 % of the plot's height.
    assert y == pytest.approx(
        TOP + (BOTTOM - TOP) * (0.04 + np.linspace(0, 1, 41)) / 1.08, abs=0.06
    )
    assert "a <b> & \ufffd" in found.texts and "training 1.000" in found.texts
    assert not found.dots


def test_held_out_losses_are_dots_at_their_step(tmp_path):
    found = drawn(tmp_path, [(s, 3.0) for s in range(101)], [(25, 2.0), (50, 4.0)])
    for (step, loss), dot in zip(((25, 2.0), (50, 4.0)), found.dots):
        x = LEFT + step / 100 * (RIGHT - LEFT)
        y = BOTTOM - (loss - 1.92) / 2.16 * (BOTTOM - TOP)
        assert dot == pytest.approx((x, y), abs=0.06)
    assert len(found.lines["held-out"]) == 1 and "held out 4.000" in found.texts


def test_a_gap_is_left_where_the_loss_is_not_finite(tmp_path):
    losses = [(s, math.nan if 40 <= s <= 60 else 2.0 + s / 100) for s in range(101)]
    before, after = drawn(tmp_path, losses).lines["train"]
    per_step = (RIGHT - LEFT) / 100
    assert before[-1, 0] == pytest.approx(LEFT + 39 * per_step, abs=0.06)
    assert after[0, 0] == pytest.approx(LEFT + 61 * per_step, abs=0.06)


def test_a_spike_does_not_flatten_the_curve(tmp_path):
    losses = [(s, 1e6 if s == 500 else 4 - 3 * s / 1000) for s in range(1001)]
    ((_, y),) = (part.T for part in drawn(tmp_path, losses).lines["train"])
    assert np.ptp(y) > 0.5 * (BOTTOM - TOP)


def test_a_level_to_compare_with_is_a_dashed_line_in_sight(tmp_path):
    levels = {"unigram entropy": 3.0, "unknown": math.nan}
    found = drawn(tmp_path, [(s, 1.0) for s in range(50)], levels=levels)
    (path,) = found.levels
    left, y, right = map(float, re.fullmatch(r"M(\S+) (\S+)H(\S+)", path).groups())
    assert (left, right) == (LEFT, RIGHT)
    assert TOP < y < TOP + 40  # above the curve, within the plot
    assert "unigram entropy 3.000" in found.texts


def test_a_long_run_is_drawn_as_its_envelope_and_its_mean(tmp_path):
    rng = np.random.default_rng(0)
    noise = rng.uniform(-1, 1, 100_000)
    found = drawn(tmp_path, [(s, 5 + float(n)) for s, n in enumerate(noise)])
    ((pale,), (mean,)) = found.lines["each"], found.lines["train"]
    assert np.ptp(pale[:, 1]) > 0.85 * (BOTTOM - TOP)
    middle = mean[mean[:, 0] > LEFT + 100]
    assert np.ptp(middle[:, 1]) < 0.1 * (BOTTOM - TOP)
    assert len(pale) <= 2 * (RIGHT - LEFT)


def test_a_png_is_drawn_by_matplotlib(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    train = [(s, math.nan if s == 70 else 4 - 3 * s / 100) for s in range(101)]
    how = {"title": "$a_", "levels": {"unigram entropy": 2.0}}
    draw_loss(tmp_path / "loss.png", train, [(50, 2.0)], **how)
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]
    picture = image.imread(tmp_path / "loss.png")
    assert picture.shape[:2] == (720, 1280)
    for color in (loss_curve._TRAIN, loss_curve._HELD_OUT, loss_curve._LEVEL):
        rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(picture[..., :3] - rgb).max(axis=-1) < 0.02).sum() > 50


losses = st.lists(
    st.one_of(st.floats(allow_nan=True, allow_infinity=True, width=32), st.just(2.0)), max_size=6
)


@settings(max_examples=60)
@given(losses, losses)
def test_any_losses_make_a_picture(tmp_path_factory, train, held_out):
    folder = tmp_path_factory.mktemp("picture")
    found = drawn(folder, list(enumerate(train)), list(enumerate(held_out)), "any")
    finite = any(map(math.isfinite, train)), any(map(math.isfinite, held_out))
    assert ("train" in found.lines, "held-out" in found.lines) == finite
    for parts in found.lines.values():
        assert all(len(part) > 1 and np.isfinite(part).all() for part in parts)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 600.0, ["0", "100", "200", "300", "400", "500", "600"]),
        (0.0, 3.0, ["0", "1", "2", "3"]),
        (0.0, 200_000.0, ["0", "25k", "50k", "75k", "100k", "125k", "150k", "175k", "200k"]),
        (0.0, 4_000_000.0, ["0", "500k", "1M", "1.5M", "2M", "2.5M", "3M", "3.5M", "4M"]),
    ],
)
def test_step_labels_are_integers_and_short(low, high, labels):
    assert [label for _, label in loss_curve._ticks(low, high, most=8, integer=True)] == labels


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_ticks_are_round_evenly_spaced_and_distinct(low, size):
    ticks = loss_curve._ticks(low, low + size, most=7, integer=False)
    values = [value for value, _ in ticks]
    assert 2 <= len(ticks) <= 8
    assert all(low - 1e-9 <= value <= low + size + 1e-9 for value in values)
    assert np.allclose(np.diff(values), values[1] - values[0])
    assert len({label for _, label in ticks}) == len(ticks)
    for value, label in ticks:
        assert float(label) == pytest.approx(value, abs=1e-6 * size)


# -- in one line of text ------------------------------------------------------------------------


def test_a_sparkline_falls_as_its_values_do():
    assert sparkline(list(range(8, 0, -1)), 8) == "█▇▆▅▄▃▂▁"


def test_a_long_curve_is_the_means_of_its_parts():
    assert sparkline([0.0] * 50 + [3.5] * 50 + [7.0] * 50, 3) == "▁▅█"
    assert len(sparkline([float(n % 7) for n in range(1000)], 60)) == 60
    assert len(sparkline([1.0, 2.0], 60)) == 2


def test_a_sparkline_of_nothing_of_one_value_and_of_nan():
    assert sparkline([], 10) == ""
    assert sparkline([3.0, 3.0], 10) == "▁▁"
    assert sparkline([1.0, math.nan, math.inf, 2.0], 10) == "▁××█"


# -- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (count_text, 0, "0"),
        (count_text, 999, "999"),
        (count_text, 999.6, "1.00k"),
        (count_text, 12.345, "12.3"),
        (count_text, 12_345, "12.3k"),
        (count_text, 999_499, "999k"),
        (count_text, 999_501, "1.00M"),
        (count_text, 9.996, "10.0"),
        (clock_text, 0.4, "0:00"),
        (clock_text, 59.6, "1:00"),
        (clock_text, 3 * 3600 + 62, "3:01:02"),
        (clock_text, 50 * 3600 + 60, "2d 02:01"),
        (duration_text, 0.123, "0.12 s"),
        (duration_text, 9.996, "10.0 s"),
        (duration_text, 600, "10:00"),
        (loss_text, 0.0, "0.0000"),
        (loss_text, 0.98765, "0.9877"),
        (loss_text, 6.77205, "6.772"),
        (loss_text, 10.8249, "10.82"),
        (loss_text, 12345.6, "12346"),
        (loss_text, 1.5e7, "1.50e+07"),
        (loss_text, 0.000123, "1.23e-04"),
        (loss_text, math.inf, "inf"),
    ],
)
def test_numbers_are_short(function, value, text):
    assert function(value) == text
