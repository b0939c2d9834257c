"""Pipeline cost report, from schedule and shapes alone, before anything is compiled.

K stages with v chunks each, M micro-batches; d data ranks. The stages go in lockstep through one
program (`schedule.py`): in each tick all of them pay for what any of them does. So a message, the
weights of a chunk and the head's exchange are counted once a tick, busy or not.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from jaxspeed.communication import Communication, ring_bytes
from jaxspeed.pipeline.gantt import gantt
from jaxspeed.pipeline.schedule import Schedule
from jaxspeed.placement.show import as_text, bytes_text

WIDTH = 80  # of the report as text
LEAST = 40  # columns that a chart needs

# How often a backward tick gathers each layer: to make its residuals again, and to use them.
GATHERS = {"stage": 2, "layers": 2, "save": 1}
KEPT = {
    "stage": "the rest is made again: one more forward",
    "layers": "the rest is made again, a layer at a time: two more forwards",
    "save": "all residuals are kept besides",
}


class Chart(NamedTuple):
    """A schedule drawn as wide as there is room."""

    schedule: Schedule

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(gantt(self.schedule, max(LEAST, options.max_width)), no_wrap=True)


class Gathering(NamedTuple):
    """Weights gathered in one of two ways, a device."""

    at_once: int  # bytes that are whole at a time
    communication: Communication  # of a step

    @property
    def sent(self) -> float:
        """Bytes in a step, by the formula of a ring: (d-1)/d of what is gathered."""
        return ring_bytes(self.communication)


@dataclass(frozen=True)
class PipelineReport:
    """All figures are of one device; it prints itself, the schedule as a chart first.

    Attributes:
      schedule: the ticks of one training step.
      carry: what a stage hands on of one micro-batch, as one device holds it.
      layers: of the model.
      rows: layers of a chunk, those that are padding included.
      recompute, gather: `parallel.pipeline_recompute` and `parallel.pipeline_gather`.
      data: the ranks over which ZeRO cuts.
      weight_bytes: of a stage, as its layers read them.
      gathered_bytes: what ZeRO 3 gathers of one layer; 0 where it gathers nothing.
      reduced_bytes: gradients of one layer that ZeRO 2 and 3 reduce to their parts in each tick.
      moved_bytes: weights that change stages at the begin of a step, because the stages do not
        hold them as they are stored, and gradients that go back at its end.
    """

    schedule: Schedule
    carry: tuple[jax.ShapeDtypeStruct, ...]
    layers: int
    rows: int
    recompute: str
    gather: str
    data: int
    weight_bytes: int
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    moved_bytes: int = 0

    # -- what passes between stages -------------------------------------------------------------

    @property
    def forward_bytes(self) -> int:
        """Of a message to the next stage: a chunk's output, and as much is kept of its input."""
        return _size(self.carry)

    @property
    def backward_bytes(self) -> int:
        """Of a message to the stage before: the gradient of what has one."""
        return _size([x for x in self.carry if jnp.issubdtype(x.dtype, jnp.inexact)])

    @property
    def live_bytes(self) -> int:
        """Inputs that are kept from their forward to their backward tick, at the most."""
        return self.schedule.live_inputs * self.forward_bytes

    @property
    def _between_stages(self) -> tuple[Communication, Communication]:
        """Messages on and back: one each way in a tick that has that way at all."""
        kind, plan = "collective-permute", self.schedule
        return (
            self._sends(kind, "pipe", self.forward_bytes, plan.forward_units),
            self._sends(kind, "pipe", self.backward_bytes, plan.backward_units),
        )

    @property
    def messages(self) -> int:
        """In a step."""
        return sum(one.runs for one in self._between_stages)

    @property
    def message_bytes(self) -> int:
        """In a step."""
        return sum(one.payload for one in self._between_stages)

    # -- what the stages share ------------------------------------------------------------------

    @property
    def head_ticks(self) -> int:
        """Ticks in which a micro-batch's head and loss run, on all stages."""
        return int((self.schedule.leaving >= 0).sum())

    @property
    def shared_bytes(self) -> int:
        """In a step, to and from the embedding and the head, which all stages compute together.

        The embedding's output is summed over the stages, and so is the gradient that returns to
        it; the last stage's output goes to all, and the head's gradients are summed. At the most:
        where nothing before the blocks is trained, no gradient goes there.
        """
        ends = self.head_ticks * (self.forward_bytes + self.backward_bytes)
        return ends + self.message_bytes

    # -- what padding and ZeRO add --------------------------------------------------------------

    @property
    def padding(self) -> int:
        """Layers that are none: computed, and their results dropped."""
        return self._slots - self.layers

    @property
    def slowdown(self) -> float:
        """A tick's time over that of equal parts of the layers: ceil(L / vK) / (L / vK)."""
        return self._slots / self.layers

    @property
    def gatherings(self) -> Mapping[str, Gathering]:
        """By `pipeline_gather`, what ZeRO 3 gathers: {} where it gathers nothing.

        "tick": a chunk's layers once in a forward tick and `GATHERS` times in a backward one.
        "step": a stage's layers, once.
        """
        if not self.gathered_bytes:
            return {}
        plan, chunk = self.schedule, self.rows * self.gathered_bytes
        stage = plan.chunks * chunk
        gathers = plan.forward_units + GATHERS[self.recompute] * plan.backward_units
        return {
            "tick": Gathering(
                self.gathered_bytes, self._sends("all-gather", "data", chunk, gathers)
            ),
            "step": Gathering(stage, self._sends("all-gather", "data", stage, 1)),
        }

    @property
    def reduced_sent(self) -> float:
        """In a step, for the gradients that each backward tick reduces to their parts."""
        chunk, ticks = self.rows * self.reduced_bytes, self.schedule.backward_units
        return ring_bytes(self._sends("reduce-scatter", "data", chunk, ticks))

    @property
    def moved_sent(self) -> float:
        """In a step: all but a K-th of what an all-to-all is given."""
        return ring_bytes(self._sends("all-to-all", "pipe", self.moved_bytes, 1))

    def _sends(self, kind: str, axis: str, payload: int, runs: int) -> Communication:
        size = {"pipe": self.schedule.stages, "data": self.data}[axis]
        return Communication(kind, (axis,), payload, runs, "formula", group_size=size)

    @property
    def _slots(self) -> int:
        return self.rows * self.schedule.stages * self.schedule.chunks

    # -- telling --------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """All of it as plain numbers and words, bytes in bytes."""
        plan = self.schedule
        return {
            "schedule": plan.name,
            "stages": plan.stages,
            "chunks": plan.chunks,
            "micro_batches": plan.micro_batches,
            "ticks": plan.ticks,
            "forward_ticks": plan.forward_units,
            "backward_ticks": plan.backward_units,
            "head_ticks": self.head_ticks,
            "bubble": plan.bubble,
            "live_inputs": plan.live_inputs,
            "live_bytes": self.live_bytes,
            "forward_bytes": self.forward_bytes,
            "backward_bytes": self.backward_bytes,
            "messages": self.messages,
            "message_bytes": self.message_bytes,
            "shared_bytes": self.shared_bytes,
            "layers": self.layers,
            "layers_of_a_chunk": self.rows,
            "padding": self.padding,
            "slowdown": self.slowdown,
            "recompute": self.recompute,
            "weight_bytes": self.weight_bytes,
            "gather": self.gather if self.gatherings else None,
            "gatherings": {
                name: {"at_once": found.at_once, "sent": found.sent}
                for name, found in self.gatherings.items()
            },
            "reduced_sent": self.reduced_sent,
            "moved_sent": self.moved_sent,
            "work": self.schedule.runs(),
        }

    def chart(self) -> "Chart":
        """The schedule, drawn."""
        return Chart(self.schedule)

    def costs(self) -> Table:
        """A line for each kind of cost."""
        table = Table(
            title="pipeline, per device (from the schedule and shapes)",
            title_justify="left",
            show_header=False,
            box=None,
        )
        table.add_column("what", no_wrap=True)
        table.add_column("how much")
        for name, text in self._lines():
            table.add_row(name, text)
        return table

    def __rich__(self) -> Group:
        return Group(self.chart(), Text(), self.costs())

    def __str__(self) -> str:
        return as_text(self, WIDTH)

    def _lines(self) -> list[tuple[str, str]]:
        plan, forward, back = self.schedule, self.forward_bytes, self.backward_bytes
        there, again = bytes_text(forward), bytes_text(back)
        product = f"{plan.chunks} x {plan.micro_batches}" if plan.chunks > 1 else plan.micro_batches
        formula = "(K-1) / (vM+K-1)" if plan.chunks > 1 else "(K-1) / (M+K-1)"
        lines = [
            (
                "bubble",
                f"{plan.bubble:.1%} of the time is waiting: {formula} = "
                f"{plan.stages - 1} / ({product} + {plan.stages - 1})",
            ),
            (
                "ticks",
                f"{plan.ticks}: {plan.forward_units} with a forward, {plan.backward_units} with a "
                f"backward, {self.head_ticks} with head and loss",
            ),
            (
                "live inputs",
                f"{plan.live_inputs} x {there} = {bytes_text(self.live_bytes)} at the most; "
                f"{KEPT[self.recompute]}",
            ),
            (
                "messages",
                f"{there} on and {again} back in a tick; {self.messages} a step, "
                f"{bytes_text(self.message_bytes)}",
            ),
            (
                "embedding",
                f"in a tick {there} to all stages, {again} of gradient back",
            ),
            (
                "head, loss",
                f"in each of their ticks {there} from the last stage to all, {again} of gradient "
                f"back; with the embedding {bytes_text(self.shared_bytes)} a step at the most",
            ),
        ]
        if self.padding:
            lines.append(
                (
                    "padding",
                    f"{self.padding} of {self._slots} layers: a tick takes "
                    f"{self._slots}/{self.layers} = {self.slowdown:.2f} x as long as without",
                )
            )
        count = plan.chunks * self.rows
        layers = f"{count} layer{'s' if count > 1 else ''}"
        lines.append(("weights", f"{bytes_text(self.weight_bytes)} as read, of {layers}"))
        for name, found in self.gatherings.items():
            chosen = " (chosen)" if name == self.gather else ""
            size = f"{bytes_text(found.at_once)} whole at a time"
            lines.append(
                (f"gather: {name}", f"{size}, {bytes_text(found.sent)} sent a step{chosen}")
            )
        if self.reduced_bytes:
            sent = bytes_text(self.reduced_sent)
            lines.append(("gradients", f"reduced in each backward tick: {sent} sent a step"))
        if self.moved_bytes:
            sent = bytes_text(self.moved_sent)
            lines.append(("all-to-all", f"{sent} sent a step, to the stages and back"))
        return lines


def _size(arrays: Sequence[jax.ShapeDtypeStruct]) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
