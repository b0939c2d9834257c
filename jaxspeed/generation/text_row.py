"""One text that is generated: its tokens, what the model sees of them, and how it ends."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from jaxspeed.generation.sampling_rules import Drawn
from jaxspeed.generation.text import TextStream, TextTokenizer
from jaxspeed.objectives.padding import bucket


def first_seen(length: int, context: int) -> int:
    """The first token that the model sees of a text: it sees more than half of the context."""
    half = max(context // 2, 1)
    return 0 if length <= context else -(-(length - context) // half) * half


class TextRow:
    """A prompt and what has followed it, what an encoder reads, and the arrays of its images.

    Attributes:
      number: of the text, among those of its request.
      folds: its draws are of `fold_in` of each of these.
      ids: the tokens of the prompt and those after it, without one that ends the text.
      end: the token that was drawn and ended the text.
      logprobs, thresholds: of each drawn token, with that of the end; see `Drawn`.
      routing: of a mixture, the choices of its routers for the tokens that were read, in parts.
      ended_by: "tokens" (their number), "stop" (a stop string) or "end" (a token), once it has.
      start: in `ids`, of what the model sees.
      place: in what it sees, of the token that is read next.
      start_of: what texts with the same start have in common.
      bucket: the length to which the start is padded.
    """

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        folds: Sequence[int],
        *,
        tokens: int,
        ends: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        tokenizer: TextTokenizer | None = None,
        inputs: Sequence[int] = (),
        images: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        self.number, self.folds, self.inputs, self.images = number, folds, inputs, images
        self.ids, self._prompt = [*prompt], len(prompt)
        self._tokens, self._ends = tokens, ends
        self._stream = None if tokenizer is None else TextStream(tokenizer, prompt, stop)
        self.end: int | None = None
        self.logprobs: list[float] = []
        self.thresholds: list[float] = []
        self.routing: list[np.ndarray] = []
        self.ended_by = None if tokens else "tokens"
        self.start = self.place = self.bucket = 0
        self.start_of: tuple[int, int] = number, 0

    @property
    def visible(self) -> list[int]:
        """What the model sees of the text."""
        return self.ids[self.start :]

    @property
    def drawn(self) -> int:
        """Tokens drawn so far."""
        return len(self.ids) - self._prompt

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens after the prompt."""
        return tuple(self.ids[self._prompt :])

    @property
    def text(self) -> str:
        """The text after the prompt, without a stop string."""
        return self._stream.text if self._stream else ""

    def left(self, context: int) -> int:
        """The number of tokens that can be drawn before the text ends or outgrows the context."""
        room = context + 1 - (len(self.ids) - self.start)
        return 0 if self.ended_by else min(self._tokens - self.drawn, room)

    def restart(self, context: int, length: int) -> None:
        """Continue it from its last half."""
        self.start = first_seen(len(self.ids), context)
        self.place, self.start_of = 0, (self.number, self.start)
        self.bucket = bucket(len(self.visible), length)

    def add(self, drawn: Drawn) -> str:
        """The text that drawn tokens make certain; those behind a stop string are left out."""
        tokens: list[int] = drawn.tokens.tolist()
        end = tokens.pop() if tokens[-1] in self._ends else None
        piece, count = "", len(tokens)
        if self._stream is not None and tokens:
            piece, count = self._stream.add(*tokens)
        self.ids += tokens[:count]
        if self._stream is not None and self._stream.stopped:
            self.ended_by = "stop"
        elif end is not None:
            self.ended_by, self.end, count = "end", end, count + 1
        elif self.drawn == self._tokens:
            self.ended_by = "tokens"
        self.logprobs += drawn.logprobs[:count].tolist()
        self.thresholds += drawn.thresholds[:count].tolist()
        return piece

    def rest(self) -> str:
        """The text that was held back, once the text has ended."""
        return self._stream.end() if self._stream else ""
