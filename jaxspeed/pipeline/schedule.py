"""Pipeline schedules (GPipe, 1F1B, interleaved) as tables of each stage's work in each tick.

K stages hold v chunks of the model each, M micro-batches pass through them. The stages go in
lockstep: in one tick each computes at most one chunk forward and at most one backward. Chunk c of
stage s is the global chunk c*K + s, so that a micro-batch goes v times around the ring of stages.
Micro-batch i computes there in the ticks

    forward                       f(i, c, s) = floor(i/K) vK + cK + (i mod K) + s
    backward, 1f1b, interleaved   b(i, c, s) = vK - 1 + floor(i/K) vK + (v-1-c) K
                                               + (i mod K) + (K-1-s)
    backward, gpipe (v = 1)       b(i, s)    = M + K - 1 + i + (K-1-s)

f grows by one from a global chunk to the next and b falls by one: each output is used by the next
stage of the ring in the very next tick, so that a stage buffers no more than one message. The
share of idle time is (K-1) / (vM + K-1): GPipe's (Huang et al. 2019), and that of Megatron-LM's
interleaved 1F1B (Narayanan et al. 2021) for v > 1.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxspeed.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b", "interleaved")


class WorkTable(NamedTuple):
    """One direction's work of each tick and stage; all three are int32 [ticks, stages]."""

    micro: np.ndarray  # the micro-batch, -1 where the stage is idle
    chunk: np.ndarray  # which of the stage's chunks, 0 where idle
    slot: np.ndarray  # where the chunk's input is saved, 0 where idle

    @property
    def busy(self) -> np.ndarray:
        """Mask of the cells that are not idle, bool [ticks, stages]."""
        return self.micro >= 0


@dataclass(frozen=True, eq=False)
class Schedule:
    """A table of ticks: the chunk, micro-batch and slot of each stage's work.

    A stage saves the input of a chunk from its forward tick to its backward tick. In a tick that
    has both, the forward writes its slot before the backward reads another.
    """

    name: str
    stages: int
    chunks: int  # of each stage
    micro_batches: int
    forward: WorkTable
    backward: WorkTable
    slots: int  # the most inputs that a stage saves at once

    @property
    def ticks(self) -> int:
        return len(self.forward.micro)

    @cached_property
    def forward_units(self) -> int:
        """The number of ticks in which any stage runs forward."""
        return int(self.forward.busy.any(axis=1).sum())

    @cached_property
    def backward_units(self) -> int:
        """The number of ticks in which any stage runs backward."""
        return int(self.backward.busy.any(axis=1).sum())

    @property
    def ideal(self) -> int:
        """The forward (or backward) ticks of a schedule without gaps: v M + K - 1."""
        return self.chunks * self.micro_batches + self.stages - 1

    @cached_property
    def bubble(self) -> float:
        """The idle fraction of the stages' time, counted in the table."""
        time = (self.forward_units + self.backward_units) * self.stages
        work = int(self.forward.busy.sum() + self.backward.busy.sum())
        return (time - work) / time

    @cached_property
    def live_inputs(self) -> int:
        """The most inputs that any stage saves in any tick."""
        return int(_live(self.forward, self.backward).max()) if self._trains else 0

    @property
    def forward_messages(self) -> int:
        """Outputs sent to another stage in one step; the last chunk's goes to the head."""
        return self._messages(self.forward)

    @property
    def backward_messages(self) -> int:
        """Gradients sent to another stage in one step; the first chunk's goes to the embedding."""
        return self._messages(self.backward)

    @cached_property
    def entering(self) -> np.ndarray:
        """The micro-batch whose first chunk runs forward in each tick, else -1; int32 [ticks]."""
        return _micro_at(self.forward, chunk=0, stage=0)

    @cached_property
    def leaving(self) -> np.ndarray:
        """The micro-batch whose head and loss run in each tick, else -1; int32 [ticks].

        They run with the backward of its last chunk, which starts from their gradient; with the
        forward where there is no backward.
        """
        work = self.backward if self._trains else self.forward
        return _micro_at(work, chunk=self.chunks - 1, stage=self.stages - 1)

    @cached_property
    def returning(self) -> np.ndarray:
        """The micro-batch whose first chunk runs backward in each tick, else -1; int32 [ticks]."""
        return _micro_at(self.backward, chunk=0, stage=0)

    def runs(self) -> dict[str, list[list[list[int]]]]:
        """The table run-length encoded: the runs of each stage, `forward` and `backward`.

        A run is [tick, chunk, micro-batch, length]: `length` micro-batches through one chunk, one
        per tick.
        """
        both = {"forward": self.forward, "backward": self.backward}
        return {
            name: [_runs(work.micro[:, s], work.chunk[:, s]) for s in range(self.stages)]
            for name, work in both.items()
        }

    @property
    def _trains(self) -> bool:
        return self.backward_units > 0

    def _messages(self, work: WorkTable) -> int:
        if self.stages == 1 or not work.busy.any():
            return 0
        return int(work.busy.sum()) - self.micro_batches


def schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The table of one training step.

    Args:
        name: One of `SCHEDULES`.
        stages: K, the devices on the `pipe` axis.
        micro_batches: M, of one step.
        chunks: v, how many chunks of the model each stage holds; more than 1 only if interleaved.

    Raises:
        ConfigError: The numbers do not make a schedule of this name.
    """
    _refuse_impossible(name, stages, micro_batches, chunks)
    forward_ticks, backward_ticks = _ticks(name, stages, micro_batches, chunks)
    ticks = int(backward_ticks.max()) + 1
    forward, backward = _work(forward_ticks, ticks), _work(backward_ticks, ticks)
    slots = _fill_slots(forward, backward)
    return _read_only(name, forward_ticks.shape, forward, backward, slots)


def forward_only(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The table of an evaluation: the forward alone, of any number of micro-batches.

    With chunks > 1 and a number of micro-batches that is no multiple of the stages, it has gaps.
    """
    forward_ticks, _ = _ticks("forward", stages, micro_batches, chunks)
    ticks = int(forward_ticks.max()) + 1
    forward, backward = _work(forward_ticks, ticks), _idle(ticks, stages)
    return _read_only("forward", forward_ticks.shape, forward, backward, slots=0)


def _ticks(name: str, K: int, M: int, v: int) -> tuple[np.ndarray, np.ndarray]:
    """f and b of the module's docstring, each [micro-batch, chunk, stage]."""
    i, c, s = np.ogrid[:M, :v, :K]
    round_start = i // K * v * K + i % K
    forward = round_start + c * K + s
    if name == "gpipe":
        return forward, M + K - 1 + i + (K - 1 - s)
    return forward, v * K - 1 + round_start + (v - 1 - c) * K + (K - 1 - s)


def _idle(ticks: int, stages: int) -> WorkTable:
    micro, chunk, slot = np.zeros((3, ticks, stages), np.int32)
    micro[:] = -1
    return WorkTable(micro, chunk, slot)


def _work(tick: np.ndarray, ticks: int) -> WorkTable:
    """The table [ticks, stages] of the ticks [micro-batch, chunk, stage]; slots are still 0."""
    work = _idle(ticks, stages=tick.shape[2])
    i, c, s = np.indices(tick.shape)
    work.micro[tick, s] = i
    work.chunk[tick, s] = c
    return work


def _live(forward: WorkTable, backward: WorkTable) -> np.ndarray:
    """The inputs that each stage has saved while each tick runs, [ticks, stages]."""
    written = np.cumsum(forward.busy, axis=0)
    read_before = np.cumsum(backward.busy, axis=0) - backward.busy
    return written - read_before


def _fill_slots(forward: WorkTable, backward: WorkTable) -> int:
    """Assign each input a slot from its forward tick to its backward tick; return their number.

    Each stage has a stack of free slots. A backward's slot is freed after its tick, so that no
    forward of the same tick overwrites the backward's input.
    """
    slots = int(_live(forward, backward).max())
    stages = forward.micro.shape[1]
    free = np.tile(np.arange(slots)[::-1], (stages, 1))  # [stages, depth of the stack]
    depth = np.full(stages, slots)
    slot_of = np.zeros((stages, forward.micro.max() + 1, forward.chunk.max() + 1), np.int32)
    for tick, (writes, reads) in enumerate(zip(forward.busy, backward.busy)):
        s = np.flatnonzero(writes)
        depth[s] -= 1
        slot = free[s, depth[s]]
        slot_of[s, forward.micro[tick, s], forward.chunk[tick, s]] = slot
        forward.slot[tick, s] = slot

        s = np.flatnonzero(reads)
        slot = slot_of[s, backward.micro[tick, s], backward.chunk[tick, s]]
        backward.slot[tick, s] = slot
        free[s, depth[s]] = slot
        depth[s] += 1
    return slots


def _runs(micro: np.ndarray, chunk: np.ndarray) -> list[list[int]]:
    runs: list[list[int]] = []
    for tick in map(int, np.flatnonzero(micro >= 0)):
        here = [tick, int(chunk[tick]), int(micro[tick])]
        if runs:
            start, through, first, length = runs[-1]
            if here == [start + length, through, first + length]:
                runs[-1][3] += 1
                continue
        runs.append([*here, 1])
    return runs


def _micro_at(work: WorkTable, chunk: int, stage: int) -> np.ndarray:
    here = work.busy[:, stage] & (work.chunk[:, stage] == chunk)
    return np.where(here, work.micro[:, stage], np.int32(-1))


def _read_only(
    name: str, shape: tuple[int, ...], forward: WorkTable, backward: WorkTable, slots: int
) -> Schedule:
    """The schedule with read-only tables, since they are shared."""
    for table in (*forward, *backward):
        table.flags.writeable = False
    micro_batches, chunks, stages = shape
    return Schedule(name, stages, chunks, micro_batches, forward, backward, slots)


def _refuse_impossible(name: str, stages: int, micro_batches: int, chunks: int) -> None:
    if name not in SCHEDULES:
        raise ConfigError(
            f"parallel.pipeline_schedule: unknown {name!r}; known: {', '.join(SCHEDULES)}"
        )
    if chunks < 1:
        raise ConfigError(
            f"parallel.pipeline_chunks is {chunks}, and each stage needs at least 1 chunk of the "
            "model; the default with the interleaved schedule is 2"
        )
    if chunks > 1 and name != "interleaved":
        raise ConfigError(
            f"parallel.pipeline_chunks is {chunks}, and the schedule {name} runs each stage as 1 "
            'chunk: set parallel.pipeline_schedule to "interleaved", or remove pipeline_chunks'
        )
    if micro_batches < stages:
        raise ConfigError(
            f"gradient_accumulation_steps is {micro_batches}, and a pipeline of {stages} stages "
            f"needs at least {stages} micro-batches: with fewer, some stage is idle at any time; "
            f"raise it to {stages} or more, or use at most {micro_batches} stages"
        )
    if name == "interleaved" and micro_batches % stages:
        below = micro_batches // stages * stages
        raise ConfigError(
            f"gradient_accumulation_steps is {micro_batches}, and the interleaved schedule of "
            f"{stages} stages needs a multiple of {stages}: set it to {below} or {below + stages}, "
            'or parallel.pipeline_schedule to "1f1b", which takes any number'
            f" from {stages}"
        )
