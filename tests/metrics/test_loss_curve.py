"""The loss picture and the sparkline: what is drawn is where the numbers are."""

import math
import string
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.metrics import draw_loss, loss_curve, sparkline
from jaxspeed.metrics.canvas import Canvas
from jaxspeed.metrics.format import clock_text, count_text, duration_text, loss_text
from jaxspeed.metrics.stroke_font import text_strokes, text_width

pytestmark = pytest.mark.fast


def pixels_of(path):
    """A PNG taken apart by its specification: [height, width, 3]."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (
            zlib.crc32(kind + body),
        )
        chunks[kind] = body
        at += 12 + size
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *kind = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert kind == [8, 2, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()  # no row is filtered
    return rows[:, 1:].reshape(height, width, 3)


def drawn(tmp_path, *args, **how):
    draw_loss(tmp_path / "loss.png", *args, **how)
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]
    return pixels_of(tmp_path / "loss.png")


def where(pixels, color):
    """[n, 2] of (x, y) within the plot, the legend's corner left out."""
    found = np.argwhere(np.abs(pixels.astype(int) - color).max(axis=-1) < 24)[:, ::-1]
    x, y = found.T
    inside = (x >= loss_curve._LEFT) & (x <= loss_curve._RIGHT) & (y > loss_curve._TOP - 9)
    legend = (x > loss_curve._RIGHT - 330) & (y < loss_curve._TOP + 110)
    return found[inside & (y < loss_curve._BOTTOM) & ~legend]


def test_a_straight_loss_is_a_straight_line_across_the_plot(tmp_path):
    found = where(drawn(tmp_path, [(s, 4 - 3 * s / 40) for s in range(41)]), loss_curve._TRAIN)
    x, y = found.T
    slope, start = np.polyfit(x, y, 1)
    assert np.abs(y - slope * x - start).max() < 2.5
    assert x.min() <= loss_curve._LEFT + 1 and x.max() >= loss_curve._RIGHT - 2
    # y grows downwards: the loss fell by 92 % of the plot's height.
    assert slope * (loss_curve._RIGHT - loss_curve._LEFT) == pytest.approx(536 / 1.08, rel=0.01)


def test_held_out_losses_are_dots_at_their_step(tmp_path):
    train = [(s, 3.0) for s in range(101)]
    found = where(drawn(tmp_path, train, [(25, 2.0), (50, 4.0)]), loss_curve._HELD_OUT)
    for step, loss in ((25, 2.0), (50, 4.0)):
        x = loss_curve._LEFT + step / 100 * (loss_curve._RIGHT - loss_curve._LEFT)
        y = loss_curve._BOTTOM - (loss - 1.92) / 2.16 * (loss_curve._BOTTOM - loss_curve._TOP)
        assert (np.hypot(*(found - (x, y)).T) < 4).sum() > 20


def test_a_gap_is_left_where_the_loss_is_not_finite(tmp_path):
    losses = [(s, math.nan if 40 <= s <= 60 else 2.0 + s / 100) for s in range(101)]
    x, _ = where(drawn(tmp_path, losses), loss_curve._TRAIN).T
    per_step = (loss_curve._RIGHT - loss_curve._LEFT) / 100
    left, right = loss_curve._LEFT + 39 * per_step, loss_curve._LEFT + 61 * per_step
    assert not ((x > left + 3) & (x < right - 3)).any()
    assert (x < left).any() and (x > right).any()


def test_a_spike_does_not_flatten_the_curve(tmp_path):
    losses = [(s, 1e6 if s == 500 else 4 - 3 * s / 1000) for s in range(1001)]
    _, y = where(drawn(tmp_path, losses), loss_curve._TRAIN).T
    assert y.max() - y.min() > 0.5 * (loss_curve._BOTTOM - loss_curve._TOP)


def test_a_level_to_compare_with_is_a_dashed_line_in_sight(tmp_path):
    pixels = drawn(tmp_path, [(s, 1.0) for s in range(50)], levels={"unigram entropy": 3.0})
    found = where(pixels, loss_curve._LEVEL)
    rows, counts = np.unique(found[:, 1], return_counts=True)
    y = rows[counts.argmax()]
    assert loss_curve._TOP < y < loss_curve._TOP + 40  # above the curve, within the plot
    assert 0.3 < counts.max() / (loss_curve._RIGHT - loss_curve._LEFT) < 0.7


def test_a_long_run_is_drawn_as_its_envelope_and_its_mean(tmp_path):
    rng = np.random.default_rng(0)
    noise = rng.uniform(-1, 1, 100_000)
    pixels = drawn(tmp_path, [(s, 5 + float(n)) for s, n in enumerate(noise)])
    pale, mean = where(pixels, loss_curve._TRAIN_EACH), where(pixels, loss_curve._TRAIN)
    height = loss_curve._BOTTOM - loss_curve._TOP
    assert np.ptp(pale[:, 1]) > 0.85 * height
    middle = mean[mean[:, 0] > loss_curve._LEFT + 100]
    assert np.ptp(middle[:, 1]) < 0.1 * height


losses = st.lists(
    st.one_of(st.floats(allow_nan=True, allow_infinity=True, width=32), st.just(2.0)), max_size=6
)


@settings(max_examples=10)
@given(losses, losses)
def test_any_losses_make_a_picture(tmp_path_factory, train, held_out):
    path = tmp_path_factory.mktemp("picture") / "loss.png"
    draw_loss(path, list(enumerate(train)), list(enumerate(held_out)), "any")
    assert pixels_of(path).shape == (720, 1280, 3)


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


def test_every_printable_character_has_a_shape_of_its_own():
    empty_box = text_strokes("漢", 0, 0, 20)
    shapes = set()
    for letter in string.printable[:94]:
        strokes = text_strokes(letter, 0, 0, 20)
        assert len(strokes) != len(empty_box) or not np.array_equal(strokes[0], empty_box[0])
        shapes.add(b"|".join(stroke.round(3).tobytes() for stroke in strokes))
        low = min(stroke[:, 0].min() for stroke in strokes)
        high = max(stroke[:, 0].max() for stroke in strokes)
        assert low > -2 and high <= text_width(letter, 20) + 0.5
    assert len(shapes) == 94


def test_a_stroke_covers_its_area_and_crossings_are_not_darker():
    canvas = Canvas(40, 40)
    across = np.array([[5.0, 20.0], [35.0, 20.0]])
    canvas.stroke([across, across[:, ::-1]], (0, 0, 0), 4, opacity=0.5)
    covered = (255 - canvas._pixels[..., 0]) / 255
    assert covered.max() == pytest.approx(0.5)
    assert covered.sum() == pytest.approx(0.5 * (2 * 30 * 4 - 16 + 2 * math.pi * 4), rel=0.02)


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
