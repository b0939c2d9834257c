"""Page section: a pipeline's schedule as a Gantt chart, a forward and a backward row per stage."""

from collections.abc import Iterator, Sequence
from string import ascii_letters
from typing import Any

from jaxspeed.planner.page.figures import Figures
from jaxspeed.planner.page.markup import Children, Markup, section, tag

MOST_STAGES = 32  # beyond that only the first and last are drawn
SHOWN_ENDS = (12, 6)
MOST_CELLS = 6000  # beyond that consecutive micro-batches are drawn as one cell
MOST_TICKS_NUMBERED = 48  # beyond that cells are too narrow for numbers
_HEAD = 20  # above the first row, for the ticks' numbers


def pipeline(figures: Figures) -> Markup | None:
    if not figures.get("pipeline", "work"):
        return None
    return section(
        "schedule",
        "Schedule",
        _lead(figures),
        _chart(figures),
        _legend(figures),
        _costs(figures),
    )


def _lead(figures: Figures) -> Children:
    return [
        tag("b", figures.get("pipeline", "schedule")),
        ": ",
        [figures.shown("count", "pipeline", "micro_batches"), " micro-batches pass "],
        [figures.shown("count", "pipeline", "stages"), " stages in "],
        [figures.shown("count", "pipeline", "ticks"), " ticks; the bubble is "],
        [figures.shown("percent", "pipeline", "bubble"), " of the time."],
    ]


def _chart(figures: Figures) -> Markup:
    found = figures.get("pipeline")
    stages = list(_stages(found["stages"]))
    pass_height = 11 if found["stages"] <= 8 else 7 if found["stages"] <= 16 else 4
    row = 2 * pass_height + 5
    busy = sum(run[3] for direction in found["work"].values() for runs in direction for run in runs)
    cells = busy <= MOST_CELLS
    height = _HEAD + row * len(stages)
    labels, drawn = [], [_ruler(found["ticks"], height)]
    every = 1 if row >= 15 else 2
    for number, stage in enumerate(stages):
        top = _HEAD + number * row
        if stage is None:
            labels.append(tag("span", "⋯", style=f"top:{top}px;height:{row}px"))
            continue
        if number % every == 0:
            labels.append(tag("span", f"{stage}", style=f"top:{top}px;height:{row}px"))
        drawn.append(_stage(found, stage, top, pass_height, cells))
    return tag(
        "div",
        tag("div", tag("span", "stage", cls="head"), labels, cls="stages"),
        tag("svg", drawn, height=height, width="100%", role="img", aria_label=_said(found)),
        cls="gantt",
        style=f"height:{height}px",
    )


def _said(found: dict[str, Any]) -> str:
    return (
        f"schedule {found['schedule']}: {found['stages']} stages, {found['micro_batches']} "
        f"micro-batches, {found['ticks']} ticks"
    )


def _stages(count: int) -> Iterator[int | None]:
    """The stages to draw; None where some are omitted."""
    if count <= MOST_STAGES:
        yield from range(count)
        return
    first, last = SHOWN_ENDS
    yield from range(first)
    yield None
    yield from range(count - last, count)


def _ruler(ticks: int, height: int) -> Markup:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if ticks / s <= 8)
    marks = []
    for tick in range(0, ticks, step):
        at = f"{tick / ticks:.3%}"
        marks.append(tag("line", x1=at, x2=at, y1=14, y2=height, cls="rule"))
        marks.append(tag("text", tick, x=at, y=11, dx=3 if tick == 0 else 2))
    return tag("g", marks, cls="ruler", aria_hidden="true")


def _stage(found: dict[str, Any], stage: int, top: int, pass_height: int, cells: bool) -> Markup:
    ticks, work = found["ticks"], found["work"]
    drawn, busy = [], {}
    for number, direction in enumerate(("forward", "backward")):
        runs = work[direction][stage]
        busy[direction] = sum(run[3] for run in runs)
        y = top + number * (pass_height + 1)
        if runs:
            drawn.append(
                tag(
                    "rect",
                    x=0,
                    y=y,
                    width="100%",
                    height=pass_height,
                    cls="idle",
                    aria_hidden="true",
                )
            )
        drawn += _pass(runs, ticks, y, pass_height, direction[0], found["chunks"], cells)
    tip = f"stage {stage}\n{busy['forward']} ticks forward, {busy['backward']} backward, of {ticks}"
    return tag(
        "g",
        drawn,
        tabindex=0,
        data_tip=tip,
        role="img",
        aria_label=tip.replace("\n", ": "),
    )


def _pass(
    runs: Sequence[Sequence[int]],
    ticks: int,
    y: int,
    height: int,
    direction: str,
    chunks: int,
    cells: bool,
) -> Iterator[Markup]:
    numbered = ticks <= MOST_TICKS_NUMBERED and height >= 11
    for tick, chunk, micro, length in runs:
        spans = (
            [(tick + i, micro + i, 1) for i in range(length)] if cells else [(tick, micro, length)]
        )
        for at, which, long in spans:
            style = f"{direction}{chunk % 4 if chunks > 1 else which % 2}"
            x, width = f"{at / ticks:.3%}", f"{long / ticks:.3%}"
            yield tag("rect", x=x, y=y, width=width, height=height, cls=style)
            if numbered:
                middle = f"{(at + 0.5) / ticks:.3%}"
                text = f"{ascii_letters[chunk % 52]}{which}" if chunks > 1 else which
                yield tag("text", text, x=middle, y=y + height - 2.5, cls="mb")


def _legend(figures: Figures) -> Markup:
    chunks = figures.get("pipeline", "chunks") or 1
    if chunks > 1:
        letters = ", ".join(ascii_letters[i] for i in range(min(chunks, 4)))
        shades = f"shades: the {chunks} chunks of a stage ({letters}{' ...' if chunks > 4 else ''})"
    else:
        shades = "light and dark: alternating micro-batches"
    return tag(
        "p",
        tag("span", tag("i", cls="swatch f0"), "forward (upper row)"),
        tag("span", tag("i", cls="swatch b0"), "backward (lower row)"),
        tag("span", tag("i", cls="swatch idle"), "idle"),
        tag("span", shades),
        cls="legend",
    )


def _costs(figures: Figures) -> Markup:
    rows = (
        ("layers", "count", "layers_of_a_chunk", "per chunk"),
        ("saved inputs", "count", "live_inputs", "at the peak"),
        ("their bytes", "bytes", "live_bytes", "per device"),
        ("forward message", "bytes", "forward_bytes", "per micro-batch, to the next stage"),
        ("backward message", "bytes", "backward_bytes", "per micro-batch, its gradient"),
        ("messages", "bytes", "message_bytes", "sent per device and step"),
        ("embedding, head", "bytes", "shared_bytes", "between all stages per step, at most"),
    )
    return tag(
        "dl",
        [
            tag(
                "div",
                tag("dt", name),
                tag("dd", figures.shown(form, "pipeline", key), tag("small", says)),
            )
            for name, form, key, says in rows
        ],
        cls="facts",
    )
