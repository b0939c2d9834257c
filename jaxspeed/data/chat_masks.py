"""Conversations as tokens, with a mask of those that the loss counts.

The text of the assistant is what the template marks by `{% generation %}`. A template without the
mark has it by prefixes: what a message of the assistant adds to the text before it, which ends with
the generation prompt. The end of its turn belongs to it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from jaxspeed.config.run_sections import ChatFormat, Data
from jaxspeed.config.verdicts import shown
from jaxspeed.data.chat_formats import Completion, Conversation
from jaxspeed.data.chat_template import (
    CHAT_TEMPLATE,
    ChatTemplate,
    Message,
    Rendered,
    Spans,
    find_template,
)
from jaxspeed.data.token_store import Masked
from jaxspeed.data.tokenizer import Tokenizer
from jaxspeed.errors import DataError

TrainOn = Literal["assistant", "last_turn", "everything"]
ASSISTANT = "assistant"
_PROBE = "jaxspeed probes"


class Text(NamedTuple):
    """The text of a conversation; with `ends` the end of a document follows."""

    text: str
    spans: Spans  # of the text, which are trained on
    ends: bool


def text_and_spans(
    template: ChatTemplate, conversation: Conversation, train_on: TrainOn
) -> tuple[str, Spans]:
    """The text of a conversation, and which of it is trained on.

    Raises:
      DataError: the template raises, or earlier turns change with later ones.
    """
    messages, tools = conversation.messages, conversation.tools

    def rendered(count: int, prompt: bool = False) -> Rendered:
        """The first messages."""
        first = messages[:count]
        return template.render(first, tools, add_generation_prompt=prompt, **conversation.variables)

    full = rendered(len(messages))
    if train_on == "everything":
        return full.text, [(0, len(full.text))]
    trained = _trained(messages, conversation.given, train_on)
    if not trained:
        return full.text, []
    if template.marks(tools):
        # Messages before the first that is trained have marks too.
        is_first = not any(m["role"] == ASSISTANT for m in messages[: trained[0]])
        before = 0 if is_first else len(rendered(trained[0]).spans)
        return full.text, full.spans[before:]
    spans = []
    for i in trained:
        start = rendered(i, prompt=True).text
        end = full.text if i == len(messages) - 1 else rendered(i + 1).text
        if not (end.startswith(start) and full.text.startswith(end)):
            raise DataError(
                f"the chat template ({template.name}) writes the text before or after an "
                "assistant's message otherwise once later messages follow, so that it is unknown "
                "what the message adds; a template with {% generation %} marks it, and "
                "data.train_on: last_turn needs the last one alone"
            )
        spans.append((len(start), len(end)))
    return full.text, spans


def _trained(messages: list[Message], prompt_messages: int, train_on: TrainOn) -> list[int]:
    """Which messages are trained on: those of the assistant after the prompt, or in its last turn.

    A turn is what the assistant says and calls after a message of another than itself or a tool.
    """
    trained = [i for i, m in enumerate(messages) if m["role"] == ASSISTANT and i >= prompt_messages]
    if train_on == "last_turn" and trained:
        inside = (ASSISTANT, "tool", "function")
        before = [i for i in range(trained[-1]) if messages[i]["role"] not in inside]
        trained = [i for i in trained if i > max(before, default=-1)]
    return trained


def mask_of(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """Which tokens have a character in a span, of spans in their order: bool [tokens]."""
    if not spans or not len(offsets):
        return np.zeros(len(offsets), bool)
    starts, ends = np.asarray(spans, np.int64).T
    span = np.searchsorted(ends, offsets[:, 0], side="right")  # the first that ends after the start
    inside = span < len(ends)
    return inside & (offsets[:, 1] > starts[np.minimum(span, len(ends) - 1)])


@dataclass
class ChatEncoder:
    """Encodes conversations with a tokenizer by the config's section `data`.

    `untrained` counts those that were dropped because no token of them is trained, `plain` those
    that are a prompt and its completion, without a template, and `rendered` the others.
    """

    tokenizer: Tokenizer
    data: Data
    untrained: int = 0
    plain: int = 0
    rendered: int = 0
    _templates: dict[str | None, ChatTemplate] = field(default_factory=dict)
    _known: set[tuple[str, bool, bool]] = field(default_factory=set)

    def template(self, kind: ChatFormat) -> ChatTemplate:
        """The template for records of a format: Alpaca's has its own unless the config names one.

        Raises:
          DataError: there is none.
        """
        named = self.data.chat_template or ("alpaca" if kind == "alpaca" else None)
        if named not in self._templates:
            self._templates[named] = find_template(
                self.tokenizer, named, self.data.chat_template_kwargs
            )
        return self._templates[named]

    def render(self, sample: Conversation | Completion, kind: ChatFormat) -> Text:
        """The text of a conversation.

        Raises:
          DataError: the template raises, or does not know a role.
        """
        if isinstance(sample, Completion):
            self.plain += 1
            text = sample.prompt + sample.completion
            start = 0 if self.data.train_on == "everything" else len(sample.prompt)
            return Text(text, [(start, len(text))], ends=True)
        self.rendered += 1
        template = self.template(kind)
        self.check_roles(template, sample)
        return Text(*text_and_spans(template, sample, self.data.train_on), ends=False)

    def encode(self, texts: Sequence[Text]) -> Iterator[Masked | str]:
        """The tokens of each text, or why it cannot be trained on; "" if it is dropped."""
        for text, encoded in zip(
            texts, self.tokenizer.encode_with_offsets([text.text for text in texts])
        ):
            end = [self.tokenizer.end] if text.ends and self.tokenizer.end is not None else []
            ids = np.append(encoded.ids, np.asarray(end, encoded.ids.dtype))
            trained = np.append(mask_of(encoded.offsets, text.spans), np.ones(len(end), bool))
            if trained[1:].any():  # nothing predicts the first
                yield Masked(ids, trained)
            elif self.data.untrained == "drop":
                self.untrained += 1
                yield ""
            else:
                why = "all are masked" if text.spans else "the assistant has no message in it"
                yield f"no token of it is trained: {why} (data.untrained: drop leaves it out)"

    def check_roles(self, template: ChatTemplate, conversation: Conversation) -> None:
        """Refuse roles that the template does not know: it renders nothing of their messages."""
        for i, message in enumerate(conversation.messages):
            role = message["role"]
            key = role, i == 0, bool(conversation.tools)
            if key in self._known or message.get("tool_calls"):  # templates may ignore its content
                continue
            if not template.names(role, conversation.tools) or self._ignores(
                template, conversation, i
            ):
                raise DataError(
                    f"message {i + 1}: the chat template ({template.name}) does not know the role "
                    f"{shown(role)}; the model speaks as {shown(ASSISTANT)}"
                )
            self._known.add(key)

    @staticmethod
    def _ignores(template: ChatTemplate, conversation: Conversation, i: int) -> bool:
        """Whether the text does not change with a message."""
        changed = [*conversation.messages]
        changed[i] = {**changed[i], "content": f"{changed[i].get('content', '')}{_PROBE}"}
        before, after = (
            template.render(messages, conversation.tools, **conversation.variables).text
            for messages in (conversation.messages, changed)
        )
        return before == after


def remember_template(encoder: ChatEncoder, formats: Iterable[str]) -> None:
    """Put the template that conversations are rendered with beside the tokenizer.

    So it is saved with the run, and exported, where it is not the tokenizer's own.
    """
    kinds, named = set(formats), encoder.data.chat_template
    if named or kinds == {"alpaca"}:
        source = encoder.template("messages" if named else "alpaca").source
        beside = encoder.tokenizer.beside
        encoder.tokenizer.beside = {**beside, CHAT_TEMPLATE: source.encode()}
