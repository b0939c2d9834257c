"""Conversations as tokens, with a mask of those that the loss counts.

The text of the assistant is what the template marks by `{% generation %}`. A template without the
mark has it by prefixes: what a message of the assistant adds to the text before it, which ends with
the generation prompt. The end of its turn belongs to it.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxspeed.config.run_sections import ChatFormat, Data
from jaxspeed.config.verdicts import shown
from jaxspeed.data.chat_formats import Completion, Conversation, has_parts, parts_of
from jaxspeed.data.chat_template import (
    CHAT_TEMPLATE,
    ChatTemplate,
    Message,
    MissingTemplateError,
    Rendered,
    Spans,
    find_template,
)
from jaxspeed.data.token_store import Masked
from jaxspeed.data.tokenizer import Tokenizer
from jaxspeed.errors import DataError
from jaxspeed.vision import ImageProcessor, ImageSource, pixels_of, source_of

TrainOn = Literal["assistant", "last_turn", "everything"]
ASSISTANT = "assistant"
_PROBE = "jaxspeed probes"


class Text(NamedTuple):
    """The text of a conversation; with `ends` the end of a document follows."""

    text: str
    spans: Spans  # of the text, which are trained on
    ends: bool
    images: tuple[ImageSource, ...] = ()  # for each marker of the text


class PromptWithImages(NamedTuple):
    """The tokens of a prompt, and the patches of its images [rows, patch].

    `places` [rows, 3] are theirs, of images of any size.
    """

    tokens: Sequence[int]
    patches: np.ndarray
    places: np.ndarray | None = None

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Those of a batch, without a dim of samples; none without images."""
        named = {"patches": self.patches, "patch_places": self.places}
        return {name: x for name, x in named.items() if x is not None and len(self.patches)}


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


def _as_text(message: Message, marker: str) -> Message:
    """A message whose content is text, with markers of images."""
    if not has_parts(message):
        return message
    texts = (marker if part["type"] == "image" else part["text"] for part in message["content"])
    return {**message, "content": "".join(texts)}


@dataclass
class ChatEncoder:
    """Encodes conversations with a tokenizer by the config's section `data`.

    `untrained` counts those that were dropped because no token of them is trained, `plain` those
    that are a prompt and its completion, without a template, and `rendered` the others.
    """

    tokenizer: Tokenizer
    data: Data
    images: ImageProcessor | None = None  # of a model that reads images
    untrained: int = 0
    plain: int = 0
    rendered: int = 0
    _templates: dict[str | None, ChatTemplate] = field(default_factory=dict)
    _known: set[tuple[str, bool, bool, bool]] = field(default_factory=set)

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

    def render(
        self,
        sample: Conversation | Completion,
        kind: ChatFormat,
        where: str = "",
        folder: Path | None = None,
    ) -> Text:
        """The text of a conversation.

        Args:
          where: the record, in errors of its images.
          folder: to which the paths of images are relative.

        Raises:
          DataError: the template raises, or does not know a role, or an image is none.
        """
        if isinstance(sample, Completion):
            self.plain += 1
            text = sample.prompt + sample.completion
            start = 0 if self.data.train_on == "everything" else len(sample.prompt)
            return Text(text, [(start, len(text))], ends=True)
        self.rendered += 1
        template = self.template(kind)
        if self.images is None:
            self.check_roles(template, sample)
            return Text(*text_and_spans(template, sample, self.data.train_on), ends=False)
        sources = [
            source_of(image, f"{where}, image {number}", folder)
            for number, image in enumerate(sample.images, 1)
        ]
        for source in sources:
            self.images.expansion(source.width, source.height)  # or an error
        text, spans = self._with_markers(template, sample, prompt=False)
        return Text(text, spans, ends=False, images=(*sources,))

    def prompt(self, template: ChatTemplate, sample: Conversation) -> PromptWithImages:
        """A conversation up to where the answer begins.

        Raises:
          DataError: the template raises, or an image is none.
        """
        assert self.images is not None
        numbered = enumerate(sample.images, 1)
        sources = [source_of(image, f"image {number} of a prompt") for number, image in numbered]
        text, _ = self._with_markers(template, sample, prompt=True)
        as_text = Text(text, [], ends=False, images=(*sources,))
        ((ids, _),) = self._ids_and_masks([as_text])
        if problem := self._image_problem(ids, as_text):
            raise DataError(f"a prompt: {problem}")
        patches = [self.images.patches(pixels_of(source)) for source in sources]
        empty = np.zeros((0, self.images.patch), np.float32)
        together = np.concatenate([empty, *patches])
        is_image = ids == self.images.token_id
        rows = np.where(is_image, np.cumsum(is_image) - 1, -1)
        arrays = {"tokens": ids[None], "image_rows": rows[None], "patches": together[None]}
        beside = self.images.beside(arrays, [[(s.width, s.height) for s in sources]])
        places = beside["patch_places"][0] if "patch_places" in beside else None
        return PromptWithImages(ids.tolist(), together, places)

    def _with_markers(
        self, template: ChatTemplate, sample: Conversation, prompt: bool
    ) -> tuple[str, Spans]:
        """The text of a conversation with a marker for each of its images.

        Some templates read messages as parts alone, and others as text alone.
        """
        assert self.images is not None
        marker, train_on = self.images.marker, self.data.train_on
        in_parts = [
            {**m, "content": parts_of(m)} if m.get("content") else m for m in sample.messages
        ]
        parts = replace(sample, messages=in_parts)
        texts = replace(sample, messages=[_as_text(m, marker) for m in sample.messages])
        problems = []
        for form in (parts, texts) if sample.images else (texts, parts):
            try:
                spans: Spans = []
                if prompt:
                    how: Any = {"add_generation_prompt": True, **form.variables}
                    text = template.render(form.messages, form.tools, **how).text
                else:
                    text, spans = text_and_spans(template, form, train_on)
                if (count := text.count(marker)) != len(sample.images):
                    raise DataError(
                        f"its text has {count} times {marker!r}, which stands for an image: "
                        f"{len(sample.images)} images, and each place needs one"
                    )
                self.check_roles(template, form)
                return text, spans
            except MissingTemplateError:
                raise
            except DataError as error:
                problems.append(error)
        raise problems[-1 if sample.images else 0]

    def encode(self, texts: Sequence[Text]) -> Iterator[Masked | str]:
        """The tokens of each text, or why it cannot be trained on; "" if it is dropped."""
        for text, (ids, trained) in zip(texts, self._ids_and_masks(texts)):
            end = [self.tokenizer.end] if text.ends and self.tokenizer.end is not None else []
            ids = np.append(ids, np.asarray(end, ids.dtype))
            trained = np.append(trained, np.ones(len(end), bool))
            if problem := self._image_problem(ids, text):
                yield problem
            elif trained[1:].any():  # nothing predicts the first
                yield Masked(ids, trained, text.images)
            elif self.data.untrained == "drop":
                self.untrained += 1
                yield ""
            else:
                why = "all are masked" if text.spans else "the assistant has no message in it"
                yield f"no token of it is trained: {why} (data.untrained: drop leaves it out)"

    def _ids_and_masks(self, texts: Sequence[Text]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The ids of each text, and which of them are in its spans.

        What an image is in a text is encoded with it; or, by a tokenizer that does not know the
        token of images, between the ids of the text before and after.
        """
        if self._knows_images:
            texts = [self._expanded(text) for text in texts]
            pieces = [[text.text] for text in texts]
        else:
            assert self.images is not None
            marker = self.images.marker
            pieces = [t.text.split(marker) if t.images else [t.text] for t in texts]
        encoded = iter(self.tokenizer.encode_with_offsets([p for group in pieces for p in group]))
        for text, group in zip(texts, pieces):
            all_ids, masks, start = [], [], 0
            for number, piece in enumerate(group):
                ids, offsets = next(encoded)
                if number:
                    assert self.images is not None
                    source = text.images[number - 1]
                    count = self.images.expansion(source.width, source.height).tokens
                    all_ids.append(np.full(count, self.images.token_id, ids.dtype))
                    masks.append(np.zeros(count, bool))
                    start += len(self.images.marker)
                all_ids.append(ids)
                masks.append(mask_of(offsets + start, text.spans))
                start += len(piece)
            yield np.concatenate(all_ids), np.concatenate(masks)

    @cached_property
    def _knows_images(self) -> bool:
        """Whether there are none, or the tokenizer has the token of images.

        Raises:
          DataError: it has that text as another token, or no such id.
        """
        if self.images is None:
            return True
        token, number = self.images.token, self.images.token_id
        ids = self.tokenizer.encode(token).tolist()
        if number not in ids and (len(ids) == 1 or number >= self.tokenizer.vocab_size):
            has = f"id {ids[0]}" if len(ids) == 1 else "no token"
            raise DataError(
                f"data.tokenizer: {self.tokenizer.name} has {token!r} as {has}, and the model's "
                f"token of images is {number}"
            )
        return number in ids

    def _expanded(self, text: Text) -> Text:
        """A text with what each image is in place of its marker."""
        if self.images is None or not text.images:
            return text
        marker = self.images.marker
        first, *others = text.text.split(marker)
        parts, at, shifts = [first], len(first), [(0, 0)]  # from a place on: what is added
        added = 0
        for source, piece in zip(text.images, others, strict=True):
            expansion = self.images.expansion(source.width, source.height).text
            added += len(expansion) - len(marker)
            shifts.append((at + len(marker), added))
            parts += [expansion, piece]
            at += len(marker) + len(piece)
        places, sums = zip(*shifts)

        def moved(place: int) -> int:
            return place + sums[bisect.bisect_right(places, place) - 1]

        spans = [(moved(start), moved(end)) for start, end in text.spans]
        return text._replace(text="".join(parts), spans=spans)

    def _image_problem(self, ids: np.ndarray, text: Text) -> str:
        """What is wrong with the number of a text's tokens of images, or ""."""
        if self.images is None:
            return ""
        sizes = ((source.width, source.height) for source in text.images)
        wanted = sum(self.images.expansion(*size).tokens for size in sizes)
        count = int((ids == self.images.token_id).sum())
        if count == wanted:
            return ""
        return (
            f"it has {count} tokens {self.images.token!r}, and its {len(text.images)} images are "
            f"{wanted}: the text itself has such tokens, or lacks them"
        )

    def check_roles(self, template: ChatTemplate, conversation: Conversation) -> None:
        """Refuse roles that the template does not know: it renders nothing of their messages."""
        for i, message in enumerate(conversation.messages):
            role = message["role"]
            key = role, i == 0, bool(conversation.tools), has_parts(message)
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
        changed, content = [*conversation.messages], conversation.messages[i].get("content", "")
        probe: Any = [*content, {"type": "text", "text": _PROBE}] if has_parts(changed[i]) else ""
        changed[i] = {**changed[i], "content": probe or f"{content}{_PROBE}"}
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
