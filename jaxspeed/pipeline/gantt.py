"""Gantt chart of a schedule as text: time to the right, forward and backward rows for each stage.

    tick       0         5        10
    stage 0 F a0 1b0 1a2 3b2 3 ·
            B          ·b0 1a0 1b2 3a2 3
    stage 1 F  ·a0 1b0 1a2 3b2 3
            B         b0 1a0 1b2 3a2 3 ·

Each number is a micro-batch; the letter before it is the chunk of the stage, for it and those that
follow. A dot is a stage that is idle while others run the same direction. Where no stage runs a
direction, the tick's program omits it and the chart is blank: the dots are the bubble.
"""

from collections.abc import Sequence
from string import ascii_letters

from jaxspeed.pipeline.schedule import Schedule, WorkTable

_IDLE = "·"
_GAP = " ... "
_RULER_STEP = 5  # ticks between the numbers above the chart


def gantt(schedule: Schedule, width: int = 80) -> str:
    """The chart between a line of the schedule's numbers and a legend.

    Args:
        schedule: The schedule to draw.
        width: Columns, at least 40. Of a longer schedule the middle is omitted.
    """
    rows = {"F": schedule.forward}
    if schedule.backward_units:
        rows["B"] = schedule.backward
    stage_digits = len(str(schedule.stages - 1))
    margin = len("stage  F ") + stage_digits
    cell = len(_mark(schedule, 0)) + len(str(schedule.micro_batches - 1))
    parts = _parts(schedule.ticks, cell, columns=width - margin)

    lines = ["tick".ljust(margin) + _GAP.join(_ruler(part, cell) for part in parts)]
    for stage in range(schedule.stages):
        name = f"stage {stage:{stage_digits}} "
        for direction, work in rows.items():
            cells = (_cells(schedule, work, stage, part, cell) for part in parts)
            lines.append(f"{name}{direction} {_GAP.join(cells)}")
            name = " " * len(name)
    chart = "\n".join(line.rstrip() for line in lines)
    return "\n\n".join(
        [_wrap(_numbers(schedule), width), chart, _wrap(_legend(schedule, parts), width)]
    )


def _parts(ticks: int, cell: int, columns: int) -> tuple[range, ...]:
    """The ticks to show: all, or as many of the first and of the last as fit."""
    if ticks * cell <= columns:
        return (range(ticks),)
    room = max(2, (columns - len(_GAP)) // cell)
    first = (room + 1) // 2
    return range(first), range(ticks - (room - first), ticks)


def _ruler(part: range, cell: int) -> str:
    """The numbers of some ticks, each ending where its cell ends."""
    text = ""
    for count, tick in enumerate(part, start=1):
        room = count * cell - len(text)
        if tick % _RULER_STEP == 0 and len(str(tick)) <= room:
            text += f"{tick:{room}}"
    return text.ljust(len(part) * cell)


def _cells(schedule: Schedule, work: WorkTable, stage: int, part: range, cell: int) -> str:
    """A stage's row for one direction; a chunk's mark stands before its first micro-batch."""
    anywhere = work.micro.max(axis=1) >= 0
    text = ""
    marked = None
    for tick in part:
        if work.micro[tick, stage] >= 0:
            micro, chunk = int(work.micro[tick, stage]), int(work.chunk[tick, stage])
            label = str(micro) if chunk == marked else f"{_mark(schedule, chunk)}{micro}"
            marked = chunk
        else:
            label = _IDLE if anywhere[tick] else ""
        text += label.rjust(cell)
    return text


def _mark(schedule: Schedule, chunk: int) -> str:
    """A chunk's letter; a blank if each stage has one chunk."""
    if schedule.chunks == 1:
        return " "
    digits = len(str(schedule.chunks - 1))
    return ascii_letters[chunk] if schedule.chunks <= len(ascii_letters) else f"{chunk:{digits}}:"


def _numbers(schedule: Schedule) -> list[str]:
    chunks = f" of {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    numbers = [
        f"{schedule.name}: {_count(schedule.stages, 'stage')}{chunks}",
        _count(schedule.micro_batches, "micro-batch", "es"),
        _count(schedule.ticks, "tick"),
        f"bubble {schedule.bubble:.1%}",
    ]
    if schedule.backward_units:
        numbers.append(_count(schedule.live_inputs, "live input"))
    return numbers


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _legend(schedule: Schedule, parts: tuple[range, ...]) -> list[str]:
    legend = ["F forward", "B backward"] if schedule.backward_units else ["F forward"]
    legend.append(f"{_IDLE} idle")
    if schedule.chunks > 1:
        first, last = _mark(schedule, 0).strip(), _mark(schedule, schedule.chunks - 1)
        legend.append(f"{first} to {last} the chunks of a stage")
    if len(parts) > 1:
        legend.append(f"... {_count(parts[1].start - parts[0].stop, 'tick')} omitted")
    return legend


def _wrap(items: Sequence[str], width: int) -> str:
    """The items separated by commas, with line breaks between items."""
    lines = [items[0]]
    for item in items[1:]:
        if len(f"{lines[-1]}, {item},") <= width:
            lines[-1] += f", {item}"
        else:
            lines[-1] += ","
            lines.append(item)
    return "\n".join(lines)
