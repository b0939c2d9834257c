"""From tokens to text as it is generated: complete characters, up to a stop string."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

UNFINISHED = "\ufffd"  # what decoders write for a part of a character, too

AT_ONCE = 64  # tokens that are decoded again with each new one
BEFORE = 8


class TextTokenizer(Protocol):
    """One of `jaxspeed.data` or of Hugging Face."""

    def encode(self, text: str) -> np.ndarray | list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


def end_of(tokenizer: object) -> int | None:
    """The id that ends a document."""
    end = getattr(tokenizer, "end", None)
    return getattr(tokenizer, "eos_token_id", None) if end is None else end


class TextStream:
    """The text of one sequence: `add` returns what tokens make certain of it.

    A character may span several tokens, and so may a stop string: what may be the beginning of one
    is held back.
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompt: Sequence[int], stop: Sequence[str]
    ) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._past = ""  # the text that was decoded before, and no longer is
        self._ids: list[int] = []
        self._begin = ""
        self._rest_on([*prompt])
        self.text, self._passed = "", 0
        self.stopped = False

    def add(self, *tokens: int) -> tuple[str, int]:
        """(the text that the tokens add, how many of them there are before the text stops)."""
        before = dict(vars(self))
        self._ids = [*self._ids, *tokens]
        decoded = self._decoded()
        piece = self._pass(self._shown(decoded), holding=True)
        if self.stopped and len(tokens) > 1:  # one by one, to find the token that stops it
            vars(self).update(before)
            pieces: list[str] = []
            while not self.stopped and len(pieces) < len(tokens):
                pieces.append(self.add(tokens[len(pieces)])[0])
            return "".join(pieces), len(pieces)
        if len(self._ids) > AT_ONCE and not decoded.endswith(UNFINISHED):
            self._past += decoded[len(self._begin) :]
            self._rest_on(self._ids)
        return piece, len(tokens)

    def end(self) -> str:
        """The rest of the text, when no token follows."""
        return "" if self.stopped else self._pass(self._decoded(), holding=False)

    def _rest_on(self, ids: list[int]) -> None:
        """Keep the last tokens before the new ones: some decoders drop a text's first space."""
        self._ids = ids[-BEFORE:]
        self._begin = self._shown(self._decoded())

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids)

    @staticmethod
    def _shown(text: str) -> str:
        return text.rstrip(UNFINISHED) if text.endswith(UNFINISHED) else text

    def _pass(self, decoded: str, holding: bool) -> str:
        new = self._past + decoded[len(self._begin) :]
        if not new.startswith(self.text):
            return ""  # a decoder that took bytes back; the end passes what is longer
        stops = [place for stop in self._stop if (place := new.find(stop)) >= 0]
        if stops:
            new, self.stopped = new[: min(stops)], True
        elif holding:
            new = new[: len(new) - self._held(new)]
        if len(new) < len(self.text):
            return ""
        piece, self.text = new[len(self.text) :], new
        return piece

    def _held(self, text: str) -> int:
        """Characters at the end that may begin a stop string."""
        lengths = (
            n
            for stop in self._stop
            for n in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:n])
        )
        return max(lengths, default=0)
