"""The batching of generation: which texts are computed together, and what refills finished rows.

A group is a batch of one shape with caches of its own. It draws a segment of tokens in one call;
at the segment's end finished rows are refilled (continuous batching, as in Orca, OSDI 2022), while
the devices compute another group. Starts are computed in batches of a group's shape, for all
generations of a prompt once, and their rows of the caches copied into free ones of the same data
rank. So what a row computes depends on its own text, and not on what else is in the batch.

A model sees at most `context` tokens. A text that outgrows it is continued from its last half, so
that the cache is filled again once for `context / 2` tokens.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxspeed.generation.decode_programs import (
    NO_TOKEN,
    UNDRAWN,
    DecodeRows,
    Draws,
    ForwardPrograms,
    rows_for_jit,
)
from jaxspeed.generation.sampling_rules import Drawn
from jaxspeed.generation.text_row import TextRow
from jaxspeed.objectives.padding import bucket
from jaxspeed.train.gather_once import GatherOnce, ModelState
from jaxspeed.train_state.staged_init import compile_ahead
from jaxspeed.train_state.state import TrainState


class Runs:
    """Calls of the programs with a model's state."""

    def __init__(self, once: GatherOnce, state: TrainState) -> None:
        self._once = once
        self._stored = ModelState.of(once.program, state)
        self._gather_compiled = once.compile_ahead()
        self._compiled: Callable[[], Any] = lambda: None

    @cached_property
    def state(self) -> ModelState:
        self._gather_compiled()
        return self._once(self._stored)

    def compile_ahead(self, function: Any, *args: Any) -> None:
        """Start to compile a program for a call with these arguments; the next call waits."""
        placed = rows_for_jit(self._once.program, *args)
        self._compiled = compile_ahead(
            self._once.program.mesh, function, self._once.shapes, *placed
        )

    def __call__(self, function: Any, *args: Any) -> Any:
        self._compiled()
        return function(self.state, *args)


@dataclass(frozen=True)
class GroupShape:
    """The shape of all batches of a request.

    Attributes:
      rows: of a group.
      ranks: data ranks, over which they are sharded in order.
      length: of the text of a row.
      context: tokens that the model sees at most.
      folds: numbers of a row that its draws are of.
      seen: of the text that a repetition penalty is for; 0 without one.
      patches: the most that the images of a text have.
    """

    rows: int
    ranks: int
    length: int
    context: int
    folds: int
    seen: int = 0
    patches: int = 0

    def arrays(self, text_rows: Sequence[TextRow | None], width: int | None = None) -> DecodeRows:
        """The arrays of a group; rows without a text are at their end."""
        rows = self.rows
        zeros = np.zeros((6, rows), np.int32)
        text = np.zeros((rows, width or self.length), np.int32)
        folds = np.zeros((rows, self.folds), np.int32)
        length, place, left, drawn, prompt, _ = zeros
        seen = np.full((rows, self.seen), NO_TOKEN, np.int32) if self.seen else None
        for number, row in enumerate(text_rows):
            if row is None:
                continue
            visible = row.visible
            text[number, : len(visible)], length[number] = visible[: text.shape[1]], len(visible)
            place[number], left[number] = row.place, row.left(self.context)
            drawn[number], folds[number] = row.drawn, row.folds
            if seen is not None:
                seen[number, : len(row.ids)] = row.ids
                prompt[number] = len(row.ids) - row.drawn
        of_penalty = (None, None) if seen is None else (seen, prompt)
        return DecodeRows(text, length, place, left, drawn, folds, *of_penalty)

    def starts(self, text_rows: Sequence[TextRow | None]) -> dict[str, np.ndarray]:
        """A batch of starts, padded to a length for which programs are compiled."""
        present = [row for row in text_rows if row is not None]
        texts = [row.visible if row else () for row in text_rows]
        width = max(row.bucket for row in present)
        tokens, _ = _filled_up(texts, width)
        positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
        batch = {"tokens": tokens, "positions": positions, "at": np.zeros(self.rows, np.int32)}
        if any(row.inputs for row in present):
            inputs = [row.inputs if row else () for row in text_rows]
            longest = bucket(max(map(len, inputs)), self.length)
            batch["inputs"], batch["mask"] = _filled_up(inputs, longest)
        if self.patches:
            for number, row in enumerate(text_rows):
                for name, x in row.images.items() if row else ():
                    if name not in batch:
                        fill = 0 if x.dtype.kind == "f" else -1
                        shape = (self.rows, self.patches, *x.shape[1:])
                        batch[name] = np.full(shape, fill, x.dtype)
                    batch[name][number, : len(x)] = x
        return batch


def _filled_up(texts: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [texts, width], 1 where a text has one)."""
    tokens = np.zeros((len(texts), width), np.int32)
    mask = np.zeros_like(tokens)
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    return tokens, mask


@dataclass
class RowGroup:
    """The rows of a batch, its caches, and what was sent to the devices for it."""

    rows: list[TextRow | None]
    caches: Any = None
    drawn: list[tuple[Drawn, Any, Any]] = field(default_factory=list)  # as of `Decoded`

    def free(self, rank: int, ranks: int) -> list[int]:
        """The free rows of a data rank."""
        size = len(self.rows) // ranks
        numbers = range(rank * size, (rank + 1) * size)
        return [number for number in numbers if self.rows[number] is None]


@dataclass
class Starts:
    """Caches of prompts, from which rows that wait for a place are continued."""

    caches: Any
    routing: Any = None  # [rows, seq, routers, k]
    waiting: int = 0


class ContinuousBatching:
    """The computation of texts, in groups: `run` yields what each segment has added to a row.

    Args:
      texts: those of a prompt's generations in a row, and those of starts of one bucket together.
      groups: their number at most.
      short: the length up to which starts are read token by token.
      steps: tokens of a row that are drawn between two looks at the texts.
    """

    def __init__(
        self,
        programs: ForwardPrograms,
        runs: Runs,
        draws: Draws,
        shape: GroupShape,
        texts: Sequence[TextRow],
        *,
        groups: int = 1,
        short: int = 0,
        steps: int = 1,
    ) -> None:
        self._programs, self._runs, self._draws, self._shape = programs, runs, draws, shape
        self._short, self._steps = short, steps
        self._pending = deque(texts)
        self._waiting: list[deque[tuple[TextRow, Starts, int]]] = [
            deque() for _ in range(shape.ranks)
        ]
        size = shape.rows
        self._groups = [RowGroup([None] * size) for _ in range(min(groups, -(-len(texts) // size)))]
        cached = programs.cached
        self._together = cached is not None and cached.one_by_one
        self._prefills = cached is not None and not cached.one_by_one
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # each segment
        if texts:
            self._compile_ahead()

    def _compile_ahead(self) -> None:
        first, shape = self._pending[0], self._shape
        some = [first, *[None] * (shape.rows - 1)]
        if self._starts_of(first):
            self._runs.compile_ahead(self._programs.prefill, shape.starts(some))
        elif self._programs.cached is not None:  # `decode` compiles already
            self._programs.compile_fresh()
        else:
            rows = shape.arrays(some, self._width([*self._pending][: shape.rows]))
            caches: dict[str, Any] = {}
            self._runs.compile_ahead(self._programs._decode, caches, rows, np.int32(1), self._draws)

    def run(self) -> Iterator[tuple[TextRow, Drawn]]:
        """What is drawn of each text, a segment at a time: arrays [tokens]."""
        groups, unfinished = self._groups, len(self._pending)
        while unfinished:
            for group, following in zip(groups, [*groups[1:], *groups[:1]], strict=True):
                with self.around():
                    self._fill(group)
                    self._send(group)
                    drawn, count, routing = self._collected(following)
                for number, row in enumerate(following.rows):
                    if drawn is None or row is None:
                        continue
                    is_drawn = drawn.tokens[number] != UNDRAWN
                    place = min(row.place + count, len(row.visible) - 1 + int(is_drawn.sum()))
                    if routing is not None:
                        row.routing.append(routing[number, : place - row.place])
                    row.place = place
                    if is_drawn.any():
                        yield row, Drawn(*(x[number][is_drawn] for x in drawn))
                    if row.ended_by is not None:
                        unfinished -= 1
                    elif not row.left(self._shape.context):
                        row.restart(self._shape.context, self._shape.length)
                        self._pending.appendleft(row)
                    else:
                        continue
                    following.rows[number] = None
                if not any(following.rows):
                    following.caches = None  # freed

    def _collected(self, group: RowGroup) -> tuple[Drawn | None, int, np.ndarray | None]:
        """(what the group's last segment has drawn, the tokens it has read, routers' choices)."""
        if not group.drawn:
            return None, 0, None
        drawn, counts, routing = zip(*group.drawn, strict=True)
        group.drawn = []

        def joined(parts: Sequence[Any]) -> np.ndarray:
            return np.concatenate([*map(np.asarray, parts)], 1)

        arrays: Any = map(joined, zip(*drawn))
        return Drawn(*arrays), sum(map(int, counts)), None if None in routing else joined(routing)

    def _send(self, group: RowGroup) -> None:
        """Start to compute the group's next segment."""
        active = [row for row in group.rows if row is not None]
        if not active:
            return
        shape = self._shape
        width = self._width(active) if self._programs.cached is None else None
        rows: Any = shape.arrays(group.rows, width)
        (rows,) = rows_for_jit(self._runs._once.program, rows)
        calls, steps = (1, self._steps) if self._programs.loops else (self._steps, 1)
        for _ in range(calls):
            group.caches, rows, *results = self._runs(
                self._programs.decode, group.caches, rows, np.int32(steps), self._draws
            )
            group.drawn.append(tuple(results))

    def _width(self, rows: Sequence[TextRow]) -> int:
        """Of a text that is computed anew for each token."""
        return bucket(max(len(row.visible) for row in rows) + self._steps - 1, self._shape.length)

    def _starts_of(self, row: TextRow) -> bool:
        """Whether `prefill` computes a text's start."""
        return self._prefills and (bool(row.inputs) or len(row.visible) > self._short)

    def _fill(self, group: RowGroup) -> None:
        """Give free rows to texts."""
        if self._together and any(row is not None for row in group.rows):
            return
        sources: dict[int, tuple[Starts, np.ndarray]] = {}
        size = self._shape.rows // self._shape.ranks
        was_empty = all(row is None for row in group.rows)
        for rank, waiting in enumerate(self._waiting):
            for number in group.free(rank, self._shape.ranks):
                if not waiting and self._pending and self._starts_of(self._pending[0]):
                    self._prefill()
                if waiting:
                    row, starts, source = waiting.popleft()
                    row.place = len(row.visible) - 1
                    if starts.routing is not None:
                        choices = np.asarray(starts.routing)[rank * size + source]
                        row.routing = [choices[: row.place]]
                    at = np.full(self._shape.rows, -1, np.int32)
                    at = sources.setdefault(id(starts), (starts, at))[1]
                    at[number] = source
                    starts.waiting -= 1
                elif self._pending and not self._starts_of(self._pending[0]):
                    row = self._pending.popleft()
                    row.place = 0 if self._prefills or self._together else len(row.visible) - 1
                else:
                    continue
                group.rows[number] = row
        straight = np.arange(self._shape.rows) % size
        for starts, at in sources.values():
            if was_empty and not starts.waiting and ((at < 0) | (at == straight)).all():
                group.caches, was_empty = starts.caches, False
                continue
            if group.caches is None:
                group.caches = self._programs.fresh()
            was_empty = False
            (at,) = rows_for_jit(self._runs._once.program, at)
            group.caches = self._programs.insert(group.caches, starts.caches, at)
        if group.caches is None and any(row is not None for row in group.rows):
            group.caches = self._programs.fresh()

    def _prefill(self) -> None:
        """Compute the next starts: those of one bucket, on the ranks with the least to do."""
        ranks, size = self._shape.ranks, self._shape.rows // self._shape.ranks
        batch: list[TextRow | None] = [None] * self._shape.rows
        starts, used = Starts(None), [0] * ranks
        last, rank, length = None, 0, self._pending[0].bucket
        while self._pending and self._pending[0].bucket == length:
            row = self._pending[0]
            if last is None or row.start_of != last:
                free = [rank for rank in range(ranks) if used[rank] < size]
                if not free or not self._starts_of(row):
                    break
                rank = min(free, key=lambda rank: (len(self._waiting[rank]), rank))
                last = row.start_of
                batch[rank * size + used[rank]] = row
                used[rank] += 1
            self._pending.popleft()
            self._waiting[rank].append((row, starts, used[rank] - 1))
            starts.waiting += 1
        (placed,) = rows_for_jit(self._runs._once.program, self._shape.starts(batch))
        starts.caches, starts.routing = self._runs(self._programs.prefill, placed)
