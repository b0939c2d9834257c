"""Preferences as tokens, by TRL's rules of where a completion begins and ends.

A completion begins where the tokens of the prompt and of the prompt with it diverge: tokens may
merge across the boundary, and a template may render the prompt otherwise by itself. All that
follows belongs to it: later turns of the user, and the end token, which is appended to text; a
template writes its own.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxspeed.data.chat_formats import Conversation
from jaxspeed.data.chat_masks import ChatEncoder
from jaxspeed.data.chat_template import special_tokens
from jaxspeed.data.preference_records import Preference
from jaxspeed.data.token_store import Masked, RecordTokens
from jaxspeed.data.tokenizer import added_tokens

log = logging.getLogger("jaxspeed")


class PreferenceTexts(NamedTuple):
    """The text of a prompt, and that of the prompt with each completion; none: it is empty."""

    texts: Sequence[str]
    is_plain: bool  # without a template: special tokens of the tokenizer are added
    values: Mapping[str, float]


@dataclass
class PreferenceEncoder:
    """Encodes preferences with the tokenizer and the templates of `chats`."""

    chats: ChatEncoder
    _has_warned: bool = False

    @cached_property
    def _end(self) -> str:
        return special_tokens(self.chats.tokenizer).get("eos_token", "")

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        return added_tokens(self.chats.tokenizer)

    def render(self, sample: Preference) -> PreferenceTexts:
        """The texts of a preference.

        Raises:
          DataError: the template raises, or does not know a role.
        """
        prompt, texts = sample.prompt, [""]
        if not sample.completions:
            return PreferenceTexts((), True, {})
        if isinstance(prompt, str):
            self.chats.plain += 1
            texts = [prompt]
            for text in sample.completions:
                assert isinstance(text, str)
                texts.append(prompt + text + ("" if text.endswith(self._end) else self._end))
            return PreferenceTexts(texts, True, sample.values)
        self.chats.rendered += 1
        template = self.chats.template("messages")
        inputs: dict[str, Any] = {"tools": sample.tools, **sample.variables}
        if prompt:
            texts = [template.render(prompt, add_generation_prompt=True, **inputs).text]
        for completion in sample.completions:
            assert isinstance(completion, list)
            messages = [*prompt, *completion]
            conversation = Conversation(messages, len(prompt), sample.tools, sample.variables)
            self.chats.check_roles(template, conversation)
            texts.append(template.render(messages, **inputs).text)
        return PreferenceTexts(texts, False, sample.values)

    def encode(self, records: Sequence[PreferenceTexts]) -> Iterator[RecordTokens]:
        """The tokens of each record, or why it is dropped."""
        texts = [text for record in records for text in record.texts]
        encodings = iter(self.chats.tokenizer.encode_with_offsets(texts))
        for record in records:
            ids = [next(encodings).ids for _ in record.texts]
            if record.is_plain:
                before, after = self._added
                ids = [np.concatenate([before, x, after]).astype(x.dtype) for x in ids]
            yield self._record(ids, record.values) if ids else RecordTokens((), dropped="empty")

    def _record(self, ids: Sequence[np.ndarray], values: Mapping[str, float]) -> RecordTokens:
        prompt, *sequences = ids
        begins = [common_prefix(prompt, sequence) for sequence in sequences]
        if any(begin == len(sequence) for begin, sequence in zip(begins, sequences)):
            return RecordTokens((), dropped="empty")
        if len(sequences) == 2 and np.array_equal(sequences[0], sequences[1]):
            return RecordTokens((), dropped="equal")
        if min(begins) < len(prompt) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "data: the tokens of a prompt do not begin those of the prompt with its completion,"
                " which begins where they diverge; training leaves out %r of the prompt",
                self.chats.tokenizer.spell(prompt[min(begins) :].tolist()),
            )
        masked = (
            Masked(sequence, np.arange(len(sequence)) >= begin)
            for begin, sequence in zip(begins, sequences)
        )
        return RecordTokens(tuple(masked), values)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """The number of tokens with which both begin."""
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differ[0]) if len(differ) else shorter
