"""Prompts as a corpus: records whose completions are sampled while a model trains."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxspeed.config.run_sections import Data
from jaxspeed.data.chat_formats import Conversation, messages_of, template_inputs
from jaxspeed.data.chat_masks import ASSISTANT, ChatEncoder
from jaxspeed.data.chat_template import Message
from jaxspeed.data.complete_documents import Counts
from jaxspeed.data.model_limits import PromptForm, refuse_idle_keys
from jaxspeed.data.samples import ALL, Batch
from jaxspeed.data.tokenizer import added_tokens
from jaxspeed.errors import DataError
from jaxspeed.objectives.padding import IGNORED, bucket
from jaxspeed.ops.vocabulary_parallel import NO_THRESHOLD

PROMPT = "prompt"
COLUMNS = (PROMPT, "tools", "chat_template_kwargs")  # what is read; rewards get all others as well
BY_ROW = ("advantages", "row_weights")  # arrays without a dim of tokens
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")  # in the text of an object, another in each process


@dataclass(frozen=True)
class PromptRecord:
    """A record of the data: its prompt, and the columns that rewards read.

    Attributes:
      prompt: text, or messages.
      tokens: of the text, or of what the chat template renders of the messages.
      columns: the record's other fields, as the source has them.
      where: its file and line.
    """

    prompt: str | list[Message]
    tokens: tuple[int, ...]
    columns: Mapping[str, Any]
    where: str


@dataclass(frozen=True)
class PromptCounts(Counts):
    """Prompts, and those that are left out."""

    prompts: int = 0
    tokens: int = 0  # of these
    longest: int = 0
    long: int = 0  # with the longest completion they exceed the context

    def __str__(self) -> str:
        shown = f"{self.prompts:,} prompt{'' if self.prompts == 1 else 's'}, {self.tokens:,} tokens"
        return f"{shown}, {self.long:,} dropped (too long)" if self.long else shown


class PromptText(NamedTuple):
    """A record's prompt as text, with all that is known before it is tokenized."""

    text: str
    record: PromptRecord


@dataclass
class PromptEncoder:
    """Encodes prompts with the tokenizer and the templates of `chats`."""

    chats: ChatEncoder

    def render(self, value: Any, where: str) -> PromptText:
        """The prompt of a record, of messages with what the template writes before an answer.

        Raises:
          DataError: the record has no prompt, or the template cannot render it.
        """
        if not isinstance(value, Mapping):
            raise DataError(f"a {type(value).__name__}, not an object")
        prompt = value.get(PROMPT)
        if prompt is None:
            raise DataError(f'no field "{PROMPT}"; its fields: {", ".join(map(str, value))}')
        columns = {name: column for name, column in value.items() if name != PROMPT}
        if isinstance(prompt, str):
            if not prompt:
                raise DataError("prompt is empty")
            self.chats.plain += 1
            return PromptText(prompt, PromptRecord(prompt, (), columns, where))
        messages = messages_of(prompt, PROMPT)
        if messages[-1]["role"] == ASSISTANT:
            raise DataError(
                "prompt ends with a message of the assistant, which is sampled: the last message "
                "is another's"
            )
        inputs = template_inputs(value)
        template = self.chats.template("messages")
        conversation = Conversation(messages, **inputs)
        self.chats.check_roles(template, conversation)
        self.chats.rendered += 1
        how = {"add_generation_prompt": True, **conversation.variables}
        text = template.render(messages, conversation.tools, **how).text
        return PromptText(text, PromptRecord(messages, (), columns, where))

    @cached_property
    def _before(self) -> list[int]:
        return added_tokens(self.chats.tokenizer)[0]

    def encode(self, texts: Sequence[PromptText]) -> Iterator[PromptRecord | str]:
        """The records with their tokens, or what is wrong with them."""
        encodings = self.chats.tokenizer.encode_with_offsets([text.text for text in texts])
        for (_, record), encoded in zip(texts, encodings, strict=True):
            before = self._before if isinstance(record.prompt, str) else []
            tokens = (*before, *encoded.ids.tolist())
            yield replace(record, tokens=tokens) if tokens else "prompt has no tokens"


def check_keys(data: Data) -> None:
    """Raise DataError for a key of the section that prompts do not have."""
    by_tokens = "the loss counts the tokens that the model samples"
    alone = "a row is one completion"
    too_long = "prompts that do not fit are dropped and counted"
    idle = {"train_on": by_tokens, "untrained": by_tokens, "truncate": too_long}
    refuse_idle_keys(data, "prompts", {**idle, "document_masks": alone, "packing": alone})


def blank_rows(form: PromptForm, length: int, count: int) -> Batch:
    """The arrays of a step for completions that are not sampled yet: rows of padding.

    They are those of `objectives/policy_gradient.py`: [rows] and [rows, length].
    """
    rows: Batch = {}
    for name in form.arrays:
        dtype = np.int32 if name in ("tokens", "targets") else np.float32
        blank = {"targets": IGNORED, "thresholds": NO_THRESHOLD}.get(name, 0)
        rows[name] = np.full((count,) if name in BY_ROW else (count, length), blank, dtype)
    return rows


class Prompts:
    """Samples whose batches are blank until completions are sampled; all prompts are in memory.

    Args:
      records: prompts that fit.
      context: tokens that a prompt with its completion can have.
      longest: tokens of the longest prompt, by default among these.
    """

    tokens_each: int | None = None

    def __init__(
        self,
        records: Sequence[PromptRecord],
        form: PromptForm,
        context: int,
        longest: int | None = None,
    ) -> None:
        self.records, self._form, self._context = records, form, context
        lengths = [len(record.tokens) for record in records]
        self.longest = max(lengths, default=0) if longest is None else longest
        self.columns = dict.fromkeys(name for record in records for name in record.columns)

    def __len__(self) -> int:
        return len(self.records)

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        """Blank rows, of the length that a step's batch has at most."""
        read = self.longest + self._form.max_completion_length - 1  # the last is only predicted
        batch = blank_rows(self._form, bucket(read, self._context), len(ids))
        return {name: x if x.ndim == 1 else x[:, positions] for name, x in batch.items()}

    def with_longest(self, longest: int) -> "Prompts":
        return Prompts(self.records, self._form, self._context, longest)


def alike(parts: Sequence[Any]) -> list[Any]:
    """The parts of a split, whose batches have one length if they are of prompts."""
    if not all(isinstance(part, Prompts) for part in parts):
        return [*parts]
    longest = max((part.longest for part in parts), default=0)
    return [part.with_longest(longest) for part in parts]


def fitting(
    records: Sequence[PromptRecord], form: PromptForm, context: int, name: str
) -> tuple[list[PromptRecord], PromptCounts]:
    """The prompts that the context holds with the longest completion.

    Raises:
      DataError: there is none.
    """
    most = context - form.max_completion_length
    fit = [record for record in records if len(record.tokens) <= most]
    lengths = [len(record.tokens) for record in fit]
    longest = max((len(record.tokens) for record in records), default=0)
    if not fit:
        shortest = min((len(record.tokens) for record in records), default=0)
        raise DataError(
            f"data: {name}: no prompt fits: the shortest of {len(records):,} has {shortest:,} "
            f"tokens, and with {form.max_completion_length:,} after it "
            f"(objective.max_completion_length) exceeds the context of {context:,}"
        )
    return fit, PromptCounts(len(fit), sum(lengths), longest, len(records) - len(fit))


def digest_of(records: Sequence[PromptRecord]) -> str:
    """A digest of prompts, their tokens and columns."""
    content = hashlib.blake2b(digest_size=16)
    for record in records:
        shown = repr((record.prompt, record.tokens, dict(record.columns)))
        content.update(_ADDRESS.sub("", shown).encode(errors="surrogatepass") + b"\n")
    return content.hexdigest()
