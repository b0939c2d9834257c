"""The next token of each sequence of a batch, with a cache where the model keeps one.

A model sees at most `context` tokens. A text that outgrows it is continued from its last half, so
that the cache is filled again once for `context / 2` tokens.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxspeed.generation.decode_programs import Draws, ForwardPrograms, Rules, rows_for_jit
from jaxspeed.train.gather_once import GatherOnce, ModelState
from jaxspeed.train_state.staged_init import compile_ahead
from jaxspeed.train_state.state import TrainState

SMALLEST = 16  # of the lengths for which programs are compiled, which are powers of two


class Seen(NamedTuple):
    """What the model sees of a text."""

    start: int
    tokens: Sequence[int]
    inputs: Sequence[int] = ()  # of the encoder


def first_seen(length: int, context: int) -> int:
    """The first token that the model sees of a text: it sees more than half of the context."""
    half = max(context // 2, 1)
    return 0 if length <= context else -(-(length - context) // half) * half


def bucket(length: int, most: int) -> int:
    """The length to which sequences are padded."""
    return min(max(1 << (length - 1).bit_length(), SMALLEST), max(most, 2))


def short_start(tokens: int) -> int:
    """The length up to which a start is read token by token, where so many are drawn after it.

    That is at most an eighth more calls than with `prefill`, whose compilation takes longer.
    """
    return min(1 + tokens // 8, SMALLEST)


class Steps(Protocol):
    """A batch's tokens, computed in turn; `next` returns those of the sequences that are ready."""

    def compile_ahead(self, seen: Sequence[Seen], draws: Draws) -> None:
        """Start to compile, in the background, what `next` calls first."""

    def next(self, seen: Sequence[Seen], draws: Draws) -> dict[int, int]:
        """{sequence: its next token}, from what the model sees of each."""


class Recomputed:
    """Without a cache: all tokens are computed again for each."""

    def __init__(self, programs: ForwardPrograms, runs: "Runs", most: int) -> None:
        self._programs, self._runs, self._most = programs, runs, most

    def compile_ahead(self, seen: Sequence[Seen], draws: Draws) -> None:
        self._runs.compile_ahead(self._programs.recompute, padded(seen, self._most), draws)

    def next(self, seen: Sequence[Seen], draws: Draws) -> dict[int, int]:
        batch = padded(seen, self._most)
        return ready(self._runs(self._programs.recompute, batch, draws), range(len(seen)))


class Cached:
    """Steps with a cache that takes the sequences' starts in one call.

    Starts of up to `short` tokens are read by `decode`, one token at a time: a request with such
    prompts only compiles no other program.
    """

    def __init__(self, programs: ForwardPrograms, runs: "Runs", most: int, short: int) -> None:
        self._programs, self._runs, self._most, self._short = programs, runs, most, short
        self._filled: Sequence[Seen] = ()  # what is in the cache
        self._caches: Any = None

    def compile_ahead(self, seen: Sequence[Seen], draws: Draws) -> None:
        if self._is_short(seen):  # `decode` compiles already
            self._programs.compile_fresh()
        else:
            self._runs.compile_ahead(self._programs.prefill, padded(seen, self._most), draws)

    def next(self, seen: Sequence[Seen], draws: Draws) -> dict[int, int]:
        grown = [
            len(row.tokens) - len(was.tokens) if row.start == was.start else None
            for row, was in zip(seen, self._filled)
        ]
        if grown and all(more in (0, 1) for more in grown):
            tokens = self._decode(seen, self._most, draws)  # the last one of each
        else:
            self._caches = None  # freed before the next one is allocated
            if self._is_short(seen):
                self._caches = self._programs.fresh()
                for place in range(max(len(row.tokens) for row in seen)):
                    tokens = self._decode(seen, place, draws)
            else:
                batch = padded(seen, self._most)
                tokens, self._caches = self._runs(self._programs.prefill, batch, draws)
        self._filled = [*seen]
        return ready(tokens, range(len(seen)))

    def _decode(self, seen: Sequence[Seen], place: int, draws: Draws) -> jax.Array:
        """Read the token at this place of each sequence; of a shorter one its last, once more."""
        places = [min(place, len(row.tokens) - 1) for row in seen]
        at_places = [row.tokens[at] for row, at in zip(seen, places)]
        batch = {
            "tokens": np.asarray(at_places, np.int32)[:, None],
            "positions": np.asarray(places, np.int32)[:, None],
            "at": np.zeros(len(seen), np.int32),
        }
        tokens, self._caches = self._runs(self._programs.decode, self._caches, batch, draws)
        return tokens

    def _is_short(self, seen: Sequence[Seen]) -> bool:
        most = self._short if not any(row.inputs for row in seen) else 0  # `prefill` encodes
        return max(len(row.tokens) for row in seen) <= most


class OneByOne:
    """Steps with a cache that takes one token of each sequence: prompts are read in step.

    All sequences start together; one whose prompt has ended is continued while others are read.
    """

    def __init__(self, programs: ForwardPrograms, runs: "Runs") -> None:
        self._programs, self._runs = programs, runs
        self._caches: Any = None
        self._place = 0
        self._starts: list[int] = []

    def compile_ahead(self, seen: Sequence[Seen], draws: Draws) -> None:
        self._programs.compile_fresh()  # `decode` compiles already

    def next(self, seen: Sequence[Seen], draws: Draws) -> dict[int, int]:
        starts = [row.start for row in seen]
        if starts != self._starts:
            self._caches, self._place = None, 0
            self._caches, self._starts = self._programs.fresh(), starts
        place, lengths = self._place, [len(row.tokens) for row in seen]
        at_place = [row.tokens[min(place, n - 1)] for row, n in zip(seen, lengths)]
        tokens = np.asarray(at_place, np.int32)[:, None]
        at = np.full_like(tokens, place)
        batch = {"tokens": tokens, "positions": at, "at": np.zeros(len(seen), np.int32)}
        next_tokens, self._caches = self._runs(self._programs.decode, self._caches, batch, draws)
        self._place += 1
        return ready(next_tokens, [row for row, n in enumerate(lengths) if n == self._place])


class Runs:
    """Calls of the programs with a model's state and with the rules of a request."""

    def __init__(self, once: GatherOnce, state: TrainState, rules: Rules) -> None:
        self._once, self._rules = once, rules
        self._stored = ModelState.of(once.program, state)
        self._gather_compiled = once.compile_ahead()
        self._compiled: Callable[[], Any] = lambda: None

    @cached_property
    def _state(self) -> ModelState:
        self._gather_compiled()
        return self._once(self._stored)

    def compile_ahead(self, function: Any, *args: Any) -> None:
        """Start to compile a program for a call with these arguments; the next call waits."""
        arguments = self._given(self._once.shapes, args)
        self._compiled = compile_ahead(self._once.program.mesh, function, *arguments)

    def __call__(self, function: Any, *args: Any) -> Any:
        self._compiled()
        return function(*self._given(self._state, args))

    def _given(self, state: ModelState, args: Sequence[Any]) -> Sequence[Any]:
        *caches, batch, draws = args
        batch, draws = rows_for_jit(self._once.program, batch, draws)
        return (state, *caches, batch, draws, self._rules)


def padded(seen: Sequence[Seen], most: int) -> dict[str, np.ndarray]:
    """A batch with the sequences' starts, padded to a length for which programs are compiled."""
    tokens, _ = _filled_up([row.tokens for row in seen], most)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    at = np.asarray([len(row.tokens) - 1 for row in seen], np.int32)
    batch = {"tokens": tokens, "positions": positions, "at": at}
    if any(row.inputs for row in seen):
        batch["inputs"], batch["mask"] = _filled_up([row.inputs for row in seen], most)
    return batch


def _filled_up(texts: Sequence[Sequence[int]], most: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [texts, length], 1 where a text has one)."""
    tokens = np.zeros((len(texts), bucket(max(map(len, texts)), most)), np.int32)
    mask = np.zeros_like(tokens)
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    return tokens, mask


def ready(tokens: jax.Array, rows: Any) -> dict[int, int]:
    host_tokens = np.asarray(tokens)
    return {row: int(host_tokens[row]) for row in rows}
