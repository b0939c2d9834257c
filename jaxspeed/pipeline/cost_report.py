"""Pipeline cost report, from schedule and shapes alone, before anything is compiled.

K stages with v chunks each, M micro-batches; d data ranks. The stages run one program in lockstep
(`schedule.py`): a tick costs all of them the work of any of them. So a message, the weights of a
chunk and the head's communication are counted once a tick, busy or not.
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

from jaxspeed.axes import PIPE
from jaxspeed.communication import Communication, ring_bytes
from jaxspeed.jaxpr.flops import nbytes
from jaxspeed.pipeline.gantt import gantt
from jaxspeed.pipeline.schedule import Schedule
from jaxspeed.placement.show import as_text, bytes_text

WIDTH = 80  # of the report as text
MIN_WIDTH = 40  # of a chart, in columns

# Gathers of each layer in a backward tick: to recompute its residuals, and to use them.
GATHERS = {"stage": 2, "layers": 2, "save": 1}
SAVED_TEXT = {
    "stage": "residuals are recomputed: one more forward",
    "layers": "residuals are recomputed layer by layer: two more forwards",
    "save": "all residuals are saved too",
}


class Chart(NamedTuple):
    """A schedule drawn at the console's width."""

    schedule: Schedule

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(gantt(self.schedule, max(MIN_WIDTH, options.max_width)), no_wrap=True)


class WeightGathers(NamedTuple):
    """Weights gathered with one setting of `pipeline_gather`, per device."""

    at_once: int  # bytes that are gathered at the same time
    communication: Communication  # of a step

    @property
    def sent(self) -> float:
        """Bytes sent in a step, by the ring formula: (d-1)/d of what is gathered."""
        return ring_bytes(self.communication)


@dataclass(frozen=True)
class PipelineReport:
    """Pipeline costs per device; printed as a chart of the schedule and a table.

    Attributes:
      schedule: the ticks of one training step.
      carry: a device's shard of the activations sent between stages, for one micro-batch.
      layers: of the model.
      rows: layers of a chunk, padding included.
      recompute, gather: `parallel.pipeline_recompute` and `parallel.pipeline_gather`.
      stored_over: the axes over which ZeRO shards, with their sizes.
      weight_bytes: of a stage, as its layers read them.
      gathered_bytes: of one layer, gathered by ZeRO 3; 0 without.
      reduced_bytes: gradients of one layer that ZeRO 2 and 3 reduce-scatter in each tick.
      moved_bytes: weights sent to their stages at the start of a step, where they are stored in
        another layout, and gradients sent back at its end.
      unlike: the stages have unlike blocks, and room for the largest.
    """

    schedule: Schedule
    carry: tuple[jax.ShapeDtypeStruct, ...]
    layers: int
    rows: int
    recompute: str
    gather: str
    stored_over: Mapping[str, int]
    weight_bytes: int
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    moved_bytes: int = 0
    unlike: bool = False

    # -- messages between stages ----------------------------------------------------------------

    @property
    def forward_bytes(self) -> int:
        """Bytes of a message to the next stage; a chunk's saved input is as large."""
        return _size(self.carry)

    @property
    def backward_bytes(self) -> int:
        """Bytes of a message to the stage before: the gradients of the floating arrays."""
        return _size([x for x in self.carry if jnp.issubdtype(x.dtype, jnp.inexact)])

    @property
    def live_bytes(self) -> int:
        """Peak bytes of inputs saved from their forward to their backward tick."""
        return self.schedule.live_inputs * self.forward_bytes

    @property
    def _between_stages(self) -> tuple[Communication, Communication]:
        """Messages in both directions, one in each tick that has that direction."""
        kind, plan = "collective-permute", self.schedule
        return (
            self._sends(kind, self._over_stages, self.forward_bytes, plan.forward_units),
            self._sends(kind, self._over_stages, self.backward_bytes, plan.backward_units),
        )

    @property
    def messages(self) -> int:
        """Messages of a step: one per direction in each tick that has that direction."""
        return sum(message.runs for message in self._between_stages)

    @property
    def message_bytes(self) -> int:
        """Bytes of a step's messages."""
        return sum(message.payload for message in self._between_stages)

    # -- embedding and head ---------------------------------------------------------------------

    @property
    def head_ticks(self) -> int:
        """Ticks in which head and loss of a micro-batch run, on all stages."""
        return int((self.schedule.leaving >= 0).sum())

    @property
    def shared_bytes(self) -> int:
        """Bytes of a step to and from the embedding and the head, which all stages compute.

        The embedding's output is summed over the stages, and so is the gradient that returns to
        it; the last stage's output goes to all, and the head's gradients are summed. An upper
        bound: where nothing before the blocks is trained, no gradient is sent there.
        """
        ends = self.head_ticks * (self.forward_bytes + self.backward_bytes)
        return ends + self.message_bytes

    # -- padding and ZeRO -----------------------------------------------------------------------

    @property
    def padding(self) -> int:
        """Padding layers: computed, and their results dropped."""
        return self._slots - self.layers

    @property
    def slowdown(self) -> float:
        """A tick's time relative to evenly divided layers: ceil(L / vK) / (L / vK)."""
        return self._slots / self.layers

    @property
    def gatherings(self) -> Mapping[str, WeightGathers]:
        """ZeRO 3's gathers by `pipeline_gather`; {} without.

        "tick": a chunk's layers once in a forward tick and `GATHERS` times in a backward one.
        "step": a stage's layers, once.
        """
        if not self.gathered_bytes:
            return {}
        plan, chunk = self.schedule, self.rows * self.gathered_bytes
        stage = plan.chunks * chunk
        gathers = plan.forward_units + GATHERS[self.recompute] * plan.backward_units
        return {
            "tick": WeightGathers(
                self.gathered_bytes, self._sends("all-gather", self.stored_over, chunk, gathers)
            ),
            "step": WeightGathers(stage, self._sends("all-gather", self.stored_over, stage, 1)),
        }

    @property
    def reduced_sent(self) -> float:
        """Bytes sent in a step to reduce-scatter gradients in each backward tick."""
        chunk, ticks = self.rows * self.reduced_bytes, self.schedule.backward_units
        return ring_bytes(self._sends("reduce-scatter", self.stored_over, chunk, ticks))

    @property
    def moved_sent(self) -> float:
        """Bytes sent in a step by the all-to-alls: (K-1)/K of their input."""
        return ring_bytes(self._sends("all-to-all", self._over_stages, self.moved_bytes, 1))

    @property
    def _over_stages(self) -> Mapping[str, int]:
        return {PIPE: self.schedule.stages}

    def _sends(self, kind: str, over: Mapping[str, int], payload: int, runs: int) -> Communication:
        size = math.prod(over.values())
        return Communication(kind, tuple(over), payload, runs, "formula", group_size=size)

    @property
    def _slots(self) -> int:
        return self.rows * self.schedule.stages * self.schedule.chunks

    # -- output ---------------------------------------------------------------------------------

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
                name: {"at_once": gathering.at_once, "sent": gathering.sent}
                for name, gathering in self.gatherings.items()
            },
            "reduced_sent": self.reduced_sent,
            "moved_sent": self.moved_sent,
            "work": self.schedule.runs(),
        }

    def chart(self) -> "Chart":
        """The schedule as a chart."""
        return Chart(self.schedule)

    def costs(self) -> Table:
        """The costs as a table, a line for each kind."""
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
                f"{plan.bubble:.1%} of the time is idle: {formula} = "
                f"{plan.stages - 1} / ({product} + {plan.stages - 1})",
            ),
            (
                "ticks",
                f"{plan.ticks}: {plan.forward_units} with a forward, {plan.backward_units} with a "
                f"backward, {self.head_ticks} with head and loss",
            ),
            (
                "live inputs",
                f"{plan.live_inputs} x {there} = {bytes_text(self.live_bytes)} at peak; "
                f"{SAVED_TEXT[self.recompute]}",
            ),
            (
                "messages",
                f"{there} forward and {again} back per tick; {self.messages} per step, "
                f"{bytes_text(self.message_bytes)}",
            ),
            (
                "embedding",
                f"{there} to all stages per tick, {again} of gradient back",
            ),
            (
                "head, loss",
                f"{there} from the last stage to all in each of their ticks, {again} of gradient "
                f"back; with the embedding at most {bytes_text(self.shared_bytes)} per step",
            ),
        ]
        if self.padding:
            lines.append(
                (
                    "padding",
                    f"{self.padding} of {self._slots} layers: a tick takes "
                    f"{self._slots}/{self.layers} = {self.slowdown:.2f} x the time without",
                )
            )
        count = plan.chunks * self.rows
        layers = "the largest stage" if self.unlike else f"{count} layer{'s' if count > 1 else ''}"
        lines.append(("weights", f"{bytes_text(self.weight_bytes)} as read, of {layers}"))
        for name, gathers in self.gatherings.items():
            chosen = " (chosen)" if name == self.gather else ""
            size = f"{bytes_text(gathers.at_once)} gathered at a time"
            lines.append(
                (f"gather: {name}", f"{size}, {bytes_text(gathers.sent)} sent per step{chosen}")
            )
        if self.reduced_bytes:
            sent = bytes_text(self.reduced_sent)
            lines.append(("gradients", f"reduced in each backward tick: {sent} sent per step"))
        if self.moved_bytes:
            sent = bytes_text(self.moved_sent)
            lines.append(("all-to-all", f"{sent} sent per step, to the stages and back"))
        return lines


def _size(arrays: Sequence[jax.ShapeDtypeStruct]) -> int:
    return sum(map(nbytes, arrays))
